"""Causal attention over the cached keys and values of `kv`, and the merge of its partial sums.

Each SPAN of positions, counted from 0, gives a query (column, head) a partial sum of its own: the highest score, the
sum of the weights, the weighted sum of V.  They are merged in ascending order (Milakov & Gimelshein 2018): by the block
that goes over all spans of its queries, or, where few columns would leave the die idle, by `merge`, with a block for
every span.  Queries that share a KV head pass over a span together, `tile` of them: the heads of a group, and as many
columns as fit.  Each takes the operations, in the order, that it would take alone, so a column's numbers depend on
nothing but its own position.  Nothing behind a column's position is ever read into its result.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from numba import float32, int64

from pantheon.accel.cuda.attention_shape import MAXIMUM, TOTAL, Shape
from pantheon.accel.cuda.attention_span import (
    first_seen,
    joined,
    make_begin,
    make_collect,
    make_maxima,
    make_place,
    make_scores,
    make_statistics,
    make_take_queries,
    make_values,
    make_weights,
    seen,
    taken_in,
)
from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.kv import PARTIAL_HEAD, SPAN, KVLayout, spans, split_columns
from pantheon.accel.cuda.kv_store import lower_store_kv, places, store_kv
from pantheon.accel.cuda.lowering import COUNT, MAX_COLUMNS, Launch, Memory
from pantheon.accel.cuda.machine import (
    F32,
    FLOATS,
    HALVES,
    I32,
    I64,
    SIMULATED,
    THREADS,
    WORDS,
    cuda,
    device_function,
    fma,
    load,
)
from pantheon.accel.cuda.query_tiles import again, get, halves, keep
from pantheon.accel.cuda.tiles import store, zeros
from pantheon.plan.ops import Attend
from pantheon.plan.state_spec import KVType

__all__ = ["attend", "kernels", "lower_attend", "lower_store_kv", "merge", "store_kv"]


#: of shared memory, so that sixteen bytes are read at a time; the simulator has no word for it
ALIGNMENT = None if SIMULATED else 16


def _make_whole(s: Shape, split: bool) -> Any:
    """The sums of V of a thread's items, through shared memory to where they belong; a barrier first."""
    items, words, threads, sums_at = s.items, s.words, s.threads, s.sums_at
    values, collect = make_values(s), make_collect(s, split)

    @device_function
    def whole(room, scratch, kv, kv_scales, place, sight, to, steps, run, j0, t):  # type: ignore[no-untyped-def]
        lo, first, end, hi = sight
        cuda.syncthreads()
        for i in range(t, items, threads):
            acc = values(room, kv, kv_scales, place, lo, first, end, hi, j0, i // words, i % words)
            store(room, sums_at + i, items, acc)
        cuda.syncthreads()
        collect(room, scratch, to, steps, run[3], j0, 0, again(t))

    return whole


def _make_halved(s: Shape, split: bool) -> Any:
    """As above, for one item, in two halves."""
    items, words, sums_at, rows, none = s.items, s.words, s.sums_at, s.rows, zeros(s.sums)
    values, collect = make_values(s), make_collect(s, split)

    @device_function
    def halved(room, scratch, kv, kv_scales, place, sight, to, steps, run, j0, t):  # type: ignore[no-untyped-def]
        lo, first, end, hi = sight
        acc = none
        if t < items:
            acc = values(room, kv, kv_scales, place, lo, first, end, hi, j0, t // words, t % words)
        front, back = halves(acc)
        cuda.syncthreads()
        if t < items:
            store(room, sums_at + t, items, front)
        cuda.syncthreads()
        collect(room, scratch, to, steps, run[3], j0, 0, again(t))
        cuda.syncthreads()
        if t < items:
            store(room, sums_at + t, items, back)
        cuda.syncthreads()
        collect(room, scratch, to, steps, run[3], j0, rows, again(t))

    return halved


def _make_weigh(s: Shape) -> Any:
    """The weights of a tile of queries over the span at `base`, all but their statistics; run: (first column, its
    position, the last one's, queries).  Returns the positions lo … hi-1 that any sees, first … end-1 that all see."""
    begin, scores, maxima, weights = make_begin(s), make_scores(s), make_maxima(s), make_weights(s)

    @device_function
    def weigh(room, kv, kv_scales, columns, place, run, base, window, t):  # type: ignore[no-untyped-def]
        column, least, most, n_queries = run
        begin(room, columns, column, n_queries, base, window, again(t))
        cuda.syncthreads()
        lo, end = seen(least, base, window)
        first, hi = seen(most, base, window)
        first = min(first, hi)
        scores(room, kv, kv_scales, place, again(lo), again(hi), again(t))
        cuda.syncthreads()
        maxima(room, again(t))
        cuda.syncthreads()
        weights(room, again(t))
        cuda.syncthreads()
        return again(lo), again(first), again(max(first, end)), again(hi)

    return weigh


def _make_note(s: Shape, split: bool) -> Any:
    """The statistics of a span, kept for the next one or handed to `merge`."""
    tile, heads, threads, stats_at, statistics = s.tile, s.heads, s.threads, s.stats_at, make_statistics(s, split)

    @device_function
    def note(room, scratch, columns, run, base, window, to, steps, t):  # type: ignore[no-untyped-def]
        for j in range(t, run[3], threads):
            position = int64(load(columns, 2 * MAX_COLUMNS + run[0] + j // heads))
            statistics(room, j, position, base, window)
            if split and position >= base:
                at = to + j // heads * steps[0] + j % heads * steps[1]
                keep(scratch, at, get(room, stats_at + MAXIMUM * tile + j))
                keep(scratch, at + 1, get(room, stats_at + TOTAL * tile + j))

    return note


@functools.cache
def attend(kv_type: KVType, dim: int, group: int, tile: int, split: bool, threads: int = THREADS) -> Kernel:
    """Blocks in x take `tile` queries: heads of a KV head's group, columns that follow each other, those of a slot
    together; blocks in y take spans, all of them unless split."""
    s = Shape(kv_type, dim, group, tile, threads)
    room_for, place = s.floats, make_place(s)
    heads, parts, width = s.heads, -(-group // tile), max(1, tile // group)
    partial = PARTIAL_HEAD + dim
    take_queries, weigh, note, queries = make_take_queries(s), _make_weigh(s), _make_note(s, split), s.queries
    add_values = (_make_halved if s.halved else _make_whole)(s, split)

    def body(  # type: ignore[no-untyped-def]
        scratch, kv, kv_scales, columns, n, q_at, q_stride, out_at, out_stride, partials_at, n_spans, kv_heads,
        scale, window, words_at, block_words, slot_words, scales_at, block_scales, slot_scales,
    ):  # fmt: skip
        room, t = cuda.shared.array(room_for, float32, ALIGNMENT), cuda.threadIdx.x
        for item in range(cuda.blockIdx.x, (n + width - 1) // width * kv_heads * parts, cuda.gridDim.x):
            kv_head, part, column = item % kv_heads, item // kv_heads % parts, item // kv_heads // parts * width
            h0, n_heads = kv_head * group + part * heads, min(heads, group - part * heads)
            behind = min(column + width, n)
            while column < behind:
                slot, more = int64(load(columns, MAX_COLUMNS + column)), 1
                while column + more < behind and load(columns, MAX_COLUMNS + column + more) == slot:
                    more += 1
                least = int64(load(columns, 2 * MAX_COLUMNS + column))
                most = int64(load(columns, 2 * MAX_COLUMNS + column + more - 1))
                run = column, least, most, more * n_heads
                if cuda.blockIdx.y * SPAN <= most:
                    q = q_at + column * q_stride + h0 * dim
                    take_queries(room, scratch, q, q_stride, more * n_heads, scale, again(t))
                for span in range(cuda.blockIdx.y, most // SPAN + 1, cuda.gridDim.y):
                    if (span + 1) * SPAN > first_seen(least, window):
                        to, steps = out_at + column * out_stride + h0 * dim, (out_stride, int64(dim))
                        if split:
                            query = (column * kv_heads * group + h0) * n_spans + span
                            step = n_spans * partial
                            to, steps = partials_at + query * partial, (kv_heads * group * step, step)
                        words, halves = (words_at, slot_words, block_words), (scales_at, slot_scales, block_scales)
                        keys = place(again(slot), again(kv_head), 0, again(span), words, halves)
                        sight = weigh(room, kv, kv_scales, columns, keys, run, span * SPAN, window, t)
                        note(room, scratch, columns, run, span * SPAN, window, to, steps, again(t))
                        values = place(again(slot), again(kv_head), 1, again(span), words, halves)
                        for j0 in range(0, run[3], queries):
                            add_values(room, scratch, kv, kv_scales, values, sight, to, steps, run, j0, again(t))
                        cuda.syncthreads()
                column += more

    types = (FLOATS, WORDS, HALVES, WORDS, I32, *[I64] * 7, F32, *[I64] * 7)
    name = f"attend {kv_type.value} {dim} x{tile}/{group}" + (" split" if split else "")
    return Kernel(name, body, types, (threads, 1), tight=True, resident=2)


@functools.cache
def merge(dim: int, threads: int = THREADS) -> Kernel:
    """Partial sums to results: a thread takes a dim of a head of a column."""

    def body(scratch, columns, n, out_at, out_stride, partials_at, n_spans, heads, window):  # type: ignore[no-untyped-def]
        for item in range(
            cuda.blockIdx.x * threads + cuda.threadIdx.x, int64(n) * heads * dim, cuda.gridDim.x * threads
        ):
            query, d = item // dim, item % dim
            column, position = query // heads, int64(load(columns, 2 * MAX_COLUMNS + query // heads))
            first, total, weight, top = first_seen(position, window) // SPAN, float32(0), float32(0), float32(0)
            for span in range(first, position // SPAN + 1):
                at = partials_at + (query * n_spans + span) * (PARTIAL_HEAD + dim)
                m, old, new = scratch[at], float32(0), float32(1)
                if span > first:
                    m, old, new = joined(top, m)
                value = scratch[at + PARTIAL_HEAD + d]
                total = taken_in(total, old, value, new)
                weight = fma(weight, old, scratch[at + 1] * new)
                top = m
            scratch[out_at + column * out_stride + query % heads * dim + d] = total * (float32(1) / weight)

    return Kernel(f"merge {dim}", body, (FLOATS, WORDS, I32, *[I64] * 6), (threads, 1), tight=True)


#: queries of a block for prefill, of heads of up to 128 dims and of larger ones: what 48 KiB of shared memory hold
_TILES = ((128, 16), (256, 8))


def tiles(dim: int, group: int) -> tuple[int, int]:
    """Queries of a block for few columns (as many as there are heads to a KV head) and for many."""
    most = next((tile for limit, tile in _TILES if dim <= limit), 4)
    return min(most, 1 << (group - 1).bit_length()), most


def lower_attend(op: Attend, memory: Memory, threads: int = THREADS) -> list[Launch]:
    """Two launches for few columns, cut by spans; the second has nothing to do for many, which are not cut."""
    layout: KVLayout = memory.kv
    group = op.heads // op.kv_heads
    cut, n_spans = split_columns(op.heads, op.head_dim, memory.n_ctx), spans(memory.n_ctx)
    few, many = tiles(op.head_dim, group)
    last = merge(op.head_dim, threads)

    def kernel(n: int) -> Kernel:
        return attend(layout.kv_type, op.head_dim, group, few if n <= cut else many, n <= cut, threads)

    def grid(n: int, reach: int) -> tuple[int, int]:
        tile = few if n <= cut else many
        blocks = op.kv_heads * -(-group // tile) * -(-n // max(1, tile // group))
        return (1, 1) if SIMULATED else (blocks, spans(reach) if n <= cut else 1)

    def merge_grid(n: int, reach: int) -> tuple[int, int]:
        return (int(n <= cut) if SIMULATED else -(-n * op.heads * op.head_dim // threads) * (n <= cut)), 1

    out, rows = memory.buffers[op.out], (memory.partials_at, n_spans)
    args = (
        "scratch", "kv", "kv_scales", "columns", COUNT, *memory.buffers[op.q], *out, *rows, op.kv_heads,
        op.scale * math.log2(math.e), op.window, *places(layout, op.layer),
    )  # fmt: skip
    return [
        Launch(kernel, grid, args),
        Launch(lambda n: last, merge_grid, ("scratch", "columns", COUNT, *out, *rows, op.heads, op.window)),
    ]


def kernels() -> list[Kernel]:
    """What the table of registers shows: every format with four heads of 128 dims to a KV head, float16 with others."""
    found, shapes = [merge(128)], [(kv_type, 128, 4) for kv_type in KVType]
    for kv_type, dim, group in (*shapes, (KVType.F16, 64, 8), (KVType.F16, 128, 1), (KVType.F16, 256, 8)):
        few, many = tiles(dim, group)
        found += [attend(kv_type, dim, group, few, True), attend(kv_type, dim, group, many, False)]
        found += [store_kv(kv_type, dim)]
    return list(dict.fromkeys(found))
