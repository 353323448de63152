"""The inner loops of products: the sum of one row of a matrix over a segment of its columns, for a tile of columns.

A row is cut into SEGMENTS of whole units (super-blocks, or 4 columns of a float type), the same for every kernel and
block shape; the products of a segment are added block by block in ascending order, the segments in ascending order
afterwards.  So a result never depends on how the work is spread.  `r` is the row in its group, `quants` and `scales`
the words where the group begins.  The formulas are those of `accel.cpu.dots`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pantheon.accel.cuda.layouts import (
    FLOATS,
    HEADER,
    IQ4_VALUES,
    KINDS,
    ROWS,
    SUB,
    Kind,
    header_words,
    quant_words,
    scale_words,
    sub_words,
)  # fmt: skip
from pantheon.accel.cuda.machine import F32, I32, as_float, device_function, half_to_float, load, prefetch, prmt
from pantheon.accel.cuda.tiles import add, add_floats, add_scaled, add_shifted, dots, gather, unbiased, zeros

#: parts of a row that are summed on their own
SEGMENTS = 8
#: columns of a float type in a unit
FLOAT_UNIT = 4
#: blocks, or units of a float type, of a chunk: a warp asks memory for a chunk while it works on the one before
CHUNK = 8
#: words of a line of the second cache
LINE = 32

_TABLE = tuple(int(w) for w in np.array(IQ4_VALUES, np.int8).view(np.int32))


@device_function
def half(weights, at, r):  # type: ignore[no-untyped-def]
    """Value r of a vector f16[32]."""
    return half_to_float(load(weights, at + (r >> 1)) >> ((r & 1) << 4))


@device_function
def unsigned(weights, at, r):  # type: ignore[no-untyped-def]
    """Value r of a vector u8[32], as a float."""
    return F32(I32((load(weights, at + (r >> 2)) >> ((r & 3) << 3)) & 255))


@device_function
def signed(weights, at, r):  # type: ignore[no-untyped-def]
    """Value r of a vector i8[32], as a float."""
    return F32(I32((((load(weights, at + (r >> 2)) >> ((r & 3) << 3)) & 255) ^ 128) - 128))


@device_function
def iq4(w):  # type: ignore[no-untyped-def]
    """IQ4_VALUES of four nibbles, one in each byte."""
    packed = prmt(w | (w >> 4), 0, 0x4420)
    low = prmt(_TABLE[0], _TABLE[1], packed & 0x7777)
    high = prmt(_TABLE[2], _TABLE[3], packed & 0x7777)
    return prmt(low, high, 0x3210 | ((packed & 0x8888) >> 1))


@device_function
def _eight_bits(weights, at):  # type: ignore[no-untyped-def]
    return (
        load(weights, at), load(weights, at + 32), load(weights, at + 64), load(weights, at + 96),
        load(weights, at + 128), load(weights, at + 160), load(weights, at + 192), load(weights, at + 224),
    )  # fmt: skip


@device_function
def _four_bits(weights, at):  # type: ignore[no-untyped-def]
    a, b = load(weights, at), load(weights, at + 32)
    c, d = load(weights, at + 64), load(weights, at + 96)
    return (
        a & 0x0F0F0F0F, (a >> 4) & 0x0F0F0F0F, b & 0x0F0F0F0F, (b >> 4) & 0x0F0F0F0F,
        c & 0x0F0F0F0F, (c >> 4) & 0x0F0F0F0F, d & 0x0F0F0F0F, (d >> 4) & 0x0F0F0F0F,
    )  # fmt: skip


@device_function
def _two_bits(weights, at):  # type: ignore[no-untyped-def]
    a, b = load(weights, at), load(weights, at + 32)
    return (
        a & 0x03030303, (a >> 2) & 0x03030303, (a >> 4) & 0x03030303, (a >> 6) & 0x03030303,
        b & 0x03030303, (b >> 2) & 0x03030303, (b >> 4) & 0x03030303, (b >> 6) & 0x03030303,
    )  # fmt: skip


@device_function
def _one_bit(weights, at):  # type: ignore[no-untyped-def]
    a = load(weights, at)
    return (
        a & 0x01010101, (a >> 1) & 0x01010101, (a >> 2) & 0x01010101, (a >> 3) & 0x01010101,
        (a >> 4) & 0x01010101, (a >> 5) & 0x01010101, (a >> 6) & 0x01010101, (a >> 7) & 0x01010101,
    )  # fmt: skip


_PLANES = {8: _eight_bits, 4: _four_bits, 2: _two_bits, 1: _one_bit}


def _whole(kind: Kind) -> Any:
    """Device function (weights, word of row r in a block's quants) -> 8 words, four values in each."""
    base, shift, high_at = _PLANES[kind.base_bits], kind.base_bits, ROWS * kind.base_bits
    if kind.high_bits:
        high = _PLANES[kind.high_bits]

        @device_function
        def joined(weights, at):  # type: ignore[no-untyped-def]
            a, b = base(weights, at), high(weights, at + high_at)
            return (
                a[0] | b[0] << shift, a[1] | b[1] << shift, a[2] | b[2] << shift, a[3] | b[3] << shift,
                a[4] | b[4] << shift, a[5] | b[5] << shift, a[6] | b[6] << shift, a[7] | b[7] << shift,
            )  # fmt: skip

        return joined
    if kind.table:

        @device_function
        def looked_up(weights, at):  # type: ignore[no-untyped-def]
            a = base(weights, at)
            return iq4(a[0]), iq4(a[1]), iq4(a[2]), iq4(a[3]), iq4(a[4]), iq4(a[5]), iq4(a[6]), iq4(a[7])

        return looked_up
    return base


def scaled(kind: Kind) -> tuple[Any, Any]:
    """Device functions (weights, at, r, d) -> scale and (weights, at, r, m) -> minimum of a block or of half a block,
    whose sub-scales begin at the word `at`."""
    sub, low_at, sub_mins = signed if kind.sub_signed else unsigned, SUB * kind.subs, kind.sub_mins

    @device_function
    def plain(weights, at, r, x):  # type: ignore[no-untyped-def]
        return x

    @device_function
    def scale(weights, at, r, d):  # type: ignore[no-untyped-def]
        return d * sub(weights, at, r)

    @device_function
    def minimum(weights, at, r, m):  # type: ignore[no-untyped-def]
        return -(m * unsigned(weights, at + low_at, r))

    return scale if kind.subs else plain, minimum if sub_mins else plain


def _make_part(kind: Kind) -> Any:
    """Device function: acc + a block, or half of one, whose quants are `words`."""
    bias, minimums = kind.bias_bits, kind.header_min
    scale, minimum = scaled(kind)

    @device_function
    def part(acc, words, weights, sub_at, r, d, m, blocks, quads, step, sums, dx):  # type: ignore[no-untyped-def]
        ints = dots(acc, words, blocks, quads, 8 * step)
        if bias:
            ints = unbiased(ints, sums, bias)
        acc = add_scaled(acc, scale(weights, sub_at, r, d), ints, dx)
        if minimums:
            acc = add_shifted(acc, minimum(weights, sub_at, r, m), sums, dx)
        return acc

    return part


def _make_block(kind: Kind) -> Any:
    """Device function: acc + one block of 32 columns."""
    words_of, part, halves = _whole(kind), _make_part(kind), kind.subs == 2

    @device_function
    def block(acc, weights, at, sub_at, r, d, m, blocks, quads, sums, scales, dx, step):  # type: ignore[no-untyped-def]
        words, x = words_of(weights, at), gather(acc, scales, dx, step)
        s0, s1 = gather(acc, blocks, sums, 2 * step), gather(acc, blocks, sums + 1, 2 * step)
        if halves:
            acc = part(acc, words[:4], weights, sub_at, r, d, m, blocks, quads, step, s0, x)
            return part(acc, words[4:], weights, sub_at + SUB, r, d, m, blocks, quads + 4, step, s1, x)
        return part(acc, words, weights, sub_at, r, d, m, blocks, quads, step, add(s0, s1), x)

    return block


def _asking(lines: int) -> Any:
    """Device function (weights, at, last, r) that asks memory for so many lines from `at` on, up to 64, as far as the
    word `last`; r: the lane of 32 that asks."""

    @device_function
    def ask(weights, at, last, r):  # type: ignore[no-untyped-def]
        if r < lines:
            prefetch(weights, min(at + r * LINE, last))
        if r + ROWS < lines:
            prefetch(weights, min(at + (r + ROWS) * LINE, last))

    return ask


def fetching(kind: Kind) -> Any:
    """Device function (weights, quants, scales, unit, end, r) that asks memory for a chunk that begins at a unit, as
    far as it lies before the unit `end`."""
    quant, scale, units = kind.sup * quant_words(kind), scale_words(kind), CHUNK // kind.sup
    ask_quants, ask_scales = _asking(units * quant // LINE), _asking(-(-units * scale // LINE))

    @device_function
    def fetch(weights, quants, scales, unit, end, r):  # type: ignore[no-untyped-def]
        if unit < end:
            ask_quants(weights, quants + unit * quant, quants + end * quant - 1, r)
            ask_scales(weights, scales + unit * scale, scales + end * scale - 1, r)

    return fetch


@functools.cache
def segment(type_name: str, width: int) -> Any:
    """Device function (weights, quants, scales, r, first, end, blocks, quads, sums, floats, dx, step) -> tile of
    `width` columns: units first ... end-1 of row r.

    quads, sums (words of `blocks`) and dx (of `floats`): where the activations of the first column begin;
    step: blocks of a column.
    """
    kind = KINDS[type_name]
    none, block, fetch = zeros(width), _make_block(kind), fetching(kind)
    minimums, sup, units = kind.header_min, kind.sup, CHUNK // kind.sup
    quant, head, sub, scale = quant_words(kind), header_words(kind), sub_words(kind), scale_words(kind)

    @device_function
    def quantised(weights, quants, scales, r, first, end, blocks, quads, sums, floats, dx, step):  # type: ignore[no-untyped-def]
        acc = none
        fetch(weights, quants, scales, first, end, r)
        for unit in range(first, end):
            if (unit - first) & (units - 1) == 0:
                fetch(weights, quants, scales, unit + units, end, r)
            b = unit * sup
            at = scales + unit * scale
            d = half(weights, at, r)
            m = d
            if minimums:
                m = half(weights, at + HEADER, r)
            for i in range(sup):
                acc = block(
                    acc, weights, quants + (b + i) * quant + r, at + head + i * sub, r, d, m,
                    blocks, quads + 8 * (b + i), sums + 2 * (b + i), floats, dx + b + i, step,
                )  # fmt: skip
        return acc

    return quantised


@device_function
def _f32(weights, at):  # type: ignore[no-untyped-def]
    return (
        as_float(load(weights, at)), as_float(load(weights, at + 32)),
        as_float(load(weights, at + 64)), as_float(load(weights, at + 96)),
    )  # fmt: skip


@device_function
def _f16(weights, at):  # type: ignore[no-untyped-def]
    a, b = load(weights, at), load(weights, at + 32)
    return half_to_float(a), half_to_float(a >> 16), half_to_float(b), half_to_float(b >> 16)


@device_function
def _bf16(weights, at):  # type: ignore[no-untyped-def]
    a, b = load(weights, at), load(weights, at + 32)
    return as_float(a << 16), as_float(a & -65536), as_float(b << 16), as_float(b & -65536)


@device_function
def _one_f32(weights, at, k):  # type: ignore[no-untyped-def]
    return as_float(load(weights, at + 32 * k))


@device_function
def _one_f16(weights, at, k):  # type: ignore[no-untyped-def]
    return half_to_float(load(weights, at + 32 * (k >> 1)) >> ((k & 1) << 4))


@device_function
def _one_bf16(weights, at, k):  # type: ignore[no-untyped-def]
    return as_float((load(weights, at + 32 * (k >> 1)) >> ((k & 1) << 4)) << 16)


#: device functions (weights, word of row r in a unit) -> 4 values, and (weights, word of row r, column) -> 1 value
VALUES = {"F32": (_f32, _one_f32), "F16": (_f16, _one_f16), "BF16": (_bf16, _one_bf16)}


@functools.cache
def float_segment(type_name: str, width: int) -> Any:
    """Device function (weights, begin, r, first, end, x, at, stride, cols) -> tile of `width` columns: units
    first ... end-1 of row r of a float type; `begin` is the word where the group begins, activations at x[at]."""
    none, words = zeros(width), ROWS * FLOATS[type_name] * FLOAT_UNIT // 4
    (four, one), ask = VALUES[type_name], _asking(CHUNK * words // LINE)

    @device_function
    def floats(weights, begin, r, first, end, x, at, stride, cols):  # type: ignore[no-untyped-def]
        acc, whole = none, cols // FLOAT_UNIT
        last = begin + max(min(end, whole) * words - 1, 0)
        ask(weights, min(begin + first * words, last), last, r)
        for unit in range(first, min(end, whole)):
            if (unit - first) & (CHUNK - 1) == 0 and unit + CHUNK < end:
                ask(weights, begin + (unit + CHUNK) * words, last, r)
            acc = add_floats(acc, four(weights, begin + unit * words + r), x, at + FLOAT_UNIT * unit, stride)
        for k in range(FLOAT_UNIT * max(first, whole), min(FLOAT_UNIT * end, cols)):  # a last unit in part
            acc = add_floats(acc, (one(weights, begin + r, k),), x, at + k, stride)
        return acc

    return floats


@device_function
def total(partial, at, step):  # type: ignore[no-untyped-def]
    """The sum of 8 segments, in order, `step` apart."""
    y = partial[at] + partial[at + step]
    y = y + partial[at + 2 * step] + partial[at + 3 * step]
    y = y + partial[at + 4 * step] + partial[at + 5 * step]
    return y + partial[at + 6 * step] + partial[at + 7 * step]


@functools.cache
def finish(width: int, lanes: int, warps: int) -> Any:
    """Device function that adds up the segments of a group, and bias and residual, and writes up to `width` columns
    from `column` on; segment s of row r of column c is partial[(s * width + c) * 32 + r].  bias_at -1: none."""

    @device_function
    def finish(partial, lane, warp, vectors, bias_at, out, out_at, stride, row, rows, column, n, more):  # type: ignore[no-untyped-def]
        for c in range(warp, min(width, n - column), warps):
            for r in range(lane, min(ROWS, rows - row), lanes):
                y = total(partial, c * ROWS + r, width * ROWS)
                if bias_at >= 0:
                    y = y + vectors[bias_at + row + r]
                to = out_at + (column + c) * stride + row + r
                if more:
                    y = out[to] + y
                out[to] = y

    return finish
