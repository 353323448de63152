"""Norm, rotary, gate and add against their twins, at awkward widths too."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.plan.ops import Add, Gate, RmsNorm, Rope
from pantheon.plan.rope import RopeSpec
from tests.accel.cpu import twins
from tests.accel.cpu.harness import Bench, evaluate


def _x(n: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, width)).astype(np.float32)


@pytest.mark.parametrize(("width", "groups"), [(576, 1), (96, 3), (40, 4), (24, 1)])
def test_rms_norm(width: int, groups: int) -> None:
    x, weight = _x(5, width) * 30, _x(1, width // groups, 1)[0]
    bench = Bench()
    source, out = bench.input("x", x), bench.build.buffer("out", width)
    bench.ops = [RmsNorm(source, bench.vector("weight", weight), out, 1e-5, groups)]
    want = twins.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-5, groups)
    np.testing.assert_allclose(evaluate(bench, out, 5), want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("pairing", ["norm", "neox"])
@pytest.mark.parametrize(("dim", "n_rot"), [(64, 64), (64, 32), (20, 12), (10, 10), (8, 4)])
def test_rope(pairing: str, dim: int, n_rot: int) -> None:
    x, positions = _x(4, 3 * dim), [0, 7, 100, 511]
    bench = Bench()
    source = bench.input("x", x)
    table = bench.build.rope(RopeSpec(n_rot, 10000.0, pairing))  # type: ignore[arg-type]
    bench.ops = [Rope(source, 3, dim, table)]
    want = twins.rope(x.astype(np.float64), 3, n_rot, 10000.0, pairing, np.array(positions))
    np.testing.assert_allclose(evaluate(bench, source, 4, positions=positions), want, atol=2e-6)


@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize(("width", "n", "threads"), [(1536, 1, 2), (50, 3, 1), (96, 9, 2)])
def test_gate(act: str, width: int, n: int, threads: int) -> None:
    x, up = _x(n, width) * 4, _x(n, width, 1)
    x[0, :6] = [0, 90, -90, 1e4, -1e4, 1e-6]
    bench = Bench()
    a, b, out = bench.input("a", x), bench.input("b", up), bench.build.buffer("out", width)
    bench.ops = [Gate(a, b, out, act)]  # type: ignore[arg-type]
    with np.errstate(over="ignore"):
        want = twins.gate(x.astype(np.float64), up.astype(np.float64), act)
    np.testing.assert_allclose(evaluate(bench, out, n, threads), want, rtol=3e-6, atol=1e-6)


def test_exp_is_accurate_over_its_range() -> None:
    """silu(x) / x = 1 / (1 + e^-x): about 1e-7 relative where e^-x dominates."""
    x = np.linspace(-80, 80, 64 * 512, dtype=np.float32).reshape(64, 512)
    bench = Bench()
    a, b, out = bench.input("a", x), bench.input("b", np.ones_like(x)), bench.build.buffer("out", 512)
    bench.ops = [Gate(a, b, out, "silu")]
    x64 = x.astype(np.float64)
    np.testing.assert_allclose(evaluate(bench, out, 64), x64 / (1 + np.exp(-x64)), rtol=6e-7)


def test_add_in_place() -> None:
    x, y = _x(3, 70), _x(3, 70, 1)
    bench = Bench()
    a, b = bench.input("a", x), bench.input("b", y)
    bench.ops = [Add(a, b, a)]
    assert np.array_equal(evaluate(bench, a, 3), x + y)
