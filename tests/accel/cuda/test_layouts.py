"""The packed layout, against the file's own numbers and against the bytes that it promises."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.accel.cpu.file_blocks import FILE_BLOCK
from pantheon.accel.cuda.layouts import BLOCK, FLOATS, KINDS, ROWS, packed_words, quant_words, scale_words
from pantheon.formats.quant import dequantize
from tests.accel.cuda.packer import block_values, packed


@pytest.mark.parametrize("type_name", list(FILE_BLOCK))
def test_planes_have_the_promised_words(type_name: str) -> None:
    values, nbytes = FILE_BLOCK[type_name]
    for rows, n in ((32, 1), (33, 3), (5, 2)):
        cols = n * block_values(type_name) + (1 if type_name in FLOATS else 0)
        raw = np.zeros((rows, cols // values * nbytes), np.uint8)
        quants, scales = packed(type_name, raw, cols)
        assert (quants.size, scales.size) == packed_words(type_name, rows, cols)


def test_a_word_can_be_found_from_the_description() -> None:
    """Value k of row r of a Q4_0, a Q6_K and an F16 matrix, read by the formulas of the docstring."""
    rng = np.random.default_rng(0)
    for type_name, rows, cols in (("Q4_0", 35, 64), ("Q6_K", 34, 512), ("F16", 33, 7)):
        values, nbytes = FILE_BLOCK[type_name]
        raw = rng.integers(0, 0x38, (rows, cols // values * nbytes), dtype=np.uint8)
        want = dequantize(type_name, raw, rows * cols).reshape(rows, cols)
        quants, scales = packed(type_name, raw, cols)
        for r, k in ((0, 0), (3, 5), (31, cols - 1), (32, 6), (rows - 1, 1)):
            assert _value(type_name, quants, scales, cols, r, k) == want[r, k], (type_name, r, k)


def _value(type_name: str, quants: np.ndarray, scales: np.ndarray, cols: int, r: int, k: int) -> np.float32:
    g, lane = divmod(r, ROWS)
    if type_name in FLOATS:
        word = quants[(g * -(-cols // 2) + k // 2) * ROWS + lane]
        return np.float32(np.uint16(int(word) >> 16 * (k % 2) & 0xFFFF).view(np.float16))
    kind, blocks = KINDS[type_name], cols // BLOCK
    block, i = divmod(k, BLOCK)
    p, byte = divmod(i, 4)

    def bits(first: int, width: int) -> int:
        vector, shift = divmod(p * width, 8)
        at = (g * blocks + block) * quant_words(kind) + (first + vector) * ROWS + lane
        return int(quants[at]) >> (8 * byte + shift) & ((1 << width) - 1)

    q = bits(0, kind.base_bits) | (bits(kind.base_bits, kind.high_bits) << kind.base_bits if kind.high_bits else 0)
    plane = scales[(g * (blocks // kind.sup) + block // kind.sup) * scale_words(kind) :].view(np.uint8)
    scale = np.float32(plane[: 2 * ROWS].view(np.float16)[lane])
    if kind.subs:
        sub = 2 * ROWS + (block % kind.sup) * ROWS * kind.subs + ROWS * (i // 16) + lane
        scale *= np.float32(plane[sub : sub + 1].view(np.int8)[0])
    return scale * np.float32(q - (1 << kind.bias_bits))
