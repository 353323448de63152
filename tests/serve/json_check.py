"""The part of JSON Schema that /openapi.json uses, checked without a dependency."""

from __future__ import annotations

from typing import Any

_KINDS = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _KINDS[kind]) and not (isinstance(value, bool) and kind in ("integer", "number"))


def faults(schema: dict[str, Any], value: Any, at: str = "$") -> list[str]:
    """What keeps a value from being what the schema says; [] when it is."""
    if "anyOf" in schema:
        tried = [faults(part, value, at) for part in schema["anyOf"]]
        return [] if [] in tried else [fault for part in tried for fault in part]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        return [f"{at}: {type(value).__name__} is not {' or '.join(kinds)}"]
    if "enum" in schema and value is not None and value not in schema["enum"]:
        return [f"{at}: {value!r} is none of {schema['enum']}"]
    found = []
    if isinstance(value, dict):
        found += [f"{at}.{name}: is missing" for name in schema.get("required", ()) if name not in value]
        for name, part in schema.get("properties", {}).items():
            if name in value:
                found += faults(part, value[name], f"{at}.{name}")
    if isinstance(value, list) and "items" in schema:
        found += [fault for i, item in enumerate(value) for fault in faults(schema["items"], item, f"{at}[{i}]")]
    return found
