"""What an answer must look like, as a Lark grammar in llguidance's dialect.  Pure: knows no matcher and no logits.

OpenAI's `response_format` and a caller's own grammar are here, and what a schema and a marker are in a grammar; tool
calls are in constraint_tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pantheon.engine.constraint_limits import check_size
from pantheon.errors import BadRequest

#: Blanks between JSON tokens: one space, or a newline with its indent.  Unbounded blanks let a small model run on.
_JSON_BLANKS = r"( |\n[ \t]{0,40})"

#: marker(text) is how a grammar spells a text that may be a control token of the model: `<[id]>` or a quoted text
Marker = Callable[[str], str]


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
    check_size(schema, param)
    try:
        return "%json " + json.dumps({**tamed(schema), "x-guidance": options})
    except RecursionError:
        raise BadRequest(f"{param}: the schema is nested too deeply", param=param) from None


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")
#: how fine a number between two bounds may be
_DECIMALS = 1e-9
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")


#: keywords beside which, or anywhere in a schema, more properties may be meant
_OPENING = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "dependentRequired", "dependencies")


def tamed(schema: Any) -> Any:
    """The schema with an end in sight, which small models need; what fits it, fits the schema as it was.

    Open integers are held to what JSON readers can hold, ±(2^53 - 1) [RFC 8259 §6], and numbers between two bounds to
    nine decimals: else digits go on.  An object that lists its properties and says nothing of others has no others:
    else they go on.
    """
    return _tamed(schema, closing="allOf" not in json.dumps(schema))


def _tamed(schema: Any, closing: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    if schema.get("type") == "integer" and not any(key in schema for key in _BOUNDS):
        made.update(minimum=-(2**53) + 1, maximum=2**53 - 1)
    if schema.get("type") == "number" and _between_bounds(schema):
        made["multipleOf"] = _DECIMALS
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


def _between_bounds(schema: Mapping[str, Any]) -> bool:
    low, high = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    free = not any(key in schema for key in ("multipleOf", "enum", "const"))
    return free and any(key in schema for key in low) and any(key in schema for key in high)


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


def after_reasoning(grammar: str, marker: Marker, closing: str = "</think>") -> str:
    """The grammar for a prompt that ends inside an open thought: free text first, then its end, then the answer."""
    close = marker(closing)
    in_text = f"_thought[lazy]: {up_to(closing)}\n"
    thought = in_text if close.startswith('"') else f"_thought: /(.|\\n)*/ {close}\n"
    return f"{thought}start: _thought /[ \\n]{{0,4}}/ _answer\n{renamed(grammar, '_answer')}"


def up_to(text: str) -> str:
    """A regex: anything, and the text at its end."""
    return "/(.|\\n)*" + re.escape(text).replace("/", "\\/") + "/"


def renamed(grammar: str, rule: str) -> str:
    """The grammar with another name for its start."""
    return re.sub(r"^start\s*:", f"{rule}:", grammar, count=1, flags=re.MULTILINE)
