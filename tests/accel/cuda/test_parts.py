"""Plans cut into parts for several dies (M197, M226)."""

from __future__ import annotations

import pytest

from pantheon.accel.cuda.parts import cut
from pantheon.models.architectures import make_plan
from pantheon.plan.ops import Attend, Conv, DeltaRule, MatMul, StoreKV
from tests.models.random_models import decoder, hybrid


def plan_of(arch: str):
    return make_plan(*(hybrid if arch.startswith("qwen35") else decoder)(arch))


@pytest.mark.parametrize("arch", ["llama", "phi3", "qwen35moe"])
def test_parts_hold_every_op_once_and_count_their_layers_from_0(arch) -> None:
    plan = plan_of(arch)
    n = len(plan.body)
    parts = cut(plan, [n // 3, 2 * n // 3])
    assert [type(op) for part in parts for op in part.plan.body] == [type(op) for op in plan.body]
    assert [part.is_last for part in parts] == [False, False, True] and parts[0].carried == ()
    for part in parts:
        for kinds, specs in (((StoreKV, Attend), part.plan.state.kv), ((Conv, DeltaRule), part.plan.state.recurrent)):
            assert {op.layer for op in part.plan.body if isinstance(op, kinds)} == set(range(len(specs)))
    assert sum((part.plan.state.kv for part in parts), ()) == plan.state.kv
    assert sum((part.plan.state.recurrent for part in parts), ()) == plan.state.recurrent


def test_one_part_is_the_plan() -> None:
    plan = plan_of("llama")
    [part] = cut(plan, [])
    assert part.plan == plan and part.carried == ()
    assert plan.logits not in part.buffers() and plan.head_in in part.buffers()


def test_between_layers_the_residual_alone_is_carried() -> None:
    plan = plan_of("llama")
    second = next(i for i, op in enumerate(plan.body) if isinstance(op, MatMul) and "blk.1." in op.weight.tensor) - 1
    assert [b.name for b in cut(plan, [second])[1].carried] == [plan.hidden.name]


@pytest.mark.parametrize("cuts", [[0], [5, 5], [9, 4], [10_000]])
def test_cuts_that_divide_nothing_are_refused(cuts) -> None:
    with pytest.raises(ValueError, match="cuts"):
        cut(plan_of("llama"), cuts)


def test_a_cut_between_storing_rows_and_reading_them_is_refused() -> None:
    """The rows would lie on the die before, and another die's zeros be read."""
    plan = plan_of("llama")
    first = next(i for i, op in enumerate(plan.body) if isinstance(op, StoreKV))
    with pytest.raises(ValueError, match=f"cut at op {first + 1} parts KV rows"):
        cut(plan, [first + 1])
    assert len(cut(plan, [first])) == len(cut(plan, [first + 2])) == 2
