"""NumPy dequantisers of the 256-value blocks: the K-quants and IQ4_XS.

Each function takes uint8 [n_blocks, block_bytes] and gives float32 [n_blocks, 256]; layouts from ggml
(`ggml-common.h`), values equal bit for bit to ggml's `dequantize_row_*`.  Codes become float32 before they are
scaled, in ggml's order: (d * scale) * q - (dmin * min).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pantheon.formats.dequant_basic import IQ4_LEVELS, Blocks, Values, half, nibbles

_PAIRS = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)


def two_bits(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[n, 64] bytes -> [n, 2, 4, 32] two-bit codes: halves of 32 bytes, four shifts each."""
    return (packed.reshape(-1, 2, 1, 32) >> _PAIRS) & np.uint8(3)


def _scales_and_mins(packed: NDArray[np.uint8]) -> tuple[Values, Values]:
    """The 12 bytes of Q4_K and Q5_K -> eight 6-bit scales and eight 6-bit mins, [n, 8, 1] each."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    mins = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=1)
    return scales.astype(np.float32)[:, :, None], mins.astype(np.float32)[:, :, None]


def q2_k(blocks: Blocks) -> Values:
    """16 bytes of 4-bit scale and min; 64 bytes of codes; f16 d, f16 dmin."""
    packed = blocks[:, :16]
    scale = half(blocks, 80) * (packed & 15).astype(np.float32)
    least = half(blocks, 82) * (packed >> 4).astype(np.float32)
    values = two_bits(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    values *= scale[:, :, None]
    values -= least[:, :, None]
    return values.reshape(-1, 256)


def q3_k(blocks: Blocks) -> Values:
    """32 bytes of third bits (clear means -4); 64 bytes of codes; 16 6-bit scales less 32 in 12 bytes; f16 d."""
    packed = blocks[:, 96:108]
    low = nibbles(packed[:, :8])
    high = (packed[:, None, 8:12] >> _PAIRS[0]) & 3
    scales = (low | (high.reshape(-1, 16) << 4)).astype(np.float32) - np.float32(32)
    scale = half(blocks, 108) * scales
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    third = ((blocks[:, None, :32] >> shifts) & np.uint8(1)) << np.uint8(2)
    codes = two_bits(blocks[:, 32:96]).reshape(-1, 16, 16) | third.reshape(-1, 16, 16)
    values = codes.astype(np.float32)
    values -= np.float32(4)
    values *= scale[:, :, None]
    return values.reshape(-1, 256)


def _scaled_by_32(blocks: Blocks, codes: NDArray[np.uint8]) -> Values:
    """Q4_K and Q5_K: codes [n, 8, 32] with f16 d, f16 dmin and the packed scales at the front of the block."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    values = codes.astype(np.float32)
    values *= half(blocks, 0)[:, :, None] * scales
    values -= half(blocks, 2)[:, :, None] * mins
    return values.reshape(-1, 256)


def q4_k(blocks: Blocks) -> Values:
    """f16 d, f16 dmin; 12 bytes of scales; 128 bytes of codes."""
    codes = nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return _scaled_by_32(blocks, codes.reshape(-1, 8, 32))


def q5_k(blocks: Blocks) -> Values:
    """f16 d, f16 dmin; 12 bytes of scales; 32 bytes of fifth bits (bit s for sub-block s); 128 bytes of codes."""
    codes = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = ((blocks[:, None, 16:48] >> shifts) & np.uint8(1)) << np.uint8(4)
    return _scaled_by_32(blocks, codes | fifth)


def q6_k(blocks: Blocks) -> Values:
    """128 bytes of low halves; 64 bytes of upper bit pairs; 16 int8 scales; f16 d.  x = d * scale * (q - 32)."""
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    high = two_bits(blocks[:, 128:192]).reshape(-1, 16, 16)
    values = (low | (high << 4)).astype(np.float32)
    values -= np.float32(32)
    scale = half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    values *= scale[:, :, None]
    return values.reshape(-1, 256)


def iq4_xs(blocks: Blocks) -> Values:
    """f16 d; 8 6-bit scales less 32 (upper pairs in a u16, lower halves in 4 bytes); 128 bytes of codes."""
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    lower = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scales = (lower | ((upper & 3) << 4)).astype(np.float32) - np.float32(32)
    values = IQ4_LEVELS[nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    values *= (half(blocks, 0) * scales)[:, :, None]
    return values.reshape(-1, 256)


DEQUANTIZERS: dict[str, Callable[[Blocks], Values]] = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_XS": iq4_xs,
}
