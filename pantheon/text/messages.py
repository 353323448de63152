"""Messages as clients send them, made ready for a template.

First each message is checked and brought into one form (text joined, arguments parsed, nulls dropped); then, if the
template refuses the list as it is, ever more tolerant forms are tried until one renders.  Pure: the input is not
changed; the only effect asked of a template is to render.  [B01-B04, B35; ARCH.md §9]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from pantheon.errors import BadRequest, PantheonError
from pantheon.text.prompt import Renders

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

Message = dict[str, Any]


class JsonArguments(dict[str, Any]):
    """Arguments of a call: a mapping for templates that walk it, JSON text for those that print it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


def normalise(
    messages: Any, template: Renders, tools: list[dict[str, Any]] | None = None, **kwargs: Any
) -> list[Message]:
    """The list that the template renders.

    Raises BadRequest naming messages[i]… for what is malformed, and with the template's own message when it refuses
    every form.
    """
    clean = check(messages)
    if "developer" not in template.source:
        clean = [{**m, "role": "system"} if m["role"] == "developer" else m for m in clean]
    refusal: PantheonError | None = None
    tried: list[list[Message]] = []
    for form in _FORMS:
        candidate = form(clean)
        if candidate in tried:
            continue
        tried.append(candidate)
        fault = _refusal(template, candidate, tools, kwargs)
        if fault is None:
            return candidate
        refusal = refusal or fault
        if fault.code == "template_limit":
            break
    assert refusal is not None
    raise refusal


def _refusal(template: Renders, messages: list[Message], tools: Any, kwargs: Any) -> PantheonError | None:
    """None when the template renders, with `tools` None or empty alike."""
    fault: PantheonError | None = None
    for offered in (tools,) if tools else (None, []):
        try:
            template.render(messages, offered, **kwargs)
            return None
        except PantheonError as refused:
            fault = fault or refused
    return fault


# ---- one message -----------------------------------------------------------------------------------------------


