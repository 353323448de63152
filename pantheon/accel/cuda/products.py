"""Matrix products: a block of threads for each group of 32 rows and tile of columns.

Thread (lane, warp) sums row `lane` over segment `warp` of the columns; the segments of a row are added up through
shared memory, in order.  Quantised weights meet int8 activations (`quantise`), float weights the activations
themselves.  Many columns of quantised weights are left to `tensor_products` where the die has what they need.
"""

from __future__ import annotations

import functools

from pantheon.accel.cuda.group_sums import float_group_sums, group_sums
from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.layouts import BLOCK, FLOATS, KINDS, ROWS, groups, quant_words, scale_words
from pantheon.accel.cuda.lowering import COUNT, Launch, Memory, Packed
from pantheon.accel.cuda.machine import F32, I32, I64, LANES, WARPS, WORDS, cuda
from pantheon.accel.cuda.machine import FLOATS as FLOAT_ARRAY
from pantheon.accel.cuda.segments import SEGMENTS, finish
from pantheon.accel.cuda.tensor_products import WIDTH, tensor_matmul
from pantheon.plan.ops import MatMul

#: columns of a tile; a forward takes the least that holds its columns, or several of the widest
WIDTHS = (1, 2, 4, 8)
#: blocks that a multiprocessor shall hold at a time, by width
RESIDENT = {1: 4, 2: 4, 4: 3, 8: 2}


@functools.cache
def matmul(type_name: str, width: int, lanes: int = LANES, warps: int = WARPS) -> Kernel:
    """(weights, quants_at, scales_at, blocks, quads_at, sums_at, scratch, dx_at, vectors, bias_at, out, out_at, stride,
    rows, blocks of a row, columns, add) for a type of `layouts.KINDS`."""
    kind, room, end_of = KINDS[type_name], SEGMENTS * width * ROWS, finish(width, lanes, warps)
    quant, scale, sup, fill = quant_words(kind), scale_words(kind), kind.sup, group_sums(type_name, width, lanes, warps)

    def body(  # type: ignore[no-untyped-def]
        weights, quants_at, scales_at, blocks, quads_at, sums_at, scratch, dx_at, vectors, bias_at, out, out_at, stride,
        rows, per_row, n, more,
    ):  # fmt: skip
        partial = cuda.shared.array(room, F32)
        lane, warp, group, column = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.x, cuda.blockIdx.y * width
        quants, scales = quants_at + group * per_row * quant, scales_at + group * (per_row // sup) * scale
        first = column * per_row
        quads, sums, dx = quads_at + 8 * first, sums_at + 2 * first, dx_at + first
        fill(partial, lane, warp, weights, quants, scales, blocks, quads, sums, scratch, dx, per_row)
        cuda.syncthreads()
        end_of(partial, lane, warp, vectors, bias_at, out, out_at, stride, group * ROWS, rows, column, n, more)

    types = (WORDS, I64, I64, WORDS, I64, I64, FLOAT_ARRAY, I64, FLOAT_ARRAY, I64, FLOAT_ARRAY, I64, I64, *[I32] * 4)
    name = f"matmul {type_name} x{width}"
    return Kernel(name, body, types, (lanes, warps), tight=True, resident=RESIDENT[width])


@functools.cache
def float_matmul(type_name: str, width: int, lanes: int = LANES, warps: int = WARPS) -> Kernel:
    """(weights, floats_at, x, x_at, x_stride, vectors, bias_at, out, out_at, stride, rows, cols, columns, add) for
    F32, F16 and BF16."""
    fill, end_of = float_group_sums(type_name, width, lanes, warps), finish(width, lanes, warps)
    size, room = FLOATS[type_name], SEGMENTS * width * ROWS

    def body(  # type: ignore[no-untyped-def]
        weights, floats_at, x, x_at, x_stride, vectors, bias_at, out, out_at, stride, rows, cols, n, more,
    ):  # fmt: skip
        partial = cuda.shared.array(room, F32)
        lane, warp, group, column = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.x, cuda.blockIdx.y * width
        begin, at = floats_at + group * ((cols * size + 3) // 4 * ROWS), x_at + column * x_stride
        fill(partial, lane, warp, weights, begin, x, at, x_stride, cols)
        cuda.syncthreads()
        end_of(partial, lane, warp, vectors, bias_at, out, out_at, stride, group * ROWS, rows, column, n, more)

    types = (WORDS, I64, FLOAT_ARRAY, I64, I64, FLOAT_ARRAY, I64, FLOAT_ARRAY, I64, I64, *[I32] * 4)
    name = f"matmul {type_name} x{width}"
    return Kernel(name, body, types, (lanes, warps), tight=True, resident=RESIDENT[width])


#: columns from which tensor cores take over, where they multiply bytes in this way
MANY, TENSOR_SM = 16, 80


def width_for(n: int) -> int:
    """The tile for n columns."""
    return next((width for width in WIDTHS if width >= n), WIDTHS[-1])


def lower_matmul(op: MatMul, memory: Memory) -> list[Launch]:
    """One product; a quantised one reads what `lower_quantise` of its input has left."""
    w = memory.matrices[op.weight]
    bias_at = memory.vectors[op.bias] if op.bias is not None else -1
    out = memory.buffers[op.out]
    tail = ("vectors", bias_at, memory.array_of(op.out), out.at + op.out_first, out.stride, w.rows)
    if w.type_name in FLOATS:
        return [_lower_floats(op, memory, w, tail)]
    name, room = w.type_name, memory.room
    head = ("weights", w.quants_at, w.scales_at, "blocks", room.quads_at, room.sums_at, "scratch", room.scales_at)

    def tensor(n: int) -> bool:
        return n >= MANY and memory.sm >= TENSOR_SM

    def grid(n: int, reach: int) -> tuple[int, int]:
        return groups(w.rows), -(-n // (WIDTH if tensor(n) else width_for(n)))

    def pick(n: int) -> Kernel:
        return tensor_matmul(name) if tensor(n) else matmul(name, width_for(n))

    return [Launch(pick, grid, (*head, *tail, w.cols // BLOCK, COUNT, int(op.add)))]


def _lower_floats(op: MatMul, memory: Memory, w: Packed, tail: tuple[str | int, ...]) -> Launch:
    if op.out is op.x:
        raise ValueError(f"{op.x.name}: a product of floats can not write its own input")
    x = memory.buffers[op.x]
    head = ("weights", w.quants_at, memory.array_of(op.x), x.at, x.stride)

    def grid(n: int, reach: int) -> tuple[int, int]:
        return groups(w.rows), -(-n // width_for(n))

    args = (*head, *tail, w.cols, COUNT, int(op.add))
    return Launch(lambda n: float_matmul(w.type_name, width_for(n)), grid, args)


def kernels() -> list[Kernel]:
    """All kernels of this module and of `tensor_products`."""
    quantised = [matmul(name, width) for name in KINDS for width in WIDTHS]
    return quantised + [float_matmul(name, width) for name in FLOATS for width in WIDTHS] + [
        tensor_matmul(name) for name in KINDS
    ]
