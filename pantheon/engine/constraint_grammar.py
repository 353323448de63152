"""What an answer must look like, as a Lark grammar in llguidance's dialect.  Pure: knows no matcher and no logits.

Three kinds of wishes become grammars: OpenAI's `response_format`, `tool_choice` (required or named) in the syntax that
the model's chat template uses for tool calls, and a grammar of the caller's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pantheon.errors import BadRequest

#: Blanks between JSON tokens: one space, or a newline with its indent.  Unbounded blanks let a small model run on.
_JSON_BLANKS = r"( |\n[ \t]{0,40})"

#: marker(text) is how a grammar spells a text that may be a control token of the model: `<[id]>` or a quoted text
Marker = Callable[[str], str]

TOOL_SYNTAXES = ("hermes", "xml", "llama3", "mistral")


def quoted(text: str) -> str:
    """A Lark literal."""
    return json.dumps(text)


def json_rule(schema: Any, param: str) -> str:
    """`%json …` for a schema (an object or true).  Unknown keywords are ignored, as JSON Schema says they are to be."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{param}: a JSON schema is an object", param=param)
    options = {"lenient": True, "whitespace_pattern": _JSON_BLANKS}
    try:
        return "%json " + json.dumps({**tamed(schema), "x-guidance": options})
    except RecursionError:
        raise BadRequest(f"{param}: the schema is nested too deeply", param=param) from None


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")


#: keywords beside which, or anywhere in a schema, more properties may be meant
_OPENING = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "dependentRequired", "dependencies")


def tamed(schema: Any) -> Any:
    """The schema with an end in sight, which small models need; what fits it, fits the schema as it was.

    Open integers are held to what JSON readers can hold, ±(2^53 - 1) [RFC 8259 §6]: else digits go on.  An object that
    lists its properties and says nothing of others has no others: else they go on.
    """
    return _tamed(schema, closing="allOf" not in json.dumps(schema))


