"""Recurrent layers: a causal convolution and the gated delta rule, on the state of the columns' slots.

A slot's state lies in `recurrent` at slot * slot_floats; a layer of it begins at Memory.recurrent_at[layer]: the past
inputs of the convolution [taps - 1][channels], oldest first, then S [heads][key_dim][value_dim].

The convolution knows every column's past at once, so columns go side by side, and a second launch keeps the last
inputs.  The delta rule goes from column to column: a block holds 32 values of a head's S in registers, a warp an
eighth of their key dims, from the first column of a slot to its last.  The chunked form of the rule (ARCH.md §4.8),
made for matrix units, would make numbers depend on how a prompt is cut.
"""

from __future__ import annotations

import functools
import math

from numba import float32

from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.lowering import COUNT, MAX_COLUMNS, Launch, Memory
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
from pantheon.accel.cuda.pointwise import FEW, by_heads, by_values, norm_factor, sigmoid_of_minus
from pantheon.plan.ops import Conv, DeltaGates, DeltaRule

#: parts of the key dims whose sums are added in order, on every shape of a block
SEGMENTS = 8
#: slots that a launch of the delta rule takes side by side
ABREAST = 8
#: softplus(x) is x beyond this, in float32
STRAIGHT = 20.0


@device_function
def before(columns, c):  # type: ignore[no-untyped-def]
    """The last column before c that is of the same slot, or -1."""
    b = c - 1
    while b >= 0 and columns[MAX_COLUMNS + b] != columns[MAX_COLUMNS + c]:
        b -= 1
    return b


@device_function
def behind(columns, c, n):  # type: ignore[no-untyped-def]
    """The next column after c that is of the same slot, or n."""
    b = c + 1
    while b < n and columns[MAX_COLUMNS + b] != columns[MAX_COLUMNS + c]:
        b += 1
    return b


@functools.cache
def conv(taps: int, alone: bool) -> Kernel:
    """silu of the sum of taps[j] * the input taps - 1 - j columns back, a channel a thread; leaves the state as it is,
    or, `alone`, of a forward of one column, does what `conv_keep` does as well."""

    def body(  # type: ignore[no-untyped-def]
        scratch, vectors, columns, recurrent, x_at, x_stride, taps_at, apart, out_at, out_stride, state_at, slot_floats,
        channels, n,
    ):  # fmt: skip
        first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            past = state_at + columns[MAX_COLUMNS + c] * slot_floats
            for i in range(first, channels, cuda.gridDim.x * cuda.blockDim.x):
                total = load(vectors, taps_at + (taps - 1) * apart + i) * scratch[x_at + c * x_stride + i]
                b, row = c, taps - 1
                for back in range(1, taps):
                    if b >= 0:
                        b = before(columns, b)
                    if b >= 0:
                        x = scratch[x_at + b * x_stride + i]
                    else:
                        row -= 1
                        x = recurrent[past + row * channels + i]
                    total += load(vectors, taps_at + (taps - 1 - back) * apart + i) * x
                scratch[out_at + c * out_stride + i] = total * sigmoid_of_minus(-total)
                if alone:
                    for j in range(taps - 2):
                        recurrent[past + j * channels + i] = recurrent[past + (j + 1) * channels + i]
                    recurrent[past + (taps - 2) * channels + i] = scratch[x_at + i]

    types = FLOATS, FLOATS, WORDS, FLOATS, *(I64,) * 8, I32, I32
    return Kernel(f"conv_{taps}_alone" if alone else f"conv_{taps}", body, types, (THREADS, 1))


@functools.cache
def conv_keep(taps: int) -> Kernel:
    """After `conv`: the last taps - 1 inputs of each slot become its past."""

    def body(scratch, columns, recurrent, x_at, x_stride, state_at, slot_floats, channels, n):  # type: ignore[no-untyped-def]
        first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            past = state_at + columns[MAX_COLUMNS + c] * slot_floats
            if behind(columns, c, n) >= n:
                fresh, b = 0, c
                while b >= 0 and fresh < taps - 1:
                    fresh, b = fresh + 1, before(columns, b)
                for i in range(first, channels, cuda.gridDim.x * cuda.blockDim.x):
                    for j in range(taps - 1 - fresh):
                        recurrent[past + j * channels + i] = recurrent[past + (j + fresh) * channels + i]
                    b = c
                    for j in range(fresh):
                        recurrent[past + (taps - 2 - j) * channels + i] = scratch[x_at + b * x_stride + i]
                        b = before(columns, b)

    types = FLOATS, WORDS, FLOATS, I64, I64, I64, I64, I32, I32
    return Kernel(f"conv_keep_{taps}", body, types, (THREADS, 1))


