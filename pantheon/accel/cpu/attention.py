"""Causal attention over the cached keys and values of `kv`, and the merge of its partial sums.

Softmax runs online over blocks of positions (flash attention; Dao et al. 2022, Milakov & Gimelshein 2018).  Sums over
each SPAN of positions, counted from 0, stand alone and are merged in ascending order, whoever computed them: so one
query over a long context can be cut between threads, and a column's numbers depend on nothing but its own position.
A query is a (column, head): those that share a KV head pass over a block together, in register tiles, but each takes
the operations, in the order, that it would take alone.  Nothing behind a column's position is ever read into its
result: stale rows do not matter.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import float32

from pantheon.accel.cpu import cache
from pantheon.accel.cpu.fields import (
    C_BLOCK_BYTES,
    C_KV,
    C_PARTIALS,
    C_POSITIONS,
    C_SCRATCH,
    C_SCRATCH_BYTES,
    C_SLOT_BYTES,
    C_SLOTS,
    C_SPANS,
    O_A,
    O_B,
    O_C,
    O_D,
    O_E,
    O_F,
    O_N,
    O_OUT,
    O_OUT_BYTES,
    O_VALUE,
    O_X,
    O_X_BYTES,
    P_COLUMNS,
    P_PARTS,
    P_SPAN,
)  # fmt: skip
from pantheon.accel.cpu.grids import grid_fma, grid_load, grid_scale, grid_store
from pantheon.accel.cpu.kv import BLOCK, QUERIES, SCORES, SPAN, STATE, STATE_SUM, TILE, WIDTH
from pantheon.accel.cpu.tiles import tile_zero
from pantheon.accel.cpu.vec import (
    add,
    exp,
    fma,
    hmax,
    hsum,
    keep_lanes,
    ld_f32,
    ld_i32,
    ld_i64,
    load_f16,
    load_f32,
    mul,
    prefetch,
    splat,
    st_f32,
    st_i64,
    store_f32,
    sub,
    vmax,
)  # fmt: skip

#: bytes that tiles of few queries ask for ahead of their use: decode waits for memory; prefill has tiles of 6, and K
#: and V in a cache after the first of them
_AHEAD, _FEW = 1024, 3
#: vectors abreast by queries of a tile: 8 to 12 sums of 8 floats in flight, and no more than 16 registers
_ABREAST = {1: 4, 2: 2, 3: 1, 6: 1}


@cache.jit
def _step(dim):  # type: ignore[no-untyped-def]
    """Bytes of a query's softmax state."""
    return STATE + 4 * ((dim + 15) // 16 * 16)


@cache.jit
def softmax_step(scores, state, dim, lo, hi):  # type: ignore[no-untyped-def]
    """scores lo … hi-1 of a block become weights relative to the new maximum; maximum, sum and V's sum move on."""
    top = splat(float32(-np.inf))
    for i in range(lo // 16, (hi + 15) // 16):
        v = keep_lanes(load_f32(scores + 64 * i), lo - 16 * i, hi - 16 * i)
        store_f32(scores + 64 * i, v)
        top = vmax(v, top)
    before = ld_f32(state)
    after = max(before, hmax(top))
    m = splat(after)
    total = splat(float32(0))
    for i in range(lo // 16, (hi + 15) // 16):
        p = exp(sub(load_f32(scores + 64 * i), m))
        store_f32(scores + 64 * i, p)
        total = add(total, p)
    scale = exp(splat(before - after))
    st_f32(state, after)
    st_f32(state + STATE_SUM, ld_f32(state + STATE_SUM) * hmax(scale) + hsum(total))
    for j in range(STATE, _step(dim), 64):
        store_f32(state + j, mul(load_f32(state + j), scale))


@cache.jit
def copy_state(to, state, dim):  # type: ignore[no-untyped-def]
    """A query's first span."""
    for j in range(0, _step(dim), 64):
        store_f32(to + j, load_f32(state + j))


@cache.jit
def merge(total, state, dim):  # type: ignore[no-untyped-def]
    """total takes a later span in."""
    m, n = ld_f32(total), ld_f32(state)
    top = max(m, n)
    a, b = exp(splat(m - top)), exp(splat(n - top))
    st_f32(total, top)
    st_f32(total + STATE_SUM, ld_f32(total + STATE_SUM) * hmax(a) + ld_f32(state + STATE_SUM) * hmax(b))
    for j in range(STATE, _step(dim), 64):
        store_f32(total + j, fma(load_f32(total + j), a, mul(load_f32(state + j), b)))


@cache.jit
def _clip(position, base, window):  # type: ignore[no-untyped-def]
    """First and end of what a query at `position` sees of the block at `base`; first >= end: nothing."""
    lo = max(0, position - window + 1 - base) if window else 0
    return lo, min(BLOCK, position + 1 - base)


@cache.jit
def _ask(abreast, at, apart):  # type: ignore[no-untyped-def]
    """Prefetch what `abreast` vectors will need soon."""
    for i in range(abreast):
        prefetch(at + i * apart + _AHEAD, 64)


def _make_take_scores(FMT, N, A):  # type: ignore[no-untyped-def]
    NA, STEP = N * A, WIDTH[FMT]

    @cache.jit
    def take_scores(k, queries, scores, dim, last):  # type: ignore[no-untyped-def]
        """Scores of N queries over positions 0 … last-1 of the block, and of some behind that nobody looks at."""
        apart = dim * STEP
        for i in range(0, (last + 15) // 16, A):
            at, to = k + i * apart, scores + 64 * i
            if FMT >= 2:
                scales = k + BLOCK // 16 * apart + 32 * i
                for first in range(0, dim, 32):
                    f = tile_zero(NA)
                    for d in range(first, min(dim, first + 32), 1 if FMT == 2 else 2):
                        if N <= _FEW:
                            _ask(A, at + STEP * d, apart)
                        f = grid_fma(f, A, FMT, at + STEP * d, apart, queries + 4 * N * d, 4)
                        if FMT == 3:
                            f = grid_fma(f, A, 4, at + STEP * d, apart, queries + 4 * N * (d + 1), 4)
                    if first:
                        grid_scale(f, A, scales, to, 64, SCORES, 1)
                    else:
                        grid_scale(f, A, scales, to, 64, SCORES, 0)
                    scales += 2 * BLOCK
            else:
                f = tile_zero(NA)
                for d in range(dim):
                    if N <= _FEW:
                        _ask(A, at + STEP * d, apart)
                    f = grid_fma(f, A, FMT, at + STEP * d, apart, queries + 4 * N * d, 4)
                grid_store(f, A, to, 64, SCORES)

    return take_scores


def _make_add_values(FMT, N, A):  # type: ignore[no-untyped-def]
    STEP, VALUES = WIDTH[FMT], 5 if FMT == 3 else FMT
    A = min(A, 2) if FMT >= 2 else A  # vectors abreast share their scales

    @cache.jit
    def weights(scales, scores, lo, hi):  # type: ignore[no-untyped-def]
        """Quantised: the weights of positions lo … hi-1 times their values' scales."""
        spare = scores + TILE * SCORES
        for c in range(N):
            for i in range(lo // 16, (hi + 15) // 16):
                at = c * SCORES + 64 * i
                store_f32(spare + at, mul(load_f32(scores + at), load_f16(scales + 32 * i)))
        return spare

    @cache.jit
    def add_values(v, scores, out, dim, lo, hi):  # type: ignore[no-untyped-def]
        """N queries' sums at out, out + _step … go on over positions lo … hi-1."""
        step, vectors, w, apart = _step(dim), (dim + 15) // 16, scores, BLOCK * STEP
        j = 0
        while j + A <= vectors:
            if FMT >= 2:
                w = weights(v + apart * vectors + 2 * BLOCK * (j // 2), scores, lo, hi)
            f = grid_load(A, N, out + 64 * j, 64, step)
            for p in range(lo, hi):
                if N <= _FEW:
                    _ask(A, v + apart * j + STEP * p, apart)
                f = grid_fma(f, A, VALUES, v + apart * j + STEP * p, apart, w + 4 * p, SCORES)
            grid_store(f, A, out + 64 * j, 64, step)
            j += A
        while A > 1 and j < vectors:
            if FMT >= 2:
                w = weights(v + apart * vectors + 2 * BLOCK * (j // 2), scores, lo, hi)
            g = grid_load(1, N, out + 64 * j, 64, step)
            for p in range(lo, hi):
                g = grid_fma(g, 1, VALUES, v + apart * j + STEP * p, apart, w + 4 * p, SCORES)
            grid_store(g, 1, out + 64 * j, 64, step)
            j += 1

    return add_values


def _make_tile_block(FMT, N, add_alone):  # type: ignore[no-untyped-def]
    take_scores = _make_take_scores(FMT, N, _ABREAST[N])
    add_values = _make_add_values(FMT, N, _ABREAST[N])

    @cache.jit
    def tile_block(k, v, queries, states, positions, scores, dim, base, window):  # type: ignore[no-untyped-def]
        """N queries over the block of positions base …; positions that all see go through the tile, the others
        through the query alone, in ascending order."""
        step = _step(dim)
        first, end, last = 0, BLOCK, 0
        for c in range(N):
            lo, hi = _clip(ld_i64(positions + 8 * c), base, window)
            first, end = max(first, lo), min(end, hi)
            if lo < hi:
                last = max(last, hi)
        end = max(first, end)
        take_scores(k, queries, scores, dim, last)
        for c in range(N):
            lo, hi = _clip(ld_i64(positions + 8 * c), base, window)
            if lo < hi:
                softmax_step(scores + c * SCORES, states + c * step, dim, lo, hi)
        for side in range(2):  # before and behind what all see; one place of calls, where the code is inlined
            for c in range(N):
                lo, hi = _clip(ld_i64(positions + 8 * c), base, window)
                lo, hi = (max(lo, end), hi) if side else (lo, min(first, hi))
                if lo < hi:
                    add_alone(v, scores + c * SCORES, states + c * step + STATE, dim, lo, hi)
            if side == 0 and first < end:
                add_values(v, scores, states + STATE, dim, first, end)

    return tile_block


@cache.jit
def _width(left):  # type: ignore[no-untyped-def]
    """Queries of the next tile: 6, 3, 2 or 1, and no lone one of 4."""
    if left >= 6:
        return 6
    return 2 if left == 4 else min(left, 3)


def _make_block_pass(FMT):  # type: ignore[no-untyped-def]
    alone = _make_add_values(FMT, 1, _ABREAST[1])
    t1, t2, t3, t6 = (_make_tile_block(FMT, n, alone) for n in _ABREAST)

    @cache.jit
    def block_pass(k, v, n, queries, states, positions, scores, dim, base, window):  # type: ignore[no-untyped-def]
        """All n queries over one block, which stays in the first cache meanwhile."""
        t = 0
        while t < n:
            w = _width(n - t)
            q, s, p = queries + 4 * dim * t, states + _step(dim) * t, positions + 8 * t
            if w == 6:
                t6(k, v, q, s, p, scores, dim, base, window)
            elif w == 3:
                t3(k, v, q, s, p, scores, dim, base, window)
            elif w == 2:
                t2(k, v, q, s, p, scores, dim, base, window)
            else:
                t1(k, v, q, s, p, scores, dim, base, window)
            t += w

    return block_pass


@cache.jit
def _slot(ctx, column):  # type: ignore[no-untyped-def]
    return ld_i32(ld_i64(ctx + C_SLOTS) + 4 * column)


@cache.jit
def _position(ctx, column):  # type: ignore[no-untyped-def]
    return ld_i32(ld_i64(ctx + C_POSITIONS) + 4 * column)


@cache.jit
def _scratch(ctx, thread):  # type: ignore[no-untyped-def]
    return ld_i64(ctx + C_SCRATCH) + thread * ld_i64(ctx + C_SCRATCH_BYTES)


@cache.jit
def _take_queries(row, ctx, n, c0, nr, h0, queries, positions):  # type: ignore[no-untyped-def]
    """Queries of columns c0 … and heads h0 … h0+nr-1: scaled, interleaved in each tile, with their positions."""
    dim, scale = ld_i64(row + O_N), ld_f32(row + O_VALUE)
    t = 0
    while t < n:
        w = _width(n - t)
        for j in range(t, t + w):
            column = c0 + j // nr
            q = ld_i64(row + O_X) + column * ld_i64(row + O_X_BYTES) + 4 * dim * (h0 + j % nr)
            to = queries + 4 * (dim * t + j - t)
            for d in range(dim):
                st_f32(to + 4 * w * d, ld_f32(q + 4 * d) * scale)
            st_i64(positions + 8 * j, _position(ctx, column))
        t += w


@cache.jit
def _put(row, column, head, total, first, end):  # type: ignore[no-untyped-def]
    """Dims first … end-1 of a head: the weighted sum divided by the sum of the weights."""
    dim = ld_i64(row + O_N)
    out = ld_i64(row + O_OUT) + column * ld_i64(row + O_OUT_BYTES) + 4 * dim * head
    inverse = float32(1) / ld_f32(total + STATE_SUM)
    for d in range(first, end):
        st_f32(out + 4 * d, ld_f32(total + STATE + 4 * d) * inverse)


@cache.jit
def _partial(ctx, row, column, head, span):  # type: ignore[no-untyped-def]
    """Where the partial sums of a query's span lie."""
    at = (column * ld_i64(row + O_D) * ld_i64(row + O_C) + head) * ld_i64(ctx + C_SPANS) + span
    return ld_i64(ctx + C_PARTIALS) + at * _step(ld_i64(row + O_N))


@cache.jit
def _first_seen(position, window):  # type: ignore[no-untyped-def]
    return max(0, position - window + 1) if window else 0


def _make_attend(FMT):  # type: ignore[no-untyped-def]
    block_pass = _make_block_pass(FMT)

    @cache.jit
    def span_pass(row, ctx, n, kv, span, queries, states, positions, scores):  # type: ignore[no-untyped-def]
        """n queries of one slot, whose K and V of block 0 lie at kv, over the positions of one span."""
        dim, window = ld_i64(row + O_N), ld_i64(row + O_E)
        least, most = ld_i64(positions), ld_i64(positions)
        for j in range(n):
            least, most = min(least, ld_i64(positions + 8 * j)), max(most, ld_i64(positions + 8 * j))
            state = states + j * _step(dim)
            st_f32(state, float32(-np.inf))
            st_f32(state + STATE_SUM, float32(0))
            for d in range(STATE, _step(dim), 64):
                store_f32(state + d, splat(float32(0)))
        first = max(span * SPAN, _first_seen(least, window)) // BLOCK
        for b in range(first, min((span + 1) * SPAN - 1, most) // BLOCK + 1):
            k = kv + b * ld_i64(ctx + C_BLOCK_BYTES)
            prefetch(k + ld_i64(ctx + C_BLOCK_BYTES), _AHEAD)
            block_pass(k, k + ld_i64(row + O_F), n, queries, states, positions, scores, dim, b * BLOCK, window)

    @cache.kernel
    def attend(row, ctx, thread, item, unused, phase):  # type: ignore[no-untyped-def]
        """An item: some columns and one KV head, or a part of its heads; of all spans or, with C_SPANS, of one."""
        dim, window = ld_i64(row + O_N), ld_i64(row + O_E)
        kv_heads, group, step = ld_i64(row + O_D), ld_i64(row + O_C), _step(dim)
        queries = _scratch(ctx, thread)
        states = queries + 4 * QUERIES * dim
        totals = states + QUERIES * step
        positions = totals + QUERIES * step
        scores = positions + QUERIES * 8
        split = ld_i64(ctx + C_SPANS)
        only = item % split if split else 0
        item = item // split if split else item
        parts, width = ld_i64(phase + P_PARTS), ld_i64(phase + P_SPAN)
        part, kv_head = item % parts, item // parts % kv_heads
        column = item // parts // kv_heads * width
        behind = min(column + width, ld_i64(phase + P_COLUMNS))
        h0 = kv_head * group + group * part // parts
        nr = kv_head * group + group * (part + 1) // parts - h0
        while column < behind:
            slot, more = _slot(ctx, column), 1
            least, most = _position(ctx, column), _position(ctx, column)
            while column + more < behind and _slot(ctx, column + more) == slot:
                position = _position(ctx, column + more)
                least, most, more = min(least, position), max(most, position), more + 1
            kv = ld_i64(ctx + C_KV) + slot * ld_i64(ctx + C_SLOT_BYTES) + ld_i64(row + O_A)
            kv += kv_head * ld_i64(row + O_B)
            first, last = _first_seen(least, window) // SPAN, most // SPAN
            if split:
                first, last = max(first, only), min(last, only)
            n = more * nr
            if first <= last:
                _take_queries(row, ctx, n, column, nr, h0, queries, positions)
            for span in range(first, last + 1):
                span_pass(row, ctx, n, kv, span, queries, states, positions, scores)
                for j in range(n):
                    position, state = ld_i64(positions + 8 * j), states + j * step
                    start = _first_seen(position, window) // SPAN
                    if start <= span <= position // SPAN:
                        if split:
                            copy_state(_partial(ctx, row, column + j // nr, h0 + j % nr, span), state, dim)
                        elif span == start:
                            copy_state(totals + j * step, state, dim)
                        else:
                            merge(totals + j * step, state, dim)
            if not split:
                for j in range(n):
                    _put(row, column + j // nr, h0 + j % nr, totals + j * step, 0, dim)
            column += more

    return attend


def _make_combine():  # type: ignore[no-untyped-def]
    @cache.kernel
    def combine(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """Partial sums to results, where there are any: blocks of 32 floats of this part of a column."""
        if ld_i64(ctx + C_SPANS) == 0:
            return
        dim, window, parts = ld_i64(row + O_N), ld_i64(row + O_E), ld_i64(phase + P_PARTS)
        width = dim * ld_i64(row + O_C) * ld_i64(row + O_D)
        blocks = (width + 31) // 32
        begin, end = 32 * (blocks * part // parts), min(width, 32 * (blocks * (part + 1) // parts))
        position, total = _position(ctx, column), _scratch(ctx, thread)
        start = _first_seen(position, window) // SPAN
        for head in range(begin // dim, (end + dim - 1) // dim):
            copy_state(total, _partial(ctx, row, column, head, start), dim)
            for span in range(start + 1, position // SPAN + 1):
                merge(total, _partial(ctx, row, column, head, span), dim)
            _put(row, column, head, total, max(0, begin - dim * head), min(dim, end - dim * head))

    return combine


@functools.cache
def kernel(name: str, fmt: int = 0) -> int:
    """The address of "attend" for a format of kv.FORMATS, or of "combine"."""
    made: int = _make_attend(fmt) if name == "attend" else _make_combine()
    return made
