"""The body of POST /v1/chat/completions as a frozen `ChatRequest`, or a `BadRequest` that names the field.

Pure: it knows no model, so what depends on one (ids of logit_bias, the context) is checked in generation.py, and
the messages themselves in text/messages.py.  Sources: OpenAI chat API; field cases B05, B06, B08, B09, B11, B13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pantheon.engine.sampler import SamplingParams
from pantheon.errors import BadRequest
from pantheon.serve import session_ids
from pantheon.serve.constraint_fields import read_constraint
from pantheon.serve.request_fields import Fields, json_object, kind

MAX_STOPS = 16
MAX_CHOICES = 8
MAX_TOP_LOGPROBS = 20
_UNLIMITED = -1
_MAX_WINDOW = 1 << 30
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# names that build_prompt fills itself
_RESERVED_KWARGS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "refuse_from",
    "continue_final",
    "prefill",
    "bos_token",
    "eos_token",
    "tokenizer",
    "template",
    "now",
    "self",
)


@dataclass(frozen=True)
class ChatRequest:
    """One checked request.

    `max_tokens` None means until the model ends or the window is full.  `tool_choice` is auto, none, required or
    named (then `tool_name` says which).  `truncate`: drop the oldest turns of a conversation that is too long, instead
    of refusing it [X21].  `template_kwargs`: what Model.prompt takes beside messages and tools.  `verbose`: the reply
    shows the prompt.  `response_format` is None for text, else what make_constraint takes.
    `thinking_budget`: the most tokens of a thought.  `legacy_functions`: calls are told as `function_call`.
    """

    model: str | None
    messages: list[dict[str, Any]]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    ignore_eog: bool = False
    truncate: bool = False
    parse_reasoning: bool = True
    thinking_budget: int | None = None
    legacy_functions: bool = False
    verbose: bool = False


def parse_chat_request(body: Any, headers: Mapping[str, str] | None = None) -> ChatRequest:
    """Check a decoded body.

    Raises:
        BadRequest: `param` is the field at fault.
    """
    fields = _legacy(Fields(json_object(body)))
    messages, tools = _messages(fields), _tools(fields)
    choice, name = _tool_choice(fields, tools)
    kwargs = _template_kwargs(fields)
    cap, cap_field = max_tokens(fields, "max_tokens", "max_completion_tokens")
    return ChatRequest(
        model=fields.text("model"),
        messages=messages,
        params=sampling_params(fields, _top_logprobs(fields)),
        max_tokens=cap,
        max_tokens_field=cap_field,
        stop=stop_strings(fields),
        n=fields.integer("n", 1, MAX_CHOICES, 1) or 1,
        stream=fields.flag("stream", False),
        include_usage=include_usage(fields),
        return_progress=fields.flag("return_progress", False),
        timings_per_token=fields.flag("timings_per_token", False),
        tools=_only_allowed(fields, tools),
        tool_choice=choice,
        tool_name=name,
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        response_format=_response_format(fields) or read_constraint(fields),
        template_kwargs=kwargs | _continues(fields, messages),
        session_id=session_id(fields, headers or {}),
        ignore_eog=fields.flag("ignore_eos", False),
        truncate=_truncation(fields),
        parse_reasoning=_reasoning_format(fields),
        thinking_budget=_thinking_budget(fields, kwargs),
        legacy_functions=fields.body is not body,
        verbose=fields.flag("verbose", False),
    )


def _continues(fields: Fields, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether a last message of the assistant is how its answer begins: yes, unless the body says otherwise."""
    given = fields.given("continue_final_message")
    go_on, begin = fields.flag("continue_final_message", True), fields.flag("add_generation_prompt", False)
    if given and go_on and begin:
        raise fields.fault("continue_final_message", "can not be combined with add_generation_prompt")
    trailing = [message.get("role") for message in messages[-2:]]
    if begin or not go_on or trailing[-1] != "assistant":
        return {}
    if trailing == ["assistant", "assistant"] and not messages[-1].get("tool_calls"):
        raise fields.fault("messages", "ends with two messages of the assistant; which one is to be continued?")
    return {"continue_final": True}


