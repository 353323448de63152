"""Requests that are nearly right: bodies made from /openapi.json and from what real clients sent, then spoilt.

All choices come from one `Random`, which hypothesis drives, so that a request that breaks something gets smaller.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

CAPTURES = Path(__file__).parents[1] / "data" / "clients"
#: bounds that would only cost time: answers are this short, and there are this few
SMALL = {
    "max_tokens": 6, "max_completion_tokens": 6, "max_output_tokens": 6, "n_predict": 6, "n": 2, "n_cmpl": 2,
    "best_of": 3, "max_tool_calls": 1,
}  # fmt: skip
#: members whose schema says little, as they usually are
USUAL: dict[str, tuple[Any, ...]] = {
    "messages": (
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": "a"},
         {"role": "user", "content": "b"}],
    ),
    "input": ("hi", [1, 2]),
    "prompt": ("hi", ["a", "b"], [1, 2]),
    "content": ("hi",),
    "grammar": ('root ::= "a" | "b"',),
    "json_schema": ({"type": "object", "properties": {"a": {"enum": [1, 2]}}}, {"type": "integer"}),
    "response_format": (
        {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}},
    ),
    "tool_choice": ("auto", "none"),
    "logit_bias": ({"7": -100, "8": 1.5},),
    "input_extra": ([{"filename": "a", "text": "b"}],),
    "tokens": ([1, 2, 3],),
    "dimensions": (8,),
    "stop": ("x", ["x", "lo"]),
    "system": ("be brief",),
    "chat_template_kwargs": ({"a": 1},),
    "quantize": (False,),
}  # fmt: skip
#: what is only there to be refused
REFUSED = {"previous_response_id", "conversation", "background", "top_logprobs", "functions"}
TEXTS = (
    "hi", "", " ", "x" * 300, "é 漢字 🏛️", "\ud800", "a\udc00b", "\0", "a\0b", "<|im_end|>", "<think>", "{{ 1 / 0 }}",
    "\r\n", "auto", "none", "user", "tool", "function", "-1", "1e999", "null", "../../etc/passwd", "script:x", "\u202e",
    "%00", "[" * 150,
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 0.5, -0.0, 1.5, 1e-320, 1e308, -1e308, 2**31, 2**32, 2**53, 2**63, -(2**63), 2**64, 10**31, 10**40,
    131072, 4294967295, 50256,
)  # fmt: skip
OTHERS: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: False, list, dict, lambda: [[]], lambda: [{}], lambda: {"": None},
    lambda: [None], lambda: nested(40), lambda: nested(99), lambda: nested(120), lambda: ["a"] * 100,
    lambda: {str(i): i for i in range(60)},
    lambda: {"type": "object", "$ref": "#"}, lambda: {"type": "string", "pattern": "(a+)+$"},
    lambda: {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}, lambda: {"type": "text", "text": 1},
)  # fmt: skip
#: what JSON does not have, put in where a marker stands
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "01", "'x'", "undefined", "1" * 5000, "{", "]", '"\\u12', "tru")
MARK = "\ue000raw\ue000"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@dataclass(frozen=True)
class Mutant:
    """One request: a path with its query, header fields, and the bytes of its body."""

    path: str
    fields: tuple[str, ...]
    body: bytes

    def __repr__(self) -> str:
        return f"Mutant({self.path!r}, {self.fields!r}, {self.body[:600]!r}{'…' if len(self.body) > 600 else ''})"


class Mutator:
    """Makes requests to every POST route of a document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        paths = sorted(document["paths"].items())
        self.schemas = {path: self._schema(methods["post"]) for path, methods in paths if "post" in methods}
        #: the routes that take nothing are asked as well, but rarely
        full = [path for path in self.schemas if self.names(path)]
        self._paths = [*full, *full, *full, *self.schemas]
        self._captured = [
            (one["path"], one["body"])
            for file in sorted(CAPTURES.glob("*.json"))
            for one in json.loads(file.read_text())
            if one["path"] in self.schemas
        ]

    def _schema(self, operation: dict[str, Any]) -> dict[str, Any]:
        body = operation.get("requestBody", {"content": {"application/json": {"schema": {"type": "object"}}}})
        while "$ref" in body:
            at: Any = self._document
            for part in body["$ref"].removeprefix("#/").split("/"):
                at = at[part.replace("~1", "/")]
            body = at
        schema: dict[str, Any] = body["content"]["application/json"]["schema"]
        return schema

    def names(self, path: str) -> set[str]:
        """The fields that a route documents."""
        return set(self.schemas[path].get("properties", ()))

    def request(self, random: Random) -> tuple[str, Mutant]:
        """(route, a request to it)."""
        if random.random() < 0.25:
            route, whole = random.choice(self._captured)
            body = json.loads(json.dumps(whole))
            body.pop("max_tokens", None)
        else:
            route = random.choice(self._paths)
            body = valid(self.schemas[route], random)
        if isinstance(body, dict):
            for name, most in SMALL.items():
                if name in body or (name in self.names(route) and "tokens" in name):
                    body[name] = most
        for _ in range(random.choice((0, 1, 1, 1, 1, 2))):
            body = spoil(body, random)
        return route, _wrap(route, _bytes(body, random), random)


