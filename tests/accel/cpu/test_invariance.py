"""Batch invariance on whole models: neighbours, tile widths, chunks and threads never change a bit of a column."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from pantheon.accel.cpu.executor import CpuExecutor
from pantheon.accel.cpu.runner import CpuRunner
from pantheon.accel.cpu.sizes import MAX_WANTED
from pantheon.accel.executor import Columns
from pantheon.formats.quant import dequantize
from pantheon.plan.buffers import Matrix, Vector
from pantheon.plan.builder import Plan, PlanBuilder
from pantheon.plan.ops import Attend, Embed, Gate, MatMul, RmsNorm, Rope, StoreKV
from pantheon.plan.rope import RopeSpec
from pantheon.plan.state_spec import KVSpec, KVType, StateSpec
from tests.accel.cpu import twins
from tests.accel.cpu.harness import Source

VOCAB, WIDTH, DIM, HEADS, KV = 200, 256, 32, 8, 4


def small_model(types: tuple[str, ...], seed: int = 0) -> tuple[Plan, Source]:
    """Two llama blocks with a tied head; matrix i has type types[i % len(types)]."""
    rng, source, build, names = np.random.default_rng(seed), Source(), PlanBuilder(), itertools.cycle(types)

    def matrix(name: str, rows: int, cols: int) -> Matrix:
        kind = next(names)
        if kind == "F32":
            source.floats(name, rng.normal(size=(rows, cols)) / cols**0.5)
        else:
            raw = twins.random_blocks(rng, kind, rows, cols)
            values = dequantize(kind, np.ascontiguousarray(raw).reshape(-1), rows * cols)
            # keep activations near 1: scale the f16 scales by a power of two
            shift = np.float16(2.0 ** np.round(np.log2(1 / (values.std() * cols**0.5))))
            for at in twins.SCALES[kind]:
                part = np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16) * shift
                raw[..., at : at + 2] = part.view(np.uint8)
            source.add(name, kind, (rows, cols), raw)
        return Matrix(name, rows, cols)

    def norm(name: str) -> Vector:
        return Vector(source.floats(name, 1 + rng.normal(size=WIDTH) / 10), WIDTH)

    x, h, att = (build.buffer(n, WIDTH) for n in ("x", "h", "att"))
    q, k, v = (build.buffer(n, w) for n, w in (("q", HEADS * DIM), ("k", KV * DIM), ("v", KV * DIM)))
    gate, up = (build.buffer(n, 2 * WIDTH) for n in ("gate", "up"))
    table = build.rope(RopeSpec(DIM, 10000.0, "norm"))
    embd = matrix("embd", VOCAB, WIDTH)
    build.add(Embed(embd, x))
    for i in range(2):
        build.add(RmsNorm(x, norm(f"{i}.an"), h, 1e-5))
        build.add(MatMul(matrix(f"{i}.q", HEADS * DIM, WIDTH), h, q), MatMul(matrix(f"{i}.k", KV * DIM, WIDTH), h, k))
        build.add(MatMul(matrix(f"{i}.v", KV * DIM, WIDTH), h, v))
        build.add(Rope(q, HEADS, DIM, table), Rope(k, KV, DIM, table), StoreKV(k, v, i))
        build.add(Attend(q, att, i, HEADS, KV, DIM, DIM**-0.5))
        build.add(MatMul(matrix(f"{i}.o", WIDTH, HEADS * DIM), att, x, add=True))
        build.add(RmsNorm(x, norm(f"{i}.fn"), h, 1e-5))
        build.add(MatMul(matrix(f"{i}.gate", 2 * WIDTH, WIDTH), h, gate))
        build.add(MatMul(matrix(f"{i}.up", 2 * WIDTH, WIDTH), h, up), Gate(gate, up, gate))
        build.add(MatMul(matrix(f"{i}.down", WIDTH, 2 * WIDTH), gate, x, add=True))
    head_in = build.begin_head(x)
    logits = build.buffer("logits", VOCAB)
    build.add(RmsNorm(head_in, norm("on"), head_in, 1e-5), MatMul(embd, head_in, logits))
    kv = tuple(KVSpec(KV, DIM, DIM) for _ in range(2))
    return build.finish("small", VOCAB, 512, logits, StateSpec(kv)), source


@contextmanager
def running(plan: Plan, source: Source, threads: int, kv_type: KVType = KVType.F16) -> Iterator[CpuRunner]:
    runner = CpuExecutor(threads).load(plan, source, n_ctx=512, kv_type=kv_type)
    try:
        yield runner
    finally:
        runner.close()


def all_logits(runner: CpuRunner, tokens: np.ndarray, chunk: int) -> np.ndarray:
    state = runner.new_state(1, 512)
    parts = [
        runner.forward(state, Columns.of_slot(tokens[i : i + chunk].tolist(), i, wanted="all")).copy()
        for i in range(0, len(tokens), chunk)
    ]
    return np.concatenate(parts)


def mixed_logits(runner: CpuRunner, prompts: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Every prompt in a slot of its own, fed in random ragged pieces that share forwards."""
    rng, state = np.random.default_rng(seed), runner.new_state(len(prompts), 512)
    done, out = [0] * len(prompts), [[] for _ in prompts]
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        tokens, slots, positions = [], [], []
        for s in rng.permutation(len(prompts)):
            n = min(int(rng.integers(0, 9)), len(prompts[s]) - done[s])
            tokens += prompts[s][done[s] : done[s] + n].tolist()
            slots += [int(s)] * n
            positions += range(done[s], done[s] + n)
            done[s] += n
        if not tokens:
            continue
        arrays = [np.array(a, np.int32) for a in (tokens, slots, positions, range(len(tokens)))]
        logits = runner.forward(state, Columns(*arrays))
        for c, s in enumerate(slots):
            out[s].append(logits[c].copy())
    return [np.stack(o) for o in out]


