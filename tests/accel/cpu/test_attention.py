"""Attention and KV store against the twin; stale rows; windows; grouped heads; both cache formats."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.accel.cpu.kv import SPAN
from pantheon.accel.cpu.runner import CpuRunner, CpuState
from pantheon.plan.buffers import Buffer
from pantheon.plan.ops import Attend, StoreKV
from pantheon.plan.state_spec import KVSpec, KVType
from tests.accel.cpu import twins
from tests.accel.cpu.harness import N_VOCAB, Bench, columns, fresh, peek


def _bench(heads: int, kv_heads: int, dim: int, window: int = 0, layers: int = 2) -> tuple[Bench, Buffer, list]:
    """Tokens pick rows of random q, k, v; layer 0 is stored but not read, so that offsets of layer 1 matter."""
    rng = np.random.default_rng(heads * 100 + dim)
    bench = Bench(tuple(KVSpec(kv_heads, dim, dim, window) for _ in range(layers)))
    rows = [rng.normal(size=(N_VOCAB, h * dim)).astype(np.float32) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (bench.input(name, x) for name, x in zip("qkv", rows, strict=True))
    out = bench.build.buffer("out", heads * dim)
    bench.ops = [StoreKV(v, k, 0), StoreKV(k, v, layers - 1)]
    bench.ops.append(Attend(q, out, layers - 1, heads, kv_heads, dim, dim**-0.5, window))
    return bench, out, rows


def _run(runner: CpuRunner, state: CpuState, out: Buffer, tokens: np.ndarray, chunk: int, slot: int = 0) -> np.ndarray:
    parts = []
    for i in range(0, len(tokens), chunk):
        part = tokens[i : i + chunk]
        runner.forward(state, columns(part, np.arange(i, i + len(part)), np.full(len(part), slot)))
        parts.append(peek(runner, out, len(part)))
    return np.concatenate(parts)


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(9, 3, 64, 0), (4, 4, 16, 0), (8, 1, 10, 0), (2, 1, 80, 0), (4, 2, 16, 40), (3, 3, 8, 100), (5, 1, 32, 1)],
)
def test_attention(heads: int, kv_heads: int, dim: int, window: int, kv_type: KVType) -> None:
    """Equal to the twin, and bit for bit the same for every chunking and thread count."""
    bench, out, rows = _bench(heads, kv_heads, dim, window)
    tokens = np.random.default_rng(0).integers(0, N_VOCAB, 210)
    q, k, v = (r[tokens].reshape(210, -1, dim) for r in rows)
    stored = [twins.cached(x, kv_type).astype(np.float64) for x in (k, v)]
    want = twins.attention(q.astype(np.float64), *stored, kv_heads, dim**-0.5, window).reshape(210, -1)
    results = []
    for threads in (1, 2):
        with bench_runner(bench, threads, kv_type) as runner:
            for chunk in (210, 1, 7, 128):
                results.append(_run(runner, fresh(runner), out, tokens, chunk))
    np.testing.assert_allclose(results[0], want, atol=3e-6)
    for got in results[1:]:
        assert np.array_equal(got, results[0])


@pytest.mark.parametrize("kv_type", [KVType.F16, KVType.Q8_0])
@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(3, 1, 0), (2, 2, 300)])
def test_contexts_of_many_spans(heads: int, kv_heads: int, window: int, kv_type: KVType) -> None:
    """Decode cut by positions over the threads gives the very numbers of prefill, which is not, and of one thread."""
    n, dim = 3 * SPAN + 70, 32
    bench, out, rows = _bench(heads, kv_heads, dim, window)
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, n)
    q, k, v = (r[tokens].reshape(n, -1, dim) for r in rows)
    stored = [twins.cached(x, kv_type).astype(np.float64) for x in (k, v)]
    want = twins.attention(q.astype(np.float64), *stored, kv_heads, dim**-0.5, window).reshape(n, -1)
    with bench_runner(bench, 1, kv_type, 1024) as runner:
        alone = _run(runner, fresh(runner, n_ctx=1024), out, tokens, 256)
    np.testing.assert_allclose(alone, want, atol=3e-6)
    for threads, chunk in ((2, 1), (3, 5), (2, 128)):
        with bench_runner(bench, threads, kv_type, 1024) as runner:
            assert np.array_equal(_run(runner, fresh(runner, n_ctx=1024), out, tokens, chunk), alone)


def test_a_long_and_a_short_conversation_share_a_forward() -> None:
    """Spans are counted for the longest; the short one has nothing in most of them."""
    bench, out, _ = _bench(4, 2, 16)
    long, short = np.arange(2 * SPAN + 5) % N_VOCAB, np.arange(9)
    with bench_runner(bench, 2, KVType.F16, 1024) as runner:
        state = fresh(runner, 2, 1024)
        alone = [_run(runner, state, out, tokens, 200, slot)[-1] for slot, tokens in enumerate((long, short))]
        runner.forward(state, columns([long[-1], short[-1]], [len(long) - 1, len(short) - 1], [0, 1]))
        assert np.array_equal(peek(runner, out, 2), alone)


def bench_runner(bench: Bench, threads: int, kv_type: KVType, n_ctx: int = 512):  # type: ignore[no-untyped-def]
    """A runner of a plan that is built once."""
    if not hasattr(bench, "made"):
        bench.made = bench.plan()  # type: ignore[attr-defined]
    bench.plan = lambda: bench.made  # type: ignore[attr-defined,method-assign]
    return bench.runner(threads, kv_type, n_ctx)


@pytest.mark.parametrize("kv_type", list(KVType))
def test_stale_rows_never_matter(kv_type: KVType) -> None:
    """Whatever lies in the cache, NaNs too, a new conversation gives the numbers of a clean state."""
    bench, out, _ = _bench(4, 2, 20)
    tokens = np.arange(50)
    with bench_runner(bench, 2, kv_type) as runner:
        clean = _run(runner, fresh(runner), out, tokens, 50)
        dirty = fresh(runner)
        dirty._arena._bytes[:] = 0xFF
        for chunk in (50, 1, 9):
            assert np.array_equal(_run(runner, dirty, out, tokens, chunk), clean)


def test_slots_are_apart_and_reset_forgets() -> None:
    bench, out, _ = _bench(4, 2, 16)
    a, b = np.arange(40), np.arange(40)[::-1].copy()
    with bench_runner(bench, 1, KVType.F16) as runner:
        state = fresh(runner, 3)
        first = _run(runner, state, out, a, 40, slot=0)
        _run(runner, state, out, b, 40, slot=1)
        again = _run(runner, state, out, a[:20], 20, slot=2)
        assert np.array_equal(again, first[:20])
        runner.forward(state, columns([3, 3], [40, 40], [0, 1]))  # both go on, side by side
        both = peek(runner, out, 2)
        assert not np.array_equal(both[0], both[1])
        state.reset(0)
        assert np.array_equal(_run(runner, state, out, a, 11, slot=0), first)


def test_reset_gives_large_slots_back() -> None:
    """A long conversation's pages are unmapped: they read as zeros."""
    bench, _, _ = _bench(4, 4, 64)
    with bench_runner(bench, 1, KVType.F32) as runner:
        state = fresh(runner, 2)
        state._arena._bytes[:] = 1
        for i in range(0, 512, 128):
            runner.forward(state, columns(np.arange(128) % N_VOCAB, np.arange(i, i + 128)))
        state.reset(0)
        assert not state._arena._bytes[: state.slot_bytes].any()
        assert state._arena._bytes[state.slot_bytes :].any()
