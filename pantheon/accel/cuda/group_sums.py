"""The segment sums of one group of 32 rows, written to shared memory by a whole block: what all products share.

Thread (lane, warp) takes row `lane` and segment `warp` of a block of 32 x 8; blocks of another shape walk both.
Segment s of row r of column c goes to partial[(s * width + c) * 32 + r]; the caller synchronises and adds them up.
"""

from __future__ import annotations

import functools
from typing import Any

from pantheon.accel.cuda.layouts import KINDS, ROWS
from pantheon.accel.cuda.machine import device_function
from pantheon.accel.cuda.segments import FLOAT_UNIT, SEGMENTS, float_segment, segment
from pantheon.accel.cuda.tiles import store


@functools.cache
def group_sums(type_name: str, width: int, lanes: int, warps: int) -> Any:
    """Device function (partial, lane, warp, weights, quants, scales, blocks, quads, sums, floats, dx, blocks of a row)
    for a type of `layouts.KINDS`: the group begins at the words quants and scales, the activations of the first column
    at quads and sums of `blocks` and dx of `floats`."""
    part, sup, whole = segment(type_name, width), KINDS[type_name].sup, lanes == ROWS and warps == SEGMENTS
    step = width * ROWS

    @device_function
    def fill(partial, lane, warp, weights, quants, scales, blocks, quads, sums, floats, dx, per_row):  # type: ignore[no-untyped-def]
        units = per_row // sup
        each = (units + SEGMENTS - 1) // SEGMENTS
        if whole:
            first, end = min(warp * each, units), min(warp * each + each, units)
            acc = part(weights, quants, scales, lane, first, end, blocks, quads, sums, floats, dx, per_row)
            store(partial, warp * step + lane, ROWS, acc)
        else:
            for s in range(warp, SEGMENTS, warps):
                first, end = min(s * each, units), min(s * each + each, units)
                for r in range(lane, ROWS, lanes):
                    acc = part(weights, quants, scales, r, first, end, blocks, quads, sums, floats, dx, per_row)
                    store(partial, s * step + r, ROWS, acc)

    return fill


@functools.cache
def float_group_sums(type_name: str, width: int, lanes: int, warps: int) -> Any:
    """Device function (partial, lane, warp, weights, begin, x, at, stride, cols) for F32, F16 and BF16: the group
    begins at the word `begin`, the activations of the first column at x[at]."""
    part, whole, step = float_segment(type_name, width), lanes == ROWS and warps == SEGMENTS, width * ROWS

    @device_function
    def fill(partial, lane, warp, weights, begin, x, at, stride, cols):  # type: ignore[no-untyped-def]
        units = (cols + FLOAT_UNIT - 1) // FLOAT_UNIT
        each = (units + SEGMENTS - 1) // SEGMENTS
        if whole:
            first, end = min(warp * each, units), min(warp * each + each, units)
            store(partial, warp * step + lane, ROWS, part(weights, begin, lane, first, end, x, at, stride, cols))
        else:
            for s in range(warp, SEGMENTS, warps):
                first, end = min(s * each, units), min(s * each + each, units)
                for r in range(lane, ROWS, lanes):
                    acc = part(weights, begin, r, first, end, x, at, stride, cols)
                    store(partial, s * step + r, ROWS, acc)

    return fill
