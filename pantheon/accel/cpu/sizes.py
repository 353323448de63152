"""How many bytes a plan takes on this executor: the one place that allocation and prediction both read.

Knows plans and weight types, not files; allocates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from pantheon.accel.checkpoints import MOST
from pantheon.accel.cpu import expert_table, kv
from pantheon.accel.cpu import fields as at
from pantheon.accel.cpu.arena import HUGE, LINE, round_up
from pantheon.accel.cpu.layouts import ACT_BYTES, FLOATS, MAX_COLUMNS, ROWS
from pantheon.accel.cpu.pack import packed_bytes
from pantheon.accel.cpu.table import stride
from pantheon.plan.buffers import Buffer, Experts, Matrix, Vector
from pantheon.plan.builder import Plan
from pantheon.plan.ops import Attend, ExpertMatMul, MatMul, Route
from pantheon.plan.state_spec import KVType

#: the most columns whose logits are computed at once
MAX_WANTED = 32
#: the widest register tile of any CPU
_WIDEST = 8
_PAGE = 4096


# --- weights and tables --------------------------------------------------------------------------------------------
def vector(v: Vector) -> int:
    """A norm weight or bias: a product's bias is read 16 rows at a time."""
    return 4 * round_up(v.size, ROWS)


def experts_of(m: Matrix) -> int:
    """How many matrices a reference stands for."""
    return m.experts if isinstance(m, Experts) else 1


def weights(plan: Plan, types: Mapping[Matrix, str]) -> int:
    """The arena that holds every weight, packed."""
    planes = [
        tuple(experts_of(m) * n for n in packed_bytes(types[m], m.rows, m.cols)) for m in plan.matrices()
    ]
    return sum(round_up(n, LINE) for n in [*map(vector, plan.vectors()), *(n for both in planes for n in both)])


def tables(plan: Plan, n_ctx: int) -> int:
    """cos and sin of every rope."""
    return sum(8 * (spec.n_rot // 2) * n_ctx for spec in plan.ropes)


# --- scratch -------------------------------------------------------------------------------------------------------
def buffer_rows(plan: Plan) -> dict[Buffer, int]:
    """Columns of each buffer: those of the head are needed only for wanted columns."""
    body = {b for op in plan.body for b in vars(op).values() if isinstance(b, Buffer)} | {plan.hidden}
    return {b: MAX_COLUMNS if b in body else MAX_WANTED for b in plan.buffers}


def staging(plan: Plan) -> int:
    """A copy of the widest input of a product, for products that write what they read."""
    return MAX_COLUMNS * max((stride(op.x.width) for op in plan.ops() if isinstance(op, MatMul)), default=0)


def activations(plan: Plan) -> int:
    """One quantised input of a product."""
    widest = max((op.x.width for op in plan.ops() if isinstance(op, MatMul)), default=32)
    return round_up(widest, 32) // 32 * ACT_BYTES * MAX_COLUMNS


def experts(plan: Plan, floats: bool) -> tuple[int, int, int]:
    """A mixture's table, and room for its inputs as int8 blocks and (when some of its weights are floats) as floats."""
    table = blocks = 0
    for op in plan.ops():
        if isinstance(op, Route):
            table = max(table, expert_table.table_bytes(MAX_COLUMNS, op.logits.width, op.chosen.width, _WIDEST))
        elif isinstance(op, ExpertMatMul):
            most = expert_table.places(MAX_COLUMNS, op.weight.experts, op.chosen.width, _WIDEST)
            blocks = max(blocks, most * (round_up(op.weight.cols, 32) // 32))
    return table, blocks * ACT_BYTES, blocks * 128 if floats else 0


def has_float_experts(types: Mapping[Matrix, str]) -> bool:
    """Whether some expert's weights are floats, whose products read floats."""
    return any(isinstance(m, Experts) and name in FLOATS for m, name in types.items())


def per_thread(plan: Plan) -> int:
    """What kernels keep for themselves on each thread."""
    dims = [op.head_dim for op in plan.ops() if isinstance(op, Attend)]
    dims += [spec.k_dim for spec in plan.state.kv]
    mixed = any(isinstance(op, ExpertMatMul) for op in plan.ops())
    staging = expert_table.staging_bytes(MAX_COLUMNS, _WIDEST) if mixed else 0
    return round_up(max(kv.thread_bytes(max(dims, default=16)), staging) + _PAGE, _PAGE)


def partials(plan: Plan, n_ctx: int) -> tuple[int, int]:
    """(columns whose attention may be cut by positions, bytes for their partial sums)."""
    attends = [op for op in plan.ops() if isinstance(op, Attend)]
    columns = min((kv.split_columns(op.heads, op.head_dim, n_ctx) for op in attends), default=0)
    return columns, max((kv.partial_bytes(columns, op.heads, op.head_dim, n_ctx) for op in attends), default=0)


def scratch(plan: Plan, n_ctx: int, threads: int, float_experts: bool) -> int:
    """Everything that a forward writes beside KV rows."""
    pieces = [rows * stride(b.width) for b, rows in buffer_rows(plan).items()]
    pieces += [staging(plan), activations(plan), partials(plan, n_ctx)[1], *experts(plan, float_experts)]
    pieces += [8 * at.CONTEXT_WORDS, *[4 * MAX_COLUMNS] * 4]
    total = sum(round_up(n, LINE) for n in pieces)
    return round_up(total, _PAGE) + threads * per_thread(plan)


# --- KV ------------------------------------------------------------------------------------------------------------
def recurrent_at(plan: Plan, n_ctx: int, kv_type: KVType) -> int:
    """Where in a slot its recurrent state begins: behind the KV rows."""
    return -(-n_ctx // kv.BLOCK) * kv.layers(plan, kv_type)[1]


def slot(plan: Plan, n_ctx: int, kv_type: KVType) -> int:
    """KV rows of one conversation of up to n_ctx positions, and its recurrent state."""
    used = recurrent_at(plan, n_ctx, kv_type) + plan.state.recurrent_bytes
    return round_up(used, HUGE if used >= HUGE else _PAGE)


def predict(
    plan: Plan, types: Mapping[Matrix, str], *, n_ctx: int, n_slots: int, kv_type: KVType, threads: int
) -> dict[str, int]:
    """Bytes by part, as `CpuRunner.memory` and `CpuState.nbytes` report them once it is loaded."""
    return {
        "weights": weights(plan, types),
        "scratch": scratch(plan, n_ctx, threads, has_float_experts(types)),
        "tables": tables(plan, n_ctx),
        "kv": n_slots * (slot(plan, n_ctx, kv_type) + MOST * plan.state.recurrent_bytes),
    }
