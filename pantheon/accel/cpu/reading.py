"""The kernel that does nothing but read memory: what `bandwidth` times."""

from __future__ import annotations

import functools

from numba import float32, int64

from pantheon.accel.cpu import cache
from pantheon.accel.cpu.vec import add, hsum, load_f32, splat


@functools.cache
def kernel() -> int:
    """The address of float32 read(start, nbytes): the sum of a multiple of 256 bytes of float32."""

    @cache.compiled(float32(int64, int64))
    def read(start, nbytes):  # type: ignore[no-untyped-def]
        # four sums, so that loads are waited for and not additions
        a, b, c, d = splat(float32(0)), splat(float32(0)), splat(float32(0)), splat(float32(0))
        for at in range(start, start + nbytes, 256):
            a, b = add(a, load_f32(at)), add(b, load_f32(at + 64))
            c, d = add(c, load_f32(at + 128)), add(d, load_f32(at + 192))
        return hsum(add(add(a, b), add(c, d)))

    return read
