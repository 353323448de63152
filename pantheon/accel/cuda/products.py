"""Matrix products: a block of threads for each group of 32 rows and tile of columns.

Thread (lane, warp) sums row `lane` over segment `warp` of the columns; the segments of a row are added up through
shared memory, in order.  Quantised weights meet int8 activations (`quantise`), float weights the activations
themselves.  Many columns of quantised weights are left to `tensor_products` where the die has what they need.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pantheon.accel.cuda.group_sums import float_group_sums, group_sums
from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.layouts import BLOCK, FLOATS, KINDS, ROWS, groups, quant_words, scale_words
from pantheon.accel.cuda.lowering import COUNT, Launch, Memory
from pantheon.accel.cuda.machine import F32, I32, I64, LANES, WARPS, WORDS, cuda
from pantheon.accel.cuda.machine import FLOATS as FLOAT_ARRAY
from pantheon.accel.cuda.segments import SEGMENTS, finish
from pantheon.accel.cuda.targets import TARGET_TYPES, target, target_args
from pantheon.accel.cuda.tensor_products import WIDTH, tensor_matmul
from pantheon.plan.ops import MatMul

#: columns of a tile; a forward takes the least that holds its columns, or several of the widest
WIDTHS = (1, 2, 4, 8)
#: blocks that a multiprocessor shall hold at a time, by width
RESIDENT = {1: 3, 2: 3, 4: 2, 8: 1}


@functools.cache
def matmul(type_name: str, width: int, lanes: int = LANES, warps: int = WARPS) -> Kernel:
    """(weights, blocks, quads_at, sums_at, scratch, dx_at, vectors, out, blocks of a row, columns, then three matrices:
    see `targets`) for a type of `layouts.KINDS`."""
    kind, room, end_of = KINDS[type_name], SEGMENTS * width * ROWS, finish(width, lanes, warps)
    quant, scale, sup, fill = quant_words(kind), scale_words(kind), kind.sup, group_sums(type_name, width, lanes, warps)

    def body(  # type: ignore[no-untyped-def]
        weights, blocks, quads_at, sums_at, scratch, dx_at, vectors, out, per_row, n,
        a0, a1, a2, a3, a4, a5, a6, b0, b1, b2, b3, b4, b5, b6, c0, c1, c2, c3, c4, c5, c6,
    ):  # fmt: skip
        partial = cuda.shared.array(room, F32)
        lane, warp, column = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.y * width
        group, it = target(
            cuda.blockIdx.x, (a0, a1, a2, a3, a4, a5, a6), (b0, b1, b2, b3, b4, b5, b6), (c0, c1, c2, c3, c4, c5, c6)
        )
        quants, scales = it[0] + group * per_row * quant, it[1] + group * (per_row // sup) * scale
        first = column * per_row
        quads, sums, dx = quads_at + 8 * first, sums_at + 2 * first, dx_at + first
        fill(partial, lane, warp, weights, quants, scales, blocks, quads, sums, scratch, dx, per_row)
        cuda.syncthreads()
        end_of(partial, lane, warp, vectors, it[2], out, it[3], it[4], group * ROWS, it[5], column, n, it[6])

    types = (WORDS, WORDS, I64, I64, FLOAT_ARRAY, I64, FLOAT_ARRAY, FLOAT_ARRAY, I32, I32, *TARGET_TYPES)
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
    if memory.matrices[op.weight].type_name in FLOATS:
        return [_lower_floats(op, memory)]
    return lower_matmuls([op], memory)


def lower_matmuls(ops: Sequence[MatMul], memory: Memory) -> list[Launch]:
    """One launch for up to three quantised products that are `alike`."""
    (name,) = {memory.matrices[op.weight].type_name for op in ops}
    total, room, x = sum(groups(op.weight.rows) for op in ops), memory.room, ops[0].x

    def tensor(n: int) -> bool:
        return n >= MANY and memory.sm >= TENSOR_SM

    def grid(n: int, reach: int) -> tuple[int, int]:
        return total, -(-n // (WIDTH if tensor(n) else width_for(n)))

    def pick(n: int) -> Kernel:
        return tensor_matmul(name) if tensor(n) else matmul(name, width_for(n))

    args: tuple[str | int, ...] = (
        "weights", "blocks", room.quads_at, room.sums_at, "scratch", room.scales_at, "vectors",
        memory.array_of(ops[0].out), x.width // BLOCK, COUNT, *target_args(ops, memory),
    )  # fmt: skip
    return [Launch(pick, grid, args)]


def _lower_floats(op: MatMul, memory: Memory) -> Launch:
    if op.out is op.x:
        raise ValueError(f"{op.x.name}: a product of floats can not write its own input")
    w, x, out = memory.matrices[op.weight], memory.buffers[op.x], memory.buffers[op.out]
    bias_at = memory.vectors[op.bias] if op.bias is not None else -1

    def grid(n: int, reach: int) -> tuple[int, int]:
        return groups(w.rows), -(-n // width_for(n))

    args = (
        "weights", w.quants_at, memory.array_of(op.x), x.at, x.stride, "vectors", bias_at, memory.array_of(op.out),
        out.at + op.out_first, out.stride, w.rows, w.cols, COUNT, int(op.add),
    )  # fmt: skip
    return Launch(lambda n: float_matmul(w.type_name, width_for(n)), grid, args)


def kernels() -> list[Kernel]:
    """All kernels of this module and of `tensor_products`."""
    quantised = [matmul(name, width) for name in KINDS for width in WIDTHS]
    return quantised + [float_matmul(name, width) for name in FLOATS for width in WIDTHS] + [
        tensor_matmul(name) for name in KINDS
    ]


__all__ = ["MANY", "TENSOR_SM", "WIDTHS", "float_matmul", "kernels", "lower_matmul", "lower_matmuls", "matmul"]
