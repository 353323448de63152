"""Embedding rows: row `token` of a packed table as floats, exactly the file's values, times a factor.

A thread takes a quad of a quantised table, a column of a float one; y of the grid counts the columns of the forward.
The formula of a value is that of `accel.cpu.embed`; its products are exact in float32 wherever something is added
behind, so that fused multiply-adds change nothing.
"""

from __future__ import annotations

import functools

from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.layouts import BLOCK, HEADER, KINDS, ROWS, SUB, Kind, header_words, quant_words, scale_words
from pantheon.accel.cuda.layouts import FLOATS as FLOAT_TYPES
from pantheon.accel.cuda.lowering import COUNT, Launch, Memory
from pantheon.accel.cuda.machine import F32, FLOATS, I32, I64, SIMULATED, WORDS, cuda, device_function, load
from pantheon.accel.cuda.segments import VALUES, half, iq4, scaled
from pantheon.plan.ops import Embed

_QUADS = BLOCK // 4
#: threads of a block: few, so that one row is on many processors
_THREADS = 1 if SIMULATED else 64


def _quad(kind: Kind):  # type: ignore[no-untyped-def]
    """Device function (weights, word of a row in a block's quants, p) -> quad p, a byte for each value."""
    base, high = kind.base_bits, kind.high_bits
    low_mask, high_mask = 0x01010101 * ((1 << base) - 1), 0x01010101 * ((1 << high) - 1)

    @device_function
    def whole(weights, at, p):  # type: ignore[no-untyped-def]
        return load(weights, at + ROWS * p)

    @device_function
    def low_bits(weights, at, p):  # type: ignore[no-untyped-def]
        bit = p * base
        return (load(weights, at + ROWS * (bit >> 3)) >> (bit & 7)) & low_mask

    @device_function
    def joined(weights, at, p):  # type: ignore[no-untyped-def]
        bit = p * high
        more = (load(weights, at + ROWS * (base + (bit >> 3))) >> (bit & 7)) & high_mask
        return low_bits(weights, at, p) | more << base

    @device_function
    def looked_up(weights, at, p):  # type: ignore[no-untyped-def]
        return iq4(low_bits(weights, at, p))

    return looked_up if kind.table else whole if base == 8 else joined if high else low_bits


def _value(kind: Kind):  # type: ignore[no-untyped-def]
    """Device function (quad, t, scale, low) -> the weight whose code is byte t."""
    offset = 1 << kind.bias_bits if kind.bias_bits else 0

    @device_function
    def signed(q, t, scale, low):  # type: ignore[no-untyped-def]
        return scale * F32((((q >> (8 * t)) & 255) ^ 128) - 128)

    @device_function
    def biased(q, t, scale, low):  # type: ignore[no-untyped-def]
        return scale * F32(((q >> (8 * t)) & 255) - offset)

    @device_function
    def above_minimum(q, t, scale, low):  # type: ignore[no-untyped-def]
        return scale * F32((q >> (8 * t)) & 255) + low

    return above_minimum if kind.header_min else signed if kind.signed else biased


@functools.cache
def embed(type_name: str) -> Kernel:
    """(weights, columns, out, quants_at, scales_at, out_at, stride, blocks of a row, factor, columns)."""
    kind = KINDS[type_name]
    quant, scales, head, sup = quant_words(kind), scale_words(kind), header_words(kind), kind.sup
    sub, halves, minimums = (scales - head) // sup, kind.subs == 2, kind.header_min
    quad, value, (scale_of, minimum_of) = _quad(kind), _value(kind), scaled(kind)

    def body(weights, columns, out, quants_at, scales_at, out_at, stride, blocks, factor, n):  # type: ignore[no-untyped-def]
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            group, r = columns[c] >> 5, columns[c] & 31
            for i in range(cuda.grid(1), blocks * _QUADS, cuda.gridsize(1)):
                b, p = i >> 3, i & 7
                q = quad(weights, quants_at + (I64(group) * blocks + b) * quant + r, p)
                at = scales_at + (I64(group) * (blocks // sup) + b // sup) * scales
                d = half(weights, at, r)
                low = d
                sub_at = at + head + b % sup * sub
                if halves:
                    sub_at += (p >> 2) * SUB
                if minimums:
                    low = minimum_of(weights, sub_at, r, half(weights, at + HEADER, r))
                scale, to = scale_of(weights, sub_at, r, d), out_at + c * stride + 4 * i
                for t in range(4):
                    out[to + t] = value(q, t, scale, low) * factor

    types = (WORDS, WORDS, FLOATS, I64, I64, I64, I64, I32, F32, I32)
    return Kernel(f"embed {type_name}", body, types, (_THREADS, 1))


@functools.cache
def float_embed(type_name: str) -> Kernel:
    """(weights, columns, out, floats_at, out_at, stride, words of a row, cols, factor, columns)."""
    value = VALUES[type_name][1]

    def body(weights, columns, out, floats_at, out_at, stride, words, cols, factor, n):  # type: ignore[no-untyped-def]
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            begin = floats_at + I64(columns[c] >> 5) * words * ROWS + (columns[c] & 31)
            for k in range(cuda.grid(1), cols, cuda.gridsize(1)):
                out[out_at + c * stride + k] = value(weights, begin, k) * factor

    types = (WORDS, WORDS, FLOATS, I64, I64, I64, I32, I32, F32, I32)
    return Kernel(f"embed {type_name}", body, types, (_THREADS, 1))


def lower_embed(op: Embed, memory: Memory) -> list[Launch]:
    """A launch for Embed; the tokens are row 0 of `columns`."""
    w, out = memory.matrices[op.table], memory.buffers[op.out]
    arrays = ("weights", "columns", memory.array_of(op.out))
    if w.type_name in FLOAT_TYPES:
        kernel, items = float_embed(w.type_name), w.cols
        words = -(-w.cols * FLOAT_TYPES[w.type_name] // 4)
        args = (*arrays, w.quants_at, out.at, out.stride, words, w.cols, op.scale, COUNT)
    else:
        kernel, items = embed(w.type_name), w.cols // 4
        args = (*arrays, w.quants_at, w.scales_at, out.at, out.stride, w.cols // BLOCK, op.scale, COUNT)

    def grid(n: int, reach: int) -> tuple[int, int]:
        return (1, 1) if SIMULATED else (-(-items // _THREADS), n)

    return [Launch(lambda n: kernel, grid, args)]


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [embed(name) for name in KINDS] + [float_embed(name) for name in FLOAT_TYPES]
