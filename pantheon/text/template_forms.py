"""Forms of one conversation, each more tolerant than the one before, for templates that refuse it as it is.

Every form is a pure function from normalised messages to normalised messages that keeps every text and its order.
[B03, B04, B35 for Gemma-2, Llama-3, Mistral]  This module must not know templates or requests.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from pantheon.text.template_values import JsonArguments, ToolCall

Message = dict[str, Any]
Form = Callable[[list[Message]], list[Message]]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def as_is(messages: list[Message]) -> list[Message]:
    return messages


def one_system(messages: list[Message]) -> list[Message]:
    """Every system and developer turn joined to one at the front [B03]."""
    systems = [m for m in messages if m["role"] in ("system", "developer")]
    if not systems:
        return messages
    rest = [m for m in messages if m["role"] not in ("system", "developer")]
    return [{**systems[0], "content": _joined(*(m["content"] for m in systems))}, *rest]


def merged(messages: list[Message]) -> list[Message]:
    """Neighbours of the same role joined with a blank line; calls and tool results stay apart [B04]."""
    out: list[Message] = []
    for message in one_system(messages):
        last = out[-1] if out else None
        plain = message["role"] != "tool" and "tool_calls" not in message
        if last and plain and last["role"] == message["role"] and "tool_calls" not in last:
            out[-1] = {**last, **message, "content": _joined(last["content"], message["content"])}
        else:
            out.append(message)
    return out


def folded_system(messages: list[Message]) -> list[Message]:
    """For templates without a system role: its text opens the first user turn."""
    first, *rest = one_system(messages)
    if first["role"] not in ("system", "developer"):
        return merged(messages)
    user = next((i for i, m in enumerate(rest) if m["role"] == "user"), None)
    if user is None:
        return merged([{"role": "user", "content": first["content"]}, *rest])
    rest[user] = {**rest[user], "content": _joined(first["content"], rest[user]["content"])}
    return merged(rest)


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


# -- tool calls ------------------------------------------------------------------------------------------------------


def short_ids(messages: list[Message]) -> list[Message]:
    """Call ids of nine letters and digits, which Mistral's templates insist on; missing ones are made up."""
    out: list[Message] = []
    unanswered: list[str] = []
    made = 0
    for message in messages:
        if message["role"] == "tool":
            given = message.get("tool_call_id")
            call_id = _short(given) if given else next(iter(unanswered), _short(f"result {len(out)}"))
            unanswered = [other for other in unanswered if other != call_id]
            message = {**message, "tool_call_id": call_id}
        elif "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                made += 1
                calls.append(ToolCall({**call, "id": _short(call.get("id") or f"call {made}")}))
            unanswered = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        out.append(message)
    return out


def _short(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def parsed_only(messages: list[Message]) -> list[Message]:
    """Arguments that are no JSON object, wrapped into one, for templates that walk them [B35]."""
    out = []
    for message in messages:
        if "tool_calls" in message:
            message = {**message, "tool_calls": [_wrapped(call) for call in message["tool_calls"]]}
        out.append(message)
    return out


def _wrapped(call: ToolCall) -> ToolCall:
    function = call["function"]
    if isinstance(function["arguments"], JsonArguments):
        return call
    wrapped = JsonArguments({"arguments": function["arguments"]})
    return ToolCall({**call, "function": {**function, "arguments": wrapped}})


def single_calls(messages: list[Message]) -> list[Message]:
    """Parallel calls one after the other, each with its result, for templates that allow one at a time (Llama-3)."""
    out: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            out.append(message)
            continue
        end = next((i for i in range(at, len(messages)) if messages[i]["role"] != "tool"), len(messages))
        out += _one_by_one(message, messages[at:end])
        at = end
    return out


def _one_by_one(message: Message, results: list[Message]) -> Iterator[Message]:
    left = list(results)
    for n, call in enumerate(message["tool_calls"]):
        yield {**message, "content": message["content"] if n == 0 else "", "tool_calls": [call]}
        mine = [r for r in left if call.get("id") is not None and r.get("tool_call_id") == call["id"]] or left[:1]
        yield from mine
        left = [r for r in left if not any(r is m for m in mine)]
    yield from left


def calls_as_text(messages: list[Message]) -> list[Message]:
    """Calls and results in Hermes' words inside plain turns, for templates that know neither [M045, B02]."""
    out: list[Message] = []
    answered = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if answered:
                out[-1] = {**out[-1], "content": out[-1]["content"] + "\n" + text}
            else:
                out.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            texts = [message["content"], *map(call_text, message["tool_calls"])]
            out.append({**plain, "content": "\n".join(text for text in texts if text)})
        else:
            out.append(message)
        answered = is_result
    return out


def call_text(call: ToolCall) -> str:
    """One call as Hermes and Qwen write it."""
    name, arguments = call["name"], call["arguments"]
    text = str(arguments) if isinstance(arguments, JsonArguments) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {text}}}\n</tool_call>'


def _then(order: Form, inner: Form) -> Form:
    return lambda messages: order(inner(messages))


_ORDERS: tuple[Form, ...] = (as_is, one_system, merged, folded_system)
_CALLS: tuple[Form, ...] = (
    as_is,
    short_ids,
    parsed_only,
    single_calls,
    _then(short_ids, parsed_only),
    calls_as_text,
)
#: The ladder: orders of turns first, then the same with calls in another shape.
FORMS: tuple[Form, ...] = tuple(_then(order, calls) for calls in _CALLS for order in _ORDERS)
