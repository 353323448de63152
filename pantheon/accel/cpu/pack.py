"""Packing: a matrix of the model file into the arena, in the layout that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cpu.arena import Arena, address
from pantheon.accel.cpu.layouts import BLOCK, FLOATS, KINDS, ROWS, Kind
from pantheon.accel.cpu.unpack import FILE_BLOCK, UNPACK
from pantheon.accel.executor import RawTensor
from pantheon.errors import ModelFileError
from pantheon.plan.buffers import Matrix, Vector

U8 = NDArray[np.uint8]
#: values that are taken apart at once: the temporaries stay in the second cache
_CHUNK_VALUES = 1 << 18


@dataclass(frozen=True)
class Packed:
    """A packed matrix: addresses of its quants (or floats) and scales."""

    type_name: str
    rows: int
    cols: int
    quants: int
    scales: int
    nbytes: int

    @property
    def groups(self) -> int:
        """Groups of 16 rows; the last may be padded."""
        return -(-self.rows // ROWS)

    @property
    def quantised(self) -> bool:
        """Takes int8 activations."""
        return self.type_name in KINDS


def packed_bytes(type_name: str, rows: int, cols: int) -> int:
    """Arena bytes of a matrix, alignment included."""
    if type_name in FLOATS:
        return -(-rows // ROWS) * ROWS * cols * FLOATS[type_name] + 128
    return sum(KINDS[type_name].packed_bytes(rows, cols)) + 256


def row_bytes(raw: RawTensor) -> int:
    """Bytes of one row in the file.  Raises ModelFileError for a type or shape that can not be packed."""
    values, nbytes = FILE_BLOCK.get(raw.type_name, (0, 0))
    if not values:
        raise ModelFileError(f"tensor {raw.name}", f"type {raw.type_name} is not supported by the cpu executor")
    cols = raw.shape[-1]
    if cols % values:
        raise ModelFileError(f"tensor {raw.name}", f"rows of {cols} values are no whole {raw.type_name} blocks")
    return cols // values * nbytes


def check(raw: RawTensor, m: Matrix) -> None:
    """Raise ModelFileError unless the plan's matrix lies inside the tensor."""
    if len(raw.shape) != 2 or raw.shape[1] != m.cols or not (
        0 <= m.first_row and 0 < m.rows and m.first_row + m.rows <= raw.shape[0]
    ):  # fmt: skip
        wanted = f"rows {m.first_row}..{m.first_row + m.rows - 1} of {m.cols} values"
        raise ModelFileError(f"tensor {raw.name}", f"shape {tuple(raw.shape)}, but the model needs {wanted}")
    if raw.data.size != raw.shape[0] * row_bytes(raw):
        raise ModelFileError(f"tensor {raw.name}", f"{raw.data.size} bytes for shape {tuple(raw.shape)}")


def pack(raw: RawTensor, m: Matrix, arena: Arena) -> Packed:
    """Pack the rows that `m` names."""
    check(raw, m)
    n = row_bytes(raw)
    rows: U8 = raw.data.reshape(-1)[m.first_row * n : (m.first_row + m.rows) * n].reshape(m.rows, n)
    if raw.type_name in FLOATS:
        return _pack_floats(raw.type_name, rows, m.cols, arena)
    kind = KINDS[raw.type_name]
    quant_bytes, scale_bytes = kind.packed_bytes(m.rows, m.cols)
    quants, scales = arena.take(quant_bytes), arena.take(scale_bytes)
    groups, blocks = -(-m.rows // ROWS), m.cols // BLOCK
    q = quants.view(np.uint32).reshape(groups, blocks, -1, ROWS)
    s = scales.reshape(groups, blocks // kind.sup, -1)
    step = max(1, _CHUNK_VALUES // (ROWS * m.cols))
    for g in range(0, groups, step):
        part = rows[g * ROWS : (g + step) * ROWS]
        _pack_groups(kind, _whole_groups(part), q[g : g + step], s[g : g + step])
    return Packed(raw.type_name, m.rows, m.cols, address(quants), address(scales), quant_bytes + scale_bytes)


def _whole_groups(rows: U8) -> U8:
    """Zero rows up to the next group."""
    missing = -len(rows) % ROWS
    return np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.uint8)]) if missing else rows


