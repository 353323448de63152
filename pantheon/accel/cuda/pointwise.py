"""Ops that treat each column on its own: norm, rotary, gates, add, pick, soft cap, and the gather of wanted rows.

Memory binds them: neighbouring threads take neighbouring values.  In a grid y counts columns and x cuts a row; heads go
over threadIdx.y and their values over threadIdx.x, so that no index is divided.
"""

from __future__ import annotations

import functools
import math

from numba import float32

from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.lowering import COUNT, MAX_COLUMNS, Grid, Launch, Memory
from pantheon.accel.cuda.machine import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    SIMULATED,
    THREADS,
    WARPS,
    WORDS,
    cuda,
    device_function,
    load,
)  # fmt: skip
from pantheon.plan.buffers import Buffer
from pantheon.plan.ops import Add, Gate, Pick, RmsNorm, Rope, Sigmoid, SoftCap

#: a norm over more values than this takes MANY partial sums, else FEW; MANY is a multiple of FEW
NARROW, FEW, MANY = 256, 32, 512
#: -2u of the tanh form of gelu, x sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x³), is x (A + B x²)
GELU_A = -2.0 * math.sqrt(2.0 / math.pi)
GELU_B = 0.044715 * GELU_A
#: e to the power of this is a float32, and 1 / (1 + that) is nothing beside 1
STEEP = 80.0


@device_function
def sigmoid_of_minus(u):  # type: ignore[no-untyped-def]
    """1 / (1 + e^u), float32; NaN stays."""
    if u > float32(STEEP):
        u = float32(STEEP)
    return float32(1) / (float32(1) + float32(math.exp(u)))


@device_function
def activated(x, silu, gelu):  # type: ignore[no-untyped-def]
    """silu(x), gelu(x) or, with neither, sigmoid(x)."""
    if silu:
        value = x * sigmoid_of_minus(-x)
    elif gelu:
        value = x * sigmoid_of_minus(x * (float32(GELU_A) + float32(GELU_B) * x * x))
    else:
        value = sigmoid_of_minus(-x)
    return value


@device_function
def norm_factor(scratch, x, end, size, eps, sums, mine, lane, lanes, parts, sync):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean of squares + eps) of scratch[x : x + size], which `lanes` threads find together, with sums[mine :
    mine + parts]; end: size, or 0 for threads without a head.  sync: cuda.syncthreads, which all threads of the block
    come to.

    Partial sum p takes every `parts`-th square from p on, in order; FEW sums of those, and their sum, are in order too:
    the same bits for every shape of a block.
    """
    for p in range(lane, parts, lanes):
        total = float32(0)
        for i in range(p, end, parts):
            v = scratch[x + i]
            total += v * v
        sums[mine + p] = total
    sync()
    if parts > FEW:
        for p in range(lane, FEW, lanes):
            total = float32(0)
            for j in range(p, parts, FEW):
                total += sums[mine + j]
            sums[mine + p] = total
        sync()
    if lane == 0:
        total = float32(0)
        for p in range(FEW):
            total += sums[mine + p]
        sums[mine] = float32(1) / float32(math.sqrt(total / float32(size) + eps))
    sync()
    factor = sums[mine]
    sync()
    return factor


@functools.cache
def rms_norm(parts: int, lanes: int, warps: int) -> Kernel:
    """x / sqrt(mean(x²) + eps) * weight of `groups` heads of `size` values, a head for each threadIdx.y."""
    room = warps * parts

    def body(  # type: ignore[no-untyped-def]
        scratch, vectors, x_at, x_stride, weight_at, out_at, out_stride, size, groups, eps, n
    ):
        sums = cuda.shared.array(room, float32)
        lane, mine = cuda.threadIdx.x, cuda.threadIdx.y * parts
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            for first in range(cuda.blockIdx.x * warps, groups, cuda.gridDim.x * warps):
                group = first + cuda.threadIdx.y
                x, out = x_at + c * x_stride + group * size, out_at + c * out_stride + group * size
                end = size if group < groups else 0
                factor = norm_factor(scratch, x, end, size, eps, sums, mine, lane, lanes, parts, cuda.syncthreads)
                for i in range(lane, end, lanes):
                    scratch[out + i] = scratch[x + i] * factor * load(vectors, weight_at + i)

    types = FLOATS, FLOATS, I64, I64, I64, I64, I64, I32, I32, F32, I32
    return Kernel(f"rms_norm_{parts}", body, types, (lanes, warps))


@functools.cache
def rope(pairing: str) -> Kernel:
    """Turn pairs of each head by the angles of the column's position; see plan/rope.py for the pairings."""
    neox = pairing == "neox"

    def body(  # type: ignore[no-untyped-def]
        scratch, columns, tables, x_at, x_stride, cos_at, sin_at, heads, head_dim, half, n
    ):
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            angle = columns[2 * MAX_COLUMNS + c] * half
            first = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
            for head in range(first, heads, cuda.gridDim.x * cuda.blockDim.y):
                x = x_at + c * x_stride + head * head_dim
                for i in range(cuda.threadIdx.x, half, cuda.blockDim.x):
                    cos, sin = load(tables, cos_at + angle + i), load(tables, sin_at + angle + i)
                    one = x + i if neox else x + 2 * i
                    other = one + half if neox else one + 1
                    a, b = scratch[one], scratch[other]
                    scratch[one] = a * cos - b * sin
                    scratch[other] = a * sin + b * cos

    types = FLOATS, WORDS, FLOATS, I64, I64, I64, I64, I32, I32, I32, I32
    return Kernel(f"rope_{pairing}", body, types, (LANES, WARPS))


