"""Matrix products: kernels over row groups, one for each weight type and tile width.

Each takes (row, ctx, thread, g0, g1, phase): row groups g0 … g1-1 of one matrix times all columns of the phase, in
tiles of n = 1, 2, 4 or 8 columns.  A group's weights stay in the first cache while the tiles pass.  The sum over
blocks runs in ascending order in every variant.  The last tile may reach past the columns: buffers have room.
"""

from __future__ import annotations

import functools

from pantheon.accel.cpu import cache
from pantheon.accel.cpu.dots import block, header
from pantheon.accel.cpu.fields import (
    C_ACT,
    C_SCRATCH,
    C_SCRATCH_BYTES,
    O_A,
    O_B,
    O_C,
    O_D,
    O_FLAG,
    O_N,
    O_OUT,
    O_OUT_BYTES,
    O_X,
    O_X_BYTES,
    P_COLUMNS,
)  # fmt: skip
from pantheon.accel.cpu.layouts import ACT_BYTES, FLOATS, KINDS, ROWS
from pantheon.accel.cpu.tiles import tile_add, tile_fma, tile_store, tile_store_add, tile_zero
from pantheon.accel.cpu.vec import ld_f32, ld_i64, load_bf16, load_f16, load_f32, prefetch, st_f32

#: columns that pass over the row groups together: their activations fit the second cache
STRIP = 128
#: bytes of weights that are asked for ahead of their use: memory answers about that much later
AHEAD = 1024


@cache.jit
def store_group(f, n, row, ctx, thread, g, column):  # type: ignore[no-untyped-def]
    """Bias, residual and store of rows 16g … of n columns from `column` on; O_D holds the row count."""
    bias, more, stride = ld_i64(row + O_C), ld_i64(row + O_FLAG), ld_i64(row + O_OUT_BYTES)
    out = ld_i64(row + O_OUT) + column * stride + 4 * ROWS * g
    rows = ld_i64(row + O_D) - ROWS * g
    if bias:
        f = tile_add(f, load_f32(bias + 4 * ROWS * g))
    if rows >= ROWS:
        if more:
            tile_store_add(f, out, stride)
        else:
            tile_store(f, out, stride)
    else:  # the neighbours behind a last, partial group belong to somebody else
        tmp = ld_i64(ctx + C_SCRATCH) + thread * ld_i64(ctx + C_SCRATCH_BYTES)
        tile_store(f, tmp, 4 * ROWS)
        for c in range(n):
            for r in range(rows):
                v = ld_f32(tmp + 4 * (ROWS * c + r))
                to = out + c * stride + 4 * r
                st_f32(to, ld_f32(to) + v if more else v)


def _make_quantised(KIND, N, SUP, QUANT, HEAD, SUB):  # type: ignore[no-untyped-def]
    SCALE, ACT = HEAD + SUP * SUB, N * ACT_BYTES
    SCALE_AHEAD = AHEAD * SCALE // (SUP * QUANT)

    @cache.kernel
    def matmul(row, ctx, thread, g0, g1, phase):  # type: ignore[no-untyped-def]
        blocks, columns = ld_i64(row + O_N), ld_i64(phase + P_COLUMNS)
        quants, scales, act = ld_i64(row + O_A), ld_i64(row + O_B), ld_i64(ctx + C_ACT)
        for strip in range(0, columns, STRIP):
            for g in range(g0, g1):
                for column in range(strip, min(strip + STRIP, columns), N):
                    f = tile_zero(N)
                    q = quants + g * blocks * QUANT
                    s = scales + g * (blocks // SUP) * SCALE
                    a = act + column * blocks * ACT_BYTES
                    for _ in range(blocks // SUP):
                        d, m = header(KIND, s, 0), header(KIND, s, 1)
                        fresh = column == strip  # later tiles find the group's weights in the first cache
                        if fresh:
                            prefetch(s + SCALE_AHEAD, SCALE)
                        s += HEAD
                        for _ in range(SUP):
                            if fresh:
                                prefetch(q + AHEAD, QUANT)
                            f = block(f, KIND, q, s, d, m, a)
                            q += QUANT
                            s += SUB
                            a += ACT
                    store_group(f, N, row, ctx, thread, g, column)

    return matmul


def _make_float(TYPE, SIZE, N):  # type: ignore[no-untyped-def]
    STEP = ROWS * SIZE

    @cache.kernel
    def matmul_float(row, ctx, thread, g0, g1, phase):  # type: ignore[no-untyped-def]
        cols, columns = ld_i64(row + O_N), ld_i64(phase + P_COLUMNS)
        weights, x, stride = ld_i64(row + O_A), ld_i64(row + O_X), ld_i64(row + O_X_BYTES)
        for strip in range(0, columns, STRIP):
            for g in range(g0, g1):
                for column in range(strip, min(strip + STRIP, columns), N):
                    f = tile_zero(N)
                    w = weights + g * cols * STEP
                    xs = x + column * stride
                    for k in range(cols):
                        if TYPE == 0:
                            f = tile_fma(f, load_f32(w + k * STEP), xs + 4 * k, stride)
                        elif TYPE == 1:
                            f = tile_fma(f, load_f16(w + k * STEP), xs + 4 * k, stride)
                        else:
                            f = tile_fma(f, load_bf16(w + k * STEP), xs + 4 * k, stride)
                    store_group(f, N, row, ctx, thread, g, column)

    return matmul_float


@functools.cache
def kernel(type_name: str, width: int) -> int:
    """The address of the product of one weight type with tiles of `width` columns."""
    if type_name in FLOATS:
        return _make_float(list(FLOATS).index(type_name), FLOATS[type_name], width)
    k = KINDS[type_name]
    made: int = _make_quantised(k.id, width, k.sup, k.quant_bytes, k.header_bytes, k.sub_bytes)
    return made
