"""Tool calls as grammars, in the syntax that a model's chat template uses for them.  Pure; knows no matcher.

A syntax is a block: its opening mark, and what stands behind it.  `tools_grammar` forces calls (tool_choice required or
named), or lets a call or another format be written; `openings` is for calls that the model begins by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pantheon.engine.constraint_gemma import gemma_arguments
from pantheon.engine.constraint_grammar import Marker, json_rule, quoted, renamed, response_grammar
from pantheon.engine.constraint_limits import check_size
from pantheon.engine.schema_types import resolved, types_of, values_of
from pantheon.errors import BadRequest

TOOL_SYNTAXES = ("hermes", "xml", "llama3", "mistral", "mistral_named", "phi", "gemma", "deepseek")

_Tool = tuple[str, Mapping[str, Any]]
#: (rule `call`, the rules below it) for some tools
_Calls = Callable[[Sequence[_Tool]], str]

_NOTHING = {"type": "object", "properties": {}}
_DS_CALL, _DS_SEP, _DS_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "\n```json\n"
#: blanks that a model may leave behind a mark that it wrote by itself
_LEAD = "/[ \\n]{0,4}/"


def tool_syntax(template_source: str) -> str:
    """Which of TOOL_SYNTAXES a chat template teaches its model; Hermes' `<tool_call>` JSON when it shows none."""
    if "<tool_call>" in template_source:
        return "xml" if "<function=" in template_source else "hermes"
    if "<tool_call|>" in template_source:
        return "gemma"
    if _DS_CALL in template_source:
        return "deepseek"
    if "[TOOL_CALLS]" in template_source:
        return "mistral_named" if "[ARGS]" in template_source else "mistral"
    if "<|tool_call|>" in template_source or "<|tool|>" in template_source:
        return "phi"
    if "<|python_tag|>" in template_source or '"parameters": ' in template_source:
        return "llama3"
    return "hermes"


@dataclass(frozen=True)
class _Syntax:
    """`opening` mark, "" for bare JSON; `behind(lead, parallel, marker)`: the rest of one block; `again`: what stands
    between two blocks, None when a block holds several calls or there is only one."""

    opening: str
    behind: Callable[[str, bool, Marker], str]
    again: str | None
    calls: Callable[[Sequence[_Tool], Marker], str]


def tools_grammar(spec: Mapping[str, Any], marker: Marker) -> str | None:
    """The grammar of {"tools", "tool_choice", "parallel_tool_calls", "syntax"}; None where nothing is forced.

    tool_choice "required" forces one of the tools or more, {"type": "function", "function": {"name"}} that one, once:
    who asks for one function reads one call (instructor refuses a second).  With "response_format" and the choice
    "auto" the answer is either of that format or calls.  Raises BadRequest (tools, tool_choice, response_format).
    """
    form = spec.get("response_format")
    chosen = _chosen_tools({**spec, "tool_choice": "required"} if form else spec)
    if chosen is None:
        return None
    check_size([schema for _, schema in chosen], "tools")
    syntax = _syntax(spec)
    several = form is not None or spec.get("tool_choice") == "required"
    parallel = several and bool(spec.get("parallel_tool_calls", True))
    behind = syntax.behind(r'"\n"', parallel, marker)
    block = f"{marker(syntax.opening)} {behind}" if syntax.opening else behind
    between = quoted(syntax.again) + " " if syntax.again else ""
    more = f" ({between}{block})*" if parallel and syntax.again is not None else ""
    grammar = f"start: {block}{more}\n{syntax.calls(chosen, marker)}"
    if form is None:
        return grammar
    answer = response_grammar(form)
    if answer is None:
        return None
    if not syntax.opening:
        grammar = _calls_as_json(chosen)
    return f"start: _format | _calls\n{renamed(answer, '_format')}\n{renamed(grammar, '_calls')}"


def openings(spec: Mapping[str, Any], marker: Marker) -> list[tuple[re.Pattern[bytes], str]]:
    """Calls that the model may begin by itself: (what its text ends with then, the grammar of the rest of the call).

    A tool that is not `strict` may get any arguments.  [] when none is.  Raises BadRequest (tools).
    """
    listed = spec.get("tools") or []
    tools = [_tool(item, f"tools[{i}]") for i, item in enumerate(listed)]
    strict = [is_strict(item) for item in listed]
    if not any(strict):
        return []
    check_size([schema for _, schema in tools], "tools")
    loose: _Tool = ("", {"type": "object"})
    chosen = [tool if hard else (tool[0], loose[1]) for tool, hard in zip(tools, strict, strict=True)]
    syntax = _syntax(spec)
    if syntax.opening:
        # several calls in one block, where the syntax has that, are allowed: the model ends it
        rules = f"start: {syntax.behind(_LEAD, True, marker)}\n{syntax.calls(chosen, marker)}"
        found = [(re.compile(re.escape(syntax.opening.encode())), rules)]
        if syntax.opening == "<tool_call>" and spec.get("syntax") == "xml":
            found += [_bare_function(tool, marker) for tool in chosen]
        return found
    return [_bare_json(tool) for tool in chosen]


