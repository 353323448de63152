"""The JSON shapes of chat replies, whole and streamed (OpenAI chat completion object; field cases B11c, B16, B17).

Pure: deltas and results in, JSON-ready dicts out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pantheon import __version__
from pantheon.serve.context import new_id
from pantheon.serve.generation import Delta, Logprob, Result, Step
from pantheon.serve.http_json import Form

FINGERPRINT = f"pantheon-{__version__}"


@dataclass(frozen=True)
class Envelope:
    """What all chunks of one reply share; `prefix` is chatcmpl or cmpl [X05]."""

    object: str
    model: str
    prefix: str = "chatcmpl"
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", self.id or new_id(self.prefix))

    def wrap(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole reply or one chunk."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            **more,
        }


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """Tokens of a reply; several answers to one prompt count its tokens once."""
    prompt, cached = (results[0].prompt_tokens, results[0].cached_tokens) if results else (0, 0)
    return token_counts(prompt, sum(result.completion_tokens for result in results), cached)


def token_counts(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """The `usage` object; `cached` tokens of the prompt were there already."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def extras(results: Sequence[Result]) -> dict[str, Any]:
    """Fields of our own: timings of the last answer, and how much of the context was cut off [M047, X21]."""
    dropped = max(result.dropped_tokens for result in results)
    capped = {"context_capped": True, "dropped_tokens": dropped} if dropped else {}
    return {"timings": results[-1].timings, **capped}


# ---- whole ----------------------------------------------------------------------------------------------------------


@dataclass
class Message:
    """An answer as it is put together from its deltas."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """Take one step."""
        if step.logprob is not None:
            self.logprobs.append(step.logprob)
        for delta in step.deltas:
            if delta.channel == "call" and delta.name:
                self.calls.append({"id": delta.call_id, "type": "function", "function": {"name": delta.name}})
                self.arguments.append([delta.text])
            elif delta.channel == "call":
                self.arguments[-1].append(delta.text)
            else:
                (self.content if delta.channel == "content" else self.reasoning).append(delta.text)

    def body(self) -> dict[str, Any]:
        """The `message`: content is null only beside calls, the other keys are there when they hold something."""
        text = "".join(self.content)
        if self.calls and not text.strip():
            text = ""
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            for call, pieces in zip(self.calls, self.arguments, strict=True):
                call["function"]["arguments"] = "".join(pieces)
            message["tool_calls"] = self.calls
        return message


def as_function_call(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice, whole or a chunk's, as clients of the first function-calling API read it."""
    key = "message" if "message" in choice else "delta"
    said = dict(choice[key])
    calls = said.pop("tool_calls", None)
    if calls:
        said["function_call"] = calls[0]["function"]
    reason = "function_call" if choice["finish_reason"] == "tool_calls" else choice["finish_reason"]
    return {**choice, key: said, "finish_reason": reason}


def choice(index: int, message: Message, result: Result, with_logprobs: bool) -> dict[str, Any]:
    """One entry of `choices` of a whole reply."""
    return {
        "index": index,
        "message": message.body(),
        "logprobs": logprob_body(message.logprobs) if with_logprobs else None,
        "finish_reason": result.finish_reason,
    }


# ---- streamed -------------------------------------------------------------------------------------------------------


def role_choice(index: int) -> dict[str, Any]:
    """The first chunk of an answer: role, and an empty text."""
    return _chunk(index, {"role": "assistant", "content": ""})


def empty_choice(index: int) -> dict[str, Any]:
    """A chunk that says something of its own and nothing of the answer."""
    return _chunk(index, {})


def finish_choice(index: int, result: Result, rest: Sequence[Logprob] = ()) -> dict[str, Any]:
    """The last one: no text, a reason; log-probabilities of tokens whose text was consumed go with it."""
    return _chunk(index, {}, result.finish_reason, rest)


def step_choices(index: int, deltas: Iterable[Delta], logprobs: Sequence[Logprob] = ()) -> Iterator[dict[str, Any]]:
    """The chunks of one step; log-probabilities go with the first."""
    for delta in deltas:
        for part in _delta_parts(delta):
            yield _chunk(index, part, None, logprobs)
            logprobs = ()


class TextChunks:
    """The chunks of one answer that hold a piece of text and nothing else, framed: most of a stream."""

    def __init__(self, envelope: Envelope, index: int) -> None:
        def form(key: str) -> Form:
            return Form(lambda text: envelope.wrap([_chunk(index, {key: text})]))

        self._content, self._reasoning = form("content"), form("reasoning_content")

    def frame(self, deltas: Sequence[Delta]) -> bytes | None:
        """The chunk of a step that brought one piece of text; None for any other."""
        if len(deltas) != 1 or (delta := deltas[0]).channel == "call":
            return None
        form = self._content if delta.channel == "content" else self._reasoning
        return b"data: " + form.fill(delta.text) + b"\n\n"


def _delta_parts(delta: Delta) -> Iterator[dict[str, Any]]:
    if delta.channel == "content":
        yield {"content": delta.text}
    elif delta.channel == "reasoning":
        yield {"reasoning_content": delta.text}
    else:
        # id, type and name come once, with empty arguments; then only pieces of arguments [B17]
        if delta.name:
            call = {"id": delta.call_id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
            yield {"tool_calls": [{"index": delta.index, **call}]}
        if delta.text:
            yield {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def _chunk(
    index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Sequence[Logprob] = ()
) -> dict[str, Any]:
    found = logprob_body(logprobs) if logprobs else None
    return {"index": index, "delta": delta, "logprobs": found, "finish_reason": reason}


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def logprob_body(logprobs: Iterable[Logprob]) -> dict[str, Any]:
    """`logprobs` of a choice: one item per token [B11c]."""
    content = []
    for item in logprobs:
        top = [_token(data, value) for data, value in item.top]
        content.append({**_token(item.token, item.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
