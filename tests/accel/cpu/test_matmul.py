"""Products and embeddings of every weight type against their twins (dequantised weights, int8 activations)."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.accel.cpu.layouts import FLOATS, KINDS
from pantheon.formats.quant import dequantize
from pantheon.plan.buffers import Buffer, Matrix
from pantheon.plan.ops import Embed, MatMul
from tests.accel.cpu import twins
from tests.accel.cpu.harness import N_VOCAB, Bench, evaluate

ALL = sorted(KINDS) + sorted(FLOATS)


def _weights(rng: np.random.Generator, type_name: str, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """(raw bytes, float64 values)."""
    if type_name not in FLOATS:
        raw = twins.random_blocks(rng, type_name, rows, cols)
    else:
        w = rng.normal(size=(rows, cols)).astype(np.float32)
        raw = w if type_name == "F32" else w.astype(np.float16)
        if type_name == "BF16":
            raw = (w.view(np.uint32) >> 16).astype(np.uint16)
    flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    return raw, dequantize(type_name, flat, rows * cols).reshape(rows, cols).astype(np.float64)


def _close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    scale = np.sqrt((want**2).mean())
    assert np.abs(got - want).max() <= tolerance * scale, np.abs(got - want).max() / scale


@pytest.mark.parametrize("type_name", ALL)
def test_product_of_every_type_matches_the_twin(type_name: str) -> None:
    """All tile widths, a partial last row group, and zero activations."""
    rng = np.random.default_rng(1)
    rows, cols = 72, 512
    raw, w = _weights(rng, type_name, rows, cols)
    x = rng.normal(size=(13, cols)) * np.exp(rng.normal(size=(13, 1)))
    x[:, 64:96] = 0
    seen = twins.int8_blocks(x) if type_name in KINDS else x.astype(np.float32)
    results = {}
    for n in (1, 2, 3, 13):
        bench = Bench()
        source, out = bench.input("x", x), bench.build.buffer("out", rows)
        bench.ops = [MatMul(bench.matrix("w", type_name, (rows, cols), raw), source, out)]
        results[n] = evaluate(bench, out, n)
        _close(results[n], seen[:n] @ w.T, 2e-5)
    for n, got in results.items():
        assert np.array_equal(got, results[13][:n]), f"tile of {n} columns differs"


@pytest.mark.parametrize("type_name", ALL)
def test_embedding_gives_the_values_of_the_file(type_name: str) -> None:
    rng = np.random.default_rng(2)
    raw, w = _weights(rng, type_name, N_VOCAB, 256)
    bench = Bench()
    out = bench.build.buffer("out", 256)
    bench.ops = [Embed(bench.matrix("w", type_name, (N_VOCAB, 256), raw), out)]
    got, want = evaluate(bench, out, N_VOCAB), w.astype(np.float32)
    assert np.array_equal(got, want)


def test_embedding_is_scaled() -> None:
    rng = np.random.default_rng(3)
    raw, w = _weights(rng, "Q8_0", N_VOCAB, 64)
    bench = Bench()
    out = bench.build.buffer("out", 64)
    bench.ops = [Embed(bench.matrix("w", "Q8_0", (N_VOCAB, 64), raw), out, scale=3.5)]
    assert np.array_equal(evaluate(bench, out, 20), w.astype(np.float32)[:20] * np.float32(3.5))


@pytest.mark.parametrize("type_name", ["F32", "Q4_0"])
def test_bias_residual_offset_and_shared_input(type_name: str) -> None:
    """Three products of one input in one phase; the ragged ones leave their neighbours alone."""
    rng = np.random.default_rng(4)
    cols = 64
    sizes, firsts = (24, 10, 30), (0, 24, 34)
    parts = [_weights(rng, type_name, rows, cols) for rows in sizes]
    x, old = rng.normal(size=(5, cols)), rng.normal(size=(5, 70))
    bias = rng.normal(size=10)
    for threads in (1, 2):
        bench = Bench()
        source, out = bench.input("x", x), bench.input("old", old)
        for i, (raw, _) in enumerate(parts):
            w = bench.matrix(f"w{i}", type_name, (sizes[i], cols), raw)
            vector = bench.vector("bias", bias) if i == 1 else None
            bench.ops.append(MatMul(w, source, out, bias=vector, add=i != 2, out_first=firsts[i]))
        seen = (twins.int8_blocks(x) if type_name in KINDS else x).astype(np.float64)
        want = old.copy()
        want[:, :24] += seen @ parts[0][1].T
        want[:, 24:34] += seen @ parts[1][1].T + bias
        want[:, 34:64] = seen @ parts[2][1].T
        got = evaluate(bench, out, 5, threads)
        _close(got, want, 2e-5)
        assert np.array_equal(got[:, 64:], old[:, 64:].astype(np.float32))


def test_product_into_its_own_input() -> None:
    """Floats read the input while rows are written: the executor must copy it first."""
    rng = np.random.default_rng(5)
    raw, w = _weights(rng, "F32", 48, 48)
    x = rng.normal(size=(6, 48))
    bench = Bench()
    source = bench.input("x", x)
    bench.ops = [MatMul(bench.matrix("w", "F32", (48, 48), raw), source, source, add=True)]
    _close(evaluate(bench, source, 6, threads=2), x + x @ w.T, 1e-5)


def test_sub_matrix_of_a_fused_tensor() -> None:
    rng = np.random.default_rng(6)
    raw, w = _weights(rng, "Q5_1", 96, 64)
    x = rng.normal(size=(3, 64))
    bench = Bench()
    source, out = bench.input("x", x), bench.build.buffer("out", 37)
    bench.matrix("w", "Q5_1", (96, 64), raw)
    bench.ops = [MatMul(Matrix("w", 37, 64, first_row=21), source, out)]
    _close(evaluate(bench, out, 3), twins.int8_blocks(x) @ w[21:58].T, 2e-5)


def test_odd_widths_of_float_weights() -> None:
    """cols that are no multiple of 32 are fine for floats."""
    rng = np.random.default_rng(7)
    raw, w = _weights(rng, "F16", 21, 45)
    x = rng.normal(size=(9, 45))
    bench = Bench()
    source: Buffer = bench.input("x", x)
    out = bench.build.buffer("out", 21)
    bench.ops = [MatMul(bench.matrix("w", "F16", (21, 45), raw), source, out)]
    _close(evaluate(bench, out, 9), x.astype(np.float32) @ w.T, 1e-5)
