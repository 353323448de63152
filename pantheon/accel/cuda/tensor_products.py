"""Products of quantised weights with many columns, on tensor cores: 32 rows by 32 columns for a block of threads.

The same segments, the same integers and the same fused multiply-adds in the same order as `products.matmul`, so the
same bits.  A warp sums one segment; lane 4g + t works on rows g, g + 8, g + 16, g + 24 and columns 2t, 2t + 1 of every
8 (see `machine.mma`).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.layouts import (
    HEADER,
    KINDS,
    ROWS,
    SUB,
    Kind,
    header_words,
    quant_words,
    scale_words,
    sub_words,
)
from pantheon.accel.cuda.machine import F32, FLOATS, I32, I64, WARPS, WORDS, cuda, device_function, fma, load, mma
from pantheon.accel.cuda.segments import CHUNK, SEGMENTS, fetching, finish, half, iq4, scaled
from pantheon.accel.cuda.targets import TARGET_TYPES, target

#: columns of a tile
WIDTH = 32

_FOUR = (np.float32(0),) * 4
_NONE = ((_FOUR, _FOUR),) * 4


def _plane(bits: int, first: int) -> Any:
    """Device function (weights, word of a row in a block's quants, p) -> `bits` bits of quad p, from vector `first`."""
    mask = -1 if bits == 8 else ((1 << bits) - 1) * 0x01010101

    @device_function
    def plane(weights, at, p):  # type: ignore[no-untyped-def]
        bit = p * bits
        return (load(weights, at + ROWS * (first + (bit >> 3))) >> (bit & 7)) & mask

    return plane


def _quad(kind: Kind) -> Any:
    """Device function (weights, word of a row in a block's quants, p) -> quad p, four values."""
    low, shift = _plane(kind.base_bits, 0), kind.base_bits
    if kind.high_bits:
        high = _plane(kind.high_bits, kind.base_bits)

        @device_function
        def joined(weights, at, p):  # type: ignore[no-untyped-def]
            return low(weights, at, p) | high(weights, at, p) << shift

        return joined
    if kind.table:

        @device_function
        def looked_up(weights, at, p):  # type: ignore[no-untyped-def]
            return iq4(low(weights, at, p))

        return looked_up
    return low


def _scales(kind: Kind) -> Any:
    """Device function -> (scales, minimums) of rows g, g + 8, g + 16, g + 24 in a block or in half of one."""
    scale, minimum = scaled(kind)

    @device_function
    def scales(weights, at, g, d, m):  # type: ignore[no-untyped-def]
        return (
            (
                scale(weights, at, g, d[0]), scale(weights, at, g + 8, d[1]),
                scale(weights, at, g + 16, d[2]), scale(weights, at, g + 24, d[3]),
            ),
            (
                minimum(weights, at, g, m[0]), minimum(weights, at, g + 8, m[1]),
                minimum(weights, at, g + 16, m[2]), minimum(weights, at, g + 24, m[3]),
            ),
        )  # fmt: skip

    return scales


def _add(minimums: bool) -> Any:
    """Device function: acc + sums of products of 2 rows and 2 columns, with the rows' scales u, v and minimums p, q and
    the columns' scales x and sums s."""

    @device_function
    def add(acc, ints, u, v, p, q, x, s):  # type: ignore[no-untyped-def]
        a, b = fma(F32(ints[0]), u * x[0], acc[0]), fma(F32(ints[1]), u * x[1], acc[1])
        c, d = fma(F32(ints[2]), v * x[0], acc[2]), fma(F32(ints[3]), v * x[1], acc[3])
        if minimums:
            y, z = x[0] * F32(s[0]), x[1] * F32(s[1])
            return fma(p, y, a), fma(p, z, b), fma(q, y, c), fma(q, z, d)
        return a, b, c, d

    return add


def _strip(kind: Kind) -> Any:
    """Device function: acc + one block of 32 rows times 8 columns; `quads` is where column g's quads are, `sums` and
    `dx` what belongs to column 2t."""
    bias, halves, add = kind.bias_bits, kind.subs == 2, _add(kind.header_min)

    @device_function
    def half_strip(acc, top, low, b, w, m, x, s):  # type: ignore[no-untyped-def]
        even, odd = 0, 0
        if bias:
            even, odd = -(s[0] << bias), -(s[1] << bias)
        return (
            add(acc[0], mma(top, b, even, odd), w[0], w[1], m[0], m[1], x, s),
            add(acc[1], mma(low, b, even, odd), w[2], w[3], m[2], m[3], x, s),
        )

    @device_function
    def strip(acc, a, w, m, v, n, blocks, quads, sums, scales, dx, step):  # type: ignore[no-untyped-def]
        b0, b1 = load(blocks, quads), load(blocks, quads + 4)
        x = (load(scales, dx), load(scales, dx + step))
        p0, q0 = load(blocks, sums), load(blocks, sums + 1)
        p1, q1 = load(blocks, sums + 2 * step), load(blocks, sums + 2 * step + 1)
        if halves:
            acc = half_strip(acc, (a[0], a[1]), (a[4], a[5]), (b0,), w, m, x, (p0, p1))
            return half_strip(acc, (a[2], a[3]), (a[6], a[7]), (b1,), v, n, x, (q0, q1))
        return half_strip(acc, a[:4], a[4:], (b0, b1), w, m, x, (p0 + q0, p1 + q1))

    return strip


def _block(kind: Kind) -> Any:
    """Device function: acc + one block of 32 rows times 32 columns."""
    quad, scales_of, strip, halves = _quad(kind), _scales(kind), _strip(kind), kind.subs == 2

    @device_function
    def block(acc, weights, at, sub_at, g, t, d, m, blocks, quads, sums, scales, dx, step):  # type: ignore[no-untyped-def]
        a = (
            quad(weights, at, t), quad(weights, at + 8, t), quad(weights, at, t + 4), quad(weights, at + 8, t + 4),
            quad(weights, at + 16, t), quad(weights, at + 24, t),
            quad(weights, at + 16, t + 4), quad(weights, at + 24, t + 4),
        )  # fmt: skip
        w, low = scales_of(weights, sub_at, g, d, m)
        v, high = w, low
        if halves:
            v, high = scales_of(weights, sub_at + SUB, g, d, m)
        q, s, x = 64 * step, 16 * step, 8 * step
        return (
            strip(acc[0], a, w, low, v, high, blocks, quads, sums, scales, dx, step),
            strip(acc[1], a, w, low, v, high, blocks, quads + q, sums + s, scales, dx + x, step),
            strip(acc[2], a, w, low, v, high, blocks, quads + 2 * q, sums + 2 * s, scales, dx + 2 * x, step),
            strip(acc[3], a, w, low, v, high, blocks, quads + 3 * q, sums + 3 * s, scales, dx + 3 * x, step),
        )

    return block


def _segment(kind: Kind) -> Any:
    """Device function: 32 rows times 32 columns over units first ... end-1; arguments as in `segments.segment`."""
    block, fetch, none = _block(kind), fetching(kind), _NONE
    minimums, sup, units = kind.header_min, kind.sup, CHUNK // kind.sup
    quant, head, sub, scale = quant_words(kind), header_words(kind), sub_words(kind), scale_words(kind)

    @device_function
    def rows(weights, at, g):  # type: ignore[no-untyped-def]
        return half(weights, at, g), half(weights, at, g + 8), half(weights, at, g + 16), half(weights, at, g + 24)

    @device_function
    def segment(weights, quants, scales, g, t, first, end, blocks, quads, sums, floats, dx, step):  # type: ignore[no-untyped-def]
        acc = none
        quads, sums, dx = quads + g * 8 * step + t, sums + t * 4 * step, dx + t * 2 * step
        fetch(weights, quants, scales, first, end, 4 * g + t)
        for unit in range(first, end):
            if (unit - first) & (units - 1) == 0:
                fetch(weights, quants, scales, unit + units, end, 4 * g + t)
            at = scales + unit * scale
            d = rows(weights, at, g)
            m = d
            if minimums:
                m = rows(weights, at + HEADER, g)
            for i in range(sup):
                b = unit * sup + i
                acc = block(
                    acc, weights, quants + b * quant + g, at + head + i * sub, g, t, d, m,
                    blocks, quads + 8 * b, sums + 2 * b, floats, dx + b, step,
                )  # fmt: skip
        return acc

    return segment


@device_function
def _put(partial, at, acc):  # type: ignore[no-untyped-def]
    """The sums of 2 rows, 8 apart, and 2 columns."""
    partial[at] = acc[0]
    partial[at + ROWS] = acc[1]
    partial[at + 8] = acc[2]
    partial[at + ROWS + 8] = acc[3]


@functools.cache
def tensor_matmul(type_name: str, warps: int = WARPS) -> Kernel:
    """The arguments of `products.matmul`; blocks of 32 lanes even in the simulator."""
    kind = KINDS[type_name]
    part, end_of, room, whole = _segment(kind), finish(WIDTH, ROWS, warps), SEGMENTS * WIDTH * ROWS, warps == SEGMENTS
    quant, scale, sup = quant_words(kind), scale_words(kind), kind.sup

    def body(  # type: ignore[no-untyped-def]
        weights, blocks, quads_at, sums_at, scratch, dx_at, vectors, out, per_row, n,
        a0, a1, a2, a3, a4, a5, a6, b0, b1, b2, b3, b4, b5, b6, c0, c1, c2, c3, c4, c5, c6,
    ):  # fmt: skip
        partial = cuda.shared.array(room, F32)
        lane, warp, column = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.y * WIDTH
        g, t = lane >> 2, lane & 3
        group, it = target(
            cuda.blockIdx.x, (a0, a1, a2, a3, a4, a5, a6), (b0, b1, b2, b3, b4, b5, b6), (c0, c1, c2, c3, c4, c5, c6)
        )
        quants, scales = it[0] + group * per_row * quant, it[1] + group * (per_row // sup) * scale
        begin = column * per_row
        quads, sums, dx = quads_at + 8 * begin, sums_at + 2 * begin, dx_at + begin
        units = per_row // sup
        each = (units + SEGMENTS - 1) // SEGMENTS
        for s in range(warp, warp + 1 if whole else SEGMENTS, warps):
            first, end = min(s * each, units), min(s * each + each, units)
            acc = part(weights, quants, scales, g, t, first, end, blocks, quads, sums, scratch, dx, per_row)
            at = (s * WIDTH + 2 * t) * ROWS + g
            _put(partial, at, acc[0][0])
            _put(partial, at + 16, acc[0][1])
            _put(partial, at + 8 * ROWS, acc[1][0])
            _put(partial, at + 8 * ROWS + 16, acc[1][1])
            _put(partial, at + 16 * ROWS, acc[2][0])
            _put(partial, at + 16 * ROWS + 16, acc[2][1])
            _put(partial, at + 24 * ROWS, acc[3][0])
            _put(partial, at + 24 * ROWS + 16, acc[3][1])
        cuda.syncthreads()
        end_of(partial, lane, warp, vectors, it[2], out, it[3], it[4], group * ROWS, it[5], column, n, it[6])

    types = (WORDS, WORDS, I64, I64, FLOATS, I64, FLOATS, FLOATS, I32, I32, *TARGET_TYPES)
    many = kind.subs == 2 or (kind.subs > 0 and kind.high_bits > 0)  # scales and bits at hand
    name = f"tensor_matmul {type_name} x{WIDTH}"
    return Kernel(name, body, types, (ROWS, warps), least_sm=80, tight=True, resident=1 if many else 2)
