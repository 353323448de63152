"""The body of POST /v1/messages as a chat request.

Pure.  Sources: Anthropic Messages API; what Claude Code sends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pantheon.errors import BadRequest
from pantheon.serve.chat_request import ChatRequest, parse_chat_request
from pantheon.serve.request_fields import Fields, json_object, kind
from pantheon.serve.translated import named_as, same_fields, text_of

#: fields of the chat request under the caller's names
NAMES = {"stop": "stop_sequences", "reasoning_effort": "output_config", "response_format": "output_config"}
_TEXTS = {"text": "text"}
_RESULTS = {**_TEXTS, "tool_reference": "tool_name"}
#: what a tool's answer may hold beside text, of which the model is told that it was there
_UNREAD = ("image", "document", "search_result")
#: blocks of tools that another server ran, and thoughts that only it can read
_FOREIGN = ("redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

Message = dict[str, Any]


def parse_messages_request(
    body: dict[str, Any],
    headers: Mapping[str, str] | None = None,
    fill: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    *,
    counting: bool = False,
) -> ChatRequest:
    """Check a decoded body; `fill` puts the server's defaults into the chat request; `counting`: nothing is generated,
    so that `max_tokens` may be missing.

    Raises BadRequest; `param` is the field at fault.
    """
    fields = Fields(json_object(body))
    chat = same_fields(body)
    cap = fields.integer("max_tokens", 1, 1 << 62, None)
    if cap is None and not counting:
        raise fields.fault("max_tokens", "is missing")
    chat |= {"max_tokens": cap, "messages": _messages(fields), "stop": fields.items("stop_sequences")}
    chat |= {"tools": _tools(fields), **_choice(fields), **_thinking(fields)}
    config = Fields(fields.object("output_config"), "output_config.")
    form = config.object("format") or fields.object("output_format")
    chat["response_format"] = {"type": form.get("type"), "json_schema": form} if form else None
    chat["reasoning_effort"] = config.text("effort")
    fields.object("metadata")
    if fields.given("enable_thinking"):
        chat["enable_thinking"] = fields.flag("enable_thinking", True)
    with named_as(NAMES):
        return parse_chat_request(fill(chat), headers)


def _thinking(fields: Fields) -> dict[str, Any]:
    """Thinking is off unless it is asked for, as with Anthropic: callers read the first block as the answer.

    With `adaptive` (Claude Code) the model decides: its template's own way, no thought that is opened for it.
    """
    thinking = Fields(fields.object("thinking"), "thinking.")
    of = thinking.text("type", "disabled")
    if of not in ("enabled", "disabled", "adaptive"):
        raise thinking.fault("type", f"must be enabled, disabled or adaptive, not {of!r:.60}")
    budget = thinking.integer("budget_tokens", 0, 1 << 62, None)
    kwargs = dict(fields.object("chat_template_kwargs"))
    if budget is not None and of == "enabled":
        kwargs.setdefault("thinking_budget", budget)
    return {"enable_thinking": None if of == "adaptive" else of == "enabled", "chat_template_kwargs": kwargs}


# ---- messages -------------------------------------------------------------------------------------------------------


def _messages(fields: Fields) -> list[Message]:
    given = fields.items("messages")
    if not fields.given("messages"):
        raise fields.fault("messages", "is missing; give an array of at least one message")
    if not given:
        raise fields.fault("messages", "must be an array of at least one message")
    found: list[Message] = []
    if fields.given("system"):
        found.append({"role": "system", "content": text_of(fields.body["system"], "system", _TEXTS, joint="\n\n")})
    for i, message in enumerate(given):
        at = f"messages[{i}]"
        if not isinstance(message, dict):
            raise BadRequest(f"{at}: must be an object, not {kind(message)}", param=at)
        inner = Fields(message, at + ".")
        role = inner.text("role")
        if role == "assistant":
            found.append(_assistant(inner))
        elif role in ("user", "system"):
            found += _user(inner, role)
        else:
            raise inner.fault("role", f"must be user or assistant, not {role!r:.60}")
    return found


def _blocks(message: Fields) -> list[Fields]:
    content = message.body.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise message.fault("content", "must be a string or an array of blocks")
    found = []
    for i, block in enumerate(content):
        at = f"{message.prefix}content[{i}]"
        if not isinstance(block, dict):
            raise BadRequest(f"{at}: must be an object with a type", param=at)
        found.append(Fields(block, at + "."))
    return found


def _user(message: Fields, role: str) -> list[Message]:
    """Text and results of tools, in their order."""
    found: list[Message] = []
    texts: list[str] = []

    def told() -> None:
        if texts:
            found.append({"role": role, "content": "\n\n".join(texts)})
            texts.clear()

    for block in _blocks(message):
        of = block.text("type")
        if of == "text":
            texts.append(_required(block, "text"))
        elif of == "document" and isinstance(source := block.body.get("source"), dict) and source.get("type") == "text":
            texts.append(_required(Fields(source, block.prefix + "source."), "data"))
        elif of == "tool_result":
            told()
            found.append(_result(block))
        else:
            why = "image input is not supported" if of == "image" else f"{of!r:.60} can't be used"
            raise block.fault("type", f"{why}, this server reads text only")
    told()
    return found or [{"role": role, "content": ""}]


def _result(block: Fields) -> Message:
    content = block.body.get("content")
    text = "" if content is None else text_of(content, f"{block.prefix}content", _RESULTS, joint="\n", skip=_UNREAD)
    if block.flag("is_error", False) and not text:
        text = "error"
    return {"role": "tool", "tool_call_id": _required(block, "tool_use_id"), "content": text}


def _assistant(message: Fields) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in _blocks(message):
        of = block.text("type")
        if of == "text":
            texts.append(_required(block, "text"))
        elif of == "thinking":
            thoughts.append(_required(block, "thinking"))
        elif of == "tool_use":
            arguments = json.dumps(block.object("input"), ensure_ascii=False)
            function = {"name": _required(block, "name"), "arguments": arguments}
            calls.append({"id": _required(block, "id"), "type": "function", "function": function})
        elif of not in _FOREIGN:
            raise block.fault("type", f"{of!r:.60} can't be used in an assistant's message")
    found: Message = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        found["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _required(fields: Fields, name: str) -> str:
    value = fields.text(name)
    if value is None:
        raise fields.fault(name, "is missing")
    return value


# ---- tools ----------------------------------------------------------------------------------------------------------


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Functions; tools that Anthropic's servers run, or whose form only its models know, are left out, and so are
    deferred ones until a search has found them."""
    found = []
    referred = _referred(fields.body.get("messages"))
    for i, item in enumerate(fields.items("tools")):
        at = f"tools[{i}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{at}: must be an object, not {kind(item)}", param=at)
        tool = Fields(item, at + ".")
        if tool.text("type", "custom") != "custom":
            continue
        if tool.flag("defer_loading", False) and item.get("name") not in referred:
            continue
        if not tool.text("name"):
            raise tool.fault("name", "must be a non-empty string")
        if not tool.given("input_schema"):
            raise tool.fault("input_schema", "is missing")
        schema = tool.object("input_schema")
        function = {"name": item["name"], "description": tool.text("description"), "parameters": schema}
        if tool.flag("strict", False):
            function["strict"] = True
        found.append({"type": "function", "function": function})
    return found


def _referred(value: Any) -> set[Any]:
    """The tools that results of searches name, wherever they stand."""
    if isinstance(value, list):
        return {name for item in value for name in _referred(item)}
    if not isinstance(value, dict):
        return set()
    if value.get("type") == "tool_reference" and isinstance(value.get("tool_name"), str):
        return {value["tool_name"]}
    return _referred(value.get("content"))


def _choice(fields: Fields) -> dict[str, Any]:
    choice = Fields(fields.object("tool_choice"), "tool_choice.")
    if not fields.given("tool_choice"):
        return {}
    parallel = {"parallel_tool_calls": not choice.flag("disable_parallel_tool_use", False)}
    of = choice.text("type")
    if of == "tool":
        name = _required(choice, "name")
        return {"tool_choice": {"type": "function", "function": {"name": name}}, **parallel}
    if of not in _CHOICES:
        raise choice.fault("type", f"must be auto, any, tool or none, not {of!r:.60}")
    return {"tool_choice": _CHOICES[of], **parallel}
