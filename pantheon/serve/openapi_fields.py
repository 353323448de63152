"""The fields of request bodies and queries, each declared once: name, JSON Schema, default and meaning.

`/openapi.json` and the tables of docs/reference/http-api.md are made of these rows; tests hold them against the parsers
(each name is read, each bound and each choice is what the parser takes).  Must not know routes or handlers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Schema = dict[str, Any]
#: bounds this far out are left out of the reference
_WIDE = 1 << 30


@dataclass(frozen=True)
class Field:
    """One field.  `schema` is JSON Schema without the null that every optional field takes; `read` False marks one that
    is accepted and not looked at, `checked` False one that is a hint: what it can not be is ignored."""

    name: str
    schema: Schema
    meaning: str
    default: Any = None
    required: bool = False
    read: bool = True
    checked: bool = True

    @property
    def optional_schema(self) -> Schema:
        """The schema as a body may fill it, with its default and meaning."""
        schema = dict(self.schema)
        if not self.required:
            if isinstance(schema.get("type"), str) and "enum" not in schema:
                schema["type"] = [schema["type"], "null"]
            else:
                schema = {"anyOf": [schema, {"type": "null"}]}
        if self.default is not None:
            schema["default"] = self.default
        return {**schema, "description": self.meaning}

    def row(self) -> str:
        """The row of the reference: field, type, default, meaning."""
        default = "required" if self.required else "" if self.default is None else f"`{_plain(self.default)}`"
        return f"| `{self.name}` | {type_text(self.schema)} | {default} | {self.meaning} |"


def type_text(schema: Schema) -> str:
    """A schema in words: `integer, 1 to 8`; `string or array of strings`."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(type_text(part) for part in schema["anyOf"])
    words = str(schema.get("type", "anything"))
    if words == "array" and isinstance(item := schema.get("items", {}).get("type"), str):
        words = f"array of {item}s"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is not None and low == high:
        words = f"only {_plain(low)}"
    elif low is not None and low > -_WIDE:
        words += f", {'above' if 'exclusiveMinimum' in schema else 'from'} {_plain(low)}"
        words += f" to {_plain(high)}" if high is not None and high < _WIDE else ""
    elif low is None and high is not None:
        words += f", at most {_plain(high)}"
    for key, text in (("maxLength", "at most {} characters"), ("maxItems", "at most {}")):
        if key in schema:
            words += ", " + text.format(schema[key])
    return words


def _plain(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


# ---- how to declare one ---------------------------------------------------------------------------------------------


def number(name: str, low: float, high: float, default: float | None, meaning: str, *, above: bool = False) -> Field:
    """A number in [low, high], in (low, high] with `above`."""
    least = "exclusiveMinimum" if above else "minimum"
    return Field(name, {"type": "number", least: low, "maximum": high}, meaning, default)


def integer(name: str, low: int, high: int, meaning: str, default: int | None = None) -> Field:
    """A whole number in [low, high]."""
    return Field(name, {"type": "integer", "minimum": low, "maximum": high}, meaning, default)


def flag(name: str, default: bool | None, meaning: str) -> Field:
    """true or false."""
    return Field(name, {"type": "boolean"}, meaning, default)


def text(name: str, meaning: str, default: str | None = None, most: int | None = None) -> Field:
    """A string."""
    return Field(name, {"type": "string", **({} if most is None else {"maxLength": most})}, meaning, default)


def choice(name: str, values: Sequence[str], meaning: str, default: str | None = None) -> Field:
    """One of some strings."""
    return Field(name, {"type": "string", "enum": list(values)}, meaning, default)


def array(name: str, item: Schema, meaning: str, **limits: int) -> Field:
    """An array; `minItems`, `maxItems`."""
    return Field(name, {"type": "array", "items": item, **limits}, meaning)


def members(name: str, meaning: str, *fields: Field) -> Field:
    """An object, its members declared or free."""
    return Field(name, object_of(fields), meaning)


def either(name: str, schemas: Sequence[Schema], meaning: str, default: Any = None) -> Field:
    """One of several kinds."""
    return Field(name, {"anyOf": list(schemas)}, meaning, default)


def needed(field: Field) -> Field:
    """The field, required."""
    return replace(field, required=True)


def unread(field: Field) -> Field:
    """The field, accepted and not looked at."""
    return replace(field, read=False)


def hint(field: Field) -> Field:
    """The field, never refused."""
    return replace(field, checked=False)


def object_of(fields: Sequence[Field]) -> Schema:
    """The schema of an object that ignores what it does not know."""
    schema: Schema = {"type": "object"}
    if fields:
        schema["properties"] = {field.name: field.optional_schema for field in fields}
    if must := [field.name for field in fields if field.required]:
        schema["required"] = must
    return schema
