"""Mixtures of experts on the cpu executor against naive twins: routing, products, the shared out sum (M224)."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.accel.cpu.executor import CpuExecutor
from pantheon.accel.cpu.layouts import FLOATS
from pantheon.errors import ModelFileError
from pantheon.plan.buffers import Buffer, Experts
from pantheon.plan.ops import ExpertMatMul, Mix, Route
from pantheon.plan.state_spec import KVType
from tests.accel.cpu import twins
from tests.accel.cpu.harness import Bench, columns, evaluate, peek
from tests.accel.cpu.test_matmul import _close, _weights

N, K, COLS = 7, 3, 64


def route_twin(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    odds /= odds.sum(-1, keepdims=True)
    mine = np.take_along_axis(odds, order, -1)
    return order, mine / np.maximum(mine.sum(-1, keepdims=True), 2.0**-14)


def _route(bench: Bench, logits: np.ndarray, k: int = K) -> tuple[Buffer, Buffer]:
    source = bench.input("logits", logits)
    chosen, shares = bench.build.buffer("chosen", k), bench.build.buffer("shares", k)
    bench.ops.append(Route(source, chosen, shares))
    return chosen, shares


@pytest.mark.parametrize(("n", "k"), [(2, 1), (7, 3), (33, 33), (128, 8)])
def test_routes_and_shares(n: int, k: int) -> None:
    """Equal logits go to the lower id first; a k of n takes all."""
    rng = np.random.default_rng(n)
    logits = np.round(rng.normal(size=(20, n)) * 3, 1)
    bench = Bench()
    chosen, shares = _route(bench, logits, k)
    with bench.runner(2) as runner:
        runner.forward(runner.new_state(1, 512), columns(np.arange(20)))
        ids, weights = peek(runner, chosen, 20), peek(runner, shares, 20)
    want_ids, want = route_twin(logits.astype(np.float32).astype(np.float64), k)
    assert np.array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want, rtol=2e-6)


def test_logits_that_are_no_numbers_stay_inside_the_tables() -> None:
    logits = np.full((4, N), np.nan)
    logits[1] = np.inf
    logits[2, 3] = -np.inf
    bench = Bench()
    chosen, _ = _route(bench, logits)
    raw, _ = _weights(np.random.default_rng(0), "Q8_0", N * 16, COLS)
    weight = Experts(bench.source.add("w", "Q8_0", (N, 16, COLS), raw), 16, COLS, 0, N)
    out = bench.build.buffer("out", K * 16)
    bench.ops.append(ExpertMatMul(weight, bench.input("x", np.ones((4, COLS))), chosen, out))
    ids = evaluate(bench, chosen, 4)
    assert ((0 <= ids) & (ids < N)).all()


def _logits(rng: np.random.Generator, n_columns: int, how: str) -> np.ndarray:
    logits = rng.normal(size=(n_columns, N))
    if how == "one":  # every column to the same experts
        logits[:, 2:5] += 100
    return logits


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q4_0", "Q4_K", "Q8_0"])
@pytest.mark.parametrize("how", ["spread", "one"])
def test_products_follow_the_route(type_name: str, how: str) -> None:
    """Shared and own inputs, a part of a fused tensor, a partial row group; the same numbers whoever else is there."""
    rng = np.random.default_rng(3)
    cols = 256 if type_name.endswith("_K") else 56 if type_name in FLOATS else COLS
    rows, first, of_rows = 40, 24, 72
    raw, w = _weights(rng, type_name, N * of_rows, cols)
    w = w.reshape(N, of_rows, cols)[:, first : first + rows]
    logits, x = _logits(rng, 21, how), rng.normal(size=(21, cols))
    own = rng.normal(size=(21, K * cols))

    def seen(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float32) if type_name in FLOATS else twins.int8_blocks(values)

    ids, _ = route_twin(logits, K)
    results: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    for n, threads in ((1, 1), (2, 2), (5, 1), (21, 3)):
        bench = Bench()
        chosen, _ = _route(bench, logits)
        weight = Experts(bench.source.add("w", type_name, (N, of_rows, cols), raw), rows, cols, first, N)
        outs = [bench.build.buffer(name, K * rows) for name in ("shared", "each")]
        for values, out in zip((x, own), outs, strict=True):
            bench.ops.append(ExpertMatMul(weight, bench.input(out.name + "_x", values), chosen, out))
        with bench.runner(threads) as runner:
            runner.forward(runner.new_state(1, 512), columns(np.arange(n)))
            results[n, threads] = peek(runner, outs[0], n), peek(runner, outs[1], n)
        for got, values in zip(results[n, threads], (x, own), strict=True):
            parts = seen(values[:n]).reshape(n, -1, cols)
            want = [[w[ids[c, j]] @ parts[c, j if parts.shape[1] > 1 else 0] for j in range(K)] for c in range(n)]
            _close(got, np.array(want).reshape(n, -1), 2e-5)
    for (n, _), both in results.items():
        for got, whole in zip(both, results[21, 3], strict=True):
            assert np.array_equal(got, whole[:n]), f"{n} columns differ"


@pytest.mark.parametrize("width", [32, 40])
def test_mix_adds_the_shares_in_order(width: int) -> None:
    rng = np.random.default_rng(5)
    logits, x, base = rng.normal(size=(5, N)), rng.normal(size=(5, K * width)), rng.normal(size=(5, width))
    bench = Bench()
    _, shares = _route(bench, logits)
    out = bench.input("out", base)
    bench.ops.append(Mix(bench.input("x", x), shares, out))
    _, weights = route_twin(logits, K)
    want = base + (x.reshape(5, K, width) * weights[..., None]).sum(1)
    _close(evaluate(bench, out, 5), want, 1e-6)


def test_a_full_forward_of_one_expert_stays_in_its_tables() -> None:
    """256 columns, all to the same experts: the widest a table and a staging area get."""
    rng = np.random.default_rng(6)
    raw, w = _weights(rng, "Q8_0", N * 16, COLS)
    logits, x = _logits(rng, 64, "one"), rng.normal(size=(64, COLS))
    bench = Bench()
    chosen, _ = _route(bench, logits)
    weight = Experts(bench.source.add("w", "Q8_0", (N, 16, COLS), raw), 16, COLS, 0, N)
    out = bench.build.buffer("out", K * 16)
    bench.ops.append(ExpertMatMul(weight, bench.input("x", x), chosen, out))
    tokens = np.arange(256) % 64
    with bench.runner(2) as runner:
        runner.forward(runner.new_state(1, 512), columns(tokens))
        got = peek(runner, out, 256)
    ids, _ = route_twin(logits, K)
    seen = twins.int8_blocks(x)
    want = np.array([[w.reshape(N, 16, COLS)[ids[c, j]] @ seen[c] for j in range(K)] for c in tokens])
    _close(got, want.reshape(256, -1), 2e-5)


_SHAPES = {
    "experts": ((N - 1, 16, COLS), 16 * (N - 1) * 68),
    "rows": ((N, 15, COLS), 15 * N * 68),
    "flat": ((N * 16, COLS), 16 * N * 68),
    "bytes": ((N, 16, COLS), 16 * N * 68 - 1),
}


@pytest.mark.parametrize("what", list(_SHAPES))
def test_expert_tensors_of_another_shape_are_refused(what: str) -> None:
    shape, nbytes = _SHAPES[what]
    bench = Bench()
    chosen, _ = _route(bench, np.zeros((1, N)))
    bench.source.add("w", "Q8_0", shape, np.zeros(nbytes, np.uint8))
    out = bench.build.buffer("out", K * 16)
    bench.ops.append(ExpertMatMul(Experts("w", 16, COLS, 0, N), bench.input("x", np.zeros((1, COLS))), chosen, out))
    with pytest.raises(ModelFileError, match="tensor w"):
        CpuExecutor(1).load(bench.plan(), bench.source, n_ctx=64, kv_type=KVType.F32)


def test_plans_whose_products_have_no_route_of_theirs_are_refused() -> None:
    raw = np.zeros(N * 16 * 68, np.uint8)
    for wrong in ("none", "other experts", "width"):
        bench = Bench()
        if wrong == "none":
            chosen = bench.input("chosen", np.zeros((1, K)))
        else:
            chosen, _ = _route(bench, np.zeros((1, N if wrong == "width" else N + 1)))
        bench.source.add("w", "Q8_0", (N, 16, COLS), raw)
        out = bench.build.buffer("out", K * 16 + (wrong == "width"))
        bench.ops.append(ExpertMatMul(Experts("w", 16, COLS, 0, N), bench.input("x", np.zeros((1, COLS))), chosen, out))
        with pytest.raises(ValueError, match="out"):
            CpuExecutor(1).load(bench.plan(), bench.source, n_ctx=64, kv_type=KVType.F32)