@functools.cache
def combine(kind: str) -> Kernel:
    """out = x + y ("add"), or act(x) * y ("silu", "gelu", "sigmoid")."""
    add, silu, gelu = kind == "add", kind == "silu", kind == "gelu"

    def body(scratch, x_at, x_stride, y_at, y_stride, out_at, out_stride, width, n):  # type: ignore[no-untyped-def]
        first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            for i in range(first, width, cuda.gridDim.x * cuda.blockDim.x):
                x, y = scratch[x_at + c * x_stride + i], scratch[y_at + c * y_stride + i]
                value = x + y if add else activated(x, silu, gelu) * y
                scratch[out_at + c * out_stride + i] = value

    return Kernel(f"combine_{kind}", body, (FLOATS, I64, I64, I64, I64, I64, I64, I32, I32), (THREADS, 1))


@functools.cache
def squash(kind: str) -> Kernel:
    """In place: x = sigmoid(x) ("sigmoid"), or limit tanh(x / limit) ("soft_cap")."""
    capped = kind == "soft_cap"

    def body(array, at, stride, limit, width, n):  # type: ignore[no-untyped-def]
        first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            for i in range(first, width, cuda.gridDim.x * cuda.blockDim.x):
                x = array[at + c * stride + i]
                if capped:
                    array[at + c * stride + i] = limit * float32(math.tanh(x / limit))
                else:
                    array[at + c * stride + i] = sigmoid_of_minus(-x)

    return Kernel(f"squash_{kind}", body, (FLOATS, I64, I64, F32, I32, I32), (THREADS, 1))


@functools.cache
def pick() -> Kernel:
    """`size` values of each of `heads` heads, which stand `step` apart, side by side."""

    def body(scratch, x_at, x_stride, out_at, out_stride, heads, size, step, n):  # type: ignore[no-untyped-def]
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            first = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
            for head in range(first, heads, cuda.gridDim.x * cuda.blockDim.y):
                x, out = x_at + c * x_stride + head * step, out_at + c * out_stride + head * size
                for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
                    scratch[out + i] = scratch[x + i]

    return Kernel("pick", body, (FLOATS, I64, I64, I64, I64, I32, I32, I32, I32), (LANES, WARPS))


@functools.cache
def gather() -> Kernel:
    """Row `wanted[i]` of x to row i of out."""

    def body(scratch, columns, x_at, x_stride, out_at, out_stride, width, n):  # type: ignore[no-untyped-def]
        first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            x, out = x_at + columns[3 * MAX_COLUMNS + c] * x_stride, out_at + c * out_stride
            for i in range(first, width, cuda.gridDim.x * cuda.blockDim.x):
                scratch[out + i] = scratch[x + i]

    return Kernel("gather", body, (FLOATS, WORDS, I64, I64, I64, I64, I32, I32), (THREADS, 1))


