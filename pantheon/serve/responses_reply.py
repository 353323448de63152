"""The answer of POST /v1/responses: output items, and the events that tell of their making.

One state machine for both forms: a plain answer is a stream whose events nobody wants.  Source: OpenAI Responses API.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from pantheon.errors import PantheonError
from pantheon.serve.answer import Frames
from pantheon.serve.chat_reply import extras, logprob_body
from pantheon.serve.generation import Delta, Logprob, Result, Step
from pantheon.serve.http_json import Form, dump_json
from pantheon.serve.responses_items import seal
from pantheon.serve.responses_request import ResponsesRequest, Tool
from pantheon.serve.voice import Voice

#: codes of our errors under which the API has one of its own
_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}

Item = dict[str, Any]


class ResponsesReply(Voice):
    """One response.  As a voice it tells of a failure in the middle by `response.failed`, which ends the stream."""

    closing = b""

    def __init__(self, request: ResponsesRequest, model: str, timings: Callable[[], Any] = dict) -> None:
        """`timings`: how the answer goes, told with each delta of text when that was asked for."""
        self.voice: Voice = self
        self.progress = self._progress if request.chat.return_progress else None
        self._timings = timings if request.chat.timings_per_token else None
        self._request, self._streams = request, request.chat.stream
        self._id, self._created = f"resp_{secrets.token_hex(24)}", int(time.time())
        self._model = model
        self._frames: list[bytes] = []
        self._sequence = 0
        self._output: list[Item] = []
        self._open: _Open | None = None
        self._blank = ""
        self._logprobs: list[Logprob] = []
        self._tokens = self._thought_tokens = 0
        self._final: Item = {}

    # ---- as a reply

    def begin(self, index: int) -> Sequence[bytes]:
        response = self._response("in_progress")
        self._emit("response.created", response=response)
        self._emit("response.in_progress", response=response)
        return self._take()

    def step(self, step: Step) -> Frames:
        self._tokens += 1
        if step.logprob is not None:
            self._logprobs.append(step.logprob)
        for delta in step.deltas:
            if delta.channel == "content":
                self._content(delta.text)
            elif delta.channel == "reasoning":
                self._piece(self._opened(_Thought), delta.text)
            else:
                self._call(delta)
        return self._take()

    def end(self, result: Result) -> Frames:
        cut = result.finish_reason == "length"
        if not self._output and (self._open is None or isinstance(self._open, _Thought)):
            # an answer of blanks, or of nothing, is still a message
            self._piece(self._opened(_Text), self._blank)
        self._close("incomplete" if cut else "completed")
        more: Item = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {"completed_at": time.time()}
        status = "incomplete" if cut else "completed"
        self._final = self._response(status, usage=self._usage(result), **more, **extras([result]))
        self._emit(f"response.{status}", response=self._final, timings=result.timings)
        return self._take()

    def close(self) -> Frames:
        return ()

    def body(self) -> Item:
        return self._final

    def _progress(self, report: Item) -> bytes:
        self._emit("response.in_progress", response=self._response("in_progress"), prompt_progress=report)
        return b"".join(self._take())

    # ---- as a voice

    def error_frames(self, fault: PantheonError) -> bytes:
        """`response.failed` with what there is."""
        if self._open is not None:
            self._output.append(self._open.item("incomplete"))
            self._open = None
        code = _CODES.get(fault.status, "server_error") if fault.code != "context_length_exceeded" else fault.code
        error = {"code": code, "message": fault.message, "type": fault.type, "param": fault.param}
        self._frames = []
        self._emit("response.failed", response=self._response("failed", error=error))
        return b"".join(self._take())

    # ---- events

    def _emit(self, name: str, /, **fields: Any) -> None:
        if self._streams:
            self._emit_json(name, dump_json(fields))

    def _emit_json(self, name: str, data: bytes) -> None:
        head = b'event: %b\ndata: {"type":"%b","sequence_number":%d,' % (name.encode(), name.encode(), self._sequence)
        self._frames.append(head + data[1:] + b"\n\n")
        self._sequence += 1

    def _take(self) -> list[bytes]:
        frames, self._frames = self._frames, []
        return frames

    def _response(self, status: str, **more: Any) -> Item:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": list(self._output),
            "previous_response_id": None,
            "usage": None,
            **self._request.echo,
            **more,
        }

    def _usage(self, result: Result) -> Item:
        return {
            "input_tokens": result.prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": result.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(self._thought_tokens, result.completion_tokens)},
            "total_tokens": result.prompt_tokens + result.completion_tokens,
        }

    # ---- items

    def _content(self, text: str) -> None:
        """Blanks in front of a text wait for it: in front of a call they are no message."""
        if not isinstance(self._open, _Text):
            self._blank += text
            if not self._blank.strip():
                return
            text, self._blank = self._blank, ""
        self._piece(self._opened(_Text), text)

    def _call(self, delta: Delta) -> None:
        if delta.name:
            self._close("completed")
            self._blank = ""
            tool = self._request.tools.get(delta.name, Tool(delta.name))
            kind = _CustomCall if tool.custom else _Call
            self._start(kind(len(self._output), self._request, tool, delta.call_id))
        if delta.text and isinstance(self._open, _Call):
            self._piece(self._open, delta.text)

    def _opened(self, kind: type[_Open]) -> _Open:
        """The open item of this kind; another one is complete."""
        if type(self._open) is kind:
            return self._open
        self._close("completed")
        return self._start(kind(len(self._output), self._request))

    def _start(self, item: _Open) -> _Open:
        self._open = item
        self._emit("response.output_item.added", output_index=item.index, item=item.item("in_progress"))
        if item.part_event:
            self._emit(item.part_event + ".added", **item.at, part=item.part())
        return item

    def _piece(self, item: _Open, text: str) -> None:
        item.pieces.append(text)
        logprobs = self._logprob_items() if isinstance(item, _Text) else []
        item.logprobs += logprobs
        if not self._streams or not item.delta_event:
            return
        if logprobs or self._timings is not None:
            more = {"timings": self._timings()} if self._timings is not None else {}
            self._emit(item.delta_event, **{**item.delta(text), **({"logprobs": logprobs} if logprobs else {})}, **more)
        else:
            self._emit_json(item.delta_event, item.form.fill(text))

    def _logprob_items(self) -> list[Item]:
        waiting, self._logprobs = self._logprobs, []
        found: list[Item] = logprob_body(waiting)["content"] if waiting else []
        return found

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, _Thought):
            self._thought_tokens = self._tokens - 1
            self._logprobs = []
        for name, fields in item.closing():
            self._emit(name, **item.at, **fields)
        if item.part_event:
            self._emit(item.part_event + ".done", **item.at, part=item.part())
        done = item.item(status)
        self._emit("response.output_item.done", output_index=item.index, item=done)
        self._output.append(done)


class _Open:
    """An output item that is being written.

    `at`: where its events say they belong; `part_event`, `delta_event`: the names of those of its only part ("": none).
    """

    prefix = part_event = delta_event = ""

    def __init__(self, index: int, request: ResponsesRequest) -> None:
        self.index, self.request = index, request
        self.id = f"{self.prefix}_{secrets.token_hex(24)}"
        self.pieces: list[str] = []
        self.logprobs: list[Item] = []
        self.at: Item = {"item_id": self.id, "output_index": index}
        self.prepare()
        self.form = Form(self.delta)

    def prepare(self) -> None:
        """What a kind adds before its first event."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def delta(self, text: str) -> Item:
        """The fields of one delta event."""
        return {**self.at, "delta": text}

    def part(self) -> Item:
        return {}

    def closing(self) -> list[tuple[str, Item]]:
        """The events in front of the part's or the item's end."""
        return []

    def item(self, status: str) -> Item:
        raise NotImplementedError