def is_strict(tool: Any) -> bool:
    """Whether a tool of a request asks for arguments that fit its schema."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and function.get("strict") is True


def _bare_json(tool: _Tool) -> tuple[re.Pattern[bytes], str]:
    """An answer that begins as a call of this tool."""
    name, schema = tool
    text = re.escape(json.dumps(name, ensure_ascii=False).encode())
    begins = re.compile(rb'\A\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*' + text)
    middle = r'/[ \n]{0,4},[ \n]{0,4}"parameters"[ \n]{0,4}:[ \n]{0,4}/'
    return begins, f'start: {middle} args "}}"\nargs: {json_rule(schema, "tools")}'


def _bare_function(tool: _Tool, marker: Marker) -> tuple[re.Pattern[bytes], str]:
    """Qwen3-Coder leaves its wrapper out at times."""
    rules = _xml_calls([tool], marker).replace(quoted(f"<function={tool[0]}>\n"), _LEAD, 1)
    return re.compile(re.escape(f"<function={tool[0]}>".encode())), f"start: call_0\n{rules}"


def _syntax(spec: Mapping[str, Any]) -> _Syntax:
    syntax = spec.get("syntax", "hermes")
    if not isinstance(syntax, str) or syntax not in TOOL_SYNTAXES:
        raise BadRequest(f"tool calls can't be forced in the syntax {syntax!r}", param="tool_choice")
    return _SYNTAXES[syntax]


def _chosen_tools(spec: Mapping[str, Any]) -> list[_Tool] | None:
    listed = spec.get("tools") or []
    if not isinstance(listed, list):
        raise BadRequest("tools must be a list", param="tools")
    tools = [_tool(item, f"tools[{i}]") for i, item in enumerate(listed)]
    choice = spec.get("tool_choice", "auto")
    if choice in ("auto", "none", None):
        return None
    if not tools:
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return tools
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    found = [tool for tool in tools if tool[0] == name]
    if not found:
        known = ", ".join(repr(tool[0]) for tool in tools)
        raise BadRequest(f"tool_choice names {name!r}, which is none of the tools ({known})", param="tool_choice")
    return found[:1]


def _tool(item: Any, param: str) -> _Tool:
    function = item.get("function", item) if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{param}.function.name is missing", param=param)
    schema = function.get("parameters")
    if schema is None or schema == _NOTHING:
        # how most clients declare a function that takes nothing; open as it is by the letter, arguments would not end
        schema = {**_NOTHING, "additionalProperties": False}
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{param}.function.parameters must be an object", param=param)
    if not {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        schema = {"type": "object", **schema}
    return function["name"], schema


# ---- calls in JSON --------------------------------------------------------------------------------------------------


def _calls(tools: Sequence[_Tool], head: Callable[[str], str], tail: str) -> str:
    """Rules `call`, `call_<i>`: head, arguments, tail; one alternative a tool."""
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, schema) in enumerate(tools):
        lines.append(f"call_{i}: {head(name)} args_{i} {tail}".rstrip())
        lines.append(f"args_{i}: {json_rule(schema, 'tools')}")
    return "\n".join(lines)


def _json_calls(key: str) -> Callable[[Sequence[_Tool], Marker], str]:
    """`{"name": "…", "<key>": <arguments>}`."""

    def head(name: str) -> str:
        return quoted(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')

    return lambda tools, marker: _calls(tools, head, quoted("}"))


def _calls_as_json(tools: Sequence[_Tool]) -> str:
    """Bare calls beside a format: both are JSON, and must be of the same tokens for the engine to tell them apart."""
    lines = ["start: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, schema) in enumerate(tools):
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        members = {"name": {"const": name}, "parameters": schema}
        call = {**shared, "type": "object", "properties": members, "required": list(members)}
        lines.append(f"call_{i}: {json_rule({**call, 'additionalProperties': False}, 'tools')}")
    return "\n".join(lines)


def _named_calls(tools: Sequence[_Tool], marker: Marker) -> str:
    return _calls(tools, lambda name: f"{quoted(name)} {marker('[ARGS]')}", "")


def _deepseek_calls(tools: Sequence[_Tool], marker: Marker) -> str:
    def head(name: str) -> str:
        return f'{marker(_DS_CALL)} "function" {marker(_DS_SEP)} {quoted(name + _FENCE)}'

    return _calls(tools, head, rf'"\n```" {marker(_DS_CALL_END)}')


def _tagged(lead: str, parallel: bool, marker: Marker) -> str:
    return rf'{lead} call "\n" {marker("</tool_call>")}'


def _listed(closing: str) -> Callable[[str, bool, Marker], str]:
    def behind(lead: str, parallel: bool, marker: Marker) -> str:
        more = ' (", " call)*' if parallel else ""
        return f'"[" call{more} "]"' + (f" {marker(closing)}" if closing else "")

    return behind


def _one_call(lead: str, parallel: bool, marker: Marker) -> str:
    return "call"


def _deepseek_block(lead: str, parallel: bool, marker: Marker) -> str:
    more = r' ("\n" call)*' if parallel else ""
    return f"call{more} {marker('<｜tool▁calls▁end｜>')}"


# ---- calls in XML and in Gemma's way --------------------------------------------------------------------------------


def _xml_calls(tools: Sequence[_Tool], marker: Marker) -> str:
    """`<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>`."""
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, schema) in enumerate(tools):
        schema = resolved(schema, schema)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        keys = list(properties.items()) if isinstance(properties, Mapping) else []
        required = schema.get("required") if isinstance(schema, Mapping) else None
        needed = required if isinstance(required, list) else []
        parts = [quoted(f"<function={name}>\n")]
        for j, (key, value_schema) in enumerate(keys):
            rule = f"arg_{i}_{j}"
            parts.append(rule if key in needed else f"{rule}?")
            lines.append(f"{rule}: {quoted(f'<parameter={key}>' + chr(10))} {rule}_value")
            lines.append(_xml_value(f"{rule}_value", value_schema, tools[i][1]))
        if not keys and not (isinstance(schema, Mapping) and schema.get("additionalProperties") is False):
            parts.append("any_args")
        lines.append(f"call_{i}: {' '.join(parts)} {quoted('</function>')}")
    if any("any_args" in line for line in lines):
        lines.append("any_args: any_arg*")
        lines.append(r"any_arg[lazy]: /<parameter=[^>\s]{1,80}>\n(.|\n)*\n<\/parameter>\n/")
    return "\n".join(lines)


def _xml_value(rule: str, schema: Any, whole: Mapping[str, Any]) -> str:
    """A parameter's value: texts stand bare up to the closing tag, everything else is JSON."""
    inner = resolved(schema, whole)
    end = r'"\n</parameter>\n"'
    values = values_of(inner)
    if values:
        options = " | ".join(quoted(v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for v in values)
        return f"{rule}: ({options}) {end}"
    kinds = types_of(inner, whole)
    if not kinds or "string" in kinds:
        # a text may be any of the other types' as well
        text = _text(inner) if kinds == {"string"} else r"(.|\n)*"
        return f"{rule}[lazy]: /{text}" + r"\n<\/parameter>\n/"
    # $defs of the whole schema stay reachable from the part
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return f"{rule}: {rule}_json {end}\n{rule}_json: {json_rule({**shared, **inner}, 'tools')}"


def _text(schema: Mapping[str, Any]) -> str:
    """A regex for a bare text: its length, or a pattern of the whole of it."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and re.fullmatch(r"\^[^\\/()|$^]*\$", pattern):
        return f"({pattern[1:-1]})"
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    ends = f"{least},{most}" if isinstance(most, int) else f"{least},"
    return rf"(.|\n){{{ends}}}" if isinstance(least, int) and (least or most) else r"(.|\n)*"


def _gemma_calls(tools: Sequence[_Tool], marker: Marker) -> str:
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, _) in enumerate(tools):
        lines.append(f"call_{i}: {quoted(f'call:{name}')} args_{i}")
    return "\n".join([*lines, gemma_arguments([schema for _, schema in tools], marker)])


_ARGUMENTS = _json_calls("arguments")
_SYNTAXES = {
    "hermes": _Syntax("<tool_call>", _tagged, "\n", _ARGUMENTS),
    "xml": _Syntax("<tool_call>", _tagged, "\n", _xml_calls),
    # the templates of this family refuse parallel calls
    "llama3": _Syntax("", _one_call, None, _json_calls("parameters")),
    "mistral": _Syntax("[TOOL_CALLS]", _listed(""), None, _ARGUMENTS),
    "mistral_named": _Syntax("[TOOL_CALLS]", _one_call, "", _named_calls),
    "phi": _Syntax("<|tool_call|>", _listed("<|/tool_call|>"), None, _ARGUMENTS),
    "gemma": _Syntax("<|tool_call>", lambda lead, parallel, marker: f"call {marker('<tool_call|>')}", "", _gemma_calls),
    "deepseek": _Syntax("<｜tool▁calls▁begin｜>", _deepseek_block, None, _deepseek_calls),
}
