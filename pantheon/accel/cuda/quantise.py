"""Activations as int8 blocks, for products with quantised weights: the numbers of the CPU's `quantise`.

A block is 32 values of a column: d = max|x| / 127, q = x / d to the nearest, even ones among equals.  With B blocks in
a column, block b of column c has its 8 words of quants at (c * B + b) * 8, the int32 sums of q over both halves at
(c * B + b) * 2, and d at c * B + b; see `lowering.Room`.
"""

from __future__ import annotations

import functools

from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.layouts import BLOCK
from pantheon.accel.cuda.lowering import COUNT, Launch, Memory
from pantheon.accel.cuda.machine import F32, FLOATS, I32, I64, SIMULATED, WORDS, cuda, device_function, to_int
from pantheon.plan.buffers import Buffer

#: threads of a block, each with a block of activations: few, so that one column is on many processors
_THREADS = 1 if SIMULATED else 64


@device_function
def largest(x, at):  # type: ignore[no-untyped-def]
    """max |x| of the 32 values from `at`."""
    top = F32(0)
    for i in range(BLOCK):
        top = max(top, abs(x[at + i]))
    return top


@device_function
def quad(x, at, inverse):  # type: ignore[no-untyped-def]
    """(word of four quants, their sum) of the 4 values from `at`; inverse is 1 / d."""
    a, b = to_int(x[at] * inverse), to_int(x[at + 1] * inverse)
    c, d = to_int(x[at + 2] * inverse), to_int(x[at + 3] * inverse)
    return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24, a + b + c + d


@device_function
def quantise_block(x, at, blocks, quads_at, sums_at):  # type: ignore[no-untyped-def]
    """32 values from `at` to 8 words and 2 sums; returns d."""
    top = largest(x, at)
    inverse = F32(0)
    if top > F32(1e-30):
        inverse = F32(127) / top
    low, high = 0, 0
    for p in range(4):
        word, total = quad(x, at + 4 * p, inverse)
        blocks[quads_at + p] = word
        low += total
        word, total = quad(x, at + 16 + 4 * p, inverse)
        blocks[quads_at + 4 + p] = word
        high += total
    blocks[sums_at] = low
    blocks[sums_at + 1] = high
    return top * F32(1 / 127)


@functools.cache
def quantise() -> Kernel:
    """(scratch, blocks, at, stride, quads_at, sums_at, scales_at, blocks of a column, columns)."""

    def body(scratch, blocks, at, stride, quads_at, sums_at, scales_at, per_column, n):  # type: ignore[no-untyped-def]
        for i in range(cuda.grid(1), n * per_column, cuda.gridsize(1)):
            column = i // per_column
            x = at + column * stride + BLOCK * (i - column * per_column)
            scratch[scales_at + i] = quantise_block(scratch, x, blocks, quads_at + 8 * i, sums_at + 2 * i)

    kinds = (FLOATS, WORDS, I64, I64, I64, I64, I64, I32, I32)
    return Kernel("quantise", body, kinds, (_THREADS, 1))


def lower_quantise(buffer: Buffer, memory: Memory) -> list[Launch]:
    """Quantise a whole buffer, for all products that read it; its width is a multiple of 32."""
    if buffer.width % BLOCK:
        raise ValueError(f"{buffer.name} is {buffer.width} wide: not a whole number of blocks of {BLOCK}")
    x, room, per_column = memory.buffers[buffer], memory.room, buffer.width // BLOCK

    def grid(n: int, reach: int) -> tuple[int, int]:
        return (1 if SIMULATED else -(-n * per_column // _THREADS), 1)

    args = (memory.array_of(buffer), "blocks", x.at, x.stride, room.quads_at, room.sums_at, room.scales_at)
    return [Launch(lambda n: quantise(), grid, (*args, per_column, COUNT))]


def kernels() -> list[Kernel]:
    """All kernels of this module."""
    return [quantise()]
