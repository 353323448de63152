"""Mixtures of experts: routing, products whose matrix depends on the column, and the sum of what the chosen give.

A pair is a column and one of its k choices.  Few pairs: a block of threads for each pair and group of 32 rows.  Many:
a block for each expert and group of rows, which looks its pairs up and takes one after the other, so that the weights
come from memory once.  Both add in the order of `segments`: the same numbers, whoever else is there.  Experts' ids are
kept inside the tensor whatever `chosen` holds.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from pantheon.accel.cuda.group_sums import float_group_sums, group_sums
from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.layouts import BLOCK, KINDS, ROWS, groups, quant_words, scale_words
from pantheon.accel.cuda.layouts import FLOATS as FLOAT_TYPES
from pantheon.accel.cuda.lowering import COUNT, Launch, Memory
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
    fma,
)  # fmt: skip
from pantheon.accel.cuda.segments import SEGMENTS, finish
from pantheon.plan.ops import ExpertMatMul, Mix, Route

#: threads that route one column
_ROUTERS = 1 if SIMULATED else 128
#: the k likeliest of so many hold k / 2^13 of all odds: what `ops.Route` says of less than 2^-14 can not happen, and
#: shares are the odds among those chosen
_MOST_EXPERTS = 1 << 13
#: pairs that a block looks through at a time
_CHUNK = 256


@functools.cache
def route(experts: int, k: int) -> Kernel:
    """(scratch, logits_at, logits_stride, chosen_at, chosen_stride, shares_at, shares_stride, columns): an expert's
    place is the number of those before it, likelier ones and lower ids among equals; a NaN counts as least likely."""

    def body(scratch, logits_at, logits_stride, chosen_at, chosen_stride, shares_at, shares_stride, n):  # type: ignore[no-untyped-def]
        values = cuda.shared.array(experts, F32)
        odds = cuda.shared.array(k, F32)
        me, step = cuda.threadIdx.x, cuda.blockDim.x
        for c in range(cuda.blockIdx.x, n, cuda.gridDim.x):
            for e in range(me, experts, step):
                v = scratch[logits_at + c * logits_stride + e]
                values[e] = F32(-math.inf) if math.isnan(v) else v
            cuda.syncthreads()
            for e in range(me, experts, step):
                v, before = values[e], 0
                for other in range(experts):
                    w = values[other]
                    if w > v or (w == v and other < e):
                        before += 1
                if before < k:
                    scratch[chosen_at + c * chosen_stride + before] = F32(e)
                    odds[before] = v
            cuda.syncthreads()
            for j in range(me, k, step):
                total = F32(0)
                for i in range(k):
                    total += F32(math.exp(odds[i] - odds[0]))
                scratch[shares_at + c * shares_stride + j] = F32(math.exp(odds[j] - odds[0])) / total
            cuda.syncthreads()

    return Kernel(f"route {k} of {experts}", body, (FLOATS, *[I64] * 6, I32), (_ROUTERS, 1))


def lower_route(op: Route, memory: Memory) -> list[Launch]:
    """A launch for Route."""
    if op.logits.width > _MOST_EXPERTS:
        raise ValueError(f"{op.logits.name}: {op.logits.width} experts, more than {_MOST_EXPERTS}")
    kernel = route(op.logits.width, op.chosen.width)
    places = (*memory.buffers[op.logits], *memory.buffers[op.chosen], *memory.buffers[op.shares])
    return [Launch(lambda n: kernel, lambda n, reach: (1 if SIMULATED else n, 1), ("scratch", *places, COUNT))]


@device_function
def _expert(scratch, at, experts):  # type: ignore[no-untyped-def]
    """The id at scratch[at], inside the tensor."""
    return min(max(I64(scratch[at]), 0), experts - 1)


def _group(type_name: str, lanes: int, warps: int) -> Any:
    """Device function that leaves the segment sums of one pair in `partial`: of group `group` of the matrix at the
    words quants and scales, with the activations from block (float types: value) x on."""
    if type_name in FLOAT_TYPES:
        floats, size = float_group_sums(type_name, 1, lanes, warps), FLOAT_TYPES[type_name]

        @device_function
        def of_floats(  # type: ignore[no-untyped-def]
            partial, lane, warp, weights, quants, scales, group, blocks, quads_at, sums_at, scratch, x_at, x, cols
        ):
            begin = quants + group * ((cols * size + 3) // 4 * ROWS)
            floats(partial, lane, warp, weights, begin, scratch, x_at + x, 0, cols)

        return of_floats
    kind, quantised = KINDS[type_name], group_sums(type_name, 1, lanes, warps)
    quant, scale, sup = quant_words(kind), scale_words(kind), kind.sup

    @device_function
    def of_blocks(  # type: ignore[no-untyped-def]
        partial, lane, warp, weights, quants, scales, group, blocks, quads_at, sums_at, scratch, x_at, x, cols
    ):
        per_row = cols // BLOCK
        q, s = quants + group * per_row * quant, scales + group * (per_row // sup) * scale
        quantised(
            partial, lane, warp, weights, q, s, blocks, quads_at + 8 * x, sums_at + 2 * x, scratch, x_at + x, per_row
        )

    return of_blocks


#: arguments of both products: weights, quants_at, scales_at, words from one expert to the next in both planes,
#: experts; blocks, quads_at, sums_at; scratch, where scales (float types: the activations) begin, blocks or values from
#: column to column and from choice to choice; chosen_at, chosen_stride, k; out_at, out_stride; rows, cols, columns
_TYPES = (WORDS, *[I64] * 4, I32, WORDS, I64, I64, FLOATS, *[I64] * 3, I64, I64, I32, I64, I64, *[I32] * 3)


@functools.cache
def by_pair(type_name: str, lanes: int = LANES, warps: int = WARPS) -> Kernel:
    """Grid: groups of rows, pairs."""
    fill, end_of, room = _group(type_name, lanes, warps), finish(1, lanes, warps), SEGMENTS * ROWS

    def body(  # type: ignore[no-untyped-def]
        weights, quants_at, scales_at, quant_step, scale_step, experts, blocks, quads_at, sums_at, scratch, x_at,
        x_stride, x_step, chosen_at, chosen_stride, k, out_at, out_stride, rows, cols, n,
    ):  # fmt: skip
        partial = cuda.shared.array(room, F32)
        lane, warp, group, pair = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.x, cuda.blockIdx.y
        c, j = pair // k, pair % k
        expert = _expert(scratch, chosen_at + c * chosen_stride + j, experts)
        fill(
            partial, lane, warp, weights, quants_at + expert * quant_step, scales_at + expert * scale_step, group,
            blocks, quads_at, sums_at, scratch, x_at, c * x_stride + j * x_step, cols,
        )  # fmt: skip
        cuda.syncthreads()
        to = out_at + c * out_stride + j * rows
        end_of(partial, lane, warp, scratch, -1, scratch, to, 0, group * ROWS, rows, 0, 1, 0)

    return Kernel(f"expert matmul {type_name}", body, _TYPES, (lanes, warps), tight=True, resident=3)


@functools.cache
def by_expert(type_name: str, lanes: int = LANES, warps: int = WARPS) -> Kernel:
    """Grid: groups of rows, experts."""
    fill, end_of, room = _group(type_name, lanes, warps), finish(1, lanes, warps), SEGMENTS * ROWS

    def body(  # type: ignore[no-untyped-def]
        weights, quants_at, scales_at, quant_step, scale_step, experts, blocks, quads_at, sums_at, scratch, x_at,
        x_stride, x_step, chosen_at, chosen_stride, k, out_at, out_stride, rows, cols, n,
    ):  # fmt: skip
        partial = cuda.shared.array(room, F32)
        found = cuda.shared.array(_CHUNK, I32)
        count = cuda.shared.array(1, I32)
        lane, warp, group, expert = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.x, cuda.blockIdx.y
        quants, scales, pairs = quants_at + expert * quant_step, scales_at + expert * scale_step, n * k
        for base in range(0, pairs, _CHUNK):
            if lane == 0 and warp == 0:
                count[0] = 0
            cuda.syncthreads()
            for pair in range(base + warp * lanes + lane, min(base + _CHUNK, pairs), lanes * warps):
                if _expert(scratch, chosen_at + pair // k * chosen_stride + pair % k, experts) == expert:
                    # in any order: a pair's numbers do not depend on it
                    found[cuda.atomic.add(count, 0, 1)] = pair
            cuda.syncthreads()
            for i in range(count[0]):
                c, j = found[i] // k, found[i] % k
                x, to = c * x_stride + j * x_step, out_at + c * out_stride + j * rows
                fill(
                    partial, lane, warp, weights, quants, scales, group, blocks, quads_at, sums_at, scratch, x_at, x,
                    cols,
                )  # fmt: skip
                cuda.syncthreads()
                end_of(partial, lane, warp, scratch, -1, scratch, to, 0, group * ROWS, rows, 0, 1, 0)
                cuda.syncthreads()

    return Kernel(f"expert matmul {type_name}, many", body, _TYPES, (lanes, warps), tight=True)


def lower_expert_matmul(op: ExpertMatMul, memory: Memory) -> list[Launch]:
    """One launch; a quantised product reads what `lower_quantise` of its input has left."""
    w, k, room = memory.matrices[op.weight], op.chosen.width, memory.room
    x, own = memory.buffers[op.x], op.x.width != op.weight.cols
    if w.type_name in FLOAT_TYPES:
        if own and w.cols % 4:
            raise ValueError(f"{op.x.name}: parts of {w.cols} floats are not aligned to 16 bytes")
        places = ("blocks", 0, 0, "scratch", x.at, x.stride, w.cols if own else 0)
    else:
        step = w.cols // BLOCK if own else 0
        places = ("blocks", room.quads_at, room.sums_at, "scratch", room.scales_at, op.x.width // BLOCK, step)
    args = (
        "weights", w.quants_at, w.scales_at, w.quant_words, w.scale_words, w.experts, *places,
        *memory.buffers[op.chosen], k, *memory.buffers[op.out], w.rows, w.cols, COUNT,
    )  # fmt: skip

    def many(n: int) -> bool:
        return n * k > w.experts

    def pick(n: int) -> Kernel:
        return (by_expert if many(n) else by_pair)(w.type_name)

    return [Launch(pick, lambda n, reach: (groups(w.rows), w.experts if many(n) else n * k), args)]


@functools.cache
def mix() -> Kernel:
    """(scratch, x_at, x_stride, shares_at, shares_stride, out_at, out_stride, width, k, columns)."""

    def body(scratch, x_at, x_stride, shares_at, shares_stride, out_at, out_stride, width, k, n):  # type: ignore[no-untyped-def]
        for c in range(cuda.blockIdx.y, n, cuda.gridDim.y):
            x, shares, out = x_at + c * x_stride, shares_at + c * shares_stride, out_at + c * out_stride
            for i in range(cuda.grid(1), width, cuda.gridsize(1)):
                v = scratch[out + i]
                for j in range(k):
                    v = fma(scratch[shares + j], scratch[x + j * width + i], v)
                scratch[out + i] = v

    return Kernel("mix", body, (FLOATS, *[I64] * 6, I32, I32, I32), (THREADS, 1))


def lower_mix(op: Mix, memory: Memory) -> list[Launch]:
    """A launch for Mix."""
    width, places = op.out.width, (*memory.buffers[op.x], *memory.buffers[op.shares], *memory.buffers[op.out])

    def grid(n: int, reach: int) -> tuple[int, int]:
        return (1, 1) if SIMULATED else (-(-width // THREADS), n)

    return [Launch(lambda n: mix(), grid, ("scratch", *places, width, op.shares.width, COUNT))]


def kernels() -> list[Kernel]:
    """Every kernel of this module; `route` for one shape that models have."""
    products = [make(name) for name in (*KINDS, *FLOAT_TYPES) for make in (by_pair, by_expert)]
    return [route(128, 8), *products, mix()]
