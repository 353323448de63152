"""One tile of queries over one span of positions: what `attention` is made of.

Scores: a thread takes a position, and all queries of the tile.  Maxima, weights and their sums: a thread takes a query
and the positions of a residue.  Values: a thread takes a word of V, of some positions, for a few queries, so that each
word is read and unpacked once for all of them.  Every sum has an order of its own that no shape of a block changes.
"""

from __future__ import annotations

import math
from typing import Any

from numba import float32, int32, int64

from pantheon.accel.cuda.attention_shape import END, FIRST, LAST, MAXIMUM, NEW, OLD, RESIDUES, TOTAL, Shape
from pantheon.accel.cuda.kv import BLOCK, PARTIAL_HEAD, SCALED, SPAN
from pantheon.accel.cuda.lowering import MAX_COLUMNS
from pantheon.accel.cuda.machine import device_function, exp2, fma, half_to_float, load
from pantheon.accel.cuda.query_tiles import add_outer, add_seen, add_times, add_words, again, get, keep, put
from pantheon.accel.cuda.tiles import gather, zeros


@device_function
def next_of(first, residue, modulus):  # type: ignore[no-untyped-def]
    """The least p >= first with p % modulus == residue."""
    p = first - first % modulus + residue
    return p if p >= first else p + modulus


