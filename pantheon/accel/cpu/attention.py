"""KV store and causal attention.

KV of one slot and layer: K [kv_heads][rows/16][dim][16 positions], V [kv_heads][rows][dim padded to 16], rows a
multiple of BLOCK.  Sixteen scores come from `dim` FMAs with no horizontal sums.

Softmax runs online over blocks of BLOCK positions counted from position 0 (flash attention; Dao et al. 2022,
Milakov & Gimelshein 2018), so a column's numbers depend on nothing but its own position: four queries share one pass
over K and V, but each takes the operations, in the order, that it would take alone.
Nothing behind a column's position is ever read into its result: stale rows do not matter.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import float32

from pantheon.accel.cpu import cache
from pantheon.accel.cpu.arena import round_up
from pantheon.accel.cpu.fields import (
    C_KV,
    C_POSITIONS,
    C_ROWS,
    C_SCRATCH,
    C_SCRATCH_BYTES,
    C_SLOT_BYTES,
    C_SLOTS,
    O_A,
    O_B,
    O_C,
    O_D,
    O_E,
    O_N,
    O_OUT,
    O_OUT_BYTES,
    O_VALUE,
    O_X,
    O_X_BYTES,
    O_Y,
    O_Y_BYTES,
    P_COLUMNS,
    P_PARTS,
    P_SPAN,
)  # fmt: skip
from pantheon.accel.cpu.tiles import tile_fma, tile_load, tile_store, tile_zero
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
    ld_u16,
    load_f16,
    load_f32,
    mul,
    splat,
    st_f32,
    st_i64,
    st_u16,
    store_f16,
    store_f32,
    sub,
    vmax,
)  # fmt: skip

#: positions of one step of the online softmax
BLOCK = 64
#: queries that share one pass over K and V
QUERIES = 4

# Per-thread scratch: queries [dim][QUERIES], scores [QUERIES][BLOCK], then for each query {max, sum, correction} and
# the weighted sum of V.
_SCORES, _STATE, _CORRECTION = 4 * BLOCK, 64, 8


def scratch_bytes(dim: int) -> int:
    """What one thread needs for heads of `dim`."""
    return 4 * QUERIES * dim + QUERIES * _SCORES + QUERIES * (_STATE + 4 * round_up(dim, 16)) + 256


@cache.jit
def softmax_step(scores, state, lo, hi):  # type: ignore[no-untyped-def]
    """scores lo … hi-1 of a block become weights relative to the new maximum; max, sum and correction move on."""
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
    correction = hmax(exp(splat(before - after)))
    st_f32(state, after)
    st_f32(state + 4, ld_f32(state + 4) * correction + hsum(total))
    st_f32(state + _CORRECTION, correction)


@cache.jit
def _clip(position, base, window):  # type: ignore[no-untyped-def]
    """First and end of what a query at `position` sees of the block at `base`; first >= end: nothing."""
    lo = max(0, position - window + 1 - base) if window else 0
    return lo, min(BLOCK, position + 1 - base)


def _make_add_values(HALF):  # type: ignore[no-untyped-def]
    SIZE = 2 if HALF else 4

    @cache.jit
    def add_values(v, scores, o, dim, j, lo, hi):  # type: ignore[no-untyped-def]
        """One query's 16 sums at o over positions lo … hi-1."""
        padded = (dim + 15) // 16 * 16
        f = load_f32(o)
        for p in range(lo, hi):
            at = v + (p * padded + j) * SIZE
            f = fma(load_f16(at) if HALF else load_f32(at), splat(ld_f32(scores + 4 * p)), f)
        store_f32(o, f)

    return add_values


_add_f32, _add_f16 = _make_add_values(0), _make_add_values(1)


