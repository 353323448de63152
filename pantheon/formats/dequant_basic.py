"""NumPy dequantisers of the plain types and of the 32-value blocks.  The oracle of every weight kernel.

Each function takes uint8 [n_blocks, block_bytes] and gives float32 [n_blocks, block_values]; layouts from ggml
(`ggml-common.h`), values equal bit for bit to ggml's `dequantize_row_*`.  The scale is multiplied in float32 in ggml's
order: d * q, then + m.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.uint8]
Values = NDArray[np.float32]

#: the 16 values of a 4-bit code of IQ4_NL and IQ4_XS
IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)


def half(blocks: Blocks, at: int) -> Values:
    """The float16 at byte `at` of each block, as float32 [n_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[…, n] bytes -> […, 2n] codes: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: Blocks, at: int) -> NDArray[np.uint8]:
    """32 bits at byte `at`, as 0 or 16: [n_blocks, 32]."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


def f32(blocks: Blocks) -> Values:
    """IEEE float32."""
    return blocks.view("<f4").astype(np.float32)


def f16(blocks: Blocks) -> Values:
    """IEEE half."""
    return blocks.view("<f2").astype(np.float32)


def bf16(blocks: Blocks) -> Values:
    """The upper 16 bits of a float32."""
    wide = blocks.view("<u2").astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def q4_0(blocks: Blocks) -> Values:
    """f16 d; 16 bytes of codes.  x = d * (q - 8)."""
    codes = nibbles(blocks[:, 2:]).astype(np.float32)
    codes -= np.float32(8)
    codes *= half(blocks, 0)
    return codes


def q4_1(blocks: Blocks) -> Values:
    """f16 d, f16 m; 16 bytes of codes.  x = d * q + m."""
    codes = nibbles(blocks[:, 4:]).astype(np.float32)
    codes *= half(blocks, 0)
    codes += half(blocks, 2)
    return codes


def q5_0(blocks: Blocks) -> Values:
    """f16 d; 32 fifth bits; 16 bytes of codes.  x = d * (q - 16)."""
    codes = (nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.float32)
    codes -= np.float32(16)
    codes *= half(blocks, 0)
    return codes


def q5_1(blocks: Blocks) -> Values:
    """f16 d, f16 m; 32 fifth bits; 16 bytes of codes.  x = d * q + m."""
    codes = (nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).astype(np.float32)
    codes *= half(blocks, 0)
    codes += half(blocks, 2)
    return codes


def q8_0(blocks: Blocks) -> Values:
    """f16 d; 32 int8.  x = d * q."""
    codes = blocks[:, 2:].view(np.int8).astype(np.float32)
    codes *= half(blocks, 0)
    return codes


def iq4_nl(blocks: Blocks) -> Values:
    """f16 d; 16 bytes of codes.  x = d * level[q]."""
    values = IQ4_LEVELS[nibbles(blocks[:, 2:])]
    values *= half(blocks, 0)
    return values


DEQUANTIZERS: dict[str, Callable[[Blocks], Values]] = {
    "F32": f32,
    "F16": f16,
    "BF16": bf16,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "IQ4_NL": iq4_nl,
}
