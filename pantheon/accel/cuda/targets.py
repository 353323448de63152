"""Up to three quantised matrices of one type that multiply the same input in one launch: which block works on which.

A decode step is so short that launches count, and a narrow matrix (k and v) alone leaves most of a die idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from pantheon.accel.cuda.layouts import KINDS, ROWS
from pantheon.accel.cuda.lowering import Memory
from pantheon.accel.cuda.machine import I32, I64, device_function
from pantheon.plan.ops import MatMul, Op

#: matrices of a launch
TARGETS = 3
#: Numba types of the arguments that say where they are
TARGET_TYPES = (I64, I64, I32, I64, I32, I32, I32) * TARGETS


@device_function
def target(group, first, second, third):  # type: ignore[no-untyped-def]
    """(the group of 32 rows in its matrix, that matrix) of a group counted over all three; a matrix: (quants_at,
    scales_at, bias_at or -1, out_at, stride, rows, add)."""
    found, at = first, group
    end = (first[5] + ROWS - 1) // ROWS
    if group >= end:
        found, at = second, group - end
        end += (second[5] + ROWS - 1) // ROWS
        if group >= end:
            found, at = third, group - end
    return at, found


def target_args(ops: Sequence[MatMul], memory: Memory) -> tuple[int, ...]:
    """The arguments for these products; matrices that are not there have no rows."""
    found: list[int] = []
    for op in ops:
        w, out = memory.matrices[op.weight], memory.buffers[op.out]
        bias_at = memory.vectors[op.bias] if op.bias is not None else -1
        found += [w.quants_at, w.scales_at, bias_at, out.at + op.out_first, out.stride, w.rows, int(op.add)]
    return (*found, *[0] * (len(TARGET_TYPES) - len(found)))


def alike(ops: Sequence[Op], memory: Memory) -> list[MatMul]:
    """The ops at the front that may be one launch: products of one input with weights of one quantised type, into
    places of one array that do not overlap."""
    found: list[MatMul] = []
    for op in ops[:TARGETS]:
        if not isinstance(op, MatMul) or memory.matrices[op.weight].type_name not in KINDS:
            break
        if not all(_together(op, other, memory) for other in found):
            break
        found.append(op)
    return found


def _together(a: MatMul, b: MatMul, memory: Memory) -> bool:
    """Whether a may run beside b, which comes before it."""
    types = memory.matrices[a.weight].type_name == memory.matrices[b.weight].type_name
    apart = a.out_first >= b.out_first + b.weight.rows or b.out_first >= a.out_first + a.weight.rows
    one_array = memory.array_of(a.out) == memory.array_of(b.out)
    return types and a.x is b.x is not b.out and one_array and (a.out is not b.out or apart)