@functools.cache
def delta_gates(lanes: int, warps: int) -> Kernel:
    """Heads of q and k to unit length, q's divided by sqrt(dim) as well; the first block does betas and decays."""
    room = warps * FEW

    def body(  # type: ignore[no-untyped-def]
        scratch, vectors, qkv_at, qkv_stride, beta_at, beta_stride, decay_at, decay_stride, rate_at, bias_at, key_heads,
        heads, dim, eps, n,
    ):  # fmt: skip
        sums = cuda.shared.array(room, float32)
        lane, mine = cuda.threadIdx.x, cuda.threadIdx.y * FEW
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            for first in range(cuda.blockIdx.x * warps, 2 * key_heads, cuda.gridDim.x * warps):
                head = first + cuda.threadIdx.y
                x, end = qkv_at + c * qkv_stride + head * dim, dim if head < 2 * key_heads else 0
                # with a size of one the mean is the sum
                factor = norm_factor(scratch, x, end, 1, eps, sums, mine, lane, lanes, FEW, cuda.syncthreads)
                if head < key_heads:
                    factor /= float32(math.sqrt(float32(dim)))
                for i in range(lane, end, lanes):
                    scratch[x + i] *= factor
            if cuda.blockIdx.x == 0:
                for h in range(cuda.threadIdx.y * lanes + lane, heads, warps * lanes):
                    beta, decay = beta_at + c * beta_stride + h, decay_at + c * decay_stride + h
                    scratch[beta] = sigmoid_of_minus(-scratch[beta])
                    step = scratch[decay] + load(vectors, bias_at + h)
                    if step < float32(STRAIGHT):
                        step = float32(math.log1p(float32(math.exp(step))))
                    scratch[decay] = float32(math.exp(load(vectors, rate_at + h) * step))

    return Kernel("delta_gates", body, (FLOATS, FLOATS, *(I64,) * 8, I32, I32, I32, F32, I32), (lanes, warps))