def norm_kernel(size: int) -> Kernel:
    """The norm over so many values: a warp for each head, or a large block for a row."""
    parts = FEW if size <= NARROW else MANY
    if SIMULATED:
        return rms_norm(parts, 1, 1)
    return rms_norm(parts, FEW, WARPS) if parts == FEW else rms_norm(parts, MANY, 1)


def by_values(width: int) -> Grid:
    """A thread for each of `width` values of each column."""
    return lambda n, reach: (1, 1) if SIMULATED else (-(-width // THREADS), n)


def by_heads(heads: int, each: int = WARPS) -> Grid:
    """A block for `each` heads of each column."""
    return lambda n, reach: (1, 1) if SIMULATED else (-(-heads // each), n)


def _launch(kernel: Kernel, grid: Grid, *args: str | int | float) -> list[Launch]:
    return [Launch(lambda n: kernel, grid, (*args, COUNT))]


def lower_rms_norm(op: RmsNorm, memory: Memory) -> list[Launch]:
    """A launch for RmsNorm."""
    kernel, size = norm_kernel(op.weight.size), op.weight.size
    return _launch(
        kernel, by_heads(op.groups, kernel.threads[1]), "scratch", "vectors", *memory.buffers[op.x],
        memory.vectors[op.weight], *memory.buffers[op.out], size, op.groups, op.eps,
    )  # fmt: skip


def lower_rope(op: Rope, memory: Memory) -> list[Launch]:
    """A launch for Rope."""
    table = memory.ropes[op.table]
    return _launch(
        rope(table.pairing), by_heads(op.heads), "scratch", "columns", "tables", *memory.buffers[op.x],
        table.cos_at, table.sin_at, op.heads, op.head_dim, table.half,
    )  # fmt: skip


def _combine(kind: str, x: Buffer, y: Buffer, out: Buffer, memory: Memory) -> list[Launch]:
    places = (*memory.buffers[x], *memory.buffers[y], *memory.buffers[out])
    return _launch(combine(kind), by_values(out.width), "scratch", *places, out.width)


def lower_gate(op: Gate, memory: Memory) -> list[Launch]:
    """A launch for Gate."""
    return _combine(op.act, op.gate, op.up, op.out, memory)


def lower_add(op: Add, memory: Memory) -> list[Launch]:
    """A launch for Add."""
    return _combine("add", op.x, op.y, op.out, memory)


def _squash(kind: str, x: Buffer, limit: float, memory: Memory) -> list[Launch]:
    return _launch(squash(kind), by_values(x.width), memory.array_of(x), *memory.buffers[x], limit, x.width)


def lower_sigmoid(op: Sigmoid, memory: Memory) -> list[Launch]:
    """A launch for Sigmoid."""
    return _squash("sigmoid", op.x, 1.0, memory)


def lower_soft_cap(op: SoftCap, memory: Memory) -> list[Launch]:
    """A launch for SoftCap."""
    return _squash("soft_cap", op.x, op.cap, memory)


def lower_pick(op: Pick, memory: Memory) -> list[Launch]:
    """A launch for Pick."""
    (at, stride), heads = memory.buffers[op.x], op.out.width // op.size
    return _launch(
        pick(), by_heads(heads), "scratch", at + op.first, stride, *memory.buffers[op.out], heads, op.size, op.step
    )


def lower_gather(memory: Memory) -> list[Launch]:
    """A launch that puts the wanted rows of the plan's `hidden` to the front of its `head_in`."""
    plan = memory.plan
    places = (*memory.buffers[plan.hidden], *memory.buffers[plan.head_in])
    return _launch(gather(), by_values(plan.hidden.width), "scratch", "columns", *places, plan.hidden.width)


def kernels() -> list[Kernel]:
    """Every kernel of this module, as a device runs them."""
    found = [rms_norm(FEW, FEW, 8), rms_norm(MANY, MANY, 1), rope("norm"), rope("neox"), pick(), gather()]
    found += [combine(kind) for kind in ("add", "silu", "gelu", "sigmoid")]
    return found + [squash(kind) for kind in ("sigmoid", "soft_cap")]
