"""The key-value section of a GGUF header, read in two passes.

`walk` finds where each value is and checks every length without keeping anything but (type, place) per key, so a file
that lies about its sizes costs nothing.  `decode` makes Python values of what has been walked.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any, NamedTuple

import numpy as np

from pantheon.errors import ModelFileError
from pantheon.formats.gguf_cursor import U64_AT, Cursor, shown

UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9
#: type number -> struct code and NumPy dtype of the scalars
SCALARS: dict[int, tuple[str, str]] = {
    0: ("<B", "<u1"),
    1: ("<b", "<i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    UINT32: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    BOOL: ("<B", "<u1"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_SIZES = {number: struct.calcsize(code) for number, (code, _) in SCALARS.items()}
_KNOWN = "0 to 12"

#: bounds that no honest file comes near; they keep time and memory of a hostile one small
MAX_KEYS = 65_536
MAX_DEPTH = 4
MAX_ITEMS = 1 << 22
MAX_NESTED = 65_536
MAX_METADATA_BYTES = 128 << 20
#: numeric arrays of more items than this become NumPy arrays, shorter ones lists
LIST_ITEMS = 1024

_LEAST_PAIR_BYTES = 14  # key of one byte, type, value of one byte
_LEAST_ARRAY_BYTES = 12


class Span(NamedTuple):
    """A value that has been walked: its type, the place of its first byte (after type, item type and count)."""

    type: int
    offset: int
    item_type: int = -1
    n_items: int = 0


class _Budget:
    """Items and nested arrays that may still come, over all arrays of a file."""

    __slots__ = ("items", "nested")

    def __init__(self) -> None:
        self.items = MAX_ITEMS
        self.nested = MAX_NESTED


def walk(cursor: Cursor, count: int) -> dict[str, Span]:
    """Walk `count` pairs.  Raises ModelFileError at the first fault; leaves the cursor behind the last value."""
    cursor.need(count * _LEAST_PAIR_BYTES, f"metadata_kv_count is {count}", 16)
    if count > MAX_KEYS:
        raise cursor.fault(f"metadata_kv_count is {count}; at most {MAX_KEYS} keys are read", 16)
    start = cursor.position
    spans: dict[str, Span] = {}
    budget = _Budget()
    for index in range(count):
        at = cursor.position
        key = cursor.name(f"metadata key {index}")
        if key in spans:
            raise cursor.fault(f"metadata key {shown(key)} is there twice", at)
        spans[key] = _walk_value(cursor, key, budget)
    size = cursor.position - start
    if size > MAX_METADATA_BYTES:
        raise cursor.fault(f"metadata has {size} bytes; at most {MAX_METADATA_BYTES} are read", start)
    return spans


def _walk_value(cursor: Cursor, key: str, budget: _Budget) -> Span:
    at = cursor.position
    field = shown(key)
    number = cursor.u32(f"type of {field}")
    start = cursor.position
    if number in _SIZES:
        cursor.need(_SIZES[number], field, start)
        cursor.position += _SIZES[number]
        return Span(number, start)
    if number == STRING:
        size = cursor.u64(f"length of {field}")
        cursor.need(size, f"length of {field}", start)
        cursor.position += size
        return Span(number, start)
    if number == ARRAY:
        return _walk_array(cursor, field, budget, 1)
    raise cursor.fault(f"type of {field} is {number}; types are {_KNOWN}", at)


def _walk_array(cursor: Cursor, field: str, budget: _Budget, depth: int) -> Span:
    at = cursor.position
    if depth > MAX_DEPTH:
        raise cursor.fault(f"array {field} is nested more than {MAX_DEPTH} deep", at)
    item_type = cursor.u32(f"item type of array {field}")
    count = cursor.u64(f"count of array {field}")
    if item_type not in _SIZES and item_type not in (STRING, ARRAY):
        raise cursor.fault(f"item type of array {field} is {item_type}; types are {_KNOWN}", at)
    span = Span(ARRAY, cursor.position, item_type, count)
    least = _SIZES.get(item_type, _LEAST_ARRAY_BYTES if item_type == ARRAY else 8)
    cursor.need(count * least, f"array {field} of {count} items", at + 4)
    budget.items -= count
    if budget.items < 0:
        raise cursor.fault(f"array {field}: more than {MAX_ITEMS} array items in all", at + 4)
    if item_type == STRING:
        _walk_strings(cursor, field, count)
    elif item_type == ARRAY:
        budget.nested -= count
        if budget.nested < 0:
            raise cursor.fault(f"array {field}: more than {MAX_NESTED} nested arrays", at + 4)
        for _ in range(count):
            _walk_array(cursor, field, budget, depth + 1)
    else:
        cursor.position += count * least
    return span


def _walk_strings(cursor: Cursor, field: str, count: int) -> None:
    # the hot loop of opening a file (half a million tokens and merges): one comparison and one read per item
    buffer, position, last = cursor.buffer, cursor.position, cursor.end - 8
    before = position
    for index in range(count):
        if position > last:
            raise _string_outside(cursor, field, index, before, position)
        before = position
        position += 8 + U64_AT(buffer, position)[0]
    if position > cursor.end:
        raise _string_outside(cursor, field, count, before, position)
    cursor.position = position


def _string_outside(cursor: Cursor, field: str, index: int, before: int, position: int) -> ModelFileError:
    """The fault of item `index` at `position`; or of the item at `before`, when that one ends too late."""
    if position > cursor.end:
        index, position = index - 1, before
    return cursor.fault(f"array {field}, item {index}: its string does not end within the file", position)


def decode(cursor: Cursor, spans: dict[str, Span]) -> dict[str, Any]:
    """Python values of walked spans.  Raises ModelFileError for text that is not UTF-8 and bools other than 0 and 1."""
    return {key: decode_value(cursor, shown(key), span) for key, span in spans.items()}


def decode_value(cursor: Cursor, field: str, span: Span) -> Any:
    """The value at one walked span (str, int, float, bool, list or NumPy array)."""
    if span.type == STRING:
        return _strings(cursor, field, span.offset, 1)[0][0]
    if span.type == ARRAY:
        return _array(cursor, field, span)[0]
    value = struct.unpack_from(SCALARS[span.type][0], cursor.buffer, span.offset)[0]
    if span.type == BOOL:
        if value > 1:
            raise cursor.fault(f"{field}: a bool is 0 or 1, not {value}", span.offset)
        return bool(value)
    return value


def _array(cursor: Cursor, field: str, span: Span) -> tuple[Any, int]:
    """The items of an array and the place behind them."""
    if span.item_type == STRING:
        return _strings(cursor, field, span.offset, span.n_items)
    if span.item_type != ARRAY:
        return _numbers(cursor, field, span)
    items: list[Any] = []
    position = span.offset
    for _ in range(span.n_items):
        item_type, count = struct.unpack_from("<IQ", cursor.buffer, position)
        item, position = _array(cursor, field, Span(ARRAY, position + _LEAST_ARRAY_BYTES, item_type, count))
        items.append(item)
    return items, position


def _numbers(cursor: Cursor, field: str, span: Span) -> tuple[Any, int]:
    dtype = SCALARS[span.item_type][1]
    # a copy: a view would keep the file mapped for as long as the metadata lives
    numbers = np.empty(span.n_items, dtype)
    if span.n_items:
        numbers[:] = np.frombuffer(cursor.buffer, dtype, span.n_items, span.offset)
    if span.item_type == BOOL:
        if span.n_items and int(numbers.max()) > 1:
            bad = int(np.argmax(numbers > 1))
            raise cursor.fault(f"array {field}, item {bad}: a bool is 0 or 1, not {numbers[bad]}", span.offset + bad)
        numbers = numbers.astype(np.bool_)
    behind = span.offset + span.n_items * _SIZES[span.item_type]
    return (numbers if span.n_items > LIST_ITEMS else numbers.tolist()), behind


def _strings(cursor: Cursor, field: str, position: int, count: int) -> tuple[list[str], int]:
    buffer: mmap.mmap = cursor.buffer
    items: list[str] = []
    append = items.append
    start = position
    try:
        for _ in range(count):
            start = position + 8
            position = start + U64_AT(buffer, position)[0]
            append(buffer[start:position].decode())
    except UnicodeDecodeError as bad:
        where = field if count == 1 else f"array {field}, item {len(items)}"
        raise cursor.fault(f"{where} is not UTF-8", start + bad.start) from None
    return items, position
