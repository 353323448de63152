"""NumPy quantisers of the types that `pantheon quantize` writes: the plain ones, Q8_0, Q4_0, Q4_K and Q6_K.

Q8_0 and Q4_0 give the codes of ggml's `quantize_row_*_ref`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pantheon.formats import quant, quantize_k

QUANTIZABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
_K_TYPES = {"Q4_K": quantize_k.q4_k, "Q6_K": quantize_k.q6_k}


def quantize(type_name: str, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Values of any shape -> blocks, uint8 1-D.  Each row (last axis) must be a whole number of blocks."""
    kind = quant.by_name(type_name)
    rows = np.ascontiguousarray(values, dtype=np.float32)
    quant.row_bytes(kind, rows.shape[-1] if rows.ndim else 1)
    if type_name == "F32":
        return rows.astype("<f4").reshape(-1).view(np.uint8)
    if type_name == "F16":
        return rows.astype("<f2").reshape(-1).view(np.uint8)
    if type_name == "BF16":
        return _bf16(rows.reshape(-1))
    blocks = rows.reshape(-1, kind.block_values)
    if type_name == "Q8_0":
        return _q8_0(blocks)
    if type_name == "Q4_0":
        return _q4_0(blocks)
    if type_name in _K_TYPES:
        return _K_TYPES[type_name](blocks).reshape(-1)
    raise quant.UnsupportedType(f"weight type {type_name} can not be written; {', '.join(QUANTIZABLE)} can")


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round to nearest, ties to even; finite values only."""
    bits = values.view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return (bits >> 16).astype("<u2").view(np.uint8)


def _with_scale(scale: NDArray[np.float32], codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    head = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    return np.concatenate([head, codes], axis=1).reshape(-1)


def _inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _q8_0(blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scale)
    # half away from zero, as C's roundf
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return _with_scale(scale, codes.view(np.uint8))


def _q4_0(blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = largest / np.float32(-8)
    codes = np.trunc(blocks * _inverse(scale) + np.float32(8.5)).clip(0, 15).astype(np.uint8)
    return _with_scale(scale, codes[:, :16] | (codes[:, 16:] << 4))