def valid(schema: dict[str, Any], random: Random, name: str = "") -> Any:
    """A value that the schema takes; optional members come now and then."""
    if name in USUAL and random.random() < 0.9:
        return random.choice(USUAL[name])
    if "anyOf" in schema:
        return valid(schema["anyOf"][0] if random.random() < 0.7 else random.choice(schema["anyOf"]), random, name)
    if "enum" in schema:
        return random.choice(schema["enum"])
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = kind[0] if random.random() < 0.9 else random.choice(kind)
    if kind == "object":
        must, known = schema.get("required", ()), schema.get("properties", {})
        some = [key for key in known if key in must or (key not in REFUSED and random.random() < 0.12)]
        return {key: valid(known[key], random, key) for key in some}
    if kind == "array":
        count = random.choice((1, 1, 2, 3)) if schema.get("minItems") else random.choice((0, 1, 2))
        return [valid(schema.get("items", {}), random, name) for _ in range(count)]
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", 0.5 if kind == "number" else 0), schema.get("maximum", 100)
        return random.choice((low, high, 1)) if kind == "integer" else random.choice((low, high, 0.5))
    return {"boolean": random.random() < 0.5, "null": None}.get(kind, random.choice(("hi", "a", "json", "a b c")))


def spoil(value: Any, random: Random) -> Any:
    """The value with one thing wrong somewhere in it."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        what = random.random()
        if what < 0.12:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.2:
            return {**value, random.choice(TEXTS): anything(random)}
        return {**value, key: spoil(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.75:
        at = random.randrange(len(value))
        return [*value[:at], spoil(value[at], random), *value[at + 1 :]]
    return anything(random)


def anything(random: Random) -> Any:
    """A value that hardly any field wants."""
    what = random.random()
    if what < 0.35:
        return random.choice(TEXTS)
    if what < 0.6:
        return random.choice(NUMBERS)
    return MARK if what < 0.65 else random.choice(OTHERS)()


def _bytes(body: Any, random: Random) -> bytes:
    text = json.dumps(body, ensure_ascii=random.random() < 0.8)
    mark = json.dumps(MARK)
    for form in (mark, f'"{MARK}"'):
        if form in text:
            text = text.replace(form, random.choice(RAW))
    data = text.encode("utf-8", "surrogatepass")
    what = random.random()
    if what > 0.12 or not data:
        return data
    at = random.randrange(len(data))
    if what < 0.02:
        return data[:at]
    if what < 0.04:
        return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
    if what < 0.06 and data.startswith(b"{") and isinstance(body, dict) and body:
        again = json.dumps({random.choice(list(body)): anything(random)}).encode("utf-8", "surrogatepass")
        return data[:-1] + b"," + again[1:]
    if what < 0.08:
        return text.encode("utf-16", "surrogatepass")
    marked = (b"\xef\xbb\xbf" + data, b"\xff\xfe" + data, b"[" + data + b"]", data + data)
    return random.choice((*marked, b"", b"   ", b"[" * 5000))


MEDIA = (
    "text/plain", "application/json; charset=utf-16", "multipart/form-data; boundary=x", "", "application/x-ndjson",
)  # fmt: skip
VALUES = ("", "%00", "%ff", "m", "1" * 90)
HEADERS = ("X-Session-Id", "X-Request-Id", "Accept", "session-id", "Authorization")


def _wrap(route: str, data: bytes, random: Random) -> Mutant:
    path, fields = route.replace("{model}", "m"), ["Content-Type: application/json"]
    what = random.random()
    if what < 0.05:
        fields[0] = "Content-Type: " + random.choice(MEDIA)
    elif what < 0.12:
        packed, coding = random.choice(((gzip.compress(data, 1), "gzip"), (zlib.compress(data), "deflate")))
        broken = random.random()
        if broken < 0.3:
            packed = packed[: len(packed) // 2]
        elif broken < 0.4:
            coding = random.choice(("gzip", "deflate", "br", "gzip, gzip", "identity", "zstd"))
        data, fields = packed, [*fields, f"Content-Encoding: {coding}"]
    elif what < 0.16:
        names = [quote(random.choice(TEXTS), errors="replace") for _ in "ab"]
        path += "?" + "&".join(f"{name}={random.choice(VALUES)}" for name in names)
    elif what < 0.2:
        text = random.choice(TEXTS).encode("utf-8", "replace").decode("latin-1")
        if text.isprintable():
            fields.append(f"{random.choice(HEADERS)}: {text}")
    return Mutant(path, tuple(fields), data)