def _tamed(schema: Any, closing: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    if schema.get("type") == "integer" and not any(key in schema for key in _BOUNDS):
        made.update(minimum=-(2**53) + 1, maximum=2**53 - 1)
    for key, value in schema.items():
        if key in _SCHEMA_MAPS and isinstance(value, Mapping):
            made[key] = {name: _tamed(inner, closing) for name, inner in value.items()}
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            made[key] = [_tamed(inner, closing) for inner in value]
        elif key in _SCHEMAS:
            made[key] = _tamed(value, closing)
    if closing and _lists_its_properties(schema):
        made["additionalProperties"] = False
    return made


def _lists_its_properties(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    return (
        schema.get("type", "object") == "object"
        and isinstance(properties, Mapping)
        and bool(properties)
        and not any(key in schema for key in (*_OPENING, *_COMBINING))
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    )


def response_grammar(spec: Mapping[str, Any]) -> str | None:
    """The grammar of a `response_format`; None for text.  Raises BadRequest (response_format)."""
    kind = spec.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return "start: " + json_rule({"type": "object"}, "response_format")
    if kind == "json_schema":
        inner = spec.get("json_schema")
        if not isinstance(inner, Mapping):
            raise BadRequest("response_format.json_schema must be an object", param="response_format")
        return "start: " + json_rule(inner.get("schema", True), "response_format")
    if kind == "grammar":
        return _own_grammar(spec)
    raise BadRequest(
        f"response_format.type must be text, json_object or json_schema, not {kind!r}", param="response_format"
    )


def _own_grammar(spec: Mapping[str, Any]) -> str:
    text, syntax = spec.get("grammar"), spec.get("syntax", "lark")
    if not isinstance(text, str):
        raise BadRequest("response_format.grammar must be a text", param="response_format")
    if syntax == "lark":
        return text
    if syntax == "regex":
        return f"start: {_regex(text)}"
    raise BadRequest(f"response_format.syntax must be lark or regex, not {syntax!r}", param="response_format")


def _regex(text: str) -> str:
    """A regex as a Lark terminal; a slash would end it."""
    return "/" + text.replace("\\/", "/").replace("/", "\\/") + "/"


def after_reasoning(grammar: str, marker: Marker) -> str:
    """The grammar for a prompt that ends inside an open <think>: free text first, then </think>, then the answer."""
    close = marker("</think>")
    in_text = "_thought[lazy]: /(.|\\n)*<\\/think>/\n"
    thought = in_text if close.startswith('"') else f"_thought: /(.|\\n)*/ {close}\n"
    inner = re.sub(r"^start\s*:", "_answer:", grammar, count=1, flags=re.MULTILINE)
    return f"{thought}start: _thought /[ \\n]{{0,4}}/ _answer\n{inner}"


# ---- tool calls ---------------------------------------------------------------------------------------------------


def tool_syntax(template_source: str) -> str:
    """Which of TOOL_SYNTAXES a chat template teaches its model; Hermes' `<tool_call>` JSON when it shows none."""
    if "<tool_call>" in template_source:
        return "xml" if "<function=" in template_source else "hermes"
    if "[TOOL_CALLS]" in template_source:
        return "mistral"
    if "<|python_tag|>" in template_source or '"parameters": ' in template_source:
        return "llama3"
    return "hermes"


def tools_grammar(spec: Mapping[str, Any], marker: Marker) -> str | None:
    """The grammar of {"tools", "tool_choice", "parallel_tool_calls", "syntax"}; None where nothing is forced.

    tool_choice "required" forces one of the tools or more, {"type": "function", "function": {"name"}} that one, once:
    who asks for one function reads one call (instructor refuses a second).
    Raises BadRequest (tools, tool_choice).
    """
    chosen = _chosen_tools(spec)
    if chosen is None:
        return None
    syntax = spec.get("syntax", "hermes")
    if syntax not in TOOL_SYNTAXES:
        raise BadRequest(f"tool calls can't be forced in the syntax {syntax!r}", param="tool_choice")
    write = {"hermes": _hermes, "xml": _xml, "llama3": _llama3, "mistral": _mistral}[syntax]
    parallel = spec.get("tool_choice") == "required" and bool(spec.get("parallel_tool_calls", True))
    return write(chosen, parallel, marker)


_Tool = tuple[str, Mapping[str, Any]]


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
    if schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{param}.function.parameters must be an object", param=param)
    if not {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        schema = {"type": "object", **schema}
    return function["name"], schema


def _json_calls(tools: Sequence[_Tool], key: str) -> str:
    """Rules `call`, `call_<i>`: `{"name": "…", "<key>": <arguments>}`, one alternative a tool."""
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, schema) in enumerate(tools):
        head = quoted(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
        lines.append(f"call_{i}: {head} args_{i} {quoted('}')}")
        lines.append(f"args_{i}: {json_rule(schema, 'tools')}")
    return "\n".join(lines)


def _hermes(tools: Sequence[_Tool], parallel: bool, marker: Marker) -> str:
    one = f'{marker("<tool_call>")} "\\n" call "\\n" {marker("</tool_call>")}'
    more = f' ("\\n" {one})*' if parallel else ""
    return f"start: {one}{more}\n{_json_calls(tools, 'arguments')}"


def _llama3(tools: Sequence[_Tool], parallel: bool, marker: Marker) -> str:
    # the templates of this family refuse parallel calls
    return f"start: call\n{_json_calls(tools, 'parameters')}"


def _mistral(tools: Sequence[_Tool], parallel: bool, marker: Marker) -> str:
    more = ' (", " call)*' if parallel else ""
    return f'start: {marker("[TOOL_CALLS]")} "[" call{more} "]"\n{_json_calls(tools, "arguments")}'


def _xml(tools: Sequence[_Tool], parallel: bool, marker: Marker) -> str:
    """`<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>`."""
    one = f'{marker("<tool_call>")} "\\n" call "\\n" {marker("</tool_call>")}'
    more = f' ("\\n" {one})*' if parallel else ""
    lines = [f"start: {one}{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, schema) in enumerate(tools):
        properties = schema.get("properties")
        keys = list(properties.items()) if isinstance(properties, Mapping) else []
        required = schema.get("required")
        needed = required if isinstance(required, list) else []
        parts = [quoted(f"<function={name}>\n")]
        for j, (key, value_schema) in enumerate(keys):
            rule = f"arg_{i}_{j}"
            parts.append(rule if key in needed else f"{rule}?")
            lines.append(f"{rule}: {quoted(f'<parameter={key}>' + chr(10))} {rule}_value")
            lines.append(_xml_value(f"{rule}_value", value_schema, schema))
        lines.append(f"call_{i}: {' '.join(parts)} {quoted('</function>')}")
    return "\n".join(lines)


def _xml_value(rule: str, schema: Any, whole: Mapping[str, Any]) -> str:
    """A parameter's value: texts stand bare up to the closing tag, everything else is JSON."""
    plain = isinstance(schema, Mapping) and schema.get("type") == "string"
    if plain and isinstance(schema.get("enum"), list) and all(isinstance(v, str) for v in schema["enum"]):
        options = " | ".join(quoted(v) for v in schema["enum"])
        return f'{rule}: ({options}) "\\n</parameter>\\n"'
    if plain:
        return f"{rule}[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/"
    # $defs of the whole schema stay reachable from the part
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    if isinstance(schema, Mapping):
        schema = {**shared, **schema}
    return f'{rule}: {rule}_json "\\n</parameter>\\n"\n{rule}_json: {json_rule(schema, "tools")}'
