"""The oracle's own properties: chunking, slots, windows, and what a reset forgets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pantheon.accel.executor import Columns, RawTensor
from pantheon.accel.reference import ReferenceExecutor, ReferenceRunner, round_q8_0
from pantheon.models.architectures import make_plan
from pantheon.plan.state_spec import KVType
from tests.models.test_llama import VOCAB, metadata, shapes


class RandomWeights:
    """A WeightSource of random float32 tensors."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.released: list[str] = []

    def tensor(self, name: str) -> RawTensor:
        shape = shapes()[name]
        values = self.rng.normal(size=shape, scale=shape[-1] ** -0.5).astype(np.float32)
        return RawTensor(name, "F32", shape, values.reshape(-1).view(np.uint8))

    def release(self, name: str) -> None:
        self.released.append(name)


def runner(kv_type: KVType = KVType.F32, **changes: Any) -> ReferenceRunner:
    plan = make_plan(metadata(**changes), shapes())
    return ReferenceExecutor().load(plan, RandomWeights(), n_ctx=64, kv_type=kv_type)


IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]


def test_chunks_and_single_steps_agree_with_one_shot() -> None:
    run = runner()
    whole = run.forward(run.new_state(1, 64), Columns.of_slot(IDS, 0, wanted="all"))
    state = run.new_state(1, 64)
    parts = [run.forward(state, Columns.of_slot(IDS[:4], 0, wanted="all"))]
    parts += [run.forward(state, Columns.of_slot([t], i, wanted="all")) for i, t in enumerate(IDS[4:], 4)]
    assert np.allclose(np.concatenate(parts), whole, atol=1e-5)


def test_slots_do_not_see_each_other_in_one_forward() -> None:
    """A prefill chunk of one slot and decode columns of another share a forward (M074)."""
    run = runner()
    alone = run.forward(run.new_state(1, 64), Columns.of_slot(IDS, 0))
    state = run.new_state(2, 64)
    run.forward(state, Columns.of_slot([7, 8, 9], 0, slot=1, wanted="none"))
    mixed = Columns(
        np.array([*IDS, 11], np.int32), np.array([0] * len(IDS) + [1], np.int32),
        np.array([*range(len(IDS)), 3], np.int32), np.array([len(IDS) - 1, len(IDS)], np.int32),
    )  # fmt: skip
    assert np.allclose(run.forward(state, mixed)[0], alone[0], atol=1e-5)


def test_a_reset_slot_answers_like_a_new_one() -> None:
    """M076."""
    run = runner()
    state = run.new_state(1, 64)
    run.forward(state, Columns.of_slot([9] * 20, 0))
    state.reset(0)
    fresh = run.forward(run.new_state(1, 64), Columns.of_slot(IDS, 0))
    assert np.array_equal(run.forward(state, Columns.of_slot(IDS, 0)), fresh)


@pytest.mark.parametrize(("kv_type", "bound"), [(KVType.F16, 0.05), (KVType.Q8_0, 0.2)])
def test_a_smaller_cache_is_close(kv_type: KVType, bound: float) -> None:
    exact, less = (runner(kv).forward for kv in (KVType.F32, kv_type))
    columns = Columns.of_slot(IDS, 0, wanted="all")
    a = exact(runner().new_state(1, 64), columns)
    b = less(runner(kv_type).new_state(1, 64), columns)
    assert 0 < np.abs(a - b).max() < bound


def test_q8_0_rounds_to_half_a_step_of_its_block() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32)
    rows[7, :32], rows[8, 32:] = 0, 1e-9
    got = round_q8_0(rows)
    for dims in (slice(0, 32), slice(32, 40)):
        step = np.abs(rows[:, dims]).max(axis=1, keepdims=True) / 127
        assert (np.abs(got - rows)[:, dims] <= 0.51 * step + 1e-8).all()
    assert np.array_equal(round_q8_0(got), got), "what was rounded stays"


def test_every_weight_is_released_once() -> None:
    source = RandomWeights()
    ReferenceExecutor().load(make_plan(metadata(), shapes()), source, n_ctx=8, kv_type=KVType.F32)
    assert sorted(source.released) == sorted(shapes())


@pytest.mark.parametrize(
    ("tokens", "slot", "position", "wanted"),
    [
        ([VOCAB], 0, 0, 0),
        ([-1], 0, 0, 0),
        ([1], 1, 0, 0),
        ([1], -1, 0, 0),
        ([1], 0, 64, 0),
        ([1], 0, 0, 1),
        ([], 0, 0, 0),
    ],
)
def test_indices_are_checked_before_any_arithmetic(tokens: list[int], slot: int, position: int, wanted: int) -> None:
    run = runner()
    n = len(tokens)
    rows = (np.array(tokens, np.int32), np.full(n, slot, np.int32), np.full(n, position, np.int32))
    columns = Columns(*rows, np.array([wanted], np.int32))
    with pytest.raises(ValueError, match=r"out of range|at least one"):
        run.forward(run.new_state(1, 64), columns)
