"""Embedding rows in the simulator: the numbers of the file, and nothing around them."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.accel.cpu.file_blocks import FILE_BLOCK
from pantheon.accel.cuda.embed import lower_embed
from pantheon.accel.cuda.layouts import FLOATS
from pantheon.formats.quant import dequantize
from pantheon.plan.ops import Embed
from tests.accel.cpu import twins
from tests.accel.cuda.bench import Bench
from tests.accel.cuda.packer import block_values

N_VOCAB = 35


def _table(type_name: str) -> tuple[np.ndarray, np.ndarray]:
    """(uint8 [N_VOCAB, row bytes], float32 [N_VOCAB, cols])."""
    rng, cols = np.random.default_rng(1), block_values(type_name) if type_name not in FLOATS else 7
    if type_name in FLOATS:
        floats = rng.normal(size=(N_VOCAB, cols)).astype(np.float16 if type_name == "F16" else np.float32)
        raw = (floats.view(np.uint32) >> 16).astype(np.uint16) if type_name == "BF16" else floats
    else:
        raw = twins.random_blocks(rng, type_name, N_VOCAB, cols)
    flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    return flat.reshape(N_VOCAB, -1), dequantize(type_name, flat, N_VOCAB * cols).reshape(N_VOCAB, cols)


@pytest.mark.parametrize("type_name", list(FILE_BLOCK))
@pytest.mark.parametrize(("threads", "grid"), [((1, 1), (1, 1)), ((4, 1), (2, 3))])
def test_embedding_gives_the_values_of_the_file(
    type_name: str, threads: tuple[int, int], grid: tuple[int, int]
) -> None:
    raw, want = _table(type_name)
    tokens = [34, 0, 31, 32, 5]
    bench = Bench()
    table, out = bench.matrix("table", type_name, raw[None], want.shape[1]), bench.empty("out", 6, want.shape[1])
    bench.place(0, tokens)
    for scale in (1.0, 3.5):
        bench.run(lower_embed(Embed(table, out, scale), bench.memory()), len(tokens), threads, grid)
        got = bench.get(out)
        assert np.array_equal(got[:5], want[tokens] * np.float32(scale))
        assert (got[5] == np.float32(777)).all(), "a column that is not there"
