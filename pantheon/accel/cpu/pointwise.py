"""Ops that treat each column on its own: norm, quantise, gate, add, rotary, gather, KV store.

Each takes (row, ctx, thread, column, part, phase).  Gate, add and quantise may be cut in parts of whole blocks of 32.
Buffers are padded to 32 floats a row; what lies in the padding is never read into a result.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import float32

from pantheon.accel.cpu import cache
from pantheon.accel.cpu.fields import (
    C_ACT,
    C_POSITIONS,
    C_WANTS,
    O_A,
    O_B,
    O_C,
    O_N,
    O_OUT,
    O_OUT_BYTES,
    O_VALUE,
    O_X,
    O_X_BYTES,
    O_Y,
    O_Y_BYTES,
    P_PARTS,
    P_TILE,
)  # fmt: skip
from pantheon.accel.cpu.layouts import (
    ACT_BYTES,
    ACT_D,
    ACT_I,
    ACT_I0,
    ACT_I1,
    ACT_S,
    ACT_S0,
    ACT_S1,
)  # fmt: skip
from pantheon.accel.cpu.vec import (
    add,
    div,
    exp,
    fma,
    hmax,
    hsum,
    ld_f32,
    ld_i32,
    ld_i64,
    load_f32,
    load_pairs,
    mul,
    splat,
    st_f32,
    st_i32,
    store_f32,
    store_i8_sum,
    sub,
    swap_pairs,
    vabs,
    vmax,
)  # fmt: skip


@cache.jit
def _span(n, part, phase):  # type: ignore[no-untyped-def]
    """The blocks of 32 of this part of a row of n blocks."""
    parts = ld_i64(phase + P_PARTS)
    return n * part // parts, n * (part + 1) // parts


@cache.jit
def _x(row, column):  # type: ignore[no-untyped-def]
    return ld_i64(row + O_X) + column * ld_i64(row + O_X_BYTES)


@cache.jit
def _y(row, column):  # type: ignore[no-untyped-def]
    return ld_i64(row + O_Y) + column * ld_i64(row + O_Y_BYTES)


@cache.jit
def _out(row, column):  # type: ignore[no-untyped-def]
    return ld_i64(row + O_OUT) + column * ld_i64(row + O_OUT_BYTES)


def _rms_norm():  # type: ignore[no-untyped-def]
    @cache.kernel
    def rms_norm(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        x, out, weight = _x(row, column), _out(row, column), ld_i64(row + O_A)
        n, eps = ld_i64(row + O_N), ld_f32(row + O_VALUE)
        whole = n // 16 * 16
        for _ in range(ld_i64(row + O_B)):
            squares = splat(float32(0))
            for i in range(0, whole, 16):
                v = load_f32(x + 4 * i)
                squares = fma(v, v, squares)
            total = hsum(squares)
            for i in range(whole, n):
                v1 = ld_f32(x + 4 * i)
                total += v1 * v1
            factor = float32(1) / np.sqrt(total / float32(n) + eps)
            scale = splat(factor)
            for i in range(0, whole, 16):
                store_f32(out + 4 * i, mul(mul(load_f32(x + 4 * i), scale), load_f32(weight + 4 * i)))
            for i in range(whole, n):
                st_f32(out + 4 * i, ld_f32(x + 4 * i) * factor * ld_f32(weight + 4 * i))
            x += 4 * n
            out += 4 * n

    return rms_norm


@cache.jit
def quantise_block(x, a, lane, n):  # type: ignore[no-untyped-def]
    """32 floats at x to column `lane` of a block of a tile of n columns at a: int8 with one scale; sums of the block
    and of its halves go along."""
    v0, v1 = load_f32(x), load_f32(x + 64)
    top = hmax(vmax(vabs(v0), vabs(v1)))
    inverse = splat(float32(127.0) / top if top > float32(1e-30) else float32(0.0))
    d = top * float32(1.0 / 127.0)
    s0 = store_i8_sum(a + 32 * lane, mul(v0, inverse))
    s1 = store_i8_sum(a + 32 * lane + 16, mul(v1, inverse))
    a += 4 * lane
    st_f32(a + ACT_D * n, d)
    st_f32(a + ACT_S * n, d * float32(s0 + s1))
    st_f32(a + ACT_S0 * n, d * float32(s0))
    st_f32(a + ACT_S1 * n, d * float32(s1))
    st_i32(a + ACT_I * n, s0 + s1)
    st_i32(a + ACT_I0 * n, s0)
    st_i32(a + ACT_I1 * n, s1)


def _quantise():  # type: ignore[no-untyped-def]
    @cache.kernel
    def quantise(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        x, blocks = _x(row, column), ld_i64(row + O_N)
        n = 1 << ld_i64(phase + P_TILE)
        first, end = _span(blocks, part, phase)
        lane = column % n
        act = ld_i64(ctx + C_ACT) + (column - lane) * blocks * ACT_BYTES
        for i in range(first, end):
            quantise_block(x + 128 * i, act + i * n * ACT_BYTES, lane, n)

    return quantise


def _gate(ACT):  # type: ignore[no-untyped-def]
    @cache.kernel
    def gate(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """act(x) * y: silu, gelu or sigmoid.  The tanh form of gelu is x * sigmoid(2u), with
        u = sqrt(2/pi) (x + 0.044715 x^3)."""
        x, y, out = _x(row, column), _y(row, column), _out(row, column)
        first, end = _span(ld_i64(row + O_N), part, phase)
        one = splat(float32(1))
        for i in range(2 * first, 2 * end):
            v = load_f32(x + 64 * i)
            if ACT == 1:
                cubic = mul(mul(v, v), v)
                u = fma(cubic, splat(float32(-0.0713548162726009)), mul(v, splat(float32(-1.5957691216057308))))
            else:
                u = sub(splat(float32(0)), v)
            top = one if ACT == 2 else v
            store_f32(out + 64 * i, mul(div(top, add(one, exp(u))), load_f32(y + 64 * i)))

    return gate


def _sigmoid():  # type: ignore[no-untyped-def]
    @cache.kernel
    def sigmoid(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        x, one = _x(row, column), splat(float32(1))
        first, end = _span(ld_i64(row + O_N), part, phase)
        for i in range(2 * first, 2 * end):
            store_f32(x + 64 * i, div(one, add(one, exp(sub(splat(float32(0)), load_f32(x + 64 * i))))))

    return sigmoid


def _cap():  # type: ignore[no-untyped-def]
    @cache.kernel
    def cap(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """c tanh(x / c) in place, as c (2 sigmoid(2x / c) - 1)."""
        x, limit = _x(row, column), ld_f32(row + O_VALUE)
        first, end = _span(ld_i64(row + O_N), part, phase)
        one, two, c = splat(float32(1)), splat(float32(2)), splat(limit)
        steep = splat(float32(-2) / limit)
        for i in range(2 * first, 2 * end):
            v = div(two, add(one, exp(mul(load_f32(x + 64 * i), steep))))
            store_f32(x + 64 * i, mul(sub(v, one), c))

    return cap


def _pick():  # type: ignore[no-untyped-def]
    @cache.kernel
    def pick(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """O_A floats of each of O_N heads that are O_B wide, from O_C on."""
        x, out, size = _x(row, column) + 4 * ld_i64(row + O_C), _out(row, column), ld_i64(row + O_A)
        for _ in range(ld_i64(row + O_N)):
            for i in range(0, size // 16 * 16, 16):
                store_f32(out + 4 * i, load_f32(x + 4 * i))
            for i in range(size // 16 * 16, size):
                st_f32(out + 4 * i, ld_f32(x + 4 * i))
            x += 4 * ld_i64(row + O_B)
            out += 4 * size

    return pick


def _add():  # type: ignore[no-untyped-def]
    @cache.kernel
    def add_rows(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        x, y, out = _x(row, column), _y(row, column), _out(row, column)
        first, end = _span(ld_i64(row + O_N), part, phase)
        for i in range(2 * first, 2 * end):
            store_f32(out + 64 * i, add(load_f32(x + 64 * i), load_f32(y + 64 * i)))

    return add_rows


def _gather():  # type: ignore[no-untyped-def]
    @cache.kernel
    def gather(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """Row `wanted[column]` of x to row `column` of out."""
        x = _x(row, ld_i32(ld_i64(ctx + C_WANTS) + 4 * column))
        out = _out(row, column)
        for i in range(2 * ld_i64(row + O_N)):
            store_f32(out + 64 * i, load_f32(x + 64 * i))

    return gather


def _copy():  # type: ignore[no-untyped-def]
    @cache.kernel
    def copy(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        x, out = _x(row, column), _out(row, column)
        first, end = _span(ld_i64(row + O_N), part, phase)
        for i in range(2 * first, 2 * end):
            store_f32(out + 64 * i, load_f32(x + 64 * i))

    return copy


def _rope(NEOX):  # type: ignore[no-untyped-def]
    @cache.kernel
    def rope(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """O_N heads of O_A floats; O_Y and O_C: cos and sin, O_B pairs each."""
        half, x = ld_i64(row + O_B), _x(row, column)
        angle = 4 * half * ld_i32(ld_i64(ctx + C_POSITIONS) + 4 * column)
        cos, sin = ld_i64(row + O_Y) + angle, ld_i64(row + O_C) + angle
        step, apart = (1, half) if NEOX else (2, 1)
        wide = half // 16 * 16 if NEOX else half // 8 * 8
        for _ in range(ld_i64(row + O_N)):
            if NEOX:
                for i in range(0, wide, 16):
                    c, s = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
                    v, w = load_f32(x + 4 * i), load_f32(x + 4 * (i + half))
                    store_f32(x + 4 * i, sub(mul(v, c), mul(w, s)))
                    store_f32(x + 4 * (i + half), add(mul(v, s), mul(w, c)))
            else:
                for i in range(0, wide, 8):
                    v = load_f32(x + 8 * i)
                    turned = mul(swap_pairs(v), load_pairs(sin + 4 * i))
                    store_f32(x + 8 * i, add(mul(v, load_pairs(cos + 4 * i)), turned))
            for i in range(wide, half):
                c1, s1 = ld_f32(cos + 4 * i), ld_f32(sin + 4 * i)
                at = x + 4 * step * i
                v1, w1 = ld_f32(at), ld_f32(at + 4 * apart)
                st_f32(at, v1 * c1 - w1 * s1)
                st_f32(at + 4 * apart, v1 * s1 + w1 * c1)
            x += 4 * ld_i64(row + O_A)

    return rope


_MAKERS = {
    "rms_norm": _rms_norm,
    "quantise": _quantise,
    "silu": lambda: _gate(0),
    "gelu": lambda: _gate(1),
    "sigmoid": lambda: _gate(2),
    "squash": _sigmoid,
    "pick": _pick,
    "cap": _cap,
    "add": _add,
    "gather": _gather,
    "copy": _copy,
    "norm": lambda: _rope(0),
    "neox": lambda: _rope(1),
}


@functools.cache
def kernel(name: str) -> int:
    """The address of one of these kernels."""
    made: int = _MAKERS[name]()
    return made
