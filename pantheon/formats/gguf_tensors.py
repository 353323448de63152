"""The tensor directory of a GGUF header: names, shapes, types and places, checked against the file.

Knows nothing of metadata but the alignment, and nothing of what a tensor is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pantheon.formats import quant
from pantheon.formats.gguf_cursor import Cursor, shown
from pantheon.formats.quant import QuantType

MAX_TENSORS = 65_536
MAX_DIMS = 4
_LEAST_INFO_BYTES = 33  # name of one byte, one dim, type, offset
_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` in NumPy order (out, in); `nbytes` of data from byte `offset` of the file `shard`."""

    name: str
    type: QuantType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    shard: Path

    @property
    def n_values(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A directory entry as it stands in the file; `at` is where it starts, `offset` counts from the data section."""

    name: str
    type: QuantType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    at: int


def check_count(cursor: Cursor, count: int) -> None:
    """Raise unless `count` entries can be in what is left of the file."""
    cursor.need(count * _LEAST_INFO_BYTES, f"tensor_count is {count}", 8)
    if count > MAX_TENSORS:
        raise cursor.fault(f"tensor_count is {count}; at most {MAX_TENSORS} tensors are read", 8)


def read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """Read `count` directory entries and check every tensor's place.  Raises ModelFileError at the first fault."""
    check_count(cursor, count)
    entries: dict[str, _Entry] = {}
    for index in range(count):
        entry = _read_entry(cursor, index, alignment)
        if entry.name in entries:
            raise cursor.fault(f"tensor {shown(entry.name)} is there twice", entry.at)
        entries[entry.name] = entry
    data_start = -(-cursor.position // alignment) * alignment
    _check_places(cursor, entries.values(), data_start)
    return {
        e.name: TensorInfo(e.name, e.type, e.shape, data_start + e.offset, e.nbytes, cursor.path)
        for e in entries.values()
    }


def _read_entry(cursor: Cursor, index: int, alignment: int) -> _Entry:
    at = cursor.position
    name = cursor.name(f"name of tensor {index}")
    field = f"tensor {shown(name)}"
    shape = _read_shape(cursor, field)
    kind = _read_type(cursor, field)
    blocks, rest = divmod(shape[-1], kind.block_values)
    if rest:
        raise cursor.fault(f"{field}: a row of {shape[-1]} values is not a multiple of the {kind.name} block", at)
    nbytes = math.prod(shape[:-1]) * blocks * kind.block_bytes
    if nbytes >= _LIMIT:
        raise cursor.fault(f"{field}: shape {list(shape)} is too large", at)
    place = cursor.position
    offset = cursor.u64(f"{field}, offset")
    if offset % alignment:
        raise cursor.fault(f"{field}: offset {offset} is not a multiple of the alignment {alignment}", place)
    return _Entry(name, kind, shape, offset, nbytes, at)


def _read_shape(cursor: Cursor, field: str) -> tuple[int, ...]:
    at = cursor.position
    n_dims = cursor.u32(f"{field}, n_dims")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fault(f"{field}: n_dims is {n_dims}; 1 to {MAX_DIMS} are allowed", at)
    dims = []
    for number in range(n_dims):
        at = cursor.position
        dim = cursor.u64(f"{field}, dim {number}")
        if not 0 < dim < _LIMIT:
            raise cursor.fault(f"{field}: dim {number} is {dim}", at)
        dims.append(dim)
    if math.prod(dims) >= _LIMIT:
        raise cursor.fault(f"{field}: dims {dims} multiply to more than 2**63", at)
    return tuple(reversed(dims))


def _read_type(cursor: Cursor, field: str) -> QuantType:
    at = cursor.position
    number = cursor.u32(f"{field}, type")
    try:
        return quant.by_id(number)
    except quant.UnsupportedType as refusal:
        raise cursor.fault(f"{field}: {refusal.message}", at) from None


def _check_places(cursor: Cursor, entries: Iterable[_Entry], data_start: int) -> None:
    """Every tensor lies within the file and no two share a byte."""
    room = cursor.end - data_start
    before: _Entry | None = None
    for entry in sorted(entries, key=lambda e: e.offset):
        field = f"tensor {shown(entry.name)}"
        if entry.offset + entry.nbytes > room:
            needed = data_start + entry.offset + entry.nbytes
            raise cursor.fault(
                f"{field}: its {entry.nbytes} bytes from data offset {entry.offset} would end at byte {needed}, "
                f"but the file ends at {cursor.end} (a download that was cut short?)",
                entry.at,
            )
        if before is not None and before.offset + before.nbytes > entry.offset:
            raise cursor.fault(f"{field}: overlaps tensor {shown(before.name)} in the data section", entry.at)
        before = entry