def _pack_groups(kind: Kind, rows: U8, quants: NDArray[np.uint32], scales: U8) -> None:
    file_bytes = FILE_BLOCK[kind.name][1]
    values, header, subs = UNPACK[kind.name](rows.reshape(len(rows), -1, file_bytes))
    groups, blocks = quants.shape[:2]
    quads = np.ascontiguousarray(values).view(np.uint32).reshape(groups, ROWS, blocks, 8).transpose(0, 2, 3, 1)
    _bit_planes(quads, kind.base_bits, 0, quants[:, :, : kind.base_bits])
    if kind.high_bits:
        _bit_planes(quads, kind.high_bits, kind.base_bits, quants[:, :, kind.base_bits :])
    supers = blocks // kind.sup
    h = scales[..., : kind.header_bytes].view(np.uint16).reshape(groups, supers, -1, ROWS)
    h[:] = header.reshape(groups, ROWS, supers, -1).transpose(0, 2, 3, 1)
    if kind.subs:
        to = scales[..., kind.header_bytes :].reshape(groups, supers, kind.sup, -1, ROWS)
        to[:] = subs.reshape(groups, ROWS, supers, kind.sup, -1).transpose(0, 2, 3, 4, 1)


def _bit_planes(quads: NDArray[np.uint32], width: int, shift: int, out: NDArray[np.uint32]) -> None:
    """Bits shift … shift+width-1 of each byte of 8 quads into `width` words."""
    if width == 8:
        out[:] = quads
        return
    mask = np.uint32(((1 << width) - 1) * 0x01010101)
    for p in range(8):
        word, at = divmod(p * width, 8)
        bits = (quads[:, :, p] >> np.uint32(shift)) & mask
        if at == 0:
            out[:, :, word] = bits
        else:
            out[:, :, word] |= bits << np.uint32(at)


def _pack_floats(type_name: str, rows: U8, cols: int, arena: Arena) -> Packed:
    size = FLOATS[type_name]
    dtype = np.uint32 if size == 4 else np.uint16
    groups = -(-len(rows) // ROWS)
    quants = arena.take(groups * ROWS * cols * size)
    to = quants.view(dtype).reshape(groups, cols, ROWS)
    step = max(1, _CHUNK_VALUES // (ROWS * cols))
    for g in range(0, groups, step):
        part = np.ascontiguousarray(_whole_groups(rows[g * ROWS : (g + step) * ROWS])).view(dtype)
        to[g : g + step] = part.reshape(-1, ROWS, cols).transpose(0, 2, 1)
    return Packed(type_name, len(rows), cols, address(quants), 0, quants.nbytes)


def floats(raw: RawTensor, v: Vector) -> NDArray[np.float32]:
    """A norm weight or bias as float32.  Raises ModelFileError for another type or a vector that is too short."""
    flat = raw.data.reshape(-1)
    n = int(np.prod(raw.shape))
    size = FLOATS.get(raw.type_name, 0)
    if not size or flat.size != n * size:
        raise ModelFileError(f"tensor {raw.name}", f"type {raw.type_name} can not be a norm weight or bias")
    if not (0 <= v.first and v.first + v.size <= n):
        raise ModelFileError(f"tensor {raw.name}", f"{n} values, but the model needs {v.first}..{v.first + v.size - 1}")
    part = flat[v.first * size : (v.first + v.size) * size].copy()
    if raw.type_name == "F16":
        return part.view(np.float16).astype(np.float32)
    if raw.type_name == "BF16":
        return (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return part.view(np.float32)