def _make_tile_block(HALF):  # type: ignore[no-untyped-def]
    SIZE = 2 if HALF else 4

    @cache.jit
    def tile_block(k, v, queries, scores, states, dim, n, bounds):  # type: ignore[no-untyped-def]
        """Up to QUERIES queries over the block at k, v; bounds: (lo, hi) of each, what it sees of the block.

        Positions that all see go through the tile, the others through the query alone, in ascending order.
        """
        padded = (dim + 15) // 16 * 16
        step = _STATE + 4 * padded
        first, end, last = 0, BLOCK, 0
        for c in range(n):
            lo, hi = ld_i64(bounds + 16 * c), ld_i64(bounds + 16 * c + 8)
            first, end, last = max(first, lo), min(end, hi), max(last, hi)
        end = max(first, end)
        for i in range((last + 15) // 16):
            f = tile_zero(QUERIES)
            at = k + i * dim * 16 * SIZE
            for d in range(dim):
                x = load_f16(at + 16 * SIZE * d) if HALF else load_f32(at + 16 * SIZE * d)
                f = tile_fma(f, x, queries + 4 * QUERIES * d, 4)
            tile_store(f, scores + 64 * i, _SCORES)
        for c in range(n):
            lo, hi, state = ld_i64(bounds + 16 * c), ld_i64(bounds + 16 * c + 8), states + c * step
            if lo < hi:
                softmax_step(scores + c * _SCORES, state, lo, hi)
                scale = splat(ld_f32(state + _CORRECTION))
                for j in range(0, padded, 16):
                    o = state + _STATE + 4 * j
                    store_f32(o, mul(load_f32(o), scale))
                    if lo < first:
                        if HALF:
                            _add_f16(v, scores + c * _SCORES, o, dim, j, lo, min(first, hi))
                        else:
                            _add_f32(v, scores + c * _SCORES, o, dim, j, lo, min(first, hi))
        for j in range(0, padded, 16):
            o = states + _STATE + 4 * j
            f = tile_load(QUERIES, o, step)
            for p in range(first, end):
                at = v + (p * padded + j) * SIZE
                f = tile_fma(f, load_f16(at) if HALF else load_f32(at), scores + 4 * p, _SCORES)
            tile_store(f, o, step)
            for c in range(n):
                lo, hi = ld_i64(bounds + 16 * c), ld_i64(bounds + 16 * c + 8)
                if hi > end:
                    if HALF:
                        _add_f16(v, scores + c * _SCORES, o + c * step, dim, j, max(lo, end), hi)
                    else:
                        _add_f32(v, scores + c * _SCORES, o + c * step, dim, j, max(lo, end), hi)

    return tile_block


def _make_one_block(HALF):  # type: ignore[no-untyped-def]
    SIZE = 2 if HALF else 4

    @cache.jit
    def one_block(k, v, queries, scores, state, dim, lo, hi):  # type: ignore[no-untyped-def]
        """One query over positions lo … hi-1: the same sums as in tile_block, four vectors abreast to hide latency.

        All 64 scores are taken; softmax_step looks at lanes lo … hi-1 only, whatever lies in the others.
        """
        padded = (dim + 15) // 16 * 16
        zero = splat(float32(0))
        a0, a1, a2, a3 = zero, zero, zero, zero
        apart = dim * 16 * SIZE
        for d in range(dim):
            q, at = splat(ld_f32(queries + 4 * QUERIES * d)), k + 16 * SIZE * d
            a0 = fma(load_f16(at) if HALF else load_f32(at), q, a0)
            a1 = fma(load_f16(at + apart) if HALF else load_f32(at + apart), q, a1)
            a2 = fma(load_f16(at + 2 * apart) if HALF else load_f32(at + 2 * apart), q, a2)
            a3 = fma(load_f16(at + 3 * apart) if HALF else load_f32(at + 3 * apart), q, a3)
        store_f32(scores, a0)
        store_f32(scores + 64, a1)
        store_f32(scores + 128, a2)
        store_f32(scores + 192, a3)
        softmax_step(scores, state, lo, hi)
        scale = splat(ld_f32(state + _CORRECTION))
        j = 0
        while j + 64 <= padded:
            o = state + _STATE + 4 * j
            a0, a1 = mul(load_f32(o), scale), mul(load_f32(o + 64), scale)
            a2, a3 = mul(load_f32(o + 128), scale), mul(load_f32(o + 192), scale)
            for p in range(lo, hi):
                w, at = splat(ld_f32(scores + 4 * p)), v + (p * padded + j) * SIZE
                a0 = fma(load_f16(at) if HALF else load_f32(at), w, a0)
                a1 = fma(load_f16(at + 16 * SIZE) if HALF else load_f32(at + 16 * SIZE), w, a1)
                a2 = fma(load_f16(at + 32 * SIZE) if HALF else load_f32(at + 32 * SIZE), w, a2)
                a3 = fma(load_f16(at + 48 * SIZE) if HALF else load_f32(at + 48 * SIZE), w, a3)
            store_f32(o, a0)
            store_f32(o + 64, a1)
            store_f32(o + 128, a2)
            store_f32(o + 192, a3)
            j += 64
        while j < padded:
            o = state + _STATE + 4 * j
            a0 = mul(load_f32(o), scale)
            for p in range(lo, hi):
                at = v + (p * padded + j) * SIZE
                a0 = fma(load_f16(at) if HALF else load_f32(at), splat(ld_f32(scores + 4 * p)), a0)
            store_f32(o, a0)
            j += 16

    return one_block


_f32_1, _f32_4, _f16_1, _f16_4 = _make_one_block(0), _make_tile_block(0), _make_one_block(1), _make_tile_block(1)


@cache.jit
def _where(ctx, slot, unit, head, dim_bytes):  # type: ignore[no-untyped-def]
    """Address of one head's K or V: `unit` bytes a position lie before this layer's part of the slot."""
    rows = ld_i64(ctx + C_ROWS)
    return ld_i64(ctx + C_KV) + slot * ld_i64(ctx + C_SLOT_BYTES) + rows * (unit + head * dim_bytes)


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
def _take_queries(row, ctx, first, n, c0, nr, r0, head, queries, states):  # type: ignore[no-untyped-def]
    """Queries first … of a work item, scaled and interleaved, and fresh softmax states.  A query is (column, head)."""
    dim, group = ld_i64(row + O_N), ld_i64(row + O_C)
    scale = ld_f32(row + O_VALUE)
    step = _STATE + 4 * ((dim + 15) // 16 * 16)
    for j in range(n):
        column = c0 + (first + j) // nr
        q = ld_i64(row + O_X) + column * ld_i64(row + O_X_BYTES)
        q += 4 * dim * (head * group + r0 + (first + j) % nr)
        for d in range(dim):
            st_f32(queries + 4 * (QUERIES * d + j), ld_f32(q + 4 * d) * scale)
        st_f32(states + j * step, float32(-np.inf))
        st_f32(states + j * step + 4, float32(0))
        for d in range(0, dim, 16):
            store_f32(states + j * step + _STATE + 4 * d, splat(float32(0)))


@cache.jit
def _put_results(row, first, n, c0, nr, r0, head, states):  # type: ignore[no-untyped-def]
    """The weighted sums, divided by the sum of the weights."""
    dim, group = ld_i64(row + O_N), ld_i64(row + O_C)
    step = _STATE + 4 * ((dim + 15) // 16 * 16)
    for j in range(n):
        out = ld_i64(row + O_OUT) + (c0 + (first + j) // nr) * ld_i64(row + O_OUT_BYTES)
        out += 4 * dim * (head * group + r0 + (first + j) % nr)
        state = states + j * step
        inverse = float32(1) / ld_f32(state + 4)
        for d in range(dim):
            st_f32(out + 4 * d, ld_f32(state + _STATE + 4 * d) * inverse)


def _make_attend(HALF):  # type: ignore[no-untyped-def]
    SIZE = 2 if HALF else 4

    @cache.kernel
    def attend(row, ctx, thread, item, unused, phase):  # type: ignore[no-untyped-def]
        dim, window = ld_i64(row + O_N), ld_i64(row + O_E)
        kv_heads, group = ld_i64(row + O_D), ld_i64(row + O_C)
        parts, span = ld_i64(phase + P_PARTS), ld_i64(phase + P_SPAN)
        padded = (dim + 15) // 16 * 16
        step = _STATE + 4 * padded
        queries = _scratch(ctx, thread)
        scores = queries + 4 * QUERIES * dim
        states = scores + QUERIES * _SCORES
        bounds = states + QUERIES * step
        part, head = item % parts, item // parts % kv_heads
        c0 = item // parts // kv_heads * span
        r0 = group * part // parts
        nr = group * (part + 1) // parts - r0
        total = min(span, ld_i64(phase + P_COLUMNS) - c0) * nr
        first = 0
        while first < total:
            slot, n = _slot(ctx, c0 + first // nr), 1
            while n < QUERIES and first + n < total and _slot(ctx, c0 + (first + n) // nr) == slot:
                n += 1
            _take_queries(row, ctx, first, n, c0, nr, r0, head, queries, states)
            least, most = _position(ctx, c0 + first // nr), _position(ctx, c0 + (first + n - 1) // nr)
            k = _where(ctx, slot, ld_i64(row + O_A), head, dim * SIZE)
            v = _where(ctx, slot, ld_i64(row + O_B), head, padded * SIZE)
            start = max(0, least - window + 1) if window else 0
            for b in range(start // BLOCK, most // BLOCK + 1):
                base = b * BLOCK
                kb, vb = k + base * dim * SIZE, v + base * padded * SIZE
                for j in range(n):
                    lo, hi = _clip(_position(ctx, c0 + (first + j) // nr), base, window)
                    st_i64(bounds + 16 * j, lo)
                    st_i64(bounds + 16 * j + 8, hi)
                if n > 1:
                    if HALF:
                        _f16_4(kb, vb, queries, scores, states, dim, n, bounds)
                    else:
                        _f32_4(kb, vb, queries, scores, states, dim, n, bounds)
                elif HALF:
                    _f16_1(kb, vb, queries, scores, states, dim, ld_i64(bounds), ld_i64(bounds + 8))
                else:
                    _f32_1(kb, vb, queries, scores, states, dim, ld_i64(bounds), ld_i64(bounds + 8))
            _put_results(row, first, n, c0, nr, r0, head, states)
            first += n

    return attend


def _make_store(HALF):  # type: ignore[no-untyped-def]
    SIZE = 2 if HALF else 4

    @cache.kernel
    def store_kv(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """O_X: k, O_Y: v; the padding of a V row stays zero, as it was mapped."""
        dim, kv_heads = ld_i64(row + O_N), ld_i64(row + O_D)
        padded = (dim + 15) // 16 * 16
        slot, position = _slot(ctx, column), _position(ctx, column)
        x = ld_i64(row + O_X) + column * ld_i64(row + O_X_BYTES)
        y = ld_i64(row + O_Y) + column * ld_i64(row + O_Y_BYTES)
        tmp = _scratch(ctx, thread)
        whole = dim // 16 * 16
        for head in range(kv_heads):
            k = _where(ctx, slot, ld_i64(row + O_A), head, dim * SIZE)
            k += (position // 16 * dim * 16 + position % 16) * SIZE
            v = _where(ctx, slot, ld_i64(row + O_B), head, padded * SIZE) + position * padded * SIZE
            if HALF:
                for d in range(0, dim, 16):  # rows are padded, so reading on is safe
                    store_f16(tmp + 2 * d, load_f32(x + 4 * d))
                    store_f16(tmp + 2 * padded + 2 * d, load_f32(y + 4 * d))
                for d in range(dim):
                    st_u16(k + 32 * d, ld_u16(tmp + 2 * d))
                for d in range(dim):
                    st_u16(v + 2 * d, ld_u16(tmp + 2 * padded + 2 * d))
            else:
                for d in range(dim):
                    st_f32(k + 64 * d, ld_f32(x + 4 * d))
                for d in range(0, whole, 16):
                    store_f32(v + 4 * d, load_f32(y + 4 * d))
                for d in range(whole, dim):
                    st_f32(v + 4 * d, ld_f32(y + 4 * d))
            x += 4 * dim
            y += 4 * dim

    return store_kv


@functools.cache
def kernel(name: str, half: bool) -> int:
    """The address of "attend" or "store" for an F16 or F32 cache."""
    made: int = {"attend": _make_attend, "store": _make_store}[name](int(half))
    return made
