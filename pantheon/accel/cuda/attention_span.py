"""One tile of queries over one span of positions: what `attention` is made of.

Scores: a thread takes a position, and all queries of the tile.  Maxima, weights and their sums: a thread takes a query
and the positions of a residue.  Values: a thread takes a word of V, of some positions, for a few queries, so that each
word is read and unpacked once for all of them.  Every sum has an order of its own that no shape of a block changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import float32, int32, int64

from pantheon.accel.cuda.kv import BLOCK, DIMS, PARTIAL_HEAD, SCALED, SPAN, row_scales, row_words
from pantheon.accel.cuda.lowering import MAX_COLUMNS
from pantheon.accel.cuda.machine import (
    SIMULATED,
    as_float,
    device_function,
    exp2,
    fma,
    half_to_float,
    load,
)
from pantheon.plan.state_spec import KVType

#: of shared memory, so that sixteen bytes are read at a time; the simulator has no word for it
ALIGNMENT = None if SIMULATED else 16
#: partial maxima and partial sums of a query's weights over a span: position p goes to p % RESIDUES
RESIDUES = 16
#: sums of V in a thread's registers, and how many of them go through shared memory at a time
SUMS, ROUND = 32, 16
#: most words of V that threads take side by side, and most parts of a span that are summed apart
ABREAST, PARTS = 256, 16
#: of a query in shared memory: running maximum and sum, factors of the sum so far, of the span and, behind its last
#: span, of the result; first and end of what it sees of the span
MAXIMUM, TOTAL, OLD, NEW, LAST, FIRST, END, STATS = range(8)


@dataclass(frozen=True)
class Shape:
    """What a kernel is made for: a format, heads of `dim`, a tile of queries.  *_at: floats in shared memory."""

    kv_type: KVType
    dim: int
    tile: int
    threads: int

    @property
    def per(self) -> int:
        """Dims of a word."""
        return DIMS[self.kv_type]

    @property
    def words(self) -> int:
        """Words of a row."""
        return row_words(self.kv_type, self.dim)

    @property
    def scales(self) -> int:
        """Scales of a row."""
        return row_scales(self.kv_type, self.dim)

    @property
    def ahead(self) -> int:
        """Words of K that a thread asks for before it needs the first of them."""
        return math.gcd(8, self.words, SCALED // self.per if self.scales else 8)

    @property
    def parts(self) -> int:
        """Positions p with equal p % parts are summed by one thread, then the parts in order."""
        return max(1, min(PARTS, ABREAST // self.words))

    @property
    def items(self) -> int:
        """Words of V abreast."""
        return self.parts * self.words

    @property
    def held(self) -> int:
        """Items of a thread."""
        return -(-self.items // self.threads)

    @property
    def queries(self) -> int:
        """Queries whose sums of V are taken at a time."""
        return min(self.tile, SUMS // self.per)

    @property
    def sums(self) -> int:
        """Their sums of one item."""
        return self.queries * self.per

    @property
    def rows(self) -> int:
        """Of those, what goes through shared memory at a time."""
        return min(ROUND, self.sums)

    @property
    def stride(self) -> int:
        """Floats from position to position in the scores: sixteen bytes abreast meet no bank twice."""
        return self.tile if self.tile <= 4 else self.tile + 4

    @property
    def scores_at(self) -> int:
        """Behind the queries, [dims of whole words][tile]."""
        return self.words * self.per * self.tile

    @property
    def sums_at(self) -> int:
        """Behind the scores."""
        return self.scores_at + SPAN * self.stride

    @property
    def stats_at(self) -> int:
        """Behind the sums, where the partial maxima and sums of weights lie before."""
        return self.sums_at + max(self.rows * self.items, 2 * RESIDUES * self.tile)

    @property
    def floats(self) -> int:
        """All of it."""
        return self.stats_at + STATS * self.tile


@device_function
def of_32(word, e):  # type: ignore[no-untyped-def]
    """The float32 of a word."""
    return as_float(word)


@device_function
def of_16(word, e):  # type: ignore[no-untyped-def]
    """Float16 e of a word."""
    return half_to_float(word >> (16 * e))


@device_function
def of_8(word, e):  # type: ignore[no-untyped-def]
    """Byte e of a word, less 128: as the last bits of 2^23 it is a float without a conversion."""
    return as_float((word >> (8 * e)) & 255 | 0x4B000000) - float32(8388608 + 128)


@device_function
def of_4(word, e):  # type: ignore[no-untyped-def]
    """Four bits e of a word, less 8."""
    return as_float((word >> (4 * e)) & 15 | 0x4B000000) - float32(8388608 + 8)


_VALUE: dict[KVType, Callable[..., Any]] = {
    KVType.F32: of_32, KVType.F16: of_16, KVType.Q8_0: of_8, KVType.Q4_0: of_4
}  # fmt: skip


@device_function
def next_of(first, residue, modulus):  # type: ignore[no-untyped-def]
    """The least p >= first with p % modulus == residue."""
    p = first - first % modulus + residue
    return p if p >= first else p + modulus


def make_scores(s: Shape) -> Any:
    """Scores of all queries of the tile over positions lo … hi-1 of a span."""
    tile, per, words, stride, scores_at, threads = s.tile, s.per, s.words, s.stride, s.scores_at, s.threads
    scaled, blocks = s.scales > 0, max(1, s.scales)
    block = SCALED // per if scaled else words
    ahead, value = s.ahead, _VALUE[s.kv_type]

    @device_function
    def scores(room, kv, kv_scales, place, lo, hi, registers, t):  # type: ignore[no-untyped-def]
        k_at, scales_at, block_words, block_scales = place
        total, sums, loaded = registers
        for p in range(lo + t, hi, threads):
            at = k_at + p // BLOCK * block_words + p % BLOCK
            for j in range(tile):
                total[j] = float32(0)
            for b in range(blocks):
                for j in range(tile):
                    sums[j] = float32(0)
                for w in range(b * block, min(words, (b + 1) * block), ahead):
                    for i in range(ahead):
                        loaded[i] = load(kv, at + (w + i) * BLOCK)
                    for i in range(ahead):
                        for e in range(per):
                            x = value(loaded[i], e)
                            for j in range(tile):
                                sums[j] = fma(room[((w + i) * per + e) * tile + j], x, sums[j])
                scale = float32(1)
                if scaled:
                    half = load(kv_scales, scales_at + p // BLOCK * block_scales + b * BLOCK + p % BLOCK)
                    scale = half_to_float(int32(half))
                for j in range(tile):
                    total[j] = fma(sums[j], scale, total[j])
            for j in range(tile):
                room[scores_at + p * stride + j] = total[j]

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
            first, end = int(room[stats_at + FIRST * tile + j]), int(room[stats_at + END * tile + j])
            for p in range(next_of(first, i // tile, RESIDUES), end, RESIDUES):
                top = max(top, room[scores_at + p * stride + j])
            room[sums_at + i] = top

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
            first, end = int(room[stats_at + FIRST * tile + j]), int(room[stats_at + END * tile + j])
            for r in range(RESIDUES):
                top = max(top, room[sums_at + r * tile + j])
            for p in range(next_of(first, i // tile, RESIDUES), end, RESIDUES):
                weight = exp2(room[scores_at + p * stride + j] - top)
                room[scores_at + p * stride + j] = weight
                total += weight
            room[sums_at + tile * RESIDUES + i] = total

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
            top = max(top, room[sums_at + r * tile + j])
            total += room[sums_at + (RESIDUES + r) * tile + j]
        old, new = float32(0), float32(1)
        if not split and base > first_seen(position, window):
            top, old, new = joined(room[at + MAXIMUM * tile], top)
            total = fma(room[at + TOTAL * tile], old, total * new)
        if room[at + FIRST * tile] < room[at + END * tile]:
            room[at + MAXIMUM * tile] = top
            room[at + TOTAL * tile] = total
        room[at + OLD * tile] = old
        room[at + NEW * tile] = new
        room[at + LAST * tile] = float32(1) / total if position < base + SPAN else float32(1)

    return statistics


@device_function
def first_seen(position, window):  # type: ignore[no-untyped-def]
    """The first position that a query sees."""
    return max(int64(0), position - window + 1) if window else int64(0)


def _make_some(s: Shape, edge: bool) -> Any:
    """Weighted sums of V over positions begin … end-1 of one part, of word w of a row, of queries j0 …, in registers
    acc[to] …; edge: not all queries see all of them."""
    queries, per, words, scales, stride, tile = s.queries, s.per, s.words, s.scales, s.stride, s.tile
    parts, scores_at, stats_at, value = s.parts, s.scores_at, s.stats_at, _VALUE[s.kv_type]

    @device_function
    def some(room, kv, kv_scales, place, begin, end, j0, acc, x, to, part, w):  # type: ignore[no-untyped-def]
        v_at, scales_at, block_words, block_scales = place
        for p in range(next_of(begin, part, parts), end, parts):
            word = load(kv, v_at + p // BLOCK * block_words + p % BLOCK * words + w)
            for e in range(per):
                x[e] = value(word, e)
            scale = float32(1)
            if scales:
                at = scales_at + p // BLOCK * block_scales + p % BLOCK * scales + w * per // SCALED
                scale = half_to_float(int32(load(kv_scales, at)))
            for j in range(queries):
                at = stats_at + j0 + j
                if not edge or (room[at + FIRST * tile] <= p and p < room[at + END * tile]):
                    weight = room[scores_at + p * stride + j0 + j]
                    if scales:
                        weight *= scale
                    for e in range(per):
                        acc[to + j * per + e] = fma(weight, x[e], acc[to + j * per + e])

    return some


def make_values(s: Shape) -> Any:
    """Weighted sums of V of queries j0 …, over positions lo … hi-1 of a span, of which all queries see first … end-1.
    """
    words, parts, threads, sums, held = s.words, s.parts, s.threads, s.sums, s.held
    inner, outer = _make_some(s, False), _make_some(s, True)

    @device_function
    def values(room, kv, kv_scales, place, lo, first, end, hi, j0, acc, x, t):  # type: ignore[no-untyped-def]
        for i in range(held):
            part, w, to = (t + i * threads) // words, (t + i * threads) % words, i * sums
            for a in range(sums):
                acc[to + a] = float32(0)
            if part < parts:
                outer(room, kv, kv_scales, place, lo, first, j0, acc, x, to, part, w)
                inner(room, kv, kv_scales, place, first, end, j0, acc, x, to, part, w)
                outer(room, kv, kv_scales, place, end, hi, j0, acc, x, to, part, w)

    return values


@device_function
def taken_in(total, old, value, new):  # type: ignore[no-untyped-def]
    """A weighted sum of V with a span more; with a factor of 0 there is nothing before it."""
    return value * new if old == float32(0) else fma(total, old, value * new)


def make_put(s: Shape, split: bool) -> Any:
    """The sums of all parts, of registers first … of every item: to the partial sums, or into the results."""
    dim, tile, per, words, parts, items, threads = s.dim, s.tile, s.per, s.words, s.parts, s.items, s.threads
    sums_at, stats_at, rows, behind = s.sums_at, s.stats_at, s.rows, PARTIAL_HEAD if split else 0

    @device_function
    def put(room, scratch, to, steps, n_heads, n_queries, j0, first, t):  # type: ignore[no-untyped-def]
        for i in range(t, rows * words, threads):
            row, w = i // words, i % words
            j, d = j0 + (first + row) // per, w * per + (first + row) % per
            at = stats_at + j
            if j < n_queries and d < dim and room[at + FIRST * tile] < room[at + END * tile]:
                total = float32(0)
                for part in range(parts):
                    total += room[sums_at + row * items + part * words + w]
                at_out = to + j // n_heads * steps[0] + j % n_heads * steps[1] + d + behind
                if not split:
                    total = taken_in(scratch[at_out], room[at + OLD * tile], total, room[at + NEW * tile])
                    total *= room[at + LAST * tile]
                scratch[at_out] = total

    return put


def make_take_queries(s: Shape) -> Any:
    """Queries to shared memory, scaled; zeros for those that the tile lacks and for dims that a row lacks."""
    tile, dim, padded, threads = s.tile, s.dim, s.words * s.per, s.threads

    @device_function
    def take_queries(room, scratch, q_at, column_step, n_heads, n_queries, scale, t):  # type: ignore[no-untyped-def]
        for i in range(t, padded * tile, threads):
            j, d, x = i // padded, i % padded, float32(0)
            if j < n_queries and d < dim:
                x = scratch[q_at + j // n_heads * column_step + j % n_heads * dim + d] * scale
            room[d * tile + j] = x

    return take_queries


def make_begin(s: Shape) -> Any:
    """What each query sees of the span at `base`; nothing, of those that the tile lacks."""
    tile, stats_at, threads = s.tile, s.stats_at, s.threads

    @device_function
    def begin(room, columns, column, n_heads, n_queries, base, window, t):  # type: ignore[no-untyped-def]
        for j in range(t, tile, threads):
            first, end = int64(0), int64(0)
            if j < n_queries:
                position = int64(load(columns, 2 * MAX_COLUMNS + column + j // n_heads))
                first, end = seen(position, base, window)
            room[stats_at + FIRST * tile + j] = float32(first)
            room[stats_at + END * tile + j] = float32(end)

    return begin


@device_function
def seen(position, base, window):  # type: ignore[no-untyped-def]
    """First and end of what a query at `position` sees of the span at `base`; end <= first: nothing."""
    first = max(int64(0), position - window + 1 - base) if window else int64(0)
    return first, min(int64(SPAN), position + 1 - base)
