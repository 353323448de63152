"""Packing kernels against their NumPy twin, word for word."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.accel.cpu.file_blocks import FILE_BLOCK
from pantheon.accel.cuda.layouts import FLOATS, ROWS, packed_words
from pantheon.accel.cuda.pack import pack, pack_grid
from tests.accel.cuda.packer import block_values, packed


@pytest.mark.parametrize("type_name", list(FILE_BLOCK))
@pytest.mark.parametrize("threads", [(1, 1), (4, 2)])
def test_packing_agrees_with_its_twin(type_name: str, threads: tuple[int, int]) -> None:
    """In two parts, the last group partial and over old bytes; what lies around the planes stays."""
    values, nbytes = FILE_BLOCK[type_name]
    rows, cols = ROWS + 3, 2 * block_values(type_name) - (1 if FLOATS.get(type_name) == 2 else 0)
    if type_name in FLOATS:
        cols = 5
    row = cols // values * nbytes
    raw = np.random.default_rng(1).integers(0, 256, (rows, row), dtype=np.uint8)
    quants, scales = packed(type_name, raw, cols)
    assert (quants.size, scales.size) == packed_words(type_name, rows, cols)
    weights = np.full(7 + quants.size + scales.size + 5, -9, np.int32)
    want = np.concatenate([weights[:7], quants, scales, weights[-5:]])
    for first, part in ((0, raw[:ROWS]), (ROWS, raw[ROWS:])):
        pack(type_name).launch(
            pack_grid(type_name, len(part), cols), 0, part.reshape(-1).copy(), weights, np.int64(7),
            np.int64(7 + quants.size), *map(np.int32, (cols, first, len(part), row)), threads=threads,
        )  # fmt: skip
    assert np.array_equal(weights, want)
