"""Tool-call text to structured calls: a pure, tolerant parser.

Takes what the emitter's tool channel holds: Hermes and Qwen `<tool_call>{json}</tool_call>`, Qwen3-Coder and Qwen3.5
`<function=name><parameter=key>value</parameter></function>`, Llama 3 bare JSON `{"name", "parameters"}`, Mistral
`[TOOL_CALLS][…]`.  Nothing raises: text that is no call comes back as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_OPENING = re.compile(r"^\s*(?:<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>)\s*")
_CLOSING = re.compile(r"\s*</tool_call>\s*$")
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
_MISTRAL_NAMED = re.compile(r"^\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*)$", re.DOTALL)
# models write line breaks into strings as they are
_DECODER = json.JSONDecoder(strict=False)
#: Deeper JSON is no call that anybody meant, and the decoder is recursive.
_MAX_DEPTH = 100


@dataclass(frozen=True)
class ToolCall:
    """One call; `arguments` is JSON text, as the OpenAI API carries it."""

    name: str
    arguments: str


def parse_tool_block(
    text: str, names: Collection[str] | None = None, schemas: dict[str, Any] | None = None
) -> tuple[list[ToolCall], str]:
    """(calls, leftover) of one tool block.

    `names`: what was offered; a call of anything else is no call.  `schemas`: name -> JSON schema of the parameters,
    by which XML values (all text) get their types.  With no call at all the leftover is the whole text.
    """
    body = _CLOSING.sub("", _OPENING.sub("", text, count=1), count=1)
    if "<function=" in body:
        calls = [_xml_call(m[1], m[2], schemas or {}) for m in _FUNCTION.finditer(body)]
    else:
        calls = [call for value in _json_values(body) for call in _json_calls(value)] or _mistral_named(body)
    calls = [call for call in calls if names is None or call.name in names]
    return (calls, "") if calls else ([], text)


def _json_values(text: str) -> list[Any]:
    """The JSON objects and arrays that stand in a text one after the other, with `;`, `,` or blanks between."""
    if _too_deep(text):
        return []
    values, at = [], 0
    while at < len(text):
        while at < len(text) and (text[at].isspace() or text[at] in ";,"):
            at += 1
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        values.append(value)
    return values


def _too_deep(text: str) -> bool:
    depth = 0
    for c in text:
        depth += (c in "[{") - (c in "]}")
        if depth > _MAX_DEPTH:
            return True
    return False


def _json_calls(value: Any) -> list[ToolCall]:
    if isinstance(value, list):
        return [call for item in value for call in _json_calls(item) if not isinstance(item, list)]
    if not isinstance(value, dict):
        return []
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = value.get("name", inner)
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return []
    return [ToolCall(name, _argument_text(arguments))]


def _argument_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _mistral_named(body: str) -> list[ToolCall]:
    """Newer Mistral models write `name{json}` or `name[ARGS]{json}`."""
    found = _MISTRAL_NAMED.match(body)
    values = _json_values(found[2]) if found else []
    return [ToolCall(found[1], _argument_text(values[0]))] if found and values else []


def _xml_call(name: str, body: str, schemas: dict[str, Any]) -> ToolCall:
    properties = _properties(schemas.get(name))
    arguments = {m[1]: _typed(m[2], properties.get(m[1])) for m in _PARAMETER.finditer(body)}
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _properties(schema: Any) -> dict[str, Any]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _typed(text: str, schema: Any) -> Any:
    """A parameter's text as what its schema asks for; text when it is a string or does not parse."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind is None or kind == "string" or (isinstance(kind, list) and "string" in kind) or _too_deep(text):
        return text
    try:
        return json.loads(text, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        return text