def _truncation(fields: Fields) -> bool:
    wanted = fields.text("truncation", "disabled")
    if wanted not in ("auto", "disabled"):
        raise fields.fault("truncation", "must be auto or disabled")
    return wanted == "auto"


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages = fields.items("messages")
    if not fields.given("messages"):
        raise fields.fault("messages", "is missing; give an array of at least one message")
    if not messages:
        raise fields.fault("messages", "must be an array of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequest(f"messages[{i}]: must be an object, not {kind(message)}", param=f"messages[{i}]")
    return messages


def sampling_params(fields: Fields, top_logprobs: int | None) -> SamplingParams:
    """The sampling fields, shared with /v1/completions."""
    base = SamplingParams()
    penalty = "repetition_penalty" if not fields.given("repeat_penalty") else "repeat_penalty"
    seed = fields.integer("seed", -(1 << 63), (1 << 64) - 1, None)
    return SamplingParams(
        temperature=fields.number("temperature", 0, 2, base.temperature),
        # some clients send -1 for "off"
        top_k=max(0, fields.integer("top_k", -1, 1 << 31, base.top_k) or 0),
        top_p=fields.number("top_p", 0, 1, base.top_p),
        min_p=fields.number("min_p", 0, 1, base.min_p),
        repeat_penalty=fields.number(penalty, 0, 100, base.repeat_penalty, above=True),
        repeat_last_n=fields.integer("repeat_last_n", -1, _MAX_WINDOW, base.repeat_last_n) or 0,
        presence_penalty=fields.number("presence_penalty", -2, 2, base.presence_penalty),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, base.frequency_penalty),
        logit_bias=_logit_bias(fields),
        # llama.cpp's clients send -1 for "any seed"
        seed=None if seed is None or seed == -1 else seed % (1 << 64),
        top_logprobs=top_logprobs,
    )


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    bias = fields.object("logit_bias")
    checked = []
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 12:
            raise fields.fault("logit_bias", f"keys must be token ids, not {key[:40]!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise fields.fault("logit_bias", f"the bias of token {key} must be a number from -100 to 100")
        checked.append((int(key), float(value)))
    return tuple(checked)


def _top_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs", False)
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, 0)
    if top and not wanted:
        raise fields.fault("top_logprobs", "needs logprobs: true")
    return top if wanted else None


def max_tokens(fields: Fields, *names: str) -> tuple[int | None, str]:
    """The cap of the reply and the field that set it; the smaller wins, -1 and null mean none [B06]."""
    caps: list[tuple[int, str]] = []
    for name in names:
        cap = fields.integer(name, _UNLIMITED, 1 << 62, None)
        if cap == 0:
            raise fields.fault(name, "must be at least 1, or -1 for no limit")
        if cap is not None and cap != _UNLIMITED:
            caps.append((cap, name))
    return min(caps) if caps else (None, names[0])


def stop_strings(fields: Fields) -> tuple[str, ...]:
    """`stop` as a tuple of non-empty strings."""
    value = fields.body.get("stop")
    items = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise fields.fault("stop", "must be a string or an array of strings")
    if len(items) > MAX_STOPS:
        raise fields.fault("stop", f"at most {MAX_STOPS} strings, not {len(items)}")
    if any(item == "" for item in items):
        raise fields.fault("stop", "a stop string must not be empty")
    return tuple(dict.fromkeys(items))


def include_usage(fields: Fields) -> bool:
    """`stream_options.include_usage`."""
    return Fields(fields.object("stream_options"), "stream_options.").flag("include_usage", False)


def session_id(fields: Fields, headers: Mapping[str, str]) -> str | None:
    """Whose conversation it is, by whatever the client names it with: a hint, of which nothing is refused [M039]."""
    return session_ids.session_id(fields.body, headers)


def _tools(fields: Fields) -> tuple[dict[str, Any], ...]:
    for i, tool in enumerate(tools := fields.items("tools")):
        at = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise BadRequest(f"{at}: must be an object, not {kind(tool)}", param=at)
        outer = Fields(tool, at + ".")
        if outer.text("type", "function") != "function":
            raise outer.fault("type", f"must be function, not {tool['type']!r}")
        if not outer.given("function"):
            raise outer.fault("function", "is missing")
        inner = Fields(outer.object("function"), at + ".function.")
        if not inner.text("name"):
            raise inner.fault("name", "must be a non-empty string")
        inner.text("description")
        inner.object("parameters")
        inner.flag("strict", False)
    return tuple(_plain_tool(tool) for tool in tools)


def _plain_tool(tool: dict[str, Any]) -> dict[str, Any]:
    # templates test `tool.function.parameters`: a null or missing one is an empty object schema
    function = {key: value for key, value in tool["function"].items() if value is not None}
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return {**tool, "type": "function", "function": function}


