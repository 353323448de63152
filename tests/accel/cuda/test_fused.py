"""Fused kernels in the simulator against the separate ones, bit by bit; and what is fused at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pantheon.accel.cuda import fused, pointwise, quantise
from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.lowering import Launch
from pantheon.plan.ops import Add, Gate, MatMul, Op, RmsNorm, Rope
from tests.accel.cpu import twins
from tests.accel.cuda.bench import F32, Bench


def on(kernel: Kernel, launch: Launch) -> list[Launch]:
    """The same launch of another kernel."""
    return [Launch(lambda n: kernel, launch.grid, launch.args)]


def outcome(bench: Bench, launches: list[Launch], n: int, threads=None, grid=(1, 1)) -> tuple[F32, F32]:
    """(scratch, blocks) after these launches."""
    bench.blocks[:] = -1
    bench.run(launches, n, threads, grid)
    return bench.scratch.copy(), bench.blocks.copy()


def same(one: tuple[F32, F32], other: tuple[F32, F32]) -> bool:
    return all((a.view(np.int32) == b.view(np.int32)).all() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("size", "parts"), [(96, pointwise.FEW), (2 * 2048 + 64, pointwise.MANY)])
def test_a_norm_and_its_blocks(size: int, parts: int) -> None:
    rng = np.random.default_rng(size)
    n = 3 if size < 2048 else 1
    x = rng.normal(size=(n, size))
    x[0, 32:64] = 0
    bench = Bench()
    source, w, out = bench.buffer("x", x), bench.vector("w", rng.normal(size=size)), bench.empty("out", n, size)
    op, memory = RmsNorm(source, w, out, 1e-5), bench.memory()
    apart = outcome(bench, pointwise.lower_rms_norm(op, memory) + quantise.lower_quantise(out, memory), n)
    launch = fused.lower_norm_blocks(op, memory)
    assert same(apart, outcome(bench, [launch], n))
    assert same(apart, outcome(bench, on(fused.norm_blocks(parts, 4), launch), n, (4, 1), (1, 2)))


@pytest.mark.parametrize("act", ["silu", "gelu", "sigmoid"])
def test_a_gate_and_its_blocks(act: str) -> None:
    rng = np.random.default_rng(1)
    n, size = 2, 4 * fused.GATE_QUADS + 32
    bench = Bench()
    gate, up = bench.buffer("gate", 4 * rng.normal(size=(n, size))), bench.buffer("up", rng.normal(size=(n, size)))
    op, memory = Gate(gate, up, gate, act), bench.memory()
    apart = outcome(bench, pointwise.lower_gate(op, memory) + quantise.lower_quantise(gate, memory), n)
    launch = fused.lower_gate_blocks(op, memory)
    assert same(apart, outcome(bench, [launch], n))
    assert same(apart, outcome(bench, on(fused.gate_blocks(act, 4), launch), n, (4, 1), (2, 1)))


@pytest.mark.parametrize("pairing", ["norm", "neox"])
@pytest.mark.parametrize("normed", [False, True])
def test_q_and_k_are_normed_and_rotated_at_once(pairing: str, normed: bool) -> None:
    rng = np.random.default_rng(2)
    heads, kv_heads, dim, half = 5, 2, 14, 5
    bench, angles = Bench(), rng.normal(size=(12, half))
    q, k = bench.buffer("q", rng.normal(size=(3, heads * dim))), bench.buffer("k", rng.normal(size=(3, kv_heads * dim)))
    weights = [bench.vector(name, rng.normal(size=dim)) for name in "qk"]
    table = bench.rope(np.cos(angles), np.sin(angles), pairing)
    bench.place(2, [3, 11, 0])
    norms = [RmsNorm(x, w, x, 1e-5, x.width // dim) for x, w in zip((q, k), weights, strict=True)] if normed else []
    ropes, memory = [Rope(q, heads, dim, table), Rope(k, kv_heads, dim, table)], bench.memory()
    # one op after the other: each run begins with the inputs, so they go in one list
    separate = [one for op in norms for one in pointwise.lower_rms_norm(op, memory)]
    separate += [one for op in ropes for one in pointwise.lower_rope(op, memory)]
    apart, launch = outcome(bench, separate, 3), fused.lower_turn(ropes, norms, memory)
    assert same(apart, outcome(bench, [launch], 3))
    assert same(apart, outcome(bench, on(fused.turn(pairing, normed, 4, 2), launch), 3, (4, 2), (2, 2)))


def plan() -> tuple[Bench, dict[str, Op]]:
    """Ops by name: the parts of a layer."""
    bench, rng = Bench(), np.random.default_rng(3)
    x, normed, q, k = (bench.empty(name, 1, 32) for name in ("x", "normed", "q", "k"))
    w, head = bench.vector("w", np.ones(32)), bench.vector("head", np.ones(16))
    table = bench.rope(np.zeros((1, 8), np.float32), np.zeros((1, 8), np.float32), "neox")
    raw = twins.random_blocks(rng, "Q8_0", 32, 32)
    blocks = bench.matrix("blocks", "Q8_0", raw.reshape(1, 32, -1), 32)
    floats = bench.matrix("floats", "F32", np.zeros((1, 32, 128), np.uint8), 32)
    return bench, {
        "norm": RmsNorm(x, w, normed, 1e-5), "product": MatMul(blocks, normed, q), "other": MatMul(blocks, x, q),
        "floats": MatMul(floats, normed, k), "add": Add(x, normed, normed), "gate": Gate(q, k, normed),
        "norm_q": RmsNorm(q, head, q, 1e-5, 2), "norm_k": RmsNorm(k, head, k, 1e-5, 2), "row_q": RmsNorm(q, w, q, 1e-5),
        "rope_q": Rope(q, 2, 16, table), "rope_k": Rope(k, 2, 16, table), "wide_k": Rope(k, 1, 32, table),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "ops", "quantised"),
    [
        ("norm product", 1, "normed"), ("norm floats product", 1, "normed"), ("gate product", 1, "normed"),
        ("norm floats", 0, None), ("norm other product", 0, None), ("norm add product", 0, None), ("gate", 0, None),
        ("rope_q rope_k", 2, None), ("rope_q wide_k", 0, None), ("rope_q rope_q", 0, None), ("rope_q", 0, None),
        ("norm_q norm_k rope_q rope_k", 4, None), ("norm_q norm_k rope_k rope_q", 0, None),
        ("row_q norm_k rope_q rope_k", 0, None), ("norm_q rope_q rope_k", 0, None), ("norm_q norm_k rope_q", 0, None),
    ],
)  # fmt: skip
def test_what_is_fused(names: str, ops: int, quantised: str | None) -> None:
    bench, by_name = plan()
    sequence: Sequence[Op] = [by_name[name] for name in names.split()]
    found = fused.fuse(sequence, bench.memory())
    assert (found.ops if found else 0) == ops
    assert (found.quantised.name if found and found.quantised else None) == quantised