class _Text(_Open):
    prefix, part_event, delta_event = "msg", "response.content_part", "response.output_text.delta"

    def prepare(self) -> None:
        self.at["content_index"] = 0

    def delta(self, text: str) -> Item:
        return {**self.at, "delta": text, "logprobs": []}

    def part(self) -> Item:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def closing(self) -> list[tuple[str, Item]]:
        return [("response.output_text.done", {"text": self.text, "logprobs": self.logprobs})]

    def item(self, status: str) -> Item:
        content = [self.part()] if status != "in_progress" else []
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


class _Thought(_Open):
    """Reasoning, as the text that it is, or as the summary that was asked for."""

    prefix = "rs"

    def prepare(self) -> None:
        if self.request.summary:
            self.at["summary_index"] = 0
            self.part_event = "response.reasoning_summary_part"
            self.delta_event = "response.reasoning_summary_text.delta"
        else:
            self.at["content_index"] = 0
            self.part_event, self.delta_event = "response.content_part", "response.reasoning_text.delta"

    def part(self) -> Item:
        return {"type": "summary_text" if self.request.summary else "reasoning_text", "text": self.text}

    def closing(self) -> list[tuple[str, Item]]:
        return [(self.delta_event.removesuffix("delta") + "done", {"text": self.text})]

    def item(self, status: str) -> Item:
        parts = [self.part()] if status != "in_progress" else []
        item: Item = {"type": "reasoning", "id": self.id, "summary": parts if self.request.summary else []}
        if not self.request.summary:
            item["content"] = parts
        if self.request.seal:
            item["encrypted_content"] = seal(self.text) if parts else None
        return {**item, "status": status}


class _Call(_Open):
    prefix, delta_event = "fc", "response.function_call_arguments.delta"

    def __init__(self, index: int, request: ResponsesRequest, tool: Tool, call_id: str) -> None:
        self.tool, self.call_id = tool, call_id
        super().__init__(index, request)

    def closing(self) -> list[tuple[str, Item]]:
        return [("response.function_call_arguments.done", {"name": self.tool.name, "arguments": self.text})]

    def item(self, status: str) -> Item:
        space = {"namespace": self.tool.namespace} if self.tool.namespace else {}
        call = {"call_id": self.call_id, "name": self.tool.name, **space, "arguments": self.text}
        return {"type": "function_call", "id": self.id, "status": status, **call}


class _CustomCall(_Call):
    """A call of a custom tool: its input is known when its arguments are complete."""

    prefix, delta_event = "ctc", ""

    def closing(self) -> list[tuple[str, Item]]:
        deltas = [("response.custom_tool_call_input.delta", {"delta": self.input})] if self.input else []
        return [*deltas, ("response.custom_tool_call_input.done", {"input": self.input})]

    @property
    def input(self) -> str:
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(self.text)
            if isinstance(arguments, dict) and isinstance(arguments.get("input"), str):
                found: str = arguments["input"]
                return found
        return self.text

    def item(self, status: str) -> Item:
        space = {"namespace": self.tool.namespace} if self.tool.namespace else {}
        call = {"call_id": self.call_id, "name": self.tool.name, **space}
        text = self.input if status != "in_progress" else ""
        return {"type": "custom_tool_call", "id": self.id, "status": status, **call, "input": text}
