"""Random JSON schemas of what clients send: nested, enums, arrays, unions, patterns, references, bounds and formats."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "city", "count", "tags", "größe", "is_done", 'q"uote', "a b", "items", "type", "id", "$x", "note")
PATTERNS = (r"^[A-Z]{2,4}-\d{1,3}$", "^(red|green)$", "^[a-z]+(_[a-z]+)?$", r"^\d{4}$", "^#[0-9a-f]{6}$", "^x?yz*$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def random_schema(seed: int) -> Schema:
    """An object as a rule, sometimes something else; the same for the same seed."""
    rng = random.Random(seed)
    defs: Schema = {}
    depth = rng.choice((1, 2, 2, 3))
    root = _object(rng, depth, defs) if rng.random() < 0.85 else _value(rng, depth, defs)
    if rng.random() < 0.2:
        # a tree, which ends where its lists are empty
        defs["tree"] = {
            "type": "object",
            "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 99}, "sub": {
                "type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
            "required": ["v"], "additionalProperties": False,
        }  # fmt: skip
        root = {"type": "object", "properties": {"root": {"$ref": "#/$defs/tree"}, "x": root},
                "required": ["root", "x"], "additionalProperties": False}  # fmt: skip
    old = rng.random() < 0.2 and "prefixItems" not in repr((root, defs))
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"} if old else {}
    return {**draft, **root, **({"$defs": defs} if defs else {})}


def _value(rng: random.Random, depth: int, defs: Schema) -> Schema:
    makers = [_string, _string, _integer, _number, _enum, _plain, _plain]
    if depth > 0:
        makers += [_array, _array, _object, _union, _reference]
    return rng.choice(makers)(rng, depth - 1, defs)


def _string(rng: random.Random, depth: int, defs: Schema) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        low = rng.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(20)}
    if kind == 1:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 2:
        return {"type": "string", "format": rng.choice(FORMATS)}
    return {"type": "string", "maxLength": 60, "description": "some text", "default": "x"}


def _integer(rng: random.Random, depth: int, defs: Schema) -> Schema:
    low = rng.randrange(-50, 50)
    return rng.choice(
        [
            {"type": "integer"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)},
            {"type": "integer", "exclusiveMinimum": low, "maximum": low + 9},
            {"type": "integer", "multipleOf": rng.choice((2, 5, 10)), "minimum": 0, "maximum": 500},
        ]
    )


def _number(rng: random.Random, depth: int, defs: Schema) -> Schema:
    low = rng.randrange(-9, 9)
    return {"type": "number", "minimum": low, "maximum": low + rng.choice((1, 2.5, 100))}


def _enum(rng: random.Random, depth: int, defs: Schema) -> Schema:
    values = ["red", "blå", 7, 2.5, None, True, 'say "hi"', "", "a\nb"]
    chosen = rng.sample(values, rng.randrange(1, 5))
    return {"const": chosen[0]} if rng.random() < 0.2 else {"enum": chosen}


def _plain(rng: random.Random, depth: int, defs: Schema) -> Schema:
    either = [{"type": ["integer", "null"]}, {"type": ["string", "boolean"], "maxLength": 30}]
    return rng.choice([{"type": "boolean"}, {"type": "null"}, *either])


def _array(rng: random.Random, depth: int, defs: Schema) -> Schema:
    low = rng.randrange(3)
    bounds = {"minItems": low, "maxItems": low + rng.randrange(3)}
    if rng.random() < 0.15:
        parts = [_value(rng, depth, defs) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2, "maxItems": 2}
    return {"type": "array", "items": _value(rng, depth, defs), **bounds}


def _object(rng: random.Random, depth: int, defs: Schema) -> Schema:
    names = rng.sample(NAMES, rng.randrange(1, 5))
    made: Schema = {
        "type": "object",
        "properties": {name: _value(rng, depth, defs) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    more = rng.random()
    if more < 0.6:
        made["additionalProperties"] = False
    elif more < 0.7:
        made["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
    return made


def _union(rng: random.Random, depth: int, defs: Schema) -> Schema:
    if rng.random() < 0.3:
        # told apart by a tag, as unions of classes are
        return {"oneOf": [_tagged(tag, _value(rng, depth, defs)) for tag in ("one", "two")]}
    return {"anyOf": [_value(rng, depth, defs) for _ in range(rng.randrange(2, 4))]}


def _tagged(tag: str, value: Schema) -> Schema:
    return {"type": "object", "properties": {"kind": {"const": tag}, "value": value}, "required": ["kind", "value"],
            "additionalProperties": False}  # fmt: skip


def _reference(rng: random.Random, depth: int, defs: Schema) -> Schema:
    name = f"d{len(defs)}"
    defs[name] = {}
    defs[name] = _value(rng, depth, defs)
    return {"$ref": f"#/$defs/{name}"}
