"""Where everything of a part lies on its die, and how much that is: the one place that prediction and allocation read.

Knows plans and weight types, not files or devices; allocates nothing and imports no Numba.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pantheon.accel.cuda.kv import KVLayout, partial_floats
from pantheon.accel.cuda.layouts import FLOATS, packed_words
from pantheon.accel.cuda.lowering import MAX_COLUMNS, At, Memory, Packed, Room, RopeTable
from pantheon.accel.cuda.parts import Part
from pantheon.accel.cuda.row_layout import row_bytes
from pantheon.plan.buffers import Buffer, Experts, Matrix
from pantheon.plan.builder import Plan
from pantheon.plan.ops import ExpertMatMul, MatMul, Rope
from pantheon.plan.state_spec import KVType

#: rows of logits beside one for each slot: whoever scores a text wants a row for every token
_SCORED = 7
#: arrays begin at multiples of so many elements: 128 bytes, a line of the second cache
_ALIGN = 32


@dataclass(frozen=True)
class Place:
    """`memory`: where; the rest: elements of the arrays that a runner has."""

    memory: Memory
    weights: int
    vectors: int
    tables: int
    scratch: int
    blocks: int

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by part; every element has four."""
        return {
            "weights": 4 * (self.weights + self.vectors),
            "scratch": 4 * (self.scratch + self.blocks + 4 * MAX_COLUMNS),
            "tables": 4 * self.tables,
        }

    @property
    def step_bytes(self) -> int:
        """Bytes of packed weights that a forward of one column reads, logits included: all but tables that are only
        looked up in, and of experts those that it is routed to."""
        found, ops = self.memory.matrices, list(self.memory.plan.ops())
        words = {m: packed.quant_words + packed.scale_words for m, packed in found.items()}
        routed = sum(words[op.weight] * op.chosen.width for op in ops if isinstance(op, ExpertMatMul))
        return 4 * (routed + sum(words[m] for m in {op.weight for op in ops if isinstance(op, MatMul)}))

    def state_bytes(self, n_slots: int) -> int:
        """KV rows and recurrent state of so many slots; behind the last layer also their logits, and room to sample."""
        memory = self.memory
        nbytes = n_slots * (memory.kv.slot_bytes + 4 * memory.slot_floats)
        n_vocab = memory.plan.n_vocab
        return nbytes + (4 * logit_rows(n_slots) * n_vocab + row_bytes(n_slots, n_vocab) if memory.plan.head else 0)


def logit_rows(n_slots: int) -> int:
    """Rows of logits of a state."""
    return n_slots + _SCORED


class _Cursor:
    """Hands out aligned ranges of an array."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, n: int) -> int:
        at, self.end = self.end, self.end + -(-n // _ALIGN) * _ALIGN
        return at


def place(part: Part, types: Mapping[Matrix, str], n_ctx: int, kv_type: KVType, sm: int = 0) -> Place:
    """types: the type that each matrix of the part is run as."""
    plan = part.plan
    weights, vectors, tables, scratch, blocks = (_Cursor() for _ in range(5))
    matrices = {m: _matrix(m, types[m], weights) for m in plan.matrices()}
    floats = {v: vectors.take(v.size) for v in plan.vectors()}
    used = tables_used(plan)
    ropes = tuple(_rope(plan, i, tables, n_ctx if i in used else 0) for i in range(len(plan.ropes)))
    buffers = {b: _buffer(b, scratch) for b in part.buffers()} | {plan.logits: At(0, plan.n_vocab)}
    widest = _widest_quantised(plan, types)
    room = Room(
        blocks.take(MAX_COLUMNS * widest // 4), blocks.take(MAX_COLUMNS * widest // 16),
        scratch.take(MAX_COLUMNS * widest // 32),
    )  # fmt: skip
    kv = KVLayout.of(plan, kv_type, n_ctx)
    partials = scratch.take(partial_floats(plan, n_ctx))
    recurrent = _Cursor()
    recurrent_at = tuple(recurrent.take(spec.floats) for spec in plan.state.recurrent)
    memory = Memory(
        plan, sm, n_ctx, matrices, floats, buffers, ropes, room, partials, kv, recurrent_at, recurrent.end
    )
    return Place(memory, weights.end, vectors.end, tables.end, scratch.end, blocks.end)


def _matrix(m: Matrix, type_name: str, weights: _Cursor) -> Packed:
    quants, scales = packed_words(type_name, m.rows, m.cols)
    experts = m.experts if isinstance(m, Experts) else 1
    at = weights.take(experts * quants), weights.take(experts * scales)
    return Packed(type_name, m.rows, m.cols, *at, experts, quants, scales)


def tables_used(plan: Plan) -> set[int]:
    """The rope tables that a part reads."""
    return {op.table for op in plan.ops() if isinstance(op, Rope)}


def _rope(plan: Plan, i: int, tables: _Cursor, n_ctx: int) -> RopeTable:
    half = plan.ropes[i].n_rot // 2
    return RopeTable(tables.take(n_ctx * half), tables.take(n_ctx * half), half, plan.ropes[i].pairing)


def _buffer(b: Buffer, scratch: _Cursor) -> At:
    stride = -(-b.width // 4) * 4
    return At(scratch.take(MAX_COLUMNS * stride), stride)


def _widest_quantised(plan: Plan, types: Mapping[Matrix, str]) -> int:
    """Values of the widest input of a product with int8 activations."""
    products = [op for op in plan.ops() if isinstance(op, MatMul | ExpertMatMul) and types[op.weight] not in FLOATS]
    return max((-(-op.x.width // 32) * 32 for op in products), default=0)



