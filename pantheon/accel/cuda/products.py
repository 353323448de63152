"""Matrix products: a block of threads for each group of 32 rows and tile of columns.

Thread (lane, warp) sums row `lane` over segment `warp` of the columns; the segments of a row are added up through
shared memory, in order.  Quantised weights meet int8 activations (`quantise`), float weights the activations
themselves.
"""

from __future__ import annotations

import functools
from typing import Any

from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.layouts import BLOCK, FLOATS, KINDS, ROWS, groups, quant_words, scale_words
from pantheon.accel.cuda.lowering import COUNT, Launch, Memory
from pantheon.accel.cuda.machine import F32, I32, I64, LANES, WARPS, WORDS, cuda, device_function
from pantheon.accel.cuda.machine import FLOATS as FLOAT_ARRAY
from pantheon.accel.cuda.segments import FLOAT_UNIT, SEGMENTS, float_segment, segment
from pantheon.accel.cuda.tiles import store
from pantheon.plan.ops import MatMul

#: columns of a tile; a forward takes the least that holds its columns, or several of the widest
WIDTHS = (1, 2, 4, 8)


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


@functools.cache
def matmul(type_name: str, width: int, lanes: int = LANES, warps: int = WARPS) -> Kernel:
    """(weights, quants_at, scales_at, blocks, quads_at, sums_at, scratch, dx_at, vectors, bias_at, out, out_at, stride,
    rows, blocks of a row, columns, add) for a type of `layouts.KINDS`."""
    kind, part, end_of = KINDS[type_name], segment(type_name, width), finish(width, lanes, warps)
    room = SEGMENTS * width * ROWS
    quant, scale, sup, whole = quant_words(kind), scale_words(kind), kind.sup, lanes == ROWS and warps == SEGMENTS

    def body(  # type: ignore[no-untyped-def]
        weights, quants_at, scales_at, blocks, quads_at, sums_at, scratch, dx_at, vectors, bias_at, out, out_at, stride,
        rows, per_row, n, more,
    ):  # fmt: skip
        partial = cuda.shared.array(room, F32)
        lane, warp, group, column = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.x, cuda.blockIdx.y * width
        units = per_row // sup
        each = (units + SEGMENTS - 1) // SEGMENTS
        quants, scales = quants_at + group * per_row * quant, scales_at + group * units * scale
        first_block = column * per_row
        quads, sums, dx = quads_at + 8 * first_block, sums_at + 2 * first_block, dx_at + first_block
        if whole:
            first, end = min(warp * each, units), min(warp * each + each, units)
            acc = part(weights, quants, scales, lane, first, end, blocks, quads, sums, scratch, dx, per_row)
            store(partial, warp * width * ROWS + lane, ROWS, acc)
        else:
            for s in range(warp, SEGMENTS, warps):
                first, end = min(s * each, units), min(s * each + each, units)
                for r in range(lane, ROWS, lanes):
                    acc = part(weights, quants, scales, r, first, end, blocks, quads, sums, scratch, dx, per_row)
                    store(partial, s * width * ROWS + r, ROWS, acc)
        cuda.syncthreads()
        end_of(partial, lane, warp, vectors, bias_at, out, out_at, stride, group * ROWS, rows, column, n, more)

    types = (WORDS, I64, I64, WORDS, I64, I64, FLOAT_ARRAY, I64, FLOAT_ARRAY, I64, FLOAT_ARRAY, I64, I64, *[I32] * 4)
    return Kernel(f"matmul {type_name} x{width}", body, types, (lanes, warps), tight=True)


@functools.cache
def float_matmul(type_name: str, width: int, lanes: int = LANES, warps: int = WARPS) -> Kernel:
    """(weights, floats_at, x, x_at, x_stride, vectors, bias_at, out, out_at, stride, rows, cols, columns, add) for
    F32, F16 and BF16."""
    part, end_of, whole = float_segment(type_name, width), finish(width, lanes, warps), lanes == ROWS
    size, room = FLOATS[type_name], SEGMENTS * width * ROWS

    def body(  # type: ignore[no-untyped-def]
        weights, floats_at, x, x_at, x_stride, vectors, bias_at, out, out_at, stride, rows, cols, n, more,
    ):  # fmt: skip
        partial = cuda.shared.array(room, F32)
        lane, warp, group, column = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.x, cuda.blockIdx.y * width
        units = (cols + FLOAT_UNIT - 1) // FLOAT_UNIT
        each = (units + SEGMENTS - 1) // SEGMENTS
        begin, at = floats_at + group * ((cols * size + 3) // 4 * ROWS), x_at + column * x_stride
        if whole:
            first, end = min(warp * each, units), min(warp * each + each, units)
            acc = part(weights, begin, lane, first, end, x, at, x_stride, cols)
            store(partial, warp * width * ROWS + lane, ROWS, acc)
        else:
            for s in range(warp, SEGMENTS, warps):
                first, end = min(s * each, units), min(s * each + each, units)
                for r in range(lane, ROWS, lanes):
                    acc = part(weights, begin, r, first, end, x, at, x_stride, cols)
                    store(partial, s * width * ROWS + r, ROWS, acc)
        cuda.syncthreads()
        end_of(partial, lane, warp, vectors, bias_at, out, out_at, stride, group * ROWS, rows, column, n, more)

    types = (WORDS, I64, FLOAT_ARRAY, I64, I64, FLOAT_ARRAY, I64, FLOAT_ARRAY, I64, I64, *[I32] * 4)
    return Kernel(f"matmul {type_name} x{width}", body, types, (lanes, warps), tight=True)


def width_for(n: int) -> int:
    """The tile for n columns."""
    return next((width for width in WIDTHS if width >= n), WIDTHS[-1])


def lower_matmul(op: MatMul, memory: Memory) -> list[Launch]:
    """One product; a quantised one reads what `lower_quantise` of its input has left."""
    w, out = memory.matrices[op.weight], memory.buffers[op.out]
    bias_at = memory.vectors[op.bias] if op.bias is not None else -1
    tail = ("vectors", bias_at, memory.array_of(op.out), out.at + op.out_first, out.stride, w.rows)
    make = float_matmul if w.type_name in FLOATS else matmul
    if w.type_name in FLOATS:
        if op.out is op.x:
            raise ValueError(f"{op.x.name}: a product of floats can not write its own input")
        x = memory.buffers[op.x]
        args: tuple[str | int, ...] = ("weights", w.quants_at, memory.array_of(op.x), x.at, x.stride, *tail, w.cols)
    else:
        room = memory.room
        head = ("weights", w.quants_at, w.scales_at, "blocks", room.quads_at, room.sums_at, "scratch", room.scales_at)
        args = (*head, *tail, w.cols // BLOCK)

    def grid(n: int, reach: int) -> tuple[int, int]:
        return groups(w.rows), -(-n // width_for(n))

    return [Launch(lambda n: make(w.type_name, width_for(n)), grid, (*args, COUNT, int(op.add)))]


def kernels() -> list[Kernel]:
    """All kernels of this module."""
    return [matmul(name, width) for name in KINDS for width in WIDTHS] + [
        float_matmul(name, width) for name in FLOATS for width in WIDTHS
    ]
