"""One token from one row of logits in a single call: top_k, top_p, min_p, temperature, draw.

The kernel twin of `engine.sampler`, which says what each step means and does what this file does not.  A call touches
little code and reads the row once: between two forwards, which empty the caches, that is what sampling costs.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from llvmlite import ir
from numba import float32, float64, int64

from pantheon.accel.cpu import cache
from pantheon.accel.cpu.vec import I64, V_F32, at, ld_f32, load, op, splat_ir

#: bytes of a candidate in the working room: value, id, running sum; float64 each
CANDIDATE = 24
_SIGNATURE = int64(*(int64,) * 4, *(float64,) * 4)


@op(float64, int64)
def ld_f64(ctx: Any, b: Any, addr: Any) -> Any:
    """A float64."""
    return load(b, addr, ir.DoubleType())


@op(float64, int64, float64)
def st_f64(ctx: Any, b: Any, addr: Any, x: Any) -> Any:
    """Store a float64 and return it."""
    b.store(x, at(b, addr, ir.DoubleType()), align=1)
    return x


def _above(b: Any, addr: Any, bound: Any, vectors: int) -> Any:
    """A bit for each of 16 lanes: one of the vectors at addr is above the bound there, or NaN."""
    limit = splat_ir(b, bound)
    found = [b.fcmp_unordered(">", load(b, addr, V_F32, 64 * i), limit) for i in range(vectors)]
    while len(found) > 1:
        found = [b.or_(x, y) for x, y in zip(found[::2], found[1::2], strict=True)]
    return b.zext(b.bitcast(found[0], ir.IntType(16)), I64)


@op(int64, int64, float32)
def above16(ctx: Any, b: Any, addr: Any, bound: Any) -> Any:
    """Not 0 when one of 16 floats is above the bound, or NaN."""
    return _above(b, addr, bound, 1)


@op(int64, int64, float32)
def above64(ctx: Any, b: Any, addr: Any, bound: Any) -> Any:
    """Not 0 when one of 64 floats is above the bound, or NaN."""
    return _above(b, addr, bound, 4)


@cache.jit
def bound_of(room, n, k):  # type: ignore[no-untyped-def]
    """What a logit must exceed to join the n best of at most k."""
    return float32(ld_f64(room + CANDIDATE * (k - 1))) if n == k else float32(-math.inf)


@cache.jit
def offer(room, n, k, row, first, end):  # type: ignore[no-untyped-def]
    """Let the ids from first to end - 1 join the n best, which stand in order; of equal logits the lower id is before.
    Returns the new n; -1 for NaN."""
    for i in range(first, end):
        x = ld_f32(row + 4 * i)
        if x != x:
            return -1
        if x > bound_of(room, n, k):
            to = room + CANDIDATE * (n if n < k else k - 1)
            while to > room and ld_f64(to - CANDIDATE) < x:
                st_f64(to, ld_f64(to - CANDIDATE))
                st_f64(to + 8, ld_f64(to - CANDIDATE + 8))
                to -= CANDIDATE
            st_f64(to, float64(x))
            st_f64(to + 8, float64(i))
            n = min(n + 1, k)
    return n


@cache.jit
def find_best(room, k, row, size):  # type: ignore[no-untyped-def]
    """Find the k highest logits above -inf; returns how many there are, -1 for NaN."""
    n, whole = 0, size & ~63
    for group in range(0, whole, 64):
        if above64(row + 4 * group, bound_of(room, n, k)):
            for first in range(group, group + 64, 16):
                if above16(row + 4 * first, bound_of(room, n, k)):
                    n = offer(room, n, k, row, first, first + 16)
                    if n < 0:
                        return n
    return offer(room, n, k, row, whole, size)


@cache.jit
def add_up(room, n, temperature):  # type: ignore[no-untyped-def]
    """Running sums of the masses relative to that of the best logit; returns the last."""
    best, total = ld_f64(room), 0.0
    for i in range(n):
        total += math.exp((ld_f64(room + CANDIDATE * i) - best) / temperature)
        st_f64(room + CANDIDATE * i + 16, total)
    return total


@cache.jit
def reach(room, n, wanted, beyond):  # type: ignore[no-untyped-def]
    """The first of n candidates whose running sum is at least `wanted`, or above it; the last one if none is."""
    i = 0
    while i < n - 1:
        sum_ = ld_f64(room + CANDIDATE * i + 16)
        if sum_ > wanted or (sum_ == wanted and not beyond):
            break
        i += 1
    return i


@cache.jit
def choose(row, size, room, k, top_p, min_p_offset, temperature, point):  # type: ignore[no-untyped-def]
    """See `drawing.Draw`."""
    n = find_best(room, k, row, size)
    if n <= 0 or ld_f64(room) == math.inf:
        return int64(-1)
    total = add_up(room, n, 1.0)
    if top_p < 1:
        n = reach(room, n, top_p * total, False) + 1
    floor = float32(ld_f64(room) + min_p_offset)
    while n > 1 and ld_f64(room + CANDIDATE * (n - 1)) < floor:
        n -= 1
    if temperature != 1.0:
        # colder than this only ties with the best are left anyway, and the quotient stays finite
        add_up(room, n, max(temperature, 1e-30))
    i = reach(room, n, point * ld_f64(room + CANDIDATE * (n - 1) + 16), True)
    return int64(ld_f64(room + CANDIDATE * i + 8))


@functools.cache
def kernel() -> int:
    """The address of `choose` as a C function."""

    @cache.compiled(_SIGNATURE)
    def draw(row, size, room, k, top_p, min_p_offset, temperature, point):  # type: ignore[no-untyped-def]
        return choose(row, size, room, k, top_p, min_p_offset, temperature, point)

    return draw
