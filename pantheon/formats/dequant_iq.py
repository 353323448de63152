"""NumPy dequantisers of the lattice types (IQ1, IQ2, IQ3), the ternary types (TQ) and MXFP4.

Each function takes uint8 [n_blocks, block_bytes] and gives float32 [n_blocks, block_values]; layouts from ggml
(`ggml-common.h`), values equal bit for bit to ggml's `dequantize_row_*`.  The lattice and sign tables are data of the
`gguf` package, taken from it when first used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pantheon.formats.dequant_basic import Blocks, Values, half, nibbles
from pantheon.formats.dequant_k import two_bits

_MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], dtype=np.uint8).reshape(1, 5, 1)


@cache
def _grid(name: str) -> Values:
    """The lattice of a type: float32 [points, 4 or 8]."""
    from gguf import quants  # the package takes a while to import, and few files need it

    kind = getattr(quants, name)
    kind.init_grid()
    points: Values = kind.grid.reshape(kind.grid_shape).astype(np.float32)
    return points


@cache
def _signs() -> Values:
    """What 7 bits say of the signs of 8 values: float32 [128, 8] of 1 and -1; the eighth makes the parity even."""
    from gguf import quants

    return _sign_bits(np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8))


def _sign_bits(packed: NDArray[np.uint8]) -> Values:
    """[…] bytes -> […, 8] of 1 and -1 (a set bit is minus), lowest bit first."""
    bits = np.unpackbits(packed[..., None], axis=-1, bitorder="little")
    return np.float32(1) - np.float32(2) * bits.astype(np.float32)


def _words(blocks: Blocks, at: int, end: int, dtype: str) -> NDArray[np.uint32]:
    return np.ascontiguousarray(blocks[:, at:end]).view(dtype).astype(np.uint32)


def _seven_bit_signs(words: NDArray[np.uint32]) -> Values:
    """[n, 8] words with four 7-bit sign codes each -> [n, 8, 4, 8]."""
    return _signs()[(words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32)) & np.uint32(127)]


def _pairs_of_nibbles(packed: NDArray[np.uint8]) -> Values:
    """[n, k] bytes -> [n, 2k] codes, low nibble before high."""
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1).astype(np.float32)


def iq2_xxs(blocks: Blocks) -> Values:
    """f16 d; for each 32 values: 4 grid indices, then a word with 4 sign codes and a 4-bit scale."""
    words = _words(blocks, 2, 66, "<u4").reshape(-1, 8, 2)[:, :, 1]
    indices = blocks[:, 2:].reshape(-1, 8, 8)[:, :, :4]
    scale = half(blocks, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.25)
    values = scale[:, :, None, None] * _grid("IQ2_XXS")[indices] * _seven_bit_signs(words)
    return values.reshape(-1, 256)


def _scale_of_16(blocks: Blocks, at: int) -> Values:
    """IQ2_XS and IQ2_S: 16 4-bit scales at byte `at`: [n, 16, 1, 1]."""
    codes = _pairs_of_nibbles(blocks[:, at : at + 8])
    scale = half(blocks, 0) * (np.float32(0.5) + codes) * np.float32(0.25)
    return scale[:, :, None, None]


def iq2_xs(blocks: Blocks) -> Values:
    """f16 d; 32 words of a 9-bit grid index and a 7-bit sign code; 16 4-bit scales."""
    words = _words(blocks, 2, 66, "<u2").reshape(-1, 16, 2)
    values = _scale_of_16(blocks, 66) * _grid("IQ2_XS")[words & np.uint32(511)] * _signs()[words >> 9]
    return values.reshape(-1, 256)


def iq2_s(blocks: Blocks) -> Values:
    """f16 d; 32 bytes of grid indices; 32 bytes of signs; 8 bytes of their upper bit pairs; 16 4-bit scales."""
    high = (blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8)) & np.uint8(3)
    indices = blocks[:, 2:34].astype(np.uint32) | (high.reshape(-1, 32).astype(np.uint32) << 8)
    signs = _sign_bits(blocks[:, 34:66].reshape(-1, 16, 2))
    values = _scale_of_16(blocks, 74) * _grid("IQ2_S")[indices.reshape(-1, 16, 2)] * signs
    return values.reshape(-1, 256)


def iq3_xxs(blocks: Blocks) -> Values:
    """f16 d; 64 grid indices of 4 values; 8 words with 4 sign codes and a 4-bit scale."""
    words = _words(blocks, 66, 98, "<u4")
    scale = half(blocks, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    points = _grid("IQ3_XXS")[blocks[:, 2:66]].reshape(-1, 8, 4, 8)
    return (scale[:, :, None, None] * points * _seven_bit_signs(words)).reshape(-1, 256)


def iq3_s(blocks: Blocks) -> Values:
    """f16 d; 64 grid indices of 4 values; their ninth bits; 32 bytes of signs; 8 4-bit scales."""
    ninth = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint32)
    points = _grid("IQ3_S")[blocks[:, 2:66].astype(np.uint32) | (ninth << 8)].reshape(-1, 8, 4, 8)
    scale = half(blocks, 0) * (np.float32(1) + np.float32(2) * _pairs_of_nibbles(blocks[:, 106:110]))
    signs = _sign_bits(blocks[:, 74:106].reshape(-1, 8, 4))
    return (scale[:, :, None, None] * points * signs).reshape(-1, 256)


def iq1_s(blocks: Blocks) -> Values:
    """f16 d; 32 bytes of grid indices; 8 words: four upper index triples, 3-bit scale, sign of the shift of 1/8."""
    words = _words(blocks, 34, 50, "<u2")
    high = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint32)) & np.uint32(7)
    points = _grid("IQ1_S")[blocks[:, 2:34].reshape(-1, 8, 4) | (high << 8)]
    scale = half(blocks, 0) * (np.float32(2) * ((words >> 12) & 7).astype(np.float32) + np.float32(1))
    shift = np.where(words & 0x8000, np.float32(-0.125), np.float32(0.125))
    return (scale[:, :, None, None] * (points + shift[:, :, None, None])).reshape(-1, 256)


def iq1_m(blocks: Blocks) -> Values:
    """32 bytes of grid indices; 16 bytes of upper triples and shift signs; 4 words: 3-bit scales, the f16 d on top."""
    words = _words(blocks, 48, 56, "<u2")
    bits = (words >> 12) << np.array([0, 4, 8, 12], np.uint32)
    d = bits.sum(axis=1, dtype=np.uint32).astype("<u2").view("<f2").astype(np.float32).reshape(-1, 1)
    codes = ((words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint32)) & 7).reshape(-1, 16).astype(np.float32)
    scale = d * (np.float32(2) * codes + np.float32(1))
    high = _upper_nibbles(blocks[:, 32:48])
    points = _grid("IQ1_M")[blocks[:, :32] | ((high & 7) << 8)].reshape(-1, 16, 2, 8)
    shift = np.where(high & 8, np.float32(-0.125), np.float32(0.125)).reshape(-1, 16, 2, 1)
    return (scale[:, :, None, None] * (points + shift)).reshape(-1, 256)


def _upper_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint32]:
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1).astype(np.uint32)


def _trits(packed: NDArray[np.uint8], n: int) -> NDArray[np.uint8]:
    """[n_blocks, k] bytes of five base-3 digits each -> the first n digits of all: [n_blocks, n * k]."""
    digits = packed[:, None, :] * _POWERS_OF_3[:, :n]
    return ((digits.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(packed), -1)


def tq1_0(blocks: Blocks) -> Values:
    """48 bytes of five digits, 4 bytes of four digits; f16 d.  x = d * (digit - 1)."""
    parts = [_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4)]
    values = np.concatenate(parts, axis=1).astype(np.float32)
    values -= np.float32(1)
    values *= half(blocks, 52)
    return values


def tq2_0(blocks: Blocks) -> Values:
    """64 bytes of codes; f16 d.  x = d * (q - 1)."""
    values = two_bits(blocks[:, :64]).reshape(-1, 256).astype(np.float32)
    values -= np.float32(1)
    values *= half(blocks, 64)
    return values


def mxfp4(blocks: Blocks) -> Values:
    """u8 exponent e; 16 bytes of codes.  x = 2^(e - 128) * level[q]."""
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    values = _MXFP4_LEVELS[nibbles(blocks[:, 1:])]
    values *= scale
    return values


DEQUANTIZERS: dict[str, Callable[[Blocks], Values]] = {
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
    "MXFP4": mxfp4,
}
