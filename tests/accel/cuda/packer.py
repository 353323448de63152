"""The NumPy twin of the packing kernels: rows of a model file as the words that `accel.cuda.layouts` describes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cpu.file_blocks import FILE_BLOCK
from pantheon.accel.cuda import layouts
from pantheon.accel.cuda.layouts import BLOCK, FLOATS, KINDS, ROWS, Kind
from tests.accel.cpu.pack_twin import UNPACK, bit_planes

Words = NDArray[np.int32]


def packed(type_name: str, rows: NDArray[Any], cols: int) -> tuple[Words, Words]:
    """(quants or floats, scales) int32 of the rows of a file, uint8 [n_rows, row bytes]."""
    if type_name in FLOATS:
        return _floats(FLOATS[type_name], rows, cols), np.zeros(0, np.int32)
    kind, n = KINDS[type_name], len(rows)
    values, header, subs = UNPACK[type_name](rows.reshape(n, -1, FILE_BLOCK[type_name][1]))
    return _quants(kind, _grouped(values)), _scales(kind, _grouped(header), _grouped(subs))


def _grouped(x: NDArray[Any]) -> NDArray[Any]:
    """[rows, ...] -> [groups, 32, ...], zeros behind the last row."""
    whole = np.concatenate([x, np.zeros((-len(x) % ROWS, *x.shape[1:]), x.dtype)])
    return whole.reshape(len(whole) // ROWS, ROWS, *x.shape[1:])


def _quants(kind: Kind, values: NDArray[Any]) -> Words:
    """[groups, 32, blocks, 32] bytes -> the quant plane."""
    quads = np.ascontiguousarray(values).view(np.uint32).transpose(0, 2, 3, 1)
    out = np.zeros((*quads.shape[:2], kind.base_bits + kind.high_bits, ROWS), np.uint32)
    bit_planes(quads, kind.base_bits, 0, out[:, :, : kind.base_bits])
    if kind.high_bits:
        bit_planes(quads, kind.high_bits, kind.base_bits, out[:, :, kind.base_bits :])
    return out.reshape(-1).view(np.int32)


def _scales(kind: Kind, header: NDArray[Any], subs: NDArray[Any]) -> Words:
    """[groups, 32, supers, 1 or 2] halves and [groups, 32, blocks, n] bytes -> the scale plane."""
    n, _, supers, _ = header.shape
    heads = np.ascontiguousarray(header.transpose(0, 2, 3, 1)).view(np.uint8).reshape(n, supers, -1)
    tails = np.ascontiguousarray(subs.transpose(0, 2, 3, 1)).reshape(n, supers, -1)
    out = np.concatenate([heads, tails], -1)
    assert out.shape[-1] == 4 * layouts.scale_words(kind)
    return np.ascontiguousarray(out).reshape(-1).view(np.int32)


def _floats(size: int, rows: NDArray[Any], cols: int) -> Words:
    values = np.ascontiguousarray(rows).view(np.uint32 if size == 4 else np.uint16)
    if size == 2:
        values = np.concatenate([values, np.zeros((len(rows), cols % 2), np.uint16)], -1)
        values = np.ascontiguousarray(values).view(np.uint32)
    return np.ascontiguousarray(_grouped(values).transpose(0, 2, 1)).reshape(-1).view(np.int32)


def block_values(type_name: str) -> int:
    """Values of a row that one file block holds, at least those of a block of 32."""
    return BLOCK if type_name in FLOATS else FILE_BLOCK[type_name][0]
