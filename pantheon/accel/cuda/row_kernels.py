"""What a sampler asks of a row of logits: its best ids in order, sums of masses, and a copy with changes.

A candidate is a key of 64 bits: its logit, made an integer of the same order, above its id turned round, so that the
higher key has the higher logit, or of equal ones the lower id.  NaN is above everything, so that nobody overlooks it.
In a grid y counts rows, or bounds of one row.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import float32, float64, int32, int64

from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.machine import (
    F32,
    FLOATS,
    I64,
    SIMULATED,
    THREADS,
    WORDS,
    as_float,
    cuda,
    device_function,
    load,
)  # fmt: skip
from pantheon.accel.cuda.row_layout import CHUNK, KEEP, KEEP_MORE, MASS_CHUNK

KEYS, DOUBLES = int64[::1], float64[::1]
#: below every key
NO_KEY = -(1 << 63)
#: partial sums of a chunk of masses
PARTS = 256
NEVER = float32(-math.inf)

if SIMULATED:

    def float_bits(x):  # type: ignore[no-untyped-def]
        """A float32's 32 bits as an int32."""
        return int(np.float32(x).view(np.int32))

    def product(x, y):  # type: ignore[no-untyped-def]
        """x * y, rounded before anything is done with it."""
        return np.float32(x) * np.float32(y)

else:
    from numba.cuda import libdevice

    float_bits, product = libdevice.float_as_int, libdevice.fmul_rn


@device_function
def key_of(x, token):  # type: ignore[no-untyped-def]
    """The key of a logit and its id."""
    bits = int64(float_bits(x))
    ordered = bits
    if bits < 0:
        ordered = bits ^ int64(0x7FFFFFFF)
    if x == float32(0):
        ordered = int64(0)
    if x != x:
        ordered = int64(0x7FFFFFFF)
    return (ordered << int64(32)) | (int64(0x7FFFFFFF) - token)


@device_function
def logit_of(key):  # type: ignore[no-untyped-def]
    """The logit of a key."""
    ordered = key >> int64(32)
    if ordered < 0:
        ordered = ordered ^ int64(0x7FFFFFFF)
    return as_float(int32(ordered))


@functools.cache
def select(first: bool, chunk: int = CHUNK, keep: int = KEEP, lanes: int = THREADS) -> Kernel:
    """The `keep` highest of each `chunk` keys, in order: of a row's logits (first), or of what such a launch left.

    Keys from `below` up are passed over.  Sorts a chunk in shared memory by Batcher's bitonic network (1968); chunk is
    a power of two.
    """

    def body(logits, keys, out, at, stride, n, below, out_at, out_stride):  # type: ignore[no-untyped-def]
        sorted_keys = cuda.shared.array(chunk, int64)
        lane, source = cuda.threadIdx.x, at + cuda.blockIdx.y * stride
        begin = int64(cuda.blockIdx.x) * chunk
        for i in range(lane, chunk, lanes):
            key = int64(NO_KEY)
            if begin + i < n:
                key = key_of(load(logits, source + begin + i), begin + i) if first else keys[source + begin + i]
                if key >= below:
                    key = int64(NO_KEY)
            sorted_keys[i] = key
        cuda.syncthreads()
        size = 2
        while size <= chunk:
            step = size >> 1
            while step > 0:
                for pair in range(lane, chunk >> 1, lanes):
                    i = 2 * pair - (pair & (step - 1))
                    x, y = sorted_keys[i], sorted_keys[i + step]
                    if (x < y) == ((i & size) == 0):
                        sorted_keys[i], sorted_keys[i + step] = y, x
                cuda.syncthreads()
                step >>= 1
            size <<= 1
        target = out_at + cuda.blockIdx.y * out_stride + cuda.blockIdx.x * keep
        for i in range(lane, keep, lanes):
            out[target + i] = sorted_keys[i]

    types = (FLOATS, KEYS, KEYS, I64, I64, I64, I64, I64, I64)
    return Kernel(f"select_{'logits' if first else 'keys'}_{keep}", body, types, (lanes, 1))


@functools.cache
def masses(chunk: int = MASS_CHUNK, parts: int = PARTS, lanes: int = THREADS) -> Kernel:
    """Of each chunk of a row: how many logits lie within the bounds, and the sum of exp((logit - best) / temperature).

    Partial sum p takes every `parts`-th logit, in order, in float64; they are added in pairs: the same numbers for
    every shape of a block.  parts is a power of two.
    """

    def body(  # type: ignore[no-untyped-def]
        logits, best, bounds, counts, sums, at, stride, n, best_at, best_stride, bounds_at, sums_at, temperature
    ):
        total = cuda.shared.array(parts, float64)
        number = cuda.shared.array(parts, int32)
        lane, y = cuda.threadIdx.x, cuda.blockIdx.y
        source, begin = at + y * stride, int64(cuda.blockIdx.x) * chunk
        top = logit_of(best[best_at + y * best_stride])
        low, high = bounds[bounds_at + 2 * y], bounds[bounds_at + 2 * y + 1]
        for p in range(lane, parts, lanes):
            mass, found = float64(0), int32(0)
            for i in range(begin + p, min(begin + chunk, n), parts):
                x = load(logits, source + i)
                if x >= low and x <= high:
                    mass += float64(float32(math.exp((x - top) / temperature)))
                    found += int32(1)
            total[p], number[p] = mass, found
        cuda.syncthreads()
        step = parts >> 1
        while step > 0:
            for p in range(lane, step, lanes):
                total[p] += total[p + step]
                number[p] += number[p + step]
            cuda.syncthreads()
            step >>= 1
        if lane == 0:
            place = sums_at + int64(y) * cuda.gridDim.x + cuda.blockIdx.x
            counts[place], sums[place] = number[0], total[0]

    types = (FLOATS, KEYS, FLOATS, WORDS, DOUBLES, I64, I64, I64, I64, I64, I64, I64, F32)
    return Kernel("masses", body, types, (lanes, 1))


@functools.cache
def masked() -> Kernel:
    """edited[i] = logit i of a row, or -inf where the bit of id i is 0; bits_at -1: there are none."""

    def body(logits, words, edited, at, n, bits_at):  # type: ignore[no-untyped-def]
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            x = load(logits, at + i)
            if bits_at >= 0 and (words[bits_at + (i >> 5)] >> (i & 31)) & 1 == 0:
                x = float32(NEVER)
            edited[i] = x

    return Kernel("masked_row", body, (FLOATS, WORDS, FLOATS, I64, I64, I64), (THREADS, 1))


@functools.cache
def patched() -> Kernel:
    """The changed logits of a row: + bias, then / by or * by (Keskar et al. 2019, llama.cpp), then - minus; forbidden
    ids are left alone.  words: n ids, biases, by, minus."""

    def body(logits, words, edited, at, n, bits_at):  # type: ignore[no-untyped-def]
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            token = int64(words[i])
            x = load(logits, at + token) + as_float(words[n + i])
            by = as_float(words[2 * n + i])
            # never part of a fused multiply-add: the host's sampler rounds the product
            x = x / by if x > float32(0) else product(x, by)
            x = x - as_float(words[3 * n + i])
            if bits_at < 0 or (words[bits_at + (token >> 5)] >> (token & 31)) & 1 != 0:
                edited[token] = x

    return Kernel("patched_row", body, (FLOATS, WORDS, FLOATS, I64, I64, I64), (THREADS, 1))


def kernels() -> list[Kernel]:
    """Everything that a device runs of this module."""
    selects = [select(first, keep=keep) for keep in (KEEP, KEEP_MORE) for first in (True, False)]
    return [*selects, masses(), masked(), patched()]