def _tool_choice(fields: Fields, tools: tuple[dict[str, Any], ...]) -> tuple[str, str | None]:
    choice = fields.body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = _allowed(fields, tools).get("mode", "auto")
    if choice is None or choice in ("auto", "none"):
        return choice or "auto", None
    names = [tool["function"]["name"] for tool in tools]
    # Mistral's word for it
    if choice in ("required", "any"):
        if not tools:
            raise fields.fault("tool_choice", "is required, but there are no tools")
        return "required", None
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise fields.fault("tool_choice", "must be auto, none, required or an object that names a function")
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise fields.fault("tool_choice", "function.name must be a string")
    if name not in names:
        raise fields.fault("tool_choice", f"there is no tool named {name!r}")
    return "named", name


def _allowed(fields: Fields, tools: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """What {"type": "allowed_tools"} holds: a mode, and some of the tools by name."""
    choice = fields.body["tool_choice"]
    inner = Fields(Fields(choice, "tool_choice.").object("allowed_tools") or choice, "tool_choice.")
    known = {tool["function"]["name"] for tool in tools}
    for tool in inner.items("tools"):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in known:
            raise fields.fault("tool_choice", f"there is no tool named {name!r:.80}")
    return dict(inner.body)


def _only_allowed(fields: Fields, tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """The tools without those that tool_choice leaves out."""
    choice = fields.body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools
    listed = Fields(_allowed(fields, tools)).items("tools")
    names = {tool.get("function", tool)["name"] for tool in listed}
    return tuple(tool for tool in tools if tool["function"]["name"] in names)


def _legacy(fields: Fields) -> Fields:
    """`functions` and `function_call`, as tools and tool_choice; the answer has them as it always has."""
    functions, call = fields.items("functions"), fields.body.get("function_call")
    if not functions and call is None:
        return fields
    if fields.given("tools") or fields.given("tool_choice"):
        raise fields.fault("functions" if functions else "function_call", "can not be combined with tools")
    for i, function in enumerate(functions):
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise fields.fault("functions", f"[{i}].name must be a string")
    if isinstance(call, dict):
        call = {"type": "function", "function": call}
    elif call not in (None, "auto", "none"):
        raise fields.fault("function_call", "must be auto, none or an object that names a function")
    tools = [{"type": "function", "function": function} for function in functions]
    return Fields({**fields.body, "tools": tools, "tool_choice": call, "parallel_tool_calls": False})


def _reasoning_format(fields: Fields) -> bool:
    """Whether thoughts are told apart; llama-server's `none` leaves them in the text."""
    wanted = fields.text("reasoning_format", "auto")
    if wanted not in ("none", "auto", "deepseek", "deepseek-legacy"):
        raise fields.fault("reasoning_format", "must be none, auto, deepseek or deepseek-legacy")
    return wanted != "none"


def _thinking_budget(fields: Fields, kwargs: Mapping[str, Any]) -> int | None:
    """How many tokens a thought may have; -1 is no limit."""
    for name in ("thinking_budget", "thinking_budget_tokens", "reasoning_budget"):
        if fields.given(name):
            return _no_limit(fields.integer(name, -1, 1 << 62, None))
    budget = kwargs.get("thinking_budget")
    return _no_limit(budget) if isinstance(budget, int) and not isinstance(budget, bool) else None


def _no_limit(budget: int | None) -> int | None:
    return budget if budget is not None and budget >= 0 else None


def _response_format(fields: Fields) -> dict[str, Any] | None:
    wanted = fields.object("response_format")
    if not fields.given("response_format"):
        return None
    of = wanted.get("type")
    if of == "text":
        return None
    # llama.cpp's spelling puts the schema beside the type
    outer = wanted.get("json_schema") if of == "json_schema" else wanted
    if of == "json_object" and wanted.get("schema") is None:
        return {"type": "json_object"}
    if of not in ("json_object", "json_schema"):
        raise fields.fault("response_format", f"type must be text, json_object or json_schema, not {str(of)[:40]!r}")
    schema = outer.get("schema") if isinstance(outer, dict) else wanted.get("schema")
    if not isinstance(schema, dict):
        raise fields.fault("response_format", "json_schema.schema must be an object")
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    effort = fields.text("reasoning_effort")
    if effort is not None:
        if effort not in _EFFORTS:
            raise fields.fault("reasoning_effort", f"must be one of {', '.join(_EFFORTS)}")
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    if fields.given("enable_thinking"):
        kwargs["enable_thinking"] = fields.flag("enable_thinking", True)
    given = fields.object("chat_template_kwargs")
    for name in given:
        if name in _RESERVED_KWARGS or not name.isidentifier():
            raise fields.fault("chat_template_kwargs", f"{name[:40]!r} can not be set")
    # templates ask whether it is true, and "false" would be
    Fields(given, "chat_template_kwargs.").flag("enable_thinking", True)
    return kwargs | given
