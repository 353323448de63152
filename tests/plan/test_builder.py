"""plan/builder: a plan lists its ops, weights and buffers in order, and counts its bytes."""

from __future__ import annotations

import dataclasses

import pytest

from pantheon.plan.buffers import Buffer, Matrix, Vector
from pantheon.plan.builder import Plan, PlanBuilder
from pantheon.plan.ops import Add, Embed, MatMul, RmsNorm, Rope
from pantheon.plan.rope import RopeSpec
from pantheon.plan.state_spec import KVSpec, StateSpec

STATE = StateSpec((KVSpec(1, 4, 4),))


def small_plan(builder: PlanBuilder | None = None) -> Plan:
    """Embed, one norm, one biased matmul into itself, a tied head: every kind of reference once or twice."""
    b = builder or PlanBuilder()
    table = Matrix("token_embd.weight", 10, 4)
    norm = Vector("norm.weight", 4)
    x, y = b.buffer("x", 4), b.buffer("y", 6)
    b.add(Embed(table, x), RmsNorm(x, norm, x, 1e-5))
    b.add(MatMul(Matrix("w", 6, 4), x, y, bias=Vector("w.bias", 6)), Rope(y, 1, 6, b.rope(RopeSpec(6, 1e4, "norm"))))
    head_in = b.begin_head(x)
    logits = b.buffer("logits", 10)
    b.add(RmsNorm(head_in, norm, head_in, 1e-5), MatMul(table, head_in, logits))
    return b.finish("small", 10, 64, logits, STATE)


def test_body_and_head_are_kept_apart_and_in_order() -> None:
    plan = small_plan()
    assert [type(op).__name__ for op in plan.body] == ["Embed", "RmsNorm", "MatMul", "Rope"]
    assert [type(op).__name__ for op in plan.head] == ["RmsNorm", "MatMul"]
    assert list(plan.ops()) == [*plan.body, *plan.head]
    assert (plan.hidden.name, plan.head_in.name, plan.logits.name) == ("x", "head_in", "logits")


def test_buffers_are_numbered_by_their_place() -> None:
    plan = small_plan()
    assert [b.index for b in plan.buffers] == [0, 1, 2, 3]
    assert [b.name for b in plan.buffers] == ["x", "y", "head_in", "logits"]


def test_each_weight_is_listed_once_by_first_use() -> None:
    plan = small_plan()
    assert [m.tensor for m in plan.matrices()] == ["token_embd.weight", "w"]
    assert [v.tensor for v in plan.vectors()] == ["norm.weight", "w.bias"]


def test_parts_of_one_tensor_are_weights_of_their_own() -> None:
    b = PlanBuilder()
    x, q = b.buffer("x", 4), b.buffer("q", 8)
    parts = [Matrix("qkv", 4, 4, first_row=row) for row in (0, 4)]
    b.add(*(MatMul(part, x, q, out_first=part.first_row) for part in parts))
    b.begin_head(x)
    assert b.finish("p", 8, 8, q, STATE).matrices() == parts


def test_column_bytes_leave_the_logits_row_out() -> None:
    assert small_plan().column_bytes() == 4 * (4 + 6 + 4)


def test_equal_rope_specs_share_a_table() -> None:
    b = PlanBuilder()
    one, other = RopeSpec(4, 1e4, "norm"), RopeSpec(4, 1e6, "norm")
    assert [b.rope(one), b.rope(other), b.rope(RopeSpec(4, 1e4, "norm")), b.rope(other)] == [0, 1, 0, 1]


def test_a_plan_without_a_head_is_refused() -> None:
    b = PlanBuilder()
    with pytest.raises(ValueError, match="needs a head"):
        b.finish("p", 1, 1, b.buffer("x", 1), STATE)


def test_a_plan_is_frozen_and_comparable() -> None:
    plan = small_plan()
    assert plan == small_plan()
    for frozen in (plan, plan.body[0], plan.buffers[0], plan.state):
        first = dataclasses.fields(frozen)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, first, None)


def test_ops_hash_so_that_they_can_key_a_table() -> None:
    x = Buffer(0, "x", 2)
    assert len({Add(x, x, x), Add(x, x, x)}) == 1