def make_scores(s: Shape) -> Any:
    """Scores of all queries of the tile over positions lo … hi-1 of a span; place: where its K and its scales begin,
    and how far it is to the next block of memory."""
    tile, per, words, stride, scores_at, threads = s.tile, s.per, s.words, s.stride, s.scores_at, s.threads
    scaled, blocks, block, ahead = s.scales > 0, s.scales, SCALED // s.per, s.ahead
    none, dims, several = zeros(tile), zeros(per), zeros(ahead)

    @device_function
    def scores(room, kv, kv_scales, place, lo, hi, t):  # type: ignore[no-untyped-def]
        k_at, scales_at, block_words, block_scales = place
        for p in range(lo + t, hi, threads):
            at = k_at + p // BLOCK * block_words + p % BLOCK
            total = none
            if scaled:
                for b in range(blocks):
                    sums = none
                    for w in range(b * block, min(words, (b + 1) * block), ahead):
                        loaded = gather(several, kv, at + w * BLOCK, BLOCK)
                        sums = add_words(sums, loaded, dims, room, w * per * tile)
                    half = load(kv_scales, scales_at + p // BLOCK * block_scales + b * BLOCK + p % BLOCK)
                    total = add_times(total, sums, half_to_float(int32(half)))
            else:
                for w in range(0, words, ahead):
                    loaded = gather(several, kv, at + w * BLOCK, BLOCK)
                    total = add_words(total, loaded, dims, room, w * per * tile)
            put(room, scores_at + p * stride, total)

    return scores


def make_maxima(s: Shape) -> Any:
    """Highest score of each query over each residue of what it sees of a span."""
    tile, stride, scores_at, sums_at, stats_at, threads = (
        s.tile, s.stride, s.scores_at, s.sums_at, s.stats_at, s.threads
    )  # fmt: skip

    @device_function
    def maxima(room, t):  # type: ignore[no-untyped-def]
        for i in range(t, tile * RESIDUES, threads):
            j, top = i % tile, float32(-math.inf)
            first, end = int(get(room, stats_at + FIRST * tile + j)), int(get(room, stats_at + END * tile + j))
            for p in range(next_of(first, i // tile, RESIDUES), end, RESIDUES):
                top = max(top, get(room, scores_at + p * stride + j))
            keep(room, sums_at + i, top)

    return maxima


def make_weights(s: Shape) -> Any:
    """Scores become weights relative to the maximum of the span; sums of them by residue."""
    tile, stride, scores_at, sums_at, stats_at, threads = (
        s.tile, s.stride, s.scores_at, s.sums_at, s.stats_at, s.threads
    )  # fmt: skip

    @device_function
    def weights(room, t):  # type: ignore[no-untyped-def]
        for i in range(t, tile * RESIDUES, threads):
            j, top, total = i % tile, float32(-math.inf), float32(0)
            first, end = int(get(room, stats_at + FIRST * tile + j)), int(get(room, stats_at + END * tile + j))
            for r in range(RESIDUES):
                top = max(top, get(room, sums_at + r * tile + j))
            for p in range(next_of(first, i // tile, RESIDUES), end, RESIDUES):
                weight = exp2(get(room, scores_at + p * stride + j) - top)
                keep(room, scores_at + p * stride + j, weight)
                total += weight
            keep(room, sums_at + tile * RESIDUES + i, total)

    return weights


@device_function
def joined(m, n):  # type: ignore[no-untyped-def]
    """(maximum of two spans, factor of what belongs to the first, factor of the second)."""
    top = max(m, n)
    return top, exp2(m - top), exp2(n - top)


def make_statistics(s: Shape, split: bool) -> Any:
    """Query j takes a span's maximum and sum in; a split attention takes each span as if it were the only one."""
    tile, sums_at, stats_at = s.tile, s.sums_at, s.stats_at

    @device_function
    def statistics(room, j, position, base, window):  # type: ignore[no-untyped-def]
        top, total, at = float32(-math.inf), float32(0), stats_at + j
        for r in range(RESIDUES):
            top = max(top, get(room, sums_at + r * tile + j))
            total += get(room, sums_at + (RESIDUES + r) * tile + j)
        old, new = float32(0), float32(1)
        if not split and base > first_seen(position, window):
            top, old, new = joined(get(room, at + MAXIMUM * tile), top)
            total = fma(get(room, at + TOTAL * tile), old, total * new)
        if get(room, at + FIRST * tile) < get(room, at + END * tile):
            keep(room, at + MAXIMUM * tile, top)
            keep(room, at + TOTAL * tile, total)
        keep(room, at + OLD * tile, old)
        keep(room, at + NEW * tile, new)
        keep(room, at + LAST * tile, float32(1) / total if position < base + SPAN else float32(1))

    return statistics


@device_function
def first_seen(position, window):  # type: ignore[no-untyped-def]
    """The first position that a query sees."""
    return max(int64(0), position - window + 1) if window else int64(0)


@device_function
def four_scales(kv_scales, at, step):  # type: ignore[no-untyped-def]
    """The float16 at `at` and at every step behind it, as float32."""
    return (
        half_to_float(int32(load(kv_scales, at))), half_to_float(int32(load(kv_scales, at + step))),
        half_to_float(int32(load(kv_scales, at + 2 * step))), half_to_float(int32(load(kv_scales, at + 3 * step))),
    )  # fmt: skip


def _make_alike(s: Shape) -> Any:
    """acc with a word of V at positions begin … end-1 of one part, which all queries see; rows, halves: where the word
    and its scale would lie for position 0 of the span, counted back from their block of memory."""
    words, scales, parts, stride, scaled, scores_at = s.words, s.scales, s.parts, s.stride, s.scales > 0, s.scores_at
    dims, four, row_step, half_step, weight_step = zeros(s.per), zeros(4), parts * words, parts * scales, parts * stride

    @device_function
    def alike(acc, room, kv, kv_scales, rows, halves, begin, end, part, j0):  # type: ignore[no-untyped-def]
        p, weights = next_of(begin, part, parts), scores_at + j0
        while p + 3 * parts < end:
            loaded = gather(four, kv, rows + p * words, row_step)
            if scaled:
                each = four_scales(kv_scales, halves + p * scales, half_step)
                acc = add_outer(acc, loaded, each, dims, room, weights + p * stride, weight_step)
            else:
                acc = add_outer(acc, loaded, None, dims, room, weights + p * stride, weight_step)
            p += 4 * parts
        while p < end:
            one = (load(kv, rows + p * words),)
            if scaled:
                scale = (half_to_float(int32(load(kv_scales, halves + p * scales))),)
                acc = add_outer(acc, one, scale, dims, room, weights + p * stride, 0)
            else:
                acc = add_outer(acc, one, None, dims, room, weights + p * stride, 0)
            p += parts
        return acc

    return alike


def _make_apart(s: Shape) -> Any:
    """As above, for positions that not all queries see."""
    words, scales, parts, stride, scaled, scores_at = s.words, s.scales, s.parts, s.stride, s.scales > 0, s.scores_at
    dims, first_at, end_at = zeros(s.per), s.stats_at + FIRST * s.tile, s.stats_at + END * s.tile

    @device_function
    def apart(acc, room, kv, kv_scales, rows, halves, begin, end, part, j0):  # type: ignore[no-untyped-def]
        for p in range(next_of(begin, part, parts), end, parts):
            word, j, at = load(kv, rows + p * words), again(j0), scores_at + p * stride + j0
            if scaled:
                scale = half_to_float(int32(load(kv_scales, halves + p * scales)))
                acc = add_seen(acc, word, scale, dims, room, at, first_at + j, end_at + j, float32(p))
            else:
                acc = add_seen(acc, word, None, dims, room, at, first_at + j, end_at + j, float32(p))
        return acc

    return apart


def make_values(s: Shape) -> Any:
    """Weighted sums of V's word w of queries j0 … over positions of one part: lo … hi-1 of a span, of which all
    see first … end-1."""
    words, per, scales, none = s.words, s.per, s.scales, zeros(s.sums)
    alike, apart = _make_alike(s), _make_apart(s)

    @device_function
    def values(room, kv, kv_scales, place, lo, first, end, hi, j0, part, w):  # type: ignore[no-untyped-def]
        v_at, scales_at, block_words, block_scales = place
        acc = none
        for base in range(0, SPAN, BLOCK):
            rows = v_at + base // BLOCK * block_words - base * words + w
            halves = scales_at + base // BLOCK * block_scales - base * scales + w * per // SCALED
            edge = base + BLOCK
            acc = apart(acc, room, kv, kv_scales, rows, halves, max(lo, base), min(first, edge), part, j0)
            acc = alike(acc, room, kv, kv_scales, rows, halves, max(first, base), min(end, edge), part, j0)
            acc = apart(acc, room, kv, kv_scales, rows, halves, max(end, base), min(hi, edge), part, j0)
        return acc

    return values


@device_function
def taken_in(total, old, value, new):  # type: ignore[no-untyped-def]
    """A weighted sum of V with a span more; with a factor of 0 there is nothing before it."""
    return value * new if old == float32(0) else fma(total, old, value * new)


def make_collect(s: Shape, split: bool) -> Any:
    """The sums of all parts, of registers first … of every item: to the partial sums, or into the results."""
    dim, tile, per, words, parts, items, threads = s.dim, s.tile, s.per, s.words, s.parts, s.items, s.threads
    heads, queries, sums_at, stats_at, rows = s.heads, s.queries, s.sums_at, s.stats_at, s.rows
    behind = PARTIAL_HEAD if split else 0

    @device_function
    def collect(room, scratch, to, steps, n_queries, j0, first, t):  # type: ignore[no-untyped-def]
        for i in range(t, rows * words, threads):
            row, w = i // words, i % words
            j, d = j0 + (first + row) % queries, w * per + (first + row) // queries
            at = stats_at + j
            if j < n_queries and d < dim and get(room, at + FIRST * tile) < get(room, at + END * tile):
                total = float32(0)
                for part in range(parts):
                    total += get(room, sums_at + row * items + part * words + w)
                at_out = to + j // heads * steps[0] + j % heads * steps[1] + d + behind
                if not split:
                    old, new = get(room, at + OLD * tile), get(room, at + NEW * tile)
                    total = taken_in(get(scratch, at_out), old, total, new) * get(room, at + LAST * tile)
                keep(scratch, at_out, total)

    return collect


def make_take_queries(s: Shape) -> Any:
    """Queries to shared memory, scaled; zeros for those that the tile lacks and for dims that a row lacks."""
    tile, heads, dim, padded, threads = s.tile, s.heads, s.dim, s.words * s.per, s.threads

    @device_function
    def take_queries(room, scratch, q_at, column_step, n_queries, scale, t):  # type: ignore[no-untyped-def]
        for i in range(t, padded * tile, threads):
            j, d, x = i // padded, i % padded, float32(0)
            if j < n_queries and d < dim:
                x = get(scratch, q_at + j // heads * column_step + j % heads * dim + d) * scale
            keep(room, d * tile + j, x)

    return take_queries


def make_place(s: Shape) -> Any:
    """Where K or V of a head begins for a span: its words, its scales, and from block to block of each; side: 0 for K,
    1 for V; words, scales: where the layer begins, from slot to slot, from block to block."""
    key_words, key_scales, blocks = BLOCK * s.words, BLOCK * s.scales, SPAN // BLOCK

    @device_function
    def place(slot, kv_head, side, span, words, scales):  # type: ignore[no-untyped-def]
        head, block = 2 * kv_head + side, span * blocks
        return (
            words[0] + slot * words[1] + block * words[2] + head * key_words,
            scales[0] + slot * scales[1] + block * scales[2] + head * key_scales,
            words[2], scales[2],
        )  # fmt: skip

    return place


def make_begin(s: Shape) -> Any:
    """What each query sees of the span at `base`; nothing, of those that the tile lacks."""
    tile, heads, stats_at, threads = s.tile, s.heads, s.stats_at, s.threads

    @device_function
    def begin(room, columns, column, n_queries, base, window, t):  # type: ignore[no-untyped-def]
        for j in range(t, tile, threads):
            first, end = int64(0), int64(0)
            if j < n_queries:
                position = int64(load(columns, 2 * MAX_COLUMNS + column + j // heads))
                first, end = seen(position, base, window)
            keep(room, stats_at + FIRST * tile + j, float32(first))
            keep(room, stats_at + END * tile + j, float32(end))

    return begin


@device_function
def seen(position, base, window):  # type: ignore[no-untyped-def]
    """First and end of what a query at `position` sees of the span at `base`; end <= first: nothing."""
    first = max(int64(0), position - window + 1 - base) if window else int64(0)
    return first, min(int64(SPAN), position + 1 - base)
