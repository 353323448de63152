"""Ops on each column of its own in the simulator against NumPy, for several shapes of blocks and grids."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.accel.cuda import pointwise
from pantheon.accel.cuda.lowering import Launch
from pantheon.plan.ops import Add, Gate, Pick, RmsNorm, Rope, Sigmoid, SoftCap
from tests.accel.cuda.bench import F32, Bench

#: (threads of a block, blocks), of kernels that walk heads and of those that walk values
SHAPES = [((1, 1), (1, 1)), ((4, 2), (2, 2))]
FLAT = [((1, 1), (1, 1)), ((4, 1), (2, 2))]


def sigmoid(x: F32) -> F32:
    return 1 / (1 + np.exp(np.minimum(-x.astype(np.float64), 700)))


def close(got: F32, want: F32) -> None:
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def normed(x: F32, weight: F32, groups: int, eps: float) -> F32:
    parts = x.astype(np.float64).reshape(len(x), groups, -1)
    return (parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps) * weight).reshape(x.shape)


@pytest.mark.parametrize(("size", "groups", "n"), [(64, 1, 3), (16, 5, 2), (7, 3, 2), (300, 1, 2)])
@pytest.mark.parametrize("in_place", [False, True])
def test_norms_of_rows_and_of_heads(size: int, groups: int, n: int, in_place: bool) -> None:
    rng = np.random.default_rng(size)
    x, weight = rng.normal(size=(n, groups * size)).astype(np.float32), rng.normal(size=size).astype(np.float32)
    bench = Bench()
    source, w = bench.buffer("x", x), bench.vector("w", weight)
    out = source if in_place else bench.empty("out", n, groups * size)
    bench.run(pointwise.lower_rms_norm(RmsNorm(source, w, out, 1e-5, groups), bench.memory()), n)
    close(bench.get(out), normed(x, weight, groups, 1e-5))


@pytest.mark.parametrize("parts", [pointwise.FEW, pointwise.MANY])
def test_a_norm_has_the_same_bits_on_every_shape(parts: int) -> None:
    rng = np.random.default_rng(2)
    bench, found = Bench(), []
    x, w = bench.buffer("x", rng.normal(size=(3, 3 * 70))), bench.vector("w", rng.normal(size=70))
    out = bench.empty("out", 3, 3 * 70)
    (plain,) = pointwise.lower_rms_norm(RmsNorm(x, w, out, 1e-5, 3), bench.memory())
    for lanes, warps, grid in ((1, 1, (1, 1)), (4, 2, (1, 2)), (8, 1, (3, 3))):
        kernel = pointwise.rms_norm(parts, lanes, warps)
        bench.run([Launch(lambda n, made=kernel: made, plain.grid, plain.args)], 3, (lanes, warps), grid)
        found.append(bench.get(out).copy())
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()
    close(found[0], normed(bench.get(x), np.asarray(bench.parts["vectors"][0]), 3, 1e-5))


@pytest.mark.parametrize(("threads", "grid"), SHAPES)
@pytest.mark.parametrize("pairing", ["norm", "neox"])
def test_rope_turns_the_first_dims_of_each_head(pairing: str, threads: tuple[int, int], grid: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    heads, dim, half, positions = 3, 14, 5, [4, 0, 11]
    x, angles = rng.normal(size=(3, heads * dim)).astype(np.float32), rng.normal(size=(12, half))
    bench = Bench()
    source = bench.buffer("x", x)
    table = bench.rope(np.cos(angles), np.sin(angles), pairing)
    bench.place(2, positions)
    bench.run(pointwise.lower_rope(Rope(source, heads, dim, table), bench.memory()), 3, threads, grid)
    want = x.reshape(3, heads, dim).copy()
    ones, others = (slice(0, 10, 2), slice(1, 10, 2)) if pairing == "norm" else (slice(0, 5), slice(5, 10))
    turned = (want[..., ones] + 1j * want[..., others]) * np.exp(1j * angles[positions])[:, None]
    want[..., ones], want[..., others] = turned.real, turned.imag
    close(bench.get(source), want.reshape(3, -1))


@pytest.mark.parametrize(("threads", "grid"), FLAT)
@pytest.mark.parametrize("act", ["silu", "gelu", "sigmoid"])
def test_gates(act: str, threads: tuple[int, int], grid: tuple[int, int]) -> None:
    rng = np.random.default_rng(4)
    x, y = (rng.normal(size=(3, 37)).astype(np.float32) for _ in range(2))
    x[0, :4], x[1, 0] = [300, -300, 90, -90], np.nan
    bench = Bench()
    gate, up = bench.buffer("gate", 3 * x), bench.buffer("up", y)
    bench.run(pointwise.lower_gate(Gate(gate, up, gate, act), bench.memory()), 3, threads, grid)
    v = (3 * x).astype(np.float64)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))
    close(bench.get(gate), {"silu": v * sigmoid(v), "gelu": v * (1 + tanh) / 2, "sigmoid": sigmoid(v)}[act] * y)


def test_add() -> None:
    rng = np.random.default_rng(5)
    x, y = (rng.normal(size=(2, 33)).astype(np.float32) for _ in range(2))
    bench = Bench()
    a, b = bench.buffer("a", x), bench.buffer("b", y)
    bench.run(pointwise.lower_add(Add(a, b, a), bench.memory()), 2, (4, 1), (2, 1))
    assert (bench.get(a) == x + y).all() and (bench.get(b) == y).all()


def test_sigmoid_and_soft_cap_in_place() -> None:
    x = np.linspace(-200, 200, 45, dtype=np.float32).reshape(3, 15)
    bench = Bench()
    a, b = bench.buffer("a", x), bench.buffer("b", x)
    memory = bench.memory()
    both = pointwise.lower_sigmoid(Sigmoid(a), memory) + pointwise.lower_soft_cap(SoftCap(b, 30.0), memory)
    bench.run(both, 3, (4, 1), (2, 2))
    close(bench.get(a), sigmoid(x))
    close(bench.get(b), 30 * np.tanh(x / 30))


def test_soft_cap_of_logits_works_where_they_lie() -> None:
    bench = Bench()
    logits = bench.buffer("logits", np.zeros((1, 3)))
    memory = bench.memory()
    object.__setattr__(memory.plan, "logits", logits)
    assert pointwise.lower_soft_cap(SoftCap(logits, 30.0), memory)[0].args[0] == "logits"


@pytest.mark.parametrize(("threads", "grid"), SHAPES)
@pytest.mark.parametrize("first", [0, 5])
def test_pick_takes_a_part_of_each_head(first: int, threads: tuple[int, int], grid: tuple[int, int]) -> None:
    x = np.arange(2 * 3 * 11, dtype=np.float32).reshape(2, 33)
    bench = Bench()
    source, out = bench.buffer("x", x), bench.empty("out", 2, 3 * 6)
    bench.run(pointwise.lower_pick(Pick(source, out, first, 6, 11), bench.memory()), 2, threads, grid)
    assert (bench.get(out) == x.reshape(2, 3, 11)[:, :, first : first + 6].reshape(2, -1)).all()


@pytest.mark.parametrize(("threads", "grid"), FLAT)
def test_gather_puts_wanted_rows_to_the_front(threads: tuple[int, int], grid: tuple[int, int]) -> None:
    x = np.arange(4 * 9, dtype=np.float32).reshape(4, 9)
    bench = Bench()
    hidden, head_in = bench.buffer("hidden", x), bench.empty("head_in", 4, 9)
    bench.place(3, [3, 1])
    bench.run(pointwise.lower_gather(bench.memory(hidden, head_in)), 2, threads, grid)
    assert (bench.get(head_in)[:2] == x[[3, 1]]).all() and (bench.get(head_in)[2:] == 777).all()
