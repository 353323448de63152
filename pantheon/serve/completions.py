"""POST /v1/completions, OpenAI's old text API, over the one way of an answer.

`best_of` answers are made and the likeliest are kept; `suffix` needs a model with fill-in-the-middle tokens; `echo`
with `logprobs` also scores the prompt, and with `max_tokens` 0 nothing else is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pantheon.engine.model import Model
from pantheon.engine.score import score
from pantheon.serve import chat_reply as reply
from pantheon.serve.answer import Frames, deliver
from pantheon.serve.chat_request import (
    MAX_CHOICES,
    include_usage,
    max_tokens,
    sampling_params,
    session_id,
    stop_strings,
)
from pantheon.serve.constraint_fields import read_constraint
from pantheon.serve.context import App
from pantheon.serve.generation import Logprob, Result, Step
from pantheon.serve.http_json import Form
from pantheon.serve.http_request import Request
from pantheon.serve.infill import fill_in_ids
from pantheon.serve.request_fields import Fields
from pantheon.serve.routes import Responder
from pantheon.serve.text_request import (
    Prompt,
    TextRequest,
    make_jobs,
    marks_of_prompt,
    prompt_ids,
    read_prompts,
)
from pantheon.serve.turn import Turn, turn
from pantheon.serve.voice import OPENAI, Voice, frame

DEFAULT_MAX_TOKENS = 16
MAX_BEST_OF = 20
_MAX_LOGPROBS = 5


@dataclass(frozen=True)
class CompletionRequest:
    """One checked request: what the engine is asked for, and what this API makes of it.

    `text.n` counts the answers that are made for each prompt, `n` those that are shown.  `only_prompt`: none are made.
    """

    text: TextRequest
    n: int = 1
    echo: bool = False
    suffix: str | None = None
    include_usage: bool = False
    with_logprobs: bool = False
    only_prompt: bool = False


def parse_completion_request(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> CompletionRequest:
    """Check a decoded body.  Raises BadRequest; `param` is the field at fault."""
    fields = Fields(body)
    logprobs = fields.integer("logprobs", 0, _MAX_LOGPROBS, None)
    n = fields.integer("n", 1, MAX_CHOICES, 1) or 1
    best_of = fields.integer("best_of", 1, MAX_BEST_OF, n) or n
    stream = fields.flag("stream", False)
    echo, suffix = fields.flag("echo", False), fields.text("suffix") or None
    if best_of < n:
        raise fields.fault("best_of", f"must be at least n ({n}), not {best_of}")
    if best_of > n and stream:
        raise fields.fault("best_of", "can not be streamed: the best is known when all are complete")
    if echo and suffix:
        raise fields.fault("echo", "can not be combined with suffix")
    only_prompt = echo and body.get("max_tokens") == 0 and not stream
    cap, _ = (1, "") if only_prompt else max_tokens(fields, "max_tokens", "max_completion_tokens")
    if not fields.given("max_tokens") and not fields.given("max_completion_tokens"):
        cap = DEFAULT_MAX_TOKENS
    params = sampling_params(fields, logprobs if best_of == n else logprobs or 0)
    text = TextRequest(
        model=fields.text("model"),
        prompts=read_prompts(fields),
        params=params,
        max_tokens=cap,
        stop=stop_strings(fields),
        n=best_of,
        stream=stream,
        ignore_eog=fields.flag("ignore_eos", False),
        constraint=read_constraint(fields),
        session_id=session_id(fields, headers or {}),
    )
    return CompletionRequest(text, n, echo, suffix, include_usage(fields), logprobs is not None, only_prompt)


def post_completion(app: App, request: Request, responder: Responder) -> None:
    """Answer one request.  Errors and the end of the answer as in the chat API."""
    asked = parse_completion_request(app.defaults.fill(request.json()), dict(request.headers))
    text = asked.text
    responder.will_stream = text.stream
    with turn(app, text.model, responder, text.session_id, marks_of_prompt(text.prompts[0])) as mine:
        ids = [_ids(mine.model, asked, prompt) for prompt in text.prompts]
        jobs = list(make_jobs(mine.model, text, ids))
        echoes = [_echo(mine, asked, prompt, tokens) for prompt, tokens in zip(text.prompts, ids, strict=True)]
        kind = CompletionStream if text.stream else CompletionWhole
        made = kind(asked, mine.entry.name, echoes)
        rest: Callable[[], None]
        if asked.only_prompt:
            rest = partial(responder.send_json, 200, made.prompts(sum(map(len, ids))), mine.headers)
        else:
            rest = deliver(app, mine, jobs, made, responder, stream=text.stream)
    rest()


def _ids(model: Model, asked: CompletionRequest, prompt: Prompt) -> list[int]:
    ids = prompt_ids(model, prompt)
    if asked.suffix is None:
        return ids
    return fill_in_ids(model, prompt_ids(model, prompt, special=False), asked.suffix)


@dataclass(frozen=True)
class Echo:
    """What an answer begins with: the prompt, and its log-probabilities when they were asked for."""

    text: str = ""
    logprobs: tuple[Logprob, ...] = ()


def _echo(mine: Turn, asked: CompletionRequest, prompt: Prompt, ids: Sequence[int]) -> Echo:
    if not asked.echo:
        return Echo()
    model = mine.model
    text = "".join(part if isinstance(part, str) else model.detokenize([part], special=True) for part in prompt)
    if not asked.with_logprobs:
        return Echo(text)

    def data(token: int) -> bytes:
        return model.tokenizer.token_bytes(token, special=True) if token < model.tokenizer.n_vocab else b""

    # of the first token nothing is known
    found = [Logprob(data(ids[0]), math.nan)]
    with mine.reading(len(ids)) as (state, forward):
        scores = score(
            model, state, ids, asked.text.params.top_logprobs or 0, cancelled=mine.cancelled, turn=forward
        )
        for token, (value, top) in zip(ids[1:], scores, strict=True):
            found.append(Logprob(data(token), value, tuple((data(other), logprob) for other, logprob in top)))
    return Echo(text, tuple(found))


class _Choices:
    """What the whole and the streamed reply share."""

    voice: Voice = OPENAI

    def __init__(self, asked: CompletionRequest, model: str, echoes: Sequence[Echo]) -> None:
        self._asked, self._echoes = asked, echoes
        self._envelope = reply.Envelope("text_completion", model, "cmpl")
        self._results: list[Result] = []
        self._index = 0

    def _usage(self) -> dict[str, Any]:
        firsts = self._results[:: self._asked.text.n]
        prompt, cached = sum(result.prompt_tokens for result in firsts), sum(result.cached_tokens for result in firsts)
        return reply.token_counts(prompt, sum(result.completion_tokens for result in self._results), cached)

    def prompts(self, tokens: int) -> dict[str, Any]:
        """The reply that holds nothing but the prompts."""
        choices = [_choice(index, echo.text, "length", echo.logprobs) for index, echo in enumerate(self._echoes)]
        return self._envelope.wrap(choices, usage=reply.token_counts(tokens, 0, 0))

    def _echo(self) -> Echo:
        return self._echoes[self._index // self._asked.text.n]


class CompletionWhole(_Choices):
    """A plain answer: one object with the choices of every prompt, the best of those that were made."""

    def begin(self, index: int) -> Sequence[bytes]:
        self._index, self._texts, self._logprobs = index, list[str](), list[Logprob]()
        if not index:
            self._made: list[tuple[float, dict[str, Any]]] = []
        return ()

    def step(self, step: Step) -> Frames:
        self._texts += [delta.text for delta in step.deltas]
        self._logprobs += [step.logprob] if step.logprob is not None else []
        return ()

    def end(self, result: Result) -> Frames:
        self._results.append(result)
        echo = self._echo()
        shown = [*echo.logprobs, *self._logprobs] if self._asked.with_logprobs else ()
        choice = _choice(0, echo.text + "".join(self._texts), result.finish_reason, shown)
        self._made.append((sum(item.logprob for item in self._logprobs) / max(1, len(self._logprobs)), choice))
        return ()

    def close(self) -> Frames:
        return ()

    def body(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        made, n, of = self._made, self._asked.n, self._asked.text.n
        for first in range(0, len(made), of):
            best = made[first : first + of]
            if n < of:
                best = sorted(best, key=lambda item: -item[0])[:n]
            choices += [{**choice, "index": len(choices) + at} for at, (_, choice) in enumerate(best)]
        return self._envelope.wrap(choices, usage=self._usage(), **reply.extras(self._results))


class CompletionStream(_Choices):
    """A streamed answer: the log-probabilities of a token go with the text that it belongs to."""

    def begin(self, index: int) -> Sequence[bytes]:
        self._index, self._waiting = index, list[Logprob]()
        self._form = Form(lambda text: self._wrap(text))
        echo = self._echo()
        return (frame(self._wrap(echo.text, None, echo.logprobs)),) if echo.text else ()

    def step(self, step: Step) -> Frames:
        self._waiting += [step.logprob] if step.logprob is not None else []
        text = "".join(delta.text for delta in step.deltas)
        if not text:
            return ()
        if not self._waiting:
            return (b"data: " + self._form.fill(text) + b"\n\n",)
        waiting, self._waiting = self._waiting, []
        return (frame(self._wrap(text, None, waiting)),)

    def end(self, result: Result) -> Frames:
        self._results.append(result)
        return (frame(self._wrap("", result.finish_reason, self._waiting)),)

    def close(self) -> Frames:
        return (frame(self._envelope.wrap([], usage=self._usage())),) if self._asked.include_usage else ()

    def body(self) -> Any:
        raise AssertionError("a streamed answer has no body")

    def _wrap(self, text: str, reason: str | None = None, logprobs: Sequence[Logprob] = ()) -> dict[str, Any]:
        return self._envelope.wrap([_choice(self._index, text, reason, logprobs)])


def _choice(index: int, text: str, reason: str | None, logprobs: Sequence[Logprob]) -> dict[str, Any]:
    found = _logprob_body(logprobs) if logprobs else None
    return {"index": index, "text": text, "logprobs": found, "finish_reason": reason}


def _logprob_body(logprobs: Sequence[Logprob]) -> dict[str, Any]:
    """The old shape: parallel arrays."""
    texts = [item.token.decode("utf-8", "replace") for item in logprobs]
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None if math.isnan(item.logprob) else item.logprob for item in logprobs],
        "top_logprobs": [
            None if math.isnan(item.logprob) else {data.decode("utf-8", "replace"): value for data, value in item.top}
            for item in logprobs
        ],
        "text_offset": offsets,
    }
