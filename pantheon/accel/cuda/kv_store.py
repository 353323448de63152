"""Writes keys and values of a forward's columns into the cache, in the layout of `kv`; rounding as the CPU's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import float32, float64, int32, int64

from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.kv import BLOCK, DIMS, SCALED, KVLayout, row_scales, row_words
from pantheon.accel.cuda.lowering import COUNT, MAX_COLUMNS, Launch, Memory
from pantheon.accel.cuda.machine import (
    FLOATS,
    HALVES,
    I32,
    I64,
    SIMULATED,
    THREADS,
    WORDS,
    as_word,
    cuda,
    device_function,
    float_to_half,
    half_to_float,
    load,
    to_int,
)
from pantheon.plan.ops import StoreKV
from pantheon.plan.state_spec import KVType


@device_function
def scale_8(x, at, n):  # type: ignore[no-untyped-def]
    """float16 bits of the scale of x[at], … n values: the largest magnitude becomes 127."""
    top = float32(0)
    for i in range(n):
        top = max(top, abs(x[at + i]))
    return float_to_half(top * float32(1.0 / 127.0))


@device_function
def scale_4(x, at, n):  # type: ignore[no-untyped-def]
    """float16 bits of the scale of x[at], … n values: the largest magnitude becomes -8."""
    top = float32(0)
    for i in range(n):
        if abs(x[at + i]) > abs(top):
            top = x[at + i]
    return float_to_half(top * float32(-0.125))


@device_function
def quant_8(x, inverse):  # type: ignore[no-untyped-def]
    """128 + the int8 of a value."""
    return 128 + to_int(max(min(x * inverse, float32(127)), float32(-127)))


@device_function
def quant_4(x, inverse):  # type: ignore[no-untyped-def]
    """8 + the int4 of a value; the product is rounded before 8.5 is added, as the CPU does: so by way of float64."""
    product = float32(float64(x) * float64(inverse))
    return int(max(min(product + float32(8.5), float32(15)), float32(0)))


@device_function
def bits_32(x, inverse):  # type: ignore[no-untyped-def]
    """A value as it is."""
    return as_word(x)


@device_function
def bits_16(x, inverse):  # type: ignore[no-untyped-def]
    """A value as float16."""
    return float_to_half(x)


@device_function
def no_scale(x, at, n):  # type: ignore[no-untyped-def]
    """1, of formats without scales."""
    return int32(0x3C00)


_SCALE: dict[KVType, Callable[..., Any]] = {KVType.Q8_0: scale_8, KVType.Q4_0: scale_4}
_BITS: dict[KVType, Callable[..., Any]] = {
    KVType.F32: bits_32, KVType.F16: bits_16, KVType.Q8_0: quant_8, KVType.Q4_0: quant_4
}  # fmt: skip
#: bits of a value that is 0
_ZERO = {KVType.F32: 0, KVType.F16: 0, KVType.Q8_0: 128, KVType.Q4_0: 8}


@functools.cache
def store_kv(kv_type: KVType, dim: int, threads: int = THREADS) -> Kernel:
    """A thread takes up to 32 dims of one head's K or V of one column; neighbours take neighbouring columns."""
    per, words, chunks = DIMS[kv_type], row_words(kv_type, dim), -(-dim // SCALED)
    bits, chunk_words, scaled, zero = 32 // per, SCALED // per, bool(row_scales(kv_type, dim)), _ZERO[kv_type]
    key_words, key_scales = BLOCK * words, BLOCK * row_scales(kv_type, dim)
    scale_of, bits_of = _SCALE.get(kv_type, no_scale), _BITS[kv_type]

    def body(  # type: ignore[no-untyped-def]
        scratch, kv, kv_scales, columns, n, k_at, k_stride, v_at, v_stride, kv_heads,
        words_at, block_words, slot_words, scales_at, block_scales, slot_scales,
    ):  # fmt: skip
        items = int64(n) * kv_heads * 2 * chunks
        for item in range(cuda.blockIdx.x * threads + cuda.threadIdx.x, items, cuda.gridDim.x * threads):
            c, rest = item % n, item // n
            chunk, side, head = rest % chunks, rest // chunks % 2, rest // (2 * chunks)
            slot, position = int64(load(columns, MAX_COLUMNS + c)), int64(load(columns, 2 * MAX_COLUMNS + c))
            block, row = position // BLOCK, position % BLOCK
            first = chunk * SCALED
            x_at = (k_at + c * k_stride if side == 0 else v_at + c * v_stride) + head * dim + first
            inverse = float32(1)
            if scaled:
                half = scale_of(scratch, x_at, min(SCALED, dim - first))
                to = slot * slot_scales + scales_at + block * block_scales + (2 * head + side) * key_scales
                kv_scales[to + (chunk * BLOCK + row if side == 0 else row * chunks + chunk)] = half
                scale = half_to_float(half)
                inverse = float32(1) / scale if scale != float32(0) else float32(0)
            to = slot * slot_words + words_at + block * block_words + (2 * head + side) * key_words
            for w in range(chunk * chunk_words, min(words, (chunk + 1) * chunk_words)):
                word = int64(0)
                for e in range(per):
                    d = w * per + e
                    value = int64(bits_of(scratch[x_at + d - first], inverse)) if d < dim else zero
                    word |= value << (e * bits)
                word = word - 4294967296 if word > 2147483647 else word  # an int32 with these bits
                kv[to + (w * BLOCK + row if side == 0 else row * words + w)] = word

    types = (FLOATS, WORDS, HALVES, WORDS, I32, *[I64] * 4, I32, *[I64] * 6)
    return Kernel(f"store_kv {kv_type.value} {dim}", body, types, (threads, 1))


def lower_store_kv(op: StoreKV, memory: Memory, threads: int = THREADS) -> list[Launch]:
    """One launch."""
    layout: KVLayout = memory.kv
    spec = memory.plan.state.kv[op.layer]
    kernel = store_kv(layout.kv_type, spec.k_dim, threads)
    chunks = 2 * spec.kv_heads * -(-spec.k_dim // SCALED)

    def grid(n: int, reach: int) -> tuple[int, int]:
        return (1 if SIMULATED else -(-n * chunks // threads)), 1

    args = ("scratch", "kv", "kv_scales", "columns", COUNT, *memory.buffers[op.k], *memory.buffers[op.v], spec.kv_heads)
    return [Launch(lambda n: kernel, grid, (*args, *places(layout, op.layer)))]


def places(layout: KVLayout, layer: int) -> tuple[int, int, int, int, int, int]:
    """Words, then scales: where the layer begins, from block to block, from slot to slot."""
    at = layout.layers[layer]
    return (
        at.words_at, layout.block_words, layout.slot_words, at.scales_at, layout.block_scales, layout.slot_scales,
    )  # fmt: skip