def check(messages: Any) -> list[Message]:
    """Every message in one form: role, content text, and what else templates read.  Raises BadRequest."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, at: str) -> Message:
    if not isinstance(message, dict):
        raise BadRequest(f"{at} must be an object", param=at)
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"{at}.role must be one of {', '.join(ROLES)}, not {role!r:.60}", param=f"{at}.role")
    clean: Message = {"role": role}
    calls = _calls(message.get("tool_calls"), at) if role == "assistant" else []
    content = _content(message.get("content"), at)
    if content is None and role != "assistant":
        raise BadRequest(f"{at}.content is missing", param=f"{at}.content")
    # some templates join `content` to text whatever else there is
    clean["content"] = content or ""
    for key, kind in (("name", str), ("tool_call_id", str), ("reasoning_content", str)):
        if isinstance(message.get(key), kind):
            clean[key] = message[key]
    if role == "assistant" and isinstance(message.get("reasoning"), str):
        clean.setdefault("reasoning_content", message["reasoning"])
    if calls:
        clean["tool_calls"] = calls
    return clean


def _content(content: Any, at: str) -> str | None:
    """The joined text of a string or of a list of parts; None for null or nothing."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{at}.content must be a string or a list of parts", param=f"{at}.content")
    return "".join(_part(part, f"{at}.content[{j}]") for j, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if not isinstance(part, dict):
        raise BadRequest(f"{at} must be an object with a type", param=at)
    key = _TEXT_PARTS.get(str(part.get("type")))
    if key is None:
        raise BadRequest(
            f"{at}.type is {part.get('type')!r:.60}: this server reads text parts only", param=f"{at}.type"
        )
    if not isinstance(part.get(key), str):
        raise BadRequest(f"{at}.{key} must be a string", param=f"{at}.{key}")
    return str(part[key])


def _calls(calls: Any, at: str) -> list[Message]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BadRequest(f"{at}.tool_calls must be a list", param=f"{at}.tool_calls")
    return [_call(call, f"{at}.tool_calls[{j}]") for j, call in enumerate(calls)]


def _call(call: Any, at: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRequest(f"{at}.function must be an object", param=f"{at}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{at}.function.name must be a string that is not empty", param=f"{at}.function.name")
    arguments = _arguments(function.get("arguments"), f"{at}.function.arguments")
    clean: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(call.get("id"), str):
        clean["id"] = call["id"]
    # Qwen3-Coder and its kind read the call itself
    return {**clean, "name": name, "arguments": arguments}


def _arguments(arguments: Any, at: str) -> JsonArguments | str:
    """The JSON text of the wire as a mapping; text that is no object stays as it is."""
    if isinstance(arguments, dict):
        return JsonArguments(arguments)
    if arguments is None or arguments == "":
        return JsonArguments()
    if not isinstance(arguments, str):
        raise BadRequest(f"{at} must be a string", param=at)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return JsonArguments(value) if isinstance(value, dict) else arguments


# ---- forms, each more tolerant than the one before -----------------------------------------------------------------


def _as_is(messages: list[Message]) -> list[Message]:
    return messages


def _one_system(messages: list[Message]) -> list[Message]:
    """Every system and developer turn joined to one at the front [B03]."""
    texts = [m["content"] for m in messages if m["role"] in ("system", "developer")]
    rest = [m for m in messages if m["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else rest


def _merged(messages: list[Message]) -> list[Message]:
    """Neighbours of the same role joined with a blank line; turns with calls and tool results stay apart [B04]."""
    out: list[Message] = []
    for message in _one_system(messages):
        last = out[-1] if out else None
        plain = message["role"] != "tool" and "tool_calls" not in message
        if last and plain and last["role"] == message["role"] and "tool_calls" not in last:
            out[-1] = {**last, "content": "\n\n".join(t for t in (last["content"], message["content"]) if t)}
        else:
            out.append(message)
    return out


def _folded_system(messages: list[Message]) -> list[Message]:
    """For templates without a system role: its text opens the first user turn."""
    merged = _one_system(messages)
    if merged[0]["role"] != "system":
        return _merged(messages)
    system, rest = merged[0]["content"], merged[1:]
    first = next((i for i, m in enumerate(rest) if m["role"] == "user"), None)
    if first is None:
        return _merged([{"role": "user", "content": system}, *rest])
    text = "\n\n".join(t for t in (system, rest[first]["content"]) if t)
    return _merged([*rest[:first], {**rest[first], "content": text}, *rest[first + 1 :]])


def _short_ids(messages: list[Message]) -> list[Message]:
    """Call ids of nine letters and digits, which Mistral's templates insist on."""

    def short(call_id: str) -> str:
        return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]

    out = []
    for message in messages:
        if isinstance(message.get("tool_call_id"), str):
            message = {**message, "tool_call_id": short(message["tool_call_id"])}
        if "tool_calls" in message:
            calls = [{**call, "id": short(call.get("id", str(i)))} for i, call in enumerate(message["tool_calls"])]
            message = {**message, "tool_calls": calls}
        out.append(message)
    return out


def _parsed_only(messages: list[Message]) -> list[Message]:
    """Arguments that are no JSON object, wrapped into one, for templates that walk them [B35]."""
    out = []
    for message in messages:
        calls = [_wrap_arguments(call) for call in message.get("tool_calls", [])]
        out.append({**message, "tool_calls": calls} if calls else message)
    return out


def _wrap_arguments(call: Message) -> Message:
    text = call["arguments"]
    if not isinstance(text, str):
        return call
    wrapped = JsonArguments(arguments=text)
    return {**call, "arguments": wrapped, "function": {**call["function"], "arguments": wrapped}}


def _then(
    outer: Callable[[list[Message]], list[Message]], inner: Callable[[list[Message]], list[Message]]
) -> Callable[[list[Message]], list[Message]]:
    return lambda messages: outer(inner(messages))


_ORDERS = (_as_is, _one_system, _merged, _folded_system)
_FORMS = (
    *_ORDERS,
    *(_then(_short_ids, order) for order in _ORDERS),
    *(_then(_parsed_only, order) for order in _ORDERS),
)
