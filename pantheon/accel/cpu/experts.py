"""Mixtures of experts: routing, and products whose matrix depends on the column.

A column is routed to k of E experts.  `dispatch` sorts the (column, choice) pairs by expert into a table; `spread`
copies each pair's input to its place there, in tiles of the width that its expert's share of columns asks for; a unit
of work is one row group of one expert that has columns, whose products the ordinary kernels compute in a staging area
of the thread, from where they go to their columns.  A pair's numbers do not depend on who shares its expert.

The table, int64: pairs placed, experts in use; then for each of those expert, first place, columns, tile; for each pair
its place, the first place and the tile of its expert; for each place its pair.
"""

from __future__ import annotations

import functools

from numba import float32

from pantheon.accel.cpu import cache
from pantheon.accel.cpu.expert_table import PAIR, PLACE_WORDS, PRIVATE_BYTES, STEP, T_USED, USED, USED_BYTES
from pantheon.accel.cpu.fields import (
    C_ACT,
    C_MAX_TILE,
    C_SCRATCH,
    C_SCRATCH_BYTES,
    CONTEXT_WORDS,
    O_A,
    O_B,
    O_C,
    O_D,
    O_E,
    O_F,
    O_FN,
    O_G,
    O_GROUPS,
    O_H,
    O_N,
    O_OUT,
    O_OUT_BYTES,
    O_X,
    O_X_BYTES,
    O_Y,
    O_Y_BYTES,
    OP_WORDS,
    P_COLUMNS,
)  # fmt: skip
from pantheon.accel.cpu.layouts import ACT_BYTES, ROWS
from pantheon.accel.cpu.pointwise import quantise_block
from pantheon.accel.cpu.vec import (
    call_op,
    exp,
    fma,
    hmax,
    ld_f32,
    ld_i64,
    load_f32,
    splat,
    st_f32,
    st_i64,
    store_f32,
)  # fmt: skip


@cache.jit
def _exp1(x):  # type: ignore[no-untyped-def]
    return hmax(exp(splat(x)))


