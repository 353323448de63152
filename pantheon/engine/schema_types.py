"""What types a JSON schema names: for values that a tool call does not write as JSON.  Pure."""

from __future__ import annotations

from typing import Any

_MAX_REFS = 8


def resolved(schema: Any, whole: Any) -> Any:
    """The schema behind local $refs into `whole`; {} for one that leads nowhere."""
    for _ in range(_MAX_REFS):
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str):
            return schema
        schema = whole if ref.startswith("#") else None
        for key in ref[2:].split("/"):
            schema = schema.get(key) if isinstance(schema, dict) and key else schema if not key else None
    return {}


def types_of(schema: Any, whole: Any = None, depth: int = 0) -> set[str]:
    """The JSON types that a schema names; empty when it names none.  `whole` holds the $defs."""
    schema = resolved(schema, whole)
    if not isinstance(schema, dict) or depth > _MAX_REFS:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {item for item in kind if isinstance(item, str)}
    options = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(options, list):
        return set().union(*(types_of(option, whole, depth + 1) for option in options))
    return {_type_of(value) for value in values_of(schema)}


def values_of(schema: Any) -> list[Any]:
    """The values of an enum or const; empty when the schema lists none."""
    if not isinstance(schema, dict):
        return []
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [schema["const"]] if "const" in schema else []


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")
