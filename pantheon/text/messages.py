"""Messages as clients send them, made ready for a template [B01-B04, B35].

First each message is checked and brought into one form (text joined, arguments parsed, nulls dropped); then, if the
template refuses the list as it is, the forms of template_forms are tried until one renders.  Pure: the input is not
changed, normalising twice changes nothing, and the only effect asked of a template is to render.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from pantheon.errors import BadRequest, PantheonError
from pantheon.text.template_forms import FORMS, Message, calls_as_text
from pantheon.text.template_values import ToolCall, parse_arguments

ROLES = ("system", "developer", "user", "assistant", "tool")

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_STRINGS = ("name", "tool_call_id", "reasoning_content", "reasoning")
_DEVELOPER = re.compile(r"['\"]developer['\"]")


class Renders(Protocol):
    """A chat template, as far as messages and prompts need one."""

    @property
    def source(self) -> str: ...

    def render(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any) -> str: ...


def normalise(
    messages: Any, template: Renders, tools: list[dict[str, Any]] | None = None, **kwargs: Any
) -> list[Message]:
    """The list that the template renders.

    `tools` and `kwargs`: what the prompt will be rendered with, where a template decides by them.
    Raises BadRequest naming messages[i]… for what is malformed, and with the template's own message when it refuses
    every form.
    """
    clean = check(messages)
    if not _DEVELOPER.search(template.source):
        clean = [{**m, "role": "system"} if m["role"] == "developer" else m for m in clean]
    if "tool_calls" not in template.source:
        clean = calls_as_text(clean)
    return fit(clean, template, tools, **kwargs)


def fit(messages: list[Message], template: Renders, tools: Any = None, **kwargs: Any) -> list[Message]:
    """The first form of checked messages that the template renders without dropping a later system turn."""
    refusal: PantheonError | None = None
    lossy: list[Message] | None = None
    tried: list[list[Message]] = []
    for form in FORMS:
        candidate = form(messages)
        if candidate in tried:
            continue
        tried.append(candidate)
        try:
            text = render(template, candidate, tools, **kwargs)
        except PantheonError as fault:
            refusal = refusal or fault
            if not _refused(fault):
                break  # stopped for what it spends: no other form would cost less
            continue
        if not _drops_system(candidate, text):
            return candidate
        lossy = lossy or candidate
    if lossy is not None:
        return lossy
    assert refusal is not None  # every form either rendered or refused
    refusal.param = refusal.param or "messages"
    raise refusal


def render(
    template: Renders, messages: list[Message], tools: Any, add_generation_prompt: bool = True, **kwargs: Any
) -> str:
    """Render with the tools as given; without any, also with an empty list, which Hermes' templates insist on."""
    try:
        return template.render(messages, tools or None, add_generation_prompt, **kwargs)
    except PantheonError as fault:
        if tools or not _refused(fault):
            raise
        try:
            return template.render(messages, [], add_generation_prompt, **kwargs)
        except PantheonError:
            pass
        raise


def _refused(fault: PantheonError) -> bool:
    """Whether the template said no to these messages, rather than ran out of its allowance."""
    return bool(getattr(fault, "refused", True))


def _drops_system(messages: list[Message], text: str) -> bool:
    """Some templates read the first (or the last) system turn and lose the others without a word [B03]."""
    turns = [m["content"].strip() for m in messages if m["role"] in ("system", "developer")]
    return len(turns) + (messages[0]["role"] not in ("system", "developer")) > 1 and any(t not in text for t in turns)


# -- one message -----------------------------------------------------------------------------------------------------


def check(messages: Any) -> list[Message]:
    """Every message in one form: role, content text, and what else templates read.  Raises BadRequest."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(_modern(messages))]


def _modern(messages: list[Any]) -> list[Any]:
    """Calls and results of the first function-calling API, as tool calls and tool messages."""
    if not any(isinstance(m, dict) and (m.get("role") == "function" or m.get("function_call")) for m in messages):
        return messages
    made: list[Any] = []
    for i, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "function":
            made.append({**message, "role": "tool", "tool_call_id": f"call_{_asked(messages, i)}"})
        elif isinstance(message, dict) and message.get("function_call") and not message.get("tool_calls"):
            plain = {key: value for key, value in message.items() if key != "function_call"}
            call = {"id": f"call_{i}", "type": "function", "function": message["function_call"]}
            made.append({**plain, "tool_calls": [call]})
        else:
            made.append(message)
    return made


def _asked(messages: list[Any], i: int) -> int:
    """Which message called the function whose result is messages[i]."""
    earlier = reversed(list(enumerate(messages[:i])))
    return next((j for j, message in earlier if isinstance(message, dict) and message.get("function_call")), i)


def _message(message: Any, at: str) -> Message:
    if not isinstance(message, dict):
        raise BadRequest(f"{at} must be an object", param=at)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{at}.role must be one of {', '.join(ROLES)}, not {role!r:.60}", param=f"{at}.role")
    content = _content(message.get("content"), at)
    if content is None and role != "assistant":
        raise BadRequest(f"{at}.content is missing", param=f"{at}.content")
    # some templates join `content` to text whatever else there is, so it is never left out
    clean: Message = {"role": role, "content": content or ""}
    for key, value in message.items():
        if value is None or key in ("role", "content", "tool_calls"):
            continue
        if key in _STRINGS and not isinstance(value, str):
            raise BadRequest(f"{at}.{key} must be a string", param=f"{at}.{key}")
        clean[key] = value
    if role == "assistant":
        if "reasoning" in clean:
            clean.setdefault("reasoning_content", clean["reasoning"])
        calls = _calls(message.get("tool_calls"), at)
        if calls:  # an empty list would count as calls for templates that ask whether the key is defined
            clean["tool_calls"] = calls
    return clean


def _content(content: Any, at: str) -> str | None:
    """The joined text of a string or of a list of parts; None for null or nothing [B01]."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{at}.content must be a string or a list of parts", param=f"{at}.content")
    return "".join(_part(part, f"{at}.content[{j}]") for j, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRequest(f"{at} must be an object with a type", param=at)
    kind = part.get("type")
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise BadRequest(f"{at}.type {kind!r:.60} can't be used: this server reads text parts only", param=f"{at}.type")
    if not isinstance(part.get(key), str):
        raise BadRequest(f"{at}.{key} must be a string", param=f"{at}.{key}")
    return str(part[key])


def _calls(calls: Any, at: str) -> list[ToolCall]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BadRequest(f"{at}.tool_calls must be a list", param=f"{at}.tool_calls")
    return [_call(call, f"{at}.tool_calls[{j}]") for j, call in enumerate(calls)]


def _call(call: Any, at: str) -> ToolCall:
    if not isinstance(call, dict):
        raise BadRequest(f"{at} must be an object", param=at)
    function = call.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{at}.function must be an object", param=f"{at}.function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{at}.function.name must be a string that is not empty", param=f"{at}.function.name")
    if not isinstance(arguments, (str, dict, type(None))):
        raise BadRequest(f"{at}.function.arguments must be a JSON string", param=f"{at}.function.arguments")
    if call.get("id") is not None and not isinstance(call["id"], str):
        raise BadRequest(f"{at}.id must be a string", param=f"{at}.id")
    parsed = arguments if type(arguments) is not dict and isinstance(arguments, dict) else parse_arguments(arguments)
    clean = {key: value for key, value in call.items() if value is not None}
    return ToolCall({**clean, "type": "function", "function": {"name": name, "arguments": parsed}})