def _route():  # type: ignore[no-untyped-def]
    @cache.kernel
    def route(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """The O_B likeliest of O_N experts, in order, lower ids first among equals, and their shares: softmax over all,
        divided by the sum of those chosen."""
        logits = ld_i64(row + O_X) + column * ld_i64(row + O_X_BYTES)
        chosen = ld_i64(row + O_OUT) + column * ld_i64(row + O_OUT_BYTES)
        shares = ld_i64(row + O_Y) + column * ld_i64(row + O_Y_BYTES)
        n, k = ld_i64(row + O_N), ld_i64(row + O_B)
        last, last_id, top = float32(0), -1, float32(0)
        for j in range(k):
            best, best_id = float32(0), -1
            for e in range(n):
                v = ld_f32(logits + 4 * e)
                after = j == 0 or v < last or (v == last and e > last_id)
                if after and (best_id < 0 or v > best):
                    best, best_id = v, e
            if best_id < 0:  # logits that are no numbers
                best_id = j
            if j == 0:
                top = best
            last, last_id = best, best_id
            st_f32(chosen + 4 * j, float32(best_id))
            st_f32(shares + 4 * j, _exp1(best - top))
        whole, mine = float32(0), float32(0)
        for e in range(n):
            whole += _exp1(ld_f32(logits + 4 * e) - top)
        for j in range(k):
            mine += ld_f32(shares + 4 * j)
        factor = float32(1) / max(mine, float32(6.103515625e-5) * whole)
        for j in range(k):
            st_f32(shares + 4 * j, ld_f32(shares + 4 * j) * factor)

    return route


def _dispatch():  # type: ignore[no-untyped-def]
    @cache.kernel
    def dispatch(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """Write the table at O_A for all columns; the chunk of column 0 does it.  O_N experts, O_B choices;
        O_E, O_C and O_D: where counts, pairs and places begin."""
        if column == 0:
            table, n, k = ld_i64(row + O_A), ld_i64(row + O_N), ld_i64(row + O_B)
            pairs, places = table + ld_i64(row + O_C), table + ld_i64(row + O_D)
            counts, columns, most = table + ld_i64(row + O_E), ld_i64(phase + P_COLUMNS), ld_i64(ctx + C_MAX_TILE)
            for e in range(n):
                st_i64(counts + 8 * e, 0)
            for c in range(columns):
                at = ld_i64(row + O_X) + c * ld_i64(row + O_X_BYTES)
                for j in range(k):
                    e = min(max(int(ld_f32(at + 4 * j)), 0), n - 1)
                    st_i64(pairs + (c * k + j) * PLACE_WORDS * 8, e)
                    st_i64(counts + 8 * e, ld_i64(counts + 8 * e) + 1)
            used, place = 0, 0
            for e in range(n):
                count = ld_i64(counts + 8 * e)
                if count > 0:
                    tile = 0
                    while (1 << tile) < count and tile < most:
                        tile += 1
                    at = table + USED + used * USED_BYTES
                    st_i64(at, e)
                    st_i64(at + 8, place)
                    st_i64(at + 16, count)
                    st_i64(at + 24, tile)
                    st_i64(counts + 8 * e, used)
                    used += 1
                    place += ((count + (1 << tile) - 1) >> tile) << tile
            st_i64(table + T_USED, used)
            _fill(table, pairs, places, counts, columns * k)

    return dispatch


@cache.jit
def _fill(table, pairs, places, counts, n):  # type: ignore[no-untyped-def]
    """Each pair's place, in the order of the pairs; the count of an expert in use is rebuilt on the way."""
    for u in range(ld_i64(table + T_USED)):
        st_i64(table + USED + u * USED_BYTES + 16, 0)
    for i in range(n):
        pair = pairs + i * PLACE_WORDS * 8
        used = table + USED + ld_i64(counts + 8 * ld_i64(pair)) * USED_BYTES
        first, done = ld_i64(used + 8), ld_i64(used + 16)
        st_i64(used + 16, done + 1)
        st_i64(pair, first + done)
        st_i64(pair + 8, first)
        st_i64(pair + 16, ld_i64(used + 24))
        st_i64(places + 8 * (first + done), i)


def _spread(FLOATS):  # type: ignore[no-untyped-def]
    @cache.kernel
    def spread(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """The input of each of a column's O_B pairs to its place behind O_OUT, as O_N blocks of int8 or O_N floats;
        O_C: bytes from one pair's input to the next (0: they share one), O_A: the pairs."""
        k, n = ld_i64(row + O_B), ld_i64(row + O_N)
        x = ld_i64(row + O_X) + column * ld_i64(row + O_X_BYTES)
        for j in range(k):
            pair = ld_i64(row + O_A) + (column * k + j) * PLACE_WORDS * 8
            place, first, tile = ld_i64(pair), ld_i64(pair + 8), ld_i64(pair + 16)
            if FLOATS:
                to = ld_i64(row + O_OUT) + place * ld_i64(row + O_OUT_BYTES)
                for i in range(0, n // 16 * 16, 16):
                    store_f32(to + 4 * i, load_f32(x + 4 * i))
                for i in range(n // 16 * 16, n):
                    st_f32(to + 4 * i, ld_f32(x + 4 * i))
            else:
                lane = (place - first) & ((1 << tile) - 1)
                to = ld_i64(row + O_OUT) + (place - lane) * n * ACT_BYTES
                for i in range(n):
                    quantise_block(x + 128 * i, to + (i * ACT_BYTES << tile), lane, 1 << tile)
            x += ld_i64(row + O_C)

    return spread


def _mix():  # type: ignore[no-untyped-def]
    @cache.kernel
    def mix(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """out += the sum of O_B parts of x, O_N floats each, times their shares at O_Y, in the order of the choices."""
        n, k = ld_i64(row + O_N), ld_i64(row + O_B)
        x = ld_i64(row + O_X) + column * ld_i64(row + O_X_BYTES)
        out = ld_i64(row + O_OUT) + column * ld_i64(row + O_OUT_BYTES)
        shares = ld_i64(row + O_Y) + column * ld_i64(row + O_Y_BYTES)
        for i in range(0, n // 16 * 16, 16):
            v = load_f32(out + 4 * i)
            for j in range(k):
                v = fma(splat(ld_f32(shares + 4 * j)), load_f32(x + 4 * (j * n + i)), v)
            store_f32(out + 4 * i, v)
        for i in range(n // 16 * 16, n):
            w = ld_f32(out + 4 * i)
            for j in range(k):
                w += ld_f32(shares + 4 * j) * ld_f32(x + 4 * (j * n + i))
            st_f32(out + 4 * i, w)

    return mix


# ---- products: called by the team's walk --------------------------------------------------------------------------


@cache.jit
def units(first):  # type: ignore[no-untyped-def]
    """Units of work of an expert phase now: row groups of one matrix, for each expert in use."""
    return ld_i64(ld_i64(first + O_G) + T_USED) * ld_i64(first + O_GROUPS)


@cache.jit
def run_units(row, ctx, thread, lo, hi):  # type: ignore[no-untyped-def]
    """Units lo … hi-1 of one op: some groups of one expert at a time."""
    groups, table = ld_i64(row + O_GROUPS), ld_i64(row + O_G)
    while lo < hi:
        g0 = lo % groups
        g1 = min(g0 + STEP, groups, g0 + hi - lo)
        _product(row, ctx, thread, table + USED + lo // groups * USED_BYTES, g0, g1)
        lo += g1 - g0


@cache.jit
def _product(row, ctx, thread, used, g0, g1):  # type: ignore[no-untyped-def]
    """Row groups g0 … g1-1 of one expert times its columns: the ordinary kernel on private copies of its operands."""
    expert, first, count, tile = ld_i64(used), ld_i64(used + 8), ld_i64(used + 16), ld_i64(used + 24)
    # the front of the scratch is the kernel's own
    mine = ld_i64(ctx + C_SCRATCH) + thread * ld_i64(ctx + C_SCRATCH_BYTES) + PRIVATE_BYTES
    own_ctx, own_phase = mine + 8 * OP_WORDS, mine + 8 * OP_WORDS + 8 * CONTEXT_WORDS
    staging = mine + 2 * PRIVATE_BYTES
    for i in range(OP_WORDS):
        st_i64(mine + 8 * i, ld_i64(row + 8 * i))
    for i in range(CONTEXT_WORDS):
        st_i64(own_ctx + 8 * i, ld_i64(ctx + 8 * i))
    st_i64(own_phase + P_COLUMNS, count)
    st_i64(mine + O_A, ld_i64(row + O_A) + expert * ld_i64(row + O_E))
    st_i64(mine + O_B, ld_i64(row + O_B) + expert * ld_i64(row + O_F))
    st_i64(mine + O_X, ld_i64(row + O_X) + first * ld_i64(row + O_X_BYTES))
    st_i64(own_ctx + C_ACT, ld_i64(row + O_Y) + first * ld_i64(row + O_N) * ACT_BYTES)
    stride = 4 * ROWS * STEP
    st_i64(mine + O_OUT, staging - 4 * ROWS * g0)
    st_i64(mine + O_OUT_BYTES, stride)
    call_op(ld_i64(row + O_FN + 8 * tile), mine, own_ctx, thread, g0, g1, own_phase)
    _deliver(row, staging, stride, first, count, g0, min(ROWS * g1, ld_i64(row + O_D)) - ROWS * g0)


@cache.jit
def _deliver(row, staging, stride, first, count, g0, n):  # type: ignore[no-untyped-def]
    """n rows of results from group g0 on to their columns."""
    places, k, rows = ld_i64(row + O_G) + ld_i64(row + PAIR), ld_i64(row + O_H), ld_i64(row + O_D)
    for i in range(count):
        pair = ld_i64(places + 8 * (first + i))
        to = ld_i64(row + O_OUT) + pair // k * ld_i64(row + O_OUT_BYTES) + 4 * (pair % k * rows + ROWS * g0)
        for r in range(n):
            st_f32(to + 4 * r, ld_f32(staging + i * stride + 4 * r))


_MAKERS = {"route": _route, "dispatch": _dispatch, "spread": lambda: _spread(0), "spread_floats": lambda: _spread(1),
           "mix": _mix}  # fmt: skip


@functools.cache
def kernel(name: str) -> int:
    """The address of one of these kernels."""
    made: int = _MAKERS[name]()
    return made
