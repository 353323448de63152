"""Kernels that do several ops in one launch, with the numbers of the separate kernels, bit for bit.

A decode step is so short that launches count: a norm or a gate also writes what it found as int8 blocks, for the
products behind it; q and k are normed and rotated at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from numba import float32, int32

from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.layouts import BLOCK
from pantheon.accel.cuda.layouts import FLOATS as FLOAT_TYPES
from pantheon.accel.cuda.lowering import COUNT, MAX_COLUMNS, Launch, Memory, Room
from pantheon.accel.cuda.machine import (
    F32,
    FLOATS,
    I32,
    I64,
    SIMULATED,
    WARPS,
    WORDS,
    cuda,
    device_function,
    load,
)  # fmt: skip
from pantheon.accel.cuda.pointwise import FEW, MANY, NARROW, activated, by_heads, norm_factor
from pantheon.accel.cuda.quantise import quad
from pantheon.plan.buffers import Buffer
from pantheon.plan.flow import writes
from pantheon.plan.ops import ExpertMatMul, Gate, MatMul, Op, RmsNorm, Rope

#: words of a block, and the words that a block of threads makes at a time: of a gate, and of a norm
BLOCK_QUADS, GATE_QUADS, NORM_QUADS = BLOCK // 4, 64, MANY


@device_function
def make_blocks(  # type: ignore[no-untyped-def]
    found, tops, sums, first, end, quads, lane, lanes, blocks, scratch, quads_at, sums_at, scales_at, sync
):
    """Words first … end - 1, at most `quads` whole blocks, of the column whose blocks begin at the three places, from
    their values in `found`; see quantise.py.  All threads of the block come here: sync is cuda.syncthreads."""
    for p in range(lane, min(quads, end - first), lanes):
        top = float32(0)
        for i in range(4):
            top = max(top, abs(found[4 * p + i]))
        tops[p] = top
    sync()
    for p in range(lane, min(quads, end - first), lanes):
        top = float32(0)
        for i in range(BLOCK_QUADS):
            top = max(top, tops[p // BLOCK_QUADS * BLOCK_QUADS + i])
        inverse = float32(0)
        if top > float32(1e-30):
            inverse = float32(127) / top
        word, total = quad(found, 4 * p, inverse)
        blocks[quads_at + first + p] = word
        sums[p] = total
        if p % BLOCK_QUADS == 0:
            scratch[scales_at + (first + p) // BLOCK_QUADS] = top * float32(1 / 127)
    sync()
    for half in range(lane, min(quads, end - first) // 4, lanes):
        blocks[sums_at + first // 4 + half] = (
            sums[4 * half] + sums[4 * half + 1] + sums[4 * half + 2] + sums[4 * half + 3]
        )
    sync()


@functools.cache
def norm_blocks(parts: int, lanes: int) -> Kernel:
    """pointwise.rms_norm of whole rows, `size` a multiple of 32, and its int8 blocks; a block of threads a column."""
    room, values = max(parts, NORM_QUADS), 4 * NORM_QUADS

    def body(  # type: ignore[no-untyped-def]
        scratch, vectors, blocks, x_at, x_stride, weight_at, out_at, out_stride, size, eps, quads_at, sums_at,
        scales_at, n,
    ):  # fmt: skip
        found = cuda.shared.array(values, float32)
        floats = cuda.shared.array(room, float32)
        ints = cuda.shared.array(NORM_QUADS, int32)
        lane = cuda.threadIdx.x
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            x, out, block = x_at + c * x_stride, out_at + c * out_stride, c * (size // BLOCK)
            factor = norm_factor(scratch, x, size, size, eps, floats, 0, lane, lanes, parts, cuda.syncthreads)
            for first in range(0, size // 4, NORM_QUADS):
                for i in range(lane, min(values, size - 4 * first), lanes):
                    at = 4 * first + i
                    value = scratch[x + at] * factor * load(vectors, weight_at + at)
                    scratch[out + at] = value
                    found[i] = value
                cuda.syncthreads()
                make_blocks(
                    found, floats, ints, first, size // 4, NORM_QUADS, lane, lanes, blocks, scratch,
                    quads_at + 8 * block, sums_at + 2 * block, scales_at + block, cuda.syncthreads,
                )  # fmt: skip

    types = FLOATS, FLOATS, WORDS, *(I64,) * 5, I32, F32, I64, I64, I64, I32
    return Kernel(f"norm_blocks_{parts}", body, types, (lanes, 1))


@functools.cache
def gate_blocks(act: str, lanes: int) -> Kernel:
    """pointwise.combine by this act, `size` a multiple of 32, and its int8 blocks."""
    silu, gelu, values = act == "silu", act == "gelu", 4 * GATE_QUADS

    def body(  # type: ignore[no-untyped-def]
        scratch, blocks, x_at, x_stride, y_at, y_stride, out_at, out_stride, size, quads_at, sums_at, scales_at, n
    ):
        found = cuda.shared.array(values, float32)
        tops = cuda.shared.array(GATE_QUADS, float32)
        ints = cuda.shared.array(GATE_QUADS, int32)
        lane = cuda.threadIdx.x
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            x, y, out, block = x_at + c * x_stride, y_at + c * y_stride, out_at + c * out_stride, c * (size // BLOCK)
            for first in range(cuda.blockIdx.x * GATE_QUADS, size // 4, cuda.gridDim.x * GATE_QUADS):
                for i in range(lane, min(values, size - 4 * first), lanes):
                    at = 4 * first + i
                    value = activated(scratch[x + at], silu, gelu) * scratch[y + at]
                    scratch[out + at] = value
                    found[i] = value
                cuda.syncthreads()
                make_blocks(
                    found, tops, ints, first, size // 4, GATE_QUADS, lane, lanes, blocks, scratch,
                    quads_at + 8 * block, sums_at + 2 * block, scales_at + block, cuda.syncthreads,
                )  # fmt: skip

    types = FLOATS, WORDS, *(I64,) * 6, I32, I64, I64, I64, I32
    return Kernel(f"gate_blocks_{act}", body, types, (lanes, 1))


@functools.cache
def turn(pairing: str, normed: bool, lanes: int, warps: int) -> Kernel:
    """The heads of q, then those of k: pointwise.rms_norm of each if `normed`, then pointwise.rope; a head for each
    threadIdx.y."""
    neox, room = pairing == "neox", warps * FEW

    def body(  # type: ignore[no-untyped-def]
        scratch, vectors, columns, tables, q_at, q_stride, q_weight, k_at, k_stride, k_weight, cos_at, sin_at, q_heads,
        k_heads, head_dim, half, eps, n,
    ):  # fmt: skip
        sums = cuda.shared.array(room, float32)
        lane, mine, heads = cuda.threadIdx.x, cuda.threadIdx.y * FEW, q_heads + k_heads
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            angle = columns[2 * MAX_COLUMNS + c] * half
            for first in range(cuda.blockIdx.x * warps, heads, cuda.gridDim.x * warps):
                head = first + cuda.threadIdx.y
                x, weight = q_at + c * q_stride + head * head_dim, q_weight
                if head >= q_heads:
                    x, weight = k_at + c * k_stride + (head - q_heads) * head_dim, k_weight
                end = head_dim if head < heads else 0
                if normed:
                    factor = norm_factor(
                        scratch, x, end, head_dim, eps, sums, mine, lane, lanes, FEW, cuda.syncthreads
                    )
                    for i in range(2 * half + lane, end, lanes):
                        scratch[x + i] = scratch[x + i] * factor * load(vectors, weight + i)
                for i in range(lane, min(half, end), lanes):
                    one = i if neox else 2 * i
                    other = one + half if neox else one + 1
                    a, b = scratch[x + one], scratch[x + other]
                    if normed:
                        a = a * factor * load(vectors, weight + one)
                        b = b * factor * load(vectors, weight + other)
                    cos, sin = load(tables, cos_at + angle + i), load(tables, sin_at + angle + i)
                    scratch[x + one] = a * cos - b * sin
                    scratch[x + other] = a * sin + b * cos

    name = f"norm_rope_{pairing}" if normed else f"rope_both_{pairing}"
    types = FLOATS, FLOATS, WORDS, FLOATS, *(I64,) * 8, I32, I32, I32, I32, F32, I32
    return Kernel(name, body, types, (lanes, warps))


class Fused(NamedTuple):
    """Launches in place of the first `ops` ops; `quantised`: the buffer whose int8 blocks are there behind them."""

    launches: list[Launch]
    ops: int
    quantised: Buffer | None = None


def fuse(ops: Sequence[Op], memory: Memory) -> Fused | None:
    """What the first of these ops can do in one launch, with those behind it; None: nothing more than alone."""
    op = ops[0]
    if isinstance(op, RmsNorm) and op.groups == 1 and _wants_blocks(op.out, ops[1:], memory):
        return Fused([lower_norm_blocks(op, memory)], 1, op.out)
    if isinstance(op, Gate) and _wants_blocks(op.out, ops[1:], memory):
        return Fused([lower_gate_blocks(op, memory)], 1, op.out)
    ropes = [one for one in ops[:2] if isinstance(one, Rope)]
    if _both(ropes):
        return Fused([lower_turn(ropes, (), memory)], 2)
    norms, ropes = [one for one in ops[:2] if isinstance(one, RmsNorm)], [o for o in ops[2:4] if isinstance(o, Rope)]
    if _both(ropes) and _norms_of(norms, ropes):
        return Fused([lower_turn(ropes, norms, memory)], 4)
    return None


def quantised_input(op: Op, memory: Memory) -> Buffer | None:
    """The buffer that an op needs as int8 blocks."""
    if isinstance(op, MatMul | ExpertMatMul) and memory.matrices[op.weight].type_name not in FLOAT_TYPES:
        return op.x
    return None


def _wants_blocks(out: Buffer, ops: Sequence[Op], memory: Memory) -> bool:
    """Whether the first of these ops that needs blocks at all needs them of `out`, as it is now."""
    for op in ops:
        x = quantised_input(op, memory)
        if x is not None or out in writes(op):
            return x is out and out.width % BLOCK == 0
    return False


def _both(ropes: Sequence[Rope]) -> bool:
    """Two rotations by one table, of heads of one size."""
    if len(ropes) != 2:
        return False
    q, k = ropes
    return (q.table, q.head_dim) == (k.table, k.head_dim) and q.x is not k.x


def _norms_of(norms: Sequence[RmsNorm], ropes: Sequence[Rope]) -> bool:
    """Whether these are norms of the heads that are rotated, in place and by one epsilon."""
    return len(norms) == 2 and all(
        norm.x is norm.out is rope.x and norm.groups == rope.heads and norm.weight.size == rope.head_dim <= NARROW
        and norm.eps == norms[0].eps
        for norm, rope in zip(norms, ropes, strict=True)
    )  # fmt: skip


def lower_norm_blocks(op: RmsNorm, memory: Memory) -> Launch:
    """RmsNorm of whole rows and the int8 blocks of its out."""
    at, room, size = memory.buffers, memory.room, op.weight.size
    kernel = norm_blocks(FEW if size <= NARROW else MANY, 1 if SIMULATED else MANY)
    args = (
        "scratch", "vectors", "blocks", *at[op.x], memory.vectors[op.weight], *at[op.out], size, op.eps, *_in(room),
        COUNT,
    )  # fmt: skip
    return Launch(lambda n: kernel, lambda n, reach: (1, 1) if SIMULATED else (1, n), args)


def lower_gate_blocks(op: Gate, memory: Memory) -> Launch:
    """Gate and the int8 blocks of its out."""
    at, room, size = memory.buffers, memory.room, op.out.width
    kernel, parts = gate_blocks(op.act, 1 if SIMULATED else 4 * GATE_QUADS), -(-size // (4 * GATE_QUADS))
    args = "scratch", "blocks", *at[op.gate], *at[op.up], *at[op.out], size, *_in(room), COUNT
    return Launch(lambda n: kernel, lambda n, reach: (1, 1) if SIMULATED else (parts, n), args)


def _in(room: Room) -> tuple[int, int, int]:
    return room.quads_at, room.sums_at, room.scales_at


def lower_turn(ropes: Sequence[Rope], norms: Sequence[RmsNorm], memory: Memory) -> Launch:
    """The rotations of q and k, and the norms of their heads if there are any."""
    q, k = ropes
    at, table = memory.buffers, memory.ropes[q.table]
    weights = [memory.vectors[norm.weight] for norm in norms] or [0, 0]
    kernel = turn(table.pairing, bool(norms), 1 if SIMULATED else FEW, WARPS)
    args = (
        "scratch", "vectors", "columns", "tables", *at[q.x], weights[0], *at[k.x], weights[1], table.cos_at,
        table.sin_at, q.heads, k.heads, q.head_dim, table.half, norms[0].eps if norms else 0.0, COUNT,
    )  # fmt: skip
    return Launch(lambda n: kernel, by_heads(q.heads + k.heads), args)


def kernels() -> list[Kernel]:
    """Every kernel of this module, as a device runs them."""
    found = [norm_blocks(parts, MANY) for parts in (FEW, MANY)]
    found += [gate_blocks(act, 4 * GATE_QUADS) for act in ("silu", "gelu", "sigmoid")]
    return found + [turn(pairing, normed, FEW, 8) for pairing in ("norm", "neox") for normed in (False, True)]
