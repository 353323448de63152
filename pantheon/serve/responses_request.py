"""The body of POST /v1/responses as a chat request, and what its answer has to repeat or translate back.

Stateless: every request brings its whole conversation.  Pure.  Sources: OpenAI Responses API; Codex.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pantheon.errors import BadRequest
from pantheon.serve.chat_request import ChatRequest, parse_chat_request
from pantheon.serve.request_fields import Fields, kind
from pantheon.serve.responses_items import read_items
from pantheon.serve.translated import named_as, same_fields

#: fields that ask the server to keep or fetch something
_STATEFUL = ("previous_response_id", "conversation", "prompt", "background")
_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
#: fields that an answer repeats as they were asked
_ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
    "user",
)
_DEFAULTS: dict[str, Any] = {
    "metadata": {},
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


class Tool(NamedTuple):
    """What a tool of the chat is to the caller: a function, or a custom one whose only argument is free text."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True)
class ResponsesRequest:
    """One checked request.

    `summary`: thoughts are shown as a summary, which clients display and give back; `seal`: they also go out as
    `encrypted_content`.  `tools` are those of the chat by name; `echo` are fields of the answer.
    """

    chat: ChatRequest
    tools: dict[str, Tool] = field(default_factory=dict)
    summary: bool = False
    seal: bool = False
    echo: dict[str, Any] = field(default_factory=dict)


def parse_responses_request(
    body: dict[str, Any],
    headers: Mapping[str, str] | None = None,
    fill: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> ResponsesRequest:
    """Check a decoded body; `fill` puts the server's defaults into the chat request.

    Raises BadRequest; `param` is the field at fault.
    """
    fields = Fields(body)
    for name in _STATEFUL:
        if body.get(name):
            raise fields.fault(name, "nothing is kept here between requests; send the whole conversation as input")
    reasoning, text = Fields(fields.object("reasoning"), "reasoning."), Fields(fields.object("text"), "text.")
    include = fields.items("include")
    offered, tools = _tools(fields)
    chat: dict[str, Any] = same_fields(
        body, "parallel_tool_calls", "truncation", "stop", "return_progress", "timings_per_token"
    )
    chat["messages"] = _messages(fields, {(tool.namespace, tool.name): name for name, tool in tools.items()})
    chat["tools"], chat["tool_choice"] = _choice(fields, offered, tools)
    chat["max_tokens"] = fields.integer("max_output_tokens", 1, 1 << 62, None)
    chat["reasoning_effort"] = reasoning.text("effort")
    chat["response_format"] = _format(text)
    # an answer of the model that stands last is complete
    chat["continue_final_message"] = False
    fields.object("metadata")
    if _LOGPROBS in include or fields.integer("top_logprobs", 0, 20, 0):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs")}
    with named_as(NAMES):
        request = parse_chat_request(fill(chat), headers)
    echo = {name: body[name] for name in _ECHOED if body.get(name) is not None}
    echo |= {"temperature": request.params.temperature, "top_p": request.params.top_p, "store": False}
    summary = (reasoning.text("summary") or reasoning.text("generate_summary")) is not None
    return ResponsesRequest(request, tools, summary, _SEALED in include, _DEFAULTS | echo)


def _messages(fields: Fields, names: dict[tuple[str | None, str], str]) -> list[dict[str, Any]]:
    if not fields.given("input"):
        raise fields.fault("input", "is missing")
    messages = read_items(fields.body["input"], lambda name, space: names.get((space, name), name))
    instructions = fields.text("instructions")
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise fields.fault("input", "must hold at least one message")
    return messages


def _format(text: Fields) -> dict[str, Any] | None:
    form = text.object("format")
    if form.get("type") != "json_schema":
        return form or None
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


# ---- tools ----------------------------------------------------------------------------------------------------------


def _tools(fields: Fields) -> tuple[list[dict[str, Any]], dict[str, Tool]]:
    """The tools as the chat API has them, and what each is to the caller.

    Tools that a server would run itself (web search …) are left out: this one runs none, and the rest still works.
    """
    offered: list[dict[str, Any]] = []
    found: dict[str, Tool] = {}
    for tool, namespace in _flat(fields):
        of = tool.text("type", "function")
        if of not in ("function", "custom"):
            continue
        name = tool.text("name")
        if not name:
            raise tool.fault("name", "must be a non-empty string")
        called = f"{namespace}__{name}" if name in found and namespace else name
        if called in found:
            raise tool.fault("name", f"there are two tools named {name!r:.60}")
        found[called] = Tool(name, namespace, of == "custom")
        function = _custom(tool) if of == "custom" else _function(tool)
        offered.append({"type": "function", "function": {"name": called, **function}})
    return offered, found


def _flat(fields: Fields) -> list[tuple[Fields, str | None]]:
    flat: list[tuple[Fields, str | None]] = []
    for i, item in enumerate(fields.items("tools")):
        at = f"tools[{i}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{at}: must be an object, not {kind(item)}", param=at)
        tool = Fields(item, at + ".")
        if item.get("type") != "namespace":
            # the chat API's form is taken too
            nested = item.get("function")
            flat.append((Fields(nested, f"{at}.function.") if isinstance(nested, dict) else tool, None))
            continue
        for j, inner in enumerate(tool.items("tools")):
            if not isinstance(inner, dict):
                raise BadRequest(f"{at}.tools[{j}]: must be an object, not {kind(inner)}", param=f"{at}.tools[{j}]")
            flat.append((Fields(inner, f"{at}.tools[{j}]."), tool.text("name")))
    return flat


def _function(tool: Fields) -> dict[str, Any]:
    kept = {"description": tool.text("description"), "strict": tool.flag("strict", False) or None}
    return {"parameters": tool.object("parameters") or None, **{k: v for k, v in kept.items() if v is not None}}


def _custom(tool: Fields) -> dict[str, Any]:
    """A tool that takes free text, as a function of one string; what holds the text to a grammar is told in words."""
    form = Fields(tool.object("format"), f"{tool.prefix}format.")
    words = [tool.text("description") or ""]
    if form.text("type") == "grammar":
        words.append(f"The input follows this {form.text('syntax') or ''} grammar:\n{form.text('definition') or ''}")
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"description": "\n\n".join(part for part in words if part), "parameters": schema}


def _choice(
    fields: Fields, offered: list[dict[str, Any]], tools: dict[str, Tool]
) -> tuple[list[dict[str, Any]], Any]:
    """(tools, tool_choice) of the chat."""
    choice = fields.body.get("tool_choice")
    if not isinstance(choice, dict):
        return offered, choice
    inner = Fields(choice, "tool_choice.")
    of = inner.text("type")
    if of == "allowed_tools":
        listed = [item.get("name") for item in inner.items("tools") if isinstance(item, dict)]
        allowed = [tool for tool in offered if tools[tool["function"]["name"]].name in listed]
        return allowed, inner.text("mode", "auto")
    if of not in ("function", "custom"):
        raise inner.fault("type", f"{of!r:.60} is not a tool that is here")
    name = inner.text("name")
    called = next((key for key, tool in tools.items() if tool.name == name and tool.custom == (of == "custom")), None)
    if called is None:
        raise inner.fault("name", f"there is no tool named {name!r:.60}")
    return offered, {"type": "function", "function": {"name": called}}
