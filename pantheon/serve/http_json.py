"""JSON in and out of strangers' hands: bounded reading, writing that is always valid UTF-8 and valid JSON [M032].

Reading refuses what Python's json would take or choke on: deep nesting (checked before the recursive parser sees it),
NaN and Infinity, numbers beyond a double or of absurd length, bytes that are not UTF-8.  It knows no field names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from pantheon.errors import BadRequest

MAX_DEPTH = 100
MAX_INT_DIGITS = 32

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
#: stands for the open string of a `Form`; what it looks like in JSON can not come from any other text
_HOLE = "\x00hole\x00"
_LONE_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_QUOTE = 2
_STEP = bytes.maketrans(b'[{]}"', b"\x01\x01\xff\xff\x02")
_NO_STEP = bytes(set(range(256)) - set(b'[]{}"'))
_BLOCK = 1 << 20


def load_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body.  Raises BadRequest (400) for anything else."""
    if not body.strip():
        raise BadRequest("the request body is empty; expected a JSON object", code="invalid_json")
    value = load_json(body)
    if not isinstance(value, dict):
        raise BadRequest("the request body must be a JSON object", code="invalid_json")
    return value


def load_json(body: bytes) -> Any:
    """The JSON value in `body`; lone surrogate escapes become U+FFFD.  Raises BadRequest (400)."""
    if nesting(body) > MAX_DEPTH:
        raise BadRequest(f"the JSON body nests deeper than {MAX_DEPTH} levels", code="invalid_json")
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_int=_integer, parse_float=_double, parse_constant=_constant)
    except UnicodeDecodeError as fault:
        raise BadRequest(f"the request body is not UTF-8 (at byte {fault.start})", code="invalid_json") from None
    except json.JSONDecodeError as fault:
        where = f"line {fault.lineno}, column {fault.colno}"
        raise BadRequest(f"the request body is not valid JSON: {fault.msg} ({where})", code="invalid_json") from None
    except RecursionError:
        raise BadRequest("the JSON body nests too deeply", code="invalid_json") from None
    return _map_strings(value, whole_text) if _LONE_HALF.search(body) else value


def nesting(body: bytes) -> int:
    """How deep the brackets outside strings nest, found without recursion, in linear time.

    Exact for JSON and for everything in front of the first fault in what is not JSON; 0 where a count says enough.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return 0
    # backslashes pair up from the left, so that what is left of a run decides whether it escapes the quote behind it
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_STEP, _NO_STEP)
    depth, deepest, quotes = 0, 0, 0
    for start in range(0, len(marks), _BLOCK):
        steps = np.frombuffer(marks, np.int8, min(_BLOCK, len(marks) - start), start)
        quoted = quotes + (steps == _QUOTE).cumsum(dtype=np.int32)
        levels = np.where((quoted & 1) | (steps == _QUOTE), 0, steps).cumsum(dtype=np.int32)
        deepest = max(deepest, depth + int(levels.max()))
        depth, quotes = depth + int(levels[-1]), int(quoted[-1]) & 1
    return deepest


def dump_json(value: Any) -> bytes:
    """Compact UTF-8 JSON.  Numbers that JSON lacks become null, lone surrogates U+FFFD: a stream must never break."""
    try:
        text = _encode(value)
    except ValueError:
        text = _encode(_finite(value))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return whole_text(text).encode("utf-8")


class Form:
    """A JSON value with one string left open, for values that differ in that string alone."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        """`make(text)` is the value with that text; it stands there once."""
        self._head, self._tail = dump_json(make(_HOLE)).split(dump_json(_HOLE))

    def fill(self, text: str) -> bytes:
        """`dump_json(make(text))`."""
        return self._head + dump_json(text) + self._tail


def whole_text(text: str) -> str:
    """`text` with lone surrogates replaced by U+FFFD and paired ones joined."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _integer(digits: str) -> int:
    if len(digits) > MAX_INT_DIGITS:
        raise BadRequest(f"the JSON body holds a whole number of {len(digits)} digits", code="invalid_json")
    return int(digits)


def _double(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise BadRequest(f"the JSON body holds a number out of range: {digits[:40]}", code="invalid_json")
    return value


def _constant(name: str) -> float:
    raise BadRequest(f"the JSON body holds {name}, which JSON does not have", code="invalid_json")


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
