"""Arguments as Gemma 4 writes them, `{key:<|"|>text<|"|>,n:1}`, as grammar rules for a JSON schema.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pantheon.engine.constraint_grammar import Marker, json_rule, quoted, up_to
from pantheon.engine.schema_types import resolved, types_of, values_of

_QUOTE = '<|"|>'
#: Deeper values may be anything.
_MAX_DEPTH = 6
_MAX_RULES = 2000


def gemma_arguments(schemas: Sequence[Mapping[str, Any]], marker: Marker) -> str:
    """Rules `args_<i>`, one for each schema."""
    rules = _Rules(marker)
    for i, schema in enumerate(schemas):
        rules.lines.append(f"args_{i}: {rules.of(schema, schema, 0)}")
    return "\n".join(rules.lines)


class _Rules:
    def __init__(self, marker: Marker) -> None:
        quote = self._quote = marker(_QUOTE)
        literal = quote.startswith('"')
        text = f"{quote} g_rest" if literal else f"{quote} /(.|\\n)*/ {quote}"
        rest = [f"g_rest[lazy]: {up_to(_QUOTE)}"] if literal else []
        self.lines = [
            *rest,
            f"g_text: {text}",
            f'g_key: /[A-Za-z_][A-Za-z0-9_.\\-]*/ ":"\ng_quoted_key: {text} ":"',
            'g_any: g_text | g_json | g_object | g_array\ng_json: %json {"type": ["number", "boolean", "null"]}',
            'g_pair: (g_key | g_quoted_key) g_any\ng_object: "{" (g_pair ("," g_pair)*)? "}"',
            'g_array: "[" (g_any ("," g_any)*)? "]"',
        ]
        self._n = 0

    def of(self, schema: Any, whole: Mapping[str, Any], depth: int) -> str:
        """An expression for one value."""
        schema = resolved(schema, whole)
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._n > _MAX_RULES:
            return "g_any"
        if values := values_of(schema):
            return "(" + " | ".join(self._constant(value) for value in values) + ")"
        options = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(options, list) and options:
            return "(" + " | ".join(self.of(option, whole, depth + 1) for option in options) + ")"
        kinds = types_of(schema, whole)
        found = [self._typed(kind, schema, whole, depth) for kind in sorted(kinds)]
        return "(" + " | ".join(found) + ")" if found else "g_any"

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"({self._quote} {quoted(value)} {self._quote})" if value else f"({self._quote} {self._quote})"
        return "g_any" if isinstance(value, list | dict) else quoted(json.dumps(value))

    def _typed(self, kind: str, schema: Mapping[str, Any], whole: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return "g_text"
        if kind == "array":
            item = self._rule(self.of(schema.get("items"), whole, depth + 1))
            return f'("[" ({item} ("," {item})*)? "]")'
        if kind == "object":
            properties = schema.get("properties")
            return self._members(properties, schema, whole, depth) if properties else "g_object"
        if kind in ("integer", "number", "boolean", "null"):
            return self._rule(json_rule({**schema, "type": kind}, "tools"))
        return "g_any"

    def _members(self, properties: Any, schema: Mapping[str, Any], whole: Mapping[str, Any], depth: int) -> str:
        """The members of an object in the template's order; commas only between those that are there."""
        if not isinstance(properties, Mapping):
            return "g_object"
        required = schema.get("required")
        needed = required if isinstance(required, list) else []
        first, later = '"}"', '"}"'
        for key in sorted(properties, key=str.lower, reverse=True):
            member = self._rule(f"{quoted(key + ':')} {self.of(properties[key], whole, depth + 1)}")
            rest = self._rule(later)
            skip_first, skip_later = ("", "") if key in needed else (f" | {self._rule(first)}", f" | {rest}")
            first, later = f"({member} {rest}{skip_first})", f'("," {member} {rest}{skip_later})'
        return f'("{{" {first})'

    def _rule(self, expression: str) -> str:
        self._n += 1
        self.lines.append(f"g_{self._n}: {expression}")
        return f"g_{self._n}"