@pytest.mark.parametrize("types", [("Q4_1", "Q8_0"), ("F32",), ("Q4_K", "Q6_K", "Q5_0")], ids="-".join)
def test_chunks_threads_and_neighbours_never_change_a_bit(types: tuple[str, ...]) -> None:
    plan, source = small_model(types)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, n) for n in (190, 3, 77, 140)]
    with running(plan, source, 1) as runner:
        want = [all_logits(runner, p, 256) for p in prompts]
        assert np.isfinite(want[0]).all() and want[0].std() > 0.1
    for threads in (1, 2, 3):
        with running(plan, source, threads) as runner:
            for chunk in (1, 7, 128):
                assert np.array_equal(all_logits(runner, prompts[0], chunk), want[0]), (threads, chunk)
            for got, expected in zip(mixed_logits(runner, prompts, threads), want, strict=True):
                assert np.array_equal(got, expected), threads


def test_wanted_columns_only() -> None:
    """Logits come for the wanted columns, in order, and are the same as when all are wanted."""
    plan, source = small_model(("Q4_0",))
    tokens = np.arange(40)
    with running(plan, source, 2) as runner:
        everything = all_logits(runner, tokens, 40)
        for wanted in ([], [39], [0, 5, 6, 38]):
            ordered = np.arange(40, dtype=np.int32)
            columns = Columns(ordered, np.zeros(40, np.int32), ordered, np.array(wanted, np.int32))
            got = runner.forward(runner.new_state(1, 64), columns)
            assert got.shape == (len(wanted), VOCAB)
            assert np.array_equal(got, everything[wanted])


def test_many_wanted_columns_give_what_few_give() -> None:
    """More than the scratch has rows of logits for: the head runs in pieces."""
    tokens = np.random.default_rng(4).integers(0, VOCAB, 3 * MAX_WANTED + 5)
    with running(*small_model(("Q4_1",)), 2) as runner:
        assert np.array_equal(all_logits(runner, tokens, len(tokens)), all_logits(runner, tokens, 7))
