"""POST /completion and /completions, llama-server's own text API, and /infill, over the one way of an answer.

Its fields and its shapes are llama-server's; samplers that this server does not have are taken and left out.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pantheon.serve.answer import Frames, deliver
from pantheon.serve.chat_job import Job
from pantheon.serve.chat_request import MAX_CHOICES, max_tokens, sampling_params, session_id, stop_strings
from pantheon.serve.constraint_fields import read_constraint
from pantheon.serve.context import App
from pantheon.serve.generation import Logprob, Result, Step
from pantheon.serve.http_request import Request
from pantheon.serve.infill import fill_in_ids, read_extra
from pantheon.serve.native_settings import generation_settings
from pantheon.serve.request_fields import Fields
from pantheon.serve.routes import Responder
from pantheon.serve.text_request import (
    TextRequest,
    is_several,
    make_jobs,
    marks_of_prompt,
    prompt_ids,
    read_bias,
    read_prompts,
)
from pantheon.serve.turn import Turn, turn
from pantheon.serve.voice import Voice, frame

MAX_PROBS = 1000
#: llama-server's own, where they are not those of the other APIs
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "min_p": 0.05}


class _Native(Voice):
    """Streams of this API end without a word."""

    closing = b""


NATIVE = _Native()


@dataclass(frozen=True)
class NativeRequest:
    """One checked request: what the engine is asked for, and what the reply shows.  `only_prompt`: nothing is to be
    made, the prompt is read for the next request; the one token that comes with that is not shown."""

    text: TextRequest
    several: bool = False
    return_tokens: bool = False
    response_fields: tuple[str, ...] = ()
    only_prompt: bool = False
    timings_per_token: bool = False
    return_progress: bool = False


def parse_native(
    body: dict[str, Any], headers: Mapping[str, str] | None = None, *, infill: bool = False
) -> NativeRequest:
    """Check a decoded body.  Raises BadRequest; `param` is the field at fault."""
    # what differs from the chat API lies over the body: the shared readers then read the rest of it as they do there
    fields = Fields(ChainMap({"logit_bias": None, **_lenient(body)}, body))
    n_probs = fields.integer("n_probs" if fields.given("n_probs") else "logprobs", 0, MAX_PROBS, 0)
    caps = [body.get(name) for name in ("n_predict", "max_tokens")]
    only_prompt = any(cap == 0 and not isinstance(cap, bool) for cap in caps) and not infill
    cap, _ = max_tokens(fields, "n_predict", "max_tokens")
    ids, texts = read_bias(Fields(body))
    text = TextRequest(
        model=fields.text("model"),
        prompts=() if infill else read_prompts(fields),
        params=replace(
            sampling_params(fields, n_probs or None),
            logit_bias=ids,
            post_sampling=fields.flag("post_sampling_probs", False),
        ),
        max_tokens=cap,
        stop=stop_strings(fields),
        n=fields.integer("n_cmpl" if fields.given("n_cmpl") else "n", 1, MAX_CHOICES, 1) or 1,
        stream=fields.flag("stream", False),
        ignore_eog=fields.flag("ignore_eos", False),
        constraint=read_constraint(fields),
        bias_texts=texts,
        session_id=session_id(fields, headers or {}),
    )
    shown = fields.items("response_fields")
    if not all(isinstance(name, str) for name in shown):
        raise fields.fault("response_fields", "must be an array of strings")
    return NativeRequest(
        text=text,
        several=not infill and (is_several(body.get("prompt")) or text.n > 1),
        return_tokens=fields.flag("return_tokens", False),
        response_fields=tuple(shown),
        only_prompt=only_prompt,
        timings_per_token=fields.flag("timings_per_token", False),
        return_progress=fields.flag("return_progress", False),
    )


def _lenient(body: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the chat API: defaults, and what is let pass: a temperature below 0 is greedy, an empty stop
    string is none, a count of -2 runs to the end of the window, one of 0 makes nothing."""
    found = {name: value for name, value in DEFAULTS.items() if body.get(name) is None}
    temperature, stop = body.get("temperature"), body.get("stop")
    if isinstance(temperature, int | float) and temperature < 0:
        found["temperature"] = 0
    if isinstance(stop, list):
        found["stop"] = [item for item in stop if item != ""]
    for name in ("n_predict", "max_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value in (-2, 0):
            found[name] = 1 if value == 0 else -1
    return found


def post_completion(app: App, request: Request, responder: Responder) -> None:
    """Answer one request; several prompts are answered with an array."""
    asked = parse_native(app.defaults.fill(request.json()), dict(request.headers))
    text = asked.text
    responder.voice = NATIVE
    responder.will_stream = text.stream
    with turn(app, text.model, responder, text.session_id, marks_of_prompt(text.prompts[0])) as mine:
        ids = [prompt_ids(mine.model, prompt) for prompt in text.prompts]
        rest = _answer(app, mine, asked, ids, responder)
    rest()


def post_infill(app: App, request: Request, responder: Responder) -> None:
    """Answer with what stands between `input_prefix` and `input_suffix`."""
    body = app.defaults.fill(request.json())
    asked, fields = parse_native(body, dict(request.headers), infill=True), Fields(body)
    middle, extra = fields.text("prompt") or "", read_extra(fields)
    prefix, suffix = fields.text("input_prefix"), fields.text("input_suffix")
    if prefix is None or suffix is None:
        raise fields.fault("input_prefix" if prefix is None else "input_suffix", "must be a string")
    text = asked.text
    responder.voice = NATIVE
    responder.will_stream = text.stream
    with turn(app, text.model, responder, text.session_id, marks_of_prompt((prefix,))) as mine:
        before = mine.model.tokenize(prefix, add_special=False)
        most = mine.model.n_ctx - max(1, min(text.max_tokens or 1, mine.model.n_ctx // 2))
        ids = fill_in_ids(mine.model, before, suffix, middle, extra, most)
        rest = _answer(app, mine, asked, [ids], responder)
    rest()


def _answer(app: App, mine: Turn, asked: NativeRequest, prompts: list[list[int]], responder: Responder) -> Any:
    jobs = list(make_jobs(mine.model, asked.text, prompts))
    made = NativeReply(asked, mine, jobs)
    return deliver(app, mine, jobs, made, responder, stream=asked.text.stream)


class NativeReply:
    """The answers to a list of jobs, whole or streamed."""

    voice: Voice = NATIVE

    def __init__(self, asked: NativeRequest, mine: Turn, jobs: Sequence[Job]) -> None:
        self._asked, self._turn, self._jobs = asked, mine, jobs
        self._model = mine.model
        self.progress = self._progress if asked.return_progress else None
        self._bodies: list[dict[str, Any]] = []
        self._index = 0
        self._clear()

    def _clear(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._probs: list[Logprob] = []

    def _progress(self, report: dict[str, Any]) -> bytes:
        return self._chunk("", [], [], {"prompt_progress": report})

    def begin(self, index: int) -> Sequence[bytes]:
        self._index = index
        self._clear()
        self._made = 0
        return ()

    def step(self, step: Step) -> Frames:
        if self._asked.only_prompt:
            return ()
        text = "".join(delta.text for delta in step.deltas)
        tokens = [] if step.token is None else [step.token]
        probs = [] if step.logprob is None else [step.logprob]
        self._texts.append(text)
        self._made += len(tokens)
        if not self._asked.text.stream:
            self._tokens += tokens
            self._probs += probs
            return ()
        if not tokens:
            # the end of the answer; what was held back may come with it
            return (self._chunk(text, tokens, probs),) if text else ()
        return (self._chunk(text, tokens, probs),)

    def _chunk(
        self, text: str, tokens: list[int], probs: list[Logprob], more: Mapping[str, Any] | None = None
    ) -> bytes:
        found: dict[str, Any] = {
            "index": self._index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self._made,
            "tokens_evaluated": len(self._jobs[self._index].prompt_ids),
        }
        if probs:
            found["completion_probabilities"] = self._shown(probs)
        if self._asked.timings_per_token:
            found["timings"] = self._turn.flight.timings()
        return frame({**found, **(more or {})})

    def _shown(self, probs: Sequence[Logprob]) -> list[dict[str, Any]]:
        return [probability(item, self._asked.text.params.post_sampling) for item in probs]

    def end(self, result: Result) -> Frames:
        body = self._final(result)
        if not self._asked.text.stream:
            self._bodies.append(body)
            return ()
        return (frame(body),)

    def _final(self, result: Result) -> dict[str, Any]:
        job, streams = self._jobs[self._index], self._asked.text.stream
        text = "".join(self._texts)
        body: dict[str, Any] = {
            "index": self._index,
            "content": "" if streams else text,
            "tokens": self._tokens if self._asked.return_tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self._turn.entry.name,
            "tokens_predicted": 0 if self._asked.only_prompt else result.completion_tokens,
            "tokens_evaluated": result.prompt_tokens,
            "generation_settings": generation_settings(self._asked.text, self._model),
            "prompt": self._model.detokenize(job.prompt_ids, special=True),
            "has_new_line": "\n" in text,
            "truncated": False,
            "stop_type": "limit" if self._asked.only_prompt else stop_type(result),
            "stopping_word": result.stop_word or "",
            "tokens_cached": result.cached_tokens,
            "timings": result.timings,
        }
        if self._probs:
            body["completion_probabilities"] = self._shown(self._probs)
        return pick(body, self._asked.response_fields) if self._asked.response_fields else body

    def close(self) -> Frames:
        return ()

    def body(self) -> Any:
        return self._bodies if self._asked.several else self._bodies[0]


def stop_type(result: Result) -> str:
    """llama-server's word for why an answer ended."""
    if result.stop_word is not None:
        return "word"
    return "limit" if result.finish_reason == "length" else "eos"


def probability(item: Logprob, drawn: bool = False) -> dict[str, Any]:
    """One token with the likeliest alternatives; `drawn`: as probabilities, which is what sampling left of them."""
    top = [_token(token, data, value, drawn) for token, (data, value) in zip(item.top_ids, item.top, strict=True)]
    return {**_token(item.id, item.token, item.logprob, drawn), "top_probs" if drawn else "top_logprobs": top}


def _token(token: int, data: bytes, logprob: float, drawn: bool) -> dict[str, Any]:
    value = {"prob": math.exp(logprob)} if drawn else {"logprob": logprob}
    return {"id": token, "token": data.decode("utf-8", "replace"), "bytes": list(data), **value}


def pick(body: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The named fields; a name with slashes leads into objects, and one that is not there is left out."""
    found = {}
    for name in names:
        value: Any = body
        for part in name.split("/"):
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
        else:
            found[name] = value
    return found
