"""The answer of POST /v1/messages: content blocks, the events that tell of their making, errors in Anthropic's words.

One state machine for both forms: a plain answer is a stream whose events nobody wants.  Source: Anthropic Messages API.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from typing import Any

from pantheon.errors import PantheonError
from pantheon.serve.answer import Frames
from pantheon.serve.chat_reply import extras
from pantheon.serve.generation import Delta, Result, Step
from pantheon.serve.http_json import Form
from pantheon.serve.voice import Voice, named_frame

#: what a thought is signed with; nobody checks it, but clients want one to send back
SIGNATURE = "pantheon"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Block = dict[str, Any]


class MessagesVoice(Voice):
    """Errors as `{"type": "error", "error": …}`; streams end behind their last event."""

    closing = b""

    def error_body(self, fault: PantheonError) -> Any:
        kind = _TYPES.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")
        error = {**fault.body()["error"], "type": kind}
        if fault.code == "context_length_exceeded" and {"n_prompt_tokens", "n_ctx"} <= set(fault.extra):
            # the words by which clients know that they have to shorten a conversation
            numbers = f"{fault.extra['n_prompt_tokens']} tokens > {fault.extra['n_ctx']} maximum"
            error["message"] = f"prompt is too long: {numbers}. {fault.message}"
        return {"type": "error", "error": error}

    def error_frames(self, fault: PantheonError) -> bytes:
        return named_frame("error", self.error_body(fault))


VOICE = MessagesVoice()


class MessagesReply:
    """One message."""

    voice: Voice = VOICE

    def __init__(self, model: str, prompt_tokens: int, *, stream: bool) -> None:
        self._streams, self._prompt_tokens = stream, prompt_tokens
        self._message: Block = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._blocks: list[Block] = []
        self._frames: list[bytes] = []
        self._kind = ""
        self._pieces: list[str] = []
        self._blank = ""
        self._form: Form | None = None

    def begin(self, index: int) -> Sequence[bytes]:
        # what is cached is known with the last event
        usage = _usage(self._prompt_tokens, 0, 0)
        self._emit("message_start", message={**self._message, "usage": usage})
        self._emit("ping")
        return self._take()

    def step(self, step: Step) -> Frames:
        for delta in step.deltas:
            if delta.channel == "content":
                self._content(delta.text)
            elif delta.channel == "reasoning":
                self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                self._piece(delta.text)
            else:
                self._call(delta)
        return self._take()

    def end(self, result: Result) -> Frames:
        if not self._blocks:
            # callers read the first block: an answer of blanks, or of nothing, has one too
            self._opened("text", {"type": "text", "text": ""})
            if self._blank:
                self._piece(self._blank)
        self._close()
        stopped = getattr(result, "stop_word", None)
        reason = "stop_sequence" if stopped and result.finish_reason == "stop" else _REASONS[result.finish_reason]
        end = {"stop_reason": reason, "stop_sequence": stopped if reason == "stop_sequence" else None}
        usage = _usage(result.prompt_tokens, result.cached_tokens, result.completion_tokens)
        # timings are no part of this API: its clients know their own
        capped = {key: value for key, value in extras([result]).items() if key != "timings"}
        self._message |= {"content": self._blocks, **end, "usage": usage, **capped}
        self._emit("message_delta", delta=end, usage=usage, **capped)
        self._emit("message_stop")
        return self._take()

    def close(self) -> Frames:
        return ()

    def body(self) -> Block:
        return self._message

    # ---- events

    def _emit(self, name: str, /, **fields: Any) -> None:
        if self._streams:
            self._frames.append(named_frame(name, {"type": name, **fields}))

    def _take(self) -> list[bytes]:
        frames, self._frames = self._frames, []
        return frames

    # ---- blocks

    def _content(self, text: str) -> None:
        """Blanks in front of a text wait for it: in front of a call they are no block."""
        if self._kind != "text":
            self._blank += text
            if not self._blank.strip():
                return
            text, self._blank = self._blank, ""
        self._opened("text", {"type": "text", "text": ""})
        self._piece(text)

    def _call(self, delta: Delta) -> None:
        if delta.name:
            self._close()
            self._blank = ""
            ident = f"toolu_{delta.call_id.removeprefix('call_')}"
            self._opened("tool_use", {"type": "tool_use", "id": ident, "name": delta.name, "input": {}})
        if delta.text and self._kind == "tool_use":
            self._piece(delta.text)

    def _opened(self, kind: str, block: Block) -> None:
        """A block of this kind is open; another one is complete."""
        if self._kind == kind:
            return
        self._close()
        self._kind, self._pieces = kind, []
        self._blocks.append(block)
        self._form = None
        self._emit("content_block_start", index=len(self._blocks) - 1, content_block=dict(block))

    def _piece(self, text: str) -> None:
        self._pieces.append(text)
        if not self._streams:
            return
        if self._form is None:
            kind, key, index = *_DELTAS[self._kind], len(self._blocks) - 1
            self._form = Form(
                lambda text: {"type": "content_block_delta", "index": index, "delta": {"type": kind, key: text}}
            )
        self._frames.append(b"event: content_block_delta\ndata: " + self._form.fill(text) + b"\n\n")

    def _close(self) -> None:
        if not self._kind:
            return
        block, text, kind = self._blocks[-1], "".join(self._pieces), self._kind
        self._kind = ""
        index = len(self._blocks) - 1
        if kind == "tool_use":
            block["input"] = _input(text)
        else:
            block[kind] = text
        if kind == "thinking":
            block["signature"] = SIGNATURE
            self._emit("content_block_delta", index=index, delta={"type": "signature_delta", "signature": SIGNATURE})
        self._emit("content_block_stop", index=index)


_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _input(text: str) -> Any:
    """The arguments of a call as an object; {} for what a cap has cut off."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text or "{}")
        return value if isinstance(value, dict) else {"value": value}
    return {}


def _usage(prompt: int, cached: int, completion: int) -> Block:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }
