"""POST /v1/completions, the old text API: a thin face over the generation path of the chat.

The prompt is the caller's own: control markers in it are parsed, nothing is put around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pantheon.engine.sampler import SamplingParams
from pantheon.errors import BadRequest
from pantheon.serve import chat_reply as reply
from pantheon.serve.chat_request import (
    MAX_CHOICES,
    include_usage,
    max_tokens,
    sampling_params,
    session_id,
    stop_strings,
)
from pantheon.serve.context import App
from pantheon.serve.generation import Job, Logprob, Result, check_bias, room
from pantheon.serve.http_json import Form
from pantheon.serve.http_request import Request
from pantheon.serve.placement import marks_of_text
from pantheon.serve.request_fields import Fields
from pantheon.serve.routes import Responder, SseStream
from pantheon.serve.stream_head import StreamHead
from pantheon.serve.turn import Turn, turn
from pantheon.text.prompt import check_least

if TYPE_CHECKING:
    from pantheon.engine.model import Model

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 32
_MAX_LOGPROBS = 5


@dataclass(frozen=True)
class CompletionRequest:
    """One checked request; `prompts` are texts or token ids."""

    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    params: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    n: int
    echo: bool
    stream: bool
    include_usage: bool
    ignore_eog: bool
    session_id: str | None = None


def parse_completion_request(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> CompletionRequest:
    """Check a decoded body.  Raises BadRequest; `param` is the field at fault."""
    fields = Fields(body)
    logprobs = fields.integer("logprobs", 0, _MAX_LOGPROBS, None)
    echo = fields.flag("echo", False)
    if echo and logprobs is not None:
        raise fields.fault("logprobs", "the prompt's log-probabilities (echo) are not supported")
    for name in ("suffix", "best_of"):
        if body.get(name) not in (None, "", 1):
            raise fields.fault(name, "is not supported")
    cap, _ = max_tokens(fields, "max_tokens", "max_completion_tokens")
    if not fields.given("max_tokens") and not fields.given("max_completion_tokens"):
        cap = DEFAULT_MAX_TOKENS
    return CompletionRequest(
        model=fields.text("model"),
        prompts=_prompts(fields),
        params=sampling_params(fields, logprobs),
        max_tokens=cap,
        stop=stop_strings(fields),
        n=fields.integer("n", 1, MAX_CHOICES, 1) or 1,
        echo=echo,
        stream=fields.flag("stream", False),
        include_usage=include_usage(fields),
        ignore_eog=fields.flag("ignore_eos", False),
        session_id=session_id(fields, headers or {}),
    )


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.body.get("prompt")
    items = [value] if isinstance(value, str) or _are_ids(value) else value
    if not isinstance(items, list) or not items:
        raise fields.fault("prompt", "must be a string, an array of strings or an array of token ids")
    if len(items) > MAX_PROMPTS:
        raise fields.fault("prompt", f"at most {MAX_PROMPTS} prompts, not {len(items)}")
    if not all(isinstance(item, str) or _are_ids(item) for item in items):
        raise fields.fault("prompt", "must be a string, an array of strings or an array of token ids")
    return tuple(item if isinstance(item, str) else tuple(item) for item in items)


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )


def post_completion(app: App, request: Request, responder: Responder) -> None:
    """Answer one request.  Errors and the end of the answer as in the chat API."""
    asked = parse_completion_request(request.json(), dict(request.headers))
    responder.will_stream = asked.stream
    with turn(app, asked.model, responder, asked.session_id, marks_of_text(asked.prompts[0])) as mine:
        jobs = [job for prompt in asked.prompts for job in _jobs(mine.model, asked, prompt)]
        answers = _Answers(asked, mine, jobs)
        if asked.stream:
            stream, tail = answers.stream(app, responder)
        else:
            body = answers.whole()
    if asked.stream:
        for event in tail:
            stream.send(event)
        stream.done()
    else:
        responder.send_json(200, body, mine.headers)


def _jobs(model: Model, asked: CompletionRequest, prompt: str | tuple[int, ...]) -> Iterator[Job]:
    check_bias(asked.params, model.n_vocab)
    if isinstance(prompt, str):
        check_least(model.tokenizer, prompt, model.n_ctx, "prompt")
        ids: Sequence[int] = model.tokenize(prompt, parse_special=True)
    else:
        ids = prompt
        if any(not 0 <= token < model.n_vocab for token in ids):
            raise BadRequest(f"prompt: a token is outside the vocabulary of {model.n_vocab}", param="prompt")
    job = Job(
        prompt_ids=list(ids),
        params=asked.params,
        limit=room(ids, model.n_ctx, asked.max_tokens, "prompt"),
        stop=asked.stop,
        parse_reasoning=False,
        ignore_eog=asked.ignore_eog,
        uncapped=asked.max_tokens is None,
    )
    yield from (job.choice(index) for index in range(asked.n))


class _Answers:
    """The answers to all prompts, one after the other."""

    def __init__(self, asked: CompletionRequest, mine: Turn, jobs: list[Job]) -> None:
        self._asked, self._turn, self._jobs = asked, mine, jobs
        self._envelope = reply.Envelope("text_completion", mine.entry.name, "cmpl")
        self._results: list[Result] = []

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, job in enumerate(self._jobs):
            message = reply.Message()
            run = self._turn.run(job)
            for step in run:
                message.add(step)
            self._results.append(self._turn.note(run))
            text = self._echo(index) + "".join(message.content)
            choices.append(self._choice(index, text, self._results[-1].finish_reason, message.logprobs))
        return self._envelope.wrap(choices, usage=self._usage(), **reply.extras(self._results))

    def stream(self, app: App, responder: Responder) -> tuple[SseStream, list[dict[str, Any]]]:
        tail: list[dict[str, Any]] = []
        with StreamHead(responder, self._turn.headers, None, app.early_head_s) as head:
            for index, job in enumerate(self._jobs):
                begin = [self._chunk(index, echo)] if (echo := self._echo(index)) else []
                run = self._turn.run(job, head)
                waiting: list[Logprob] = []
                form = self._form(index)
                for step in run:
                    waiting += [step.logprob] if step.logprob is not None else []
                    text = "".join(delta.text for delta in step.deltas)
                    if text and not (tail or begin or waiting):
                        head.open().send_json(form.fill(text))
                        continue
                    events = [*tail, *begin, *([self._chunk(index, text, None, waiting)] if text else [])]
                    for event in events:
                        head.open().send(event)
                    waiting = [] if text else waiting
                    tail, begin = [], []
                self._results.append(self._turn.note(run))
                tail = [self._chunk(index, "", self._results[-1].finish_reason, waiting)]
            if self._asked.include_usage:
                tail.append(self._envelope.wrap([], usage=self._usage()))
            return head.open(), tail

    def _chunk(
        self, index: int, text: str, reason: str | None = None, logprobs: Sequence[Logprob] = ()
    ) -> dict[str, Any]:
        return self._envelope.wrap([self._choice(index, text, reason, logprobs)])

    def _form(self, index: int) -> Form:
        """The chunk that holds a piece of text and nothing else."""
        return Form(lambda text: self._chunk(index, text))

    def _choice(self, index: int, text: str, reason: str | None, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        found = _logprob_body(logprobs) if logprobs else None
        return {"index": index, "text": text, "logprobs": found, "finish_reason": reason}

    def _echo(self, index: int) -> str:
        if not self._asked.echo:
            return ""
        prompt = self._asked.prompts[index // self._asked.n]
        return prompt if isinstance(prompt, str) else self._turn.model.detokenize(prompt, special=True)

    def _usage(self) -> dict[str, Any]:
        firsts = self._results[:: self._asked.n]
        prompt, cached = sum(result.prompt_tokens for result in firsts), sum(result.cached_tokens for result in firsts)
        return reply.token_counts(prompt, sum(result.completion_tokens for result in self._results), cached)


def _logprob_body(logprobs: Sequence[Logprob]) -> dict[str, Any]:
    """The old shape: parallel arrays."""
    texts = [item.token.decode("utf-8", "replace") for item in logprobs]
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [item.logprob for item in logprobs],
        "top_logprobs": [{data.decode("utf-8", "replace"): value for data, value in item.top} for item in logprobs],
        "text_offset": offsets,
    }