@device_function
def row_of(j, rows, warps, warp):  # type: ignore[no-untyped-def]
    """The key dim of value j of a thread of this warp, which has `rows` of every `warps`-th segment."""
    return (j // rows * warps + warp) * rows + j % rows


@device_function
def take(recurrent, state, at, value_dim, rows, warps, warp, held, limit):  # type: ignore[no-untyped-def]
    """Read `held` values of a column of S into `state`; those of key dims from `limit` on are left out."""
    for j in range(held):
        row = row_of(j, rows, warps, warp)
        if row < limit:
            state[j] = recurrent[at + row * value_dim]


@device_function
def give(recurrent, state, at, value_dim, rows, warps, warp, held, limit):  # type: ignore[no-untyped-def]
    """Write them back."""
    for j in range(held):
        row = row_of(j, rows, warps, warp)
        if row < limit:
            recurrent[at + row * value_dim] = state[j]


@device_function
def put_sums(scratch, state, q, k, sums, at, lanes, rows, warps, warp, shares, limit):  # type: ignore[no-untyped-def]
    """S^T k, S^T q and k·q over each of a thread's segments, `lanes` apart in `sums`."""
    for share in range(shares):
        of_k, of_q, both = float32(0), float32(0), float32(0)
        for j in range(share * rows, share * rows + rows):
            row = row_of(j, rows, warps, warp)
            if row < limit:
                one, other = load(scratch, k + row), load(scratch, q + row)
                of_k += state[j] * one
                of_q += state[j] * other
                both += one * other
        place = at + (share * warps + warp) * 3 * lanes
        sums[place], sums[place + lanes], sums[place + 2 * lanes] = of_k, of_q, both


@device_function
def segments_sum(sums, at, lanes):  # type: ignore[no-untyped-def]
    """The sum of one of the three over all segments, in order."""
    total = float32(0)
    for segment in range(SEGMENTS):
        total += sums[at + segment * 3 * lanes]
    return total


@functools.cache
def delta_rule(key_dim: int, lanes: int, warps: int) -> Kernel:
    """S = decay S + k delta^T with delta = beta (v - decay S^T k), and S^T q, as decay S^T q + (k·q) delta: all that a
    column needs of the old S is summed at once, so that the threads of a block meet once a column.

    A block takes `lanes` values of a head; a thread holds their column of S, of every `warps`-th segment.
    """
    rows, shares = -(-key_dim // SEGMENTS), SEGMENTS // warps
    held, side = shares * rows, 3 * SEGMENTS * lanes
    room = 2 * side
    # no row of whole segments needs a check
    limit = key_dim if key_dim % SEGMENTS else 1 << 30

    def body(  # type: ignore[no-untyped-def]
        scratch, columns, recurrent, qkv_at, qkv_stride, beta_at, beta_stride, decay_at, decay_stride, out_at,
        out_stride, state_at, slot_floats, key_heads, heads, value_dim, n,
    ):  # fmt: skip
        # two sides in turn: who is a column ahead does not touch what others still read
        sums = cuda.shared.array(room, float32)
        state = cuda.local.array(held, float32)
        lane, warp, at = cuda.threadIdx.x, cuda.threadIdx.y, cuda.threadIdx.x
        tiles = (value_dim + lanes - 1) // lanes
        for tile in range(cuda.blockIdx.x, heads * tiles, cuda.gridDim.x):
            head = tile // tiles
            key = qkv_at + head % key_heads * key_dim
            value = (tile - head * tiles) * lanes + lane
            inside = value < value_dim
            value = min(value, value_dim - 1)
            for first in range(cuda.blockIdx.y, n, cuda.gridDim.y):
                # the first column of a slot finds the others; n ends the walk of those that are not
                c = first if before(columns, first) < 0 else n
                matrix = state_at + columns[MAX_COLUMNS + first] * slot_floats + head * key_dim * value_dim + value
                take(recurrent, state, matrix, value_dim, rows, warps, warp, held, limit if c < n else 0)
                bound = limit if c < n and inside else 0
                while c < n:
                    q = key + c * qkv_stride
                    k, v = q + key_heads * key_dim, qkv_at + c * qkv_stride + 2 * key_heads * key_dim + value
                    put_sums(scratch, state, q, k, sums, at, lanes, rows, warps, warp, shares, limit)
                    cuda.syncthreads()
                    decay = load(scratch, decay_at + c * decay_stride + head)
                    delta = load(scratch, v + head * value_dim) - decay * segments_sum(sums, at, lanes)
                    delta *= load(scratch, beta_at + c * beta_stride + head)
                    if inside and warp == 0:
                        scratch[out_at + c * out_stride + head * value_dim + value] = (
                            decay * segments_sum(sums, at + lanes, lanes)
                            + delta * segments_sum(sums, at + 2 * lanes, lanes)
                        )
                    at = 2 * lane + side - at
                    for j in range(held):
                        row = row_of(j, rows, warps, warp)
                        if row < limit:
                            state[j] = decay * state[j] + load(scratch, k + row) * delta
                    c = behind(columns, c, n)
                give(recurrent, state, matrix, value_dim, rows, warps, warp, held, bound)

    types = FLOATS, WORDS, FLOATS, *(I64,) * 10, I32, I32, I32, I32
    return Kernel(f"delta_rule_{key_dim}", body, types, (lanes, warps))


def lower_conv(op: Conv, memory: Memory) -> list[Launch]:
    """Launches for Conv: its sums, then the past that they leave; one column alone takes one.

    ValueError: the taps do not lie evenly, or it would write where it reads.
    """
    taps, channels = len(op.taps), op.x.width
    places = [memory.vectors[tap] for tap in op.taps]
    apart = places[1] - places[0]
    if op.x is op.out or places != [places[0] + j * apart for j in range(taps)]:
        raise ValueError("a convolution needs a buffer of its own for what it finds, and taps at even distances")
    x, state = memory.buffers[op.x], (memory.recurrent_at[op.layer], memory.slot_floats)
    keep, by_channels = conv_keep(taps), by_values(channels)
    return [
        Launch(
            lambda n: conv(taps, n == 1), by_channels,
            ("scratch", "vectors", "columns", "recurrent", *x, places[0], apart, *memory.buffers[op.out], *state,
             channels, COUNT),
        ),
        Launch(
            lambda n: keep, lambda n, reach: (0, 0) if n == 1 else by_channels(n, reach),
            ("scratch", "columns", "recurrent", *x, *state, channels, COUNT),
        ),
    ]  # fmt: skip


def lower_delta_gates(op: DeltaGates, memory: Memory) -> list[Launch]:
    """A launch for DeltaGates."""
    at = memory.buffers
    kernel = delta_gates(1 if SIMULATED else FEW, WARPS)
    args = (
        "scratch", "vectors", *at[op.qkv], *at[op.beta], *at[op.decay], memory.vectors[op.rate],
        memory.vectors[op.bias], op.key_heads, op.beta.width, op.dim, op.eps, COUNT,
    )  # fmt: skip
    return [Launch(lambda n: kernel, by_heads(2 * op.key_heads), args)]


def lower_delta_rule(op: DeltaRule, memory: Memory) -> list[Launch]:
    """A launch for DeltaRule."""
    at, spec = memory.buffers, memory.plan.state.recurrent[op.layer]
    kernel = delta_rule(spec.key_dim, LANES, WARPS)
    args = (
        "scratch", "columns", "recurrent", *at[op.qkv], *at[op.beta], *at[op.decay], *at[op.out],
        memory.recurrent_at[op.layer] + spec.conv_floats, memory.slot_floats, op.key_heads, spec.heads,
        spec.value_dim, COUNT,
    )  # fmt: skip
    tiles = spec.heads * -(-spec.value_dim // LANES)
    return [Launch(lambda n: kernel, lambda n, reach: (1, 1) if SIMULATED else (tiles, min(n, ABREAST)), args)]


def kernels() -> list[Kernel]:
    """Every kernel of this module, as a device runs them, for the sizes that models have."""
    return [conv(4, False), conv(4, True), conv_keep(4), delta_gates(FEW, 8), delta_rule(128, 32, 8)]
