"""The `input` of a Responses request as chat messages.

The items of one turn of the model (reasoning, message, calls) become one assistant message, as it was when the model
wrote it.  Pure.  Source: OpenAI Responses API, and what Codex sends.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Callable
from typing import Any

from pantheon.errors import BadRequest
from pantheon.serve.request_fields import Fields, kind
from pantheon.serve.translated import text_of

ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_UNREAD = ("input_image", "input_file")
#: what hosted tools did for another server's model; their results are in its answers
_HOSTED = ("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call")
_SEALED = "pantheon1."
_MAX_UNSEALED = 1 << 22

Message = dict[str, Any]


def seal(thought: str) -> str:
    """A thought as `encrypted_content`: opaque to clients, which give it back, and no secret."""
    return _SEALED + base64.b64encode(zlib.compress(thought.encode("utf-8", "surrogatepass"))).decode()


def unseal(data: Any) -> str | None:
    """The thought again; None when another server sealed it."""
    if not isinstance(data, str) or not data.startswith(_SEALED):
        return None
    try:
        packed = base64.b64decode(data.removeprefix(_SEALED), validate=True)
        return zlib.decompressobj().decompress(packed, _MAX_UNSEALED).decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError):
        return None


def read_items(value: Any, tool_name: Callable[[str, str | None], str]) -> list[Message]:
    """Messages of `input`; `tool_name(name, namespace)` is how a tool is called in the chat.

    Raises BadRequest naming input[i].
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRequest(f"input: must be a string or an array of items, not {kind(value)}", param="input")
    reader = _Reader(tool_name)
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise BadRequest(f"input[{i}]: must be an object, not {kind(item)}", param=f"input[{i}]")
        reader.take(Fields(item, f"input[{i}]."))
    return reader.messages


class _Reader:
    def __init__(self, tool_name: Callable[[str, str | None], str]) -> None:
        self.messages: list[Message] = []
        self._tool_name = tool_name

    def take(self, item: Fields) -> None:
        of = item.text("type", "message")
        if of in _HOSTED:
            return
        read = getattr(self, f"_{of}", None) if of in _KINDS else None
        if read is None:
            why = "is not kept here; send the item itself" if of == "item_reference" else "can't be used"
            raise item.fault("type", f"{of[:60] if of else of!r} {why}")
        read(item)

    def _message(self, item: Fields) -> None:
        role = item.text("role")
        if role not in ROLES:
            raise item.fault("role", f"must be one of {', '.join(ROLES)}, not {role!r:.60}")
        text = text_of(item.body.get("content"), f"{item.prefix}content", _TEXTS)
        if role != "assistant":
            self.messages.append({"role": role, "content": text})
            return
        turn = self._turn()
        if "tool_calls" in turn or turn.get("content"):
            self.messages.append(turn := {"role": "assistant"})
        turn["content"] = text

    def _reasoning(self, item: Fields) -> None:
        thought = unseal(item.body.get("encrypted_content"))
        if thought is None:
            parts = item.items("content") or item.items("summary")
            kinds = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
            thought = text_of(parts, f"{item.prefix}content", kinds, joint="\n\n")
        if not thought:
            return
        turn = self._turn()
        if turn.get("content") or "tool_calls" in turn:
            # a thought comes first: this is another turn
            self.messages.append(turn := {"role": "assistant"})
        before = [turn["reasoning_content"]] if "reasoning_content" in turn else []
        turn["reasoning_content"] = "\n\n".join([*before, thought])

    def _function_call(self, item: Fields) -> None:
        self._call(item, item.text("arguments", "{}") or "{}")

    def _custom_tool_call(self, item: Fields) -> None:
        self._call(item, json.dumps({"input": item.text("input", "")}, ensure_ascii=False))

    def _call(self, item: Fields, arguments: str) -> None:
        name = item.text("name")
        if not name:
            raise item.fault("name", "must be a non-empty string")
        function = {"name": self._tool_name(name, item.text("namespace")), "arguments": arguments}
        turn = self._turn()
        turn.setdefault("content", None)
        turn.setdefault("tool_calls", []).append({"id": _call_id(item), "type": "function", "function": function})

    def _function_call_output(self, item: Fields) -> None:
        output = item.body.get("output")
        text = "" if output is None else text_of(output, f"{item.prefix}output", _TEXTS, joint="\n", skip=_UNREAD)
        self.messages.append({"role": "tool", "tool_call_id": _call_id(item), "content": text})

    _custom_tool_call_output = _function_call_output

    def _turn(self) -> Message:
        """The assistant's turn that is being put together."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant"})
        return self.messages[-1]


_KINDS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)


def _call_id(item: Fields) -> str:
    call_id = item.text("call_id")
    if not call_id:
        raise item.fault("call_id", "must be a non-empty string")
    return call_id
