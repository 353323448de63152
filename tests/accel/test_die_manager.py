"""Budgets and bindings: one model on a die, nothing charged twice, nothing left behind [M058, M142, M204, M242]."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pantheon.accel.die import virtual_dies
from pantheon.accel.die_manager import DieManager
from pantheon.errors import BadRequest, PantheonError


def manager(*sizes: int) -> DieManager:
    return DieManager(virtual_dies(sizes))


def halves(total: int):  # type: ignore[no-untyped-def]
    """A model that can be divided evenly."""

    def need(budgets: Sequence[int]) -> list[int] | None:
        each = -(-total // len(budgets))
        return [each] * len(budgets) if each <= min(budgets) else None

    return need


def refused(fault: pytest.ExceptionInfo[PantheonError]) -> tuple[int, str | None]:
    return fault.value.status, fault.value.code


def test_the_tightest_free_die_that_fits_is_chosen_M058() -> None:
    dies = manager(100, 300, 200)
    assert dies.pick(150) == (2,)
    dies.bind((2,), "a", [150])
    assert dies.pick(150) == (1,)
    assert dies.pick(90) == (0,)


def test_a_model_that_fits_no_die_is_split_over_the_fewest_M226() -> None:
    dies = manager(100, 300, 200)
    assert dies.pick(halves(390)) == (1, 2)
    assert dies.pick(halves(300)) == (1,)
    assert dies.pick(halves(290)) == (1,)
    with pytest.raises(PantheonError) as fault:
        dies.pick(halves(700))
    assert refused(fault) == (507, "die_full")
    assert fault.value.extra == {"need_bytes": 700, "have_bytes": 600, "reserve_bytes": 0}


def test_one_model_on_a_die_M242() -> None:
    dies = manager(100, 100)
    dies.bind((0,), "a", [10])
    with pytest.raises(PantheonError) as fault:
        dies.pick(10, (0,))
    assert refused(fault) == (409, "die_taken") and "'a'" in fault.value.message
    with pytest.raises(PantheonError) as fault:
        dies.bind((1, 0), "b", [1, 1])
    assert refused(fault) == (409, "die_taken")
    assert dies.snapshot()[1].model is None
    dies.bind((1,), "b", [1])
    with pytest.raises(PantheonError) as fault:
        dies.pick(1)
    assert refused(fault) == (507, "no_free_die")


@pytest.mark.parametrize(("asked", "words"), [((2,), "0 to 1"), ((-1,), "no die -1"), ((0, 0), "twice")])
def test_dies_that_are_not_there_M005(asked: tuple[int, ...], words: str) -> None:
    with pytest.raises(BadRequest, match=words) as fault:
        manager(100, 100).pick(1, asked)
    assert fault.value.param == "dies"


def test_charges_are_seen_and_given_back_M143() -> None:
    dies = manager(100, 50)
    dies.bind((0, 1), "a", [60, 20])
    dies.note_cache((0, 1), "a", 10)
    first, second = dies.snapshot()
    assert (first.charged_bytes, first.cache_bytes, first.free_bytes, first.model) == (60, 5, 35, "a")
    assert (second.charged_bytes, second.free_bytes) == (20, 25)
    dies.unbind((0, 1), "b")
    assert dies.snapshot() == (first, second)
    dies.unbind((0, 1), "a")
    dies.note_cache((0, 1), "a", 10)
    assert [(i.charged_bytes, i.cache_bytes, i.free_bytes, i.model) for i in dies.snapshot()] == [
        (0, 0, 100, None),
        (0, 0, 50, None),
    ]


def test_held_dies_are_bound_by_their_holder_only() -> None:
    dies = manager(100, 100)
    dies.hold((0,), "later")
    assert dies.take("now", 60) == ((1,), (100,), (60,))
    assert dies.take("later", 60, (0,)).dies == (0,)
    assert [info.charged_bytes for info in dies.snapshot()] == [60, 60]


def test_a_virtual_die_is_its_share_of_the_cores_M065(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pantheon.accel.die_manager.usable_cores", lambda: 8)
    dies = manager(1, 1, 1, 1)
    assert (dies.threads((0,)), dies.threads((0, 1)), dies.threads((0,), 5), dies.threads(())) == (2, 4, 5, None)
    monkeypatch.setattr("pantheon.accel.die_manager.usable_cores", lambda: 1)
    assert dies.threads((0,)) == 1


class Dies(RuleBasedStateMachine):
    """Loads and unloads in any order: never two models on a die, never more than a budget, never a byte left."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (100, 200, 300, 50)
        self.dies = manager(*self.sizes)
        self.loaded: dict[str, tuple[int, ...]] = {}
        self.count = 0

    @rule(total=st.integers(1, 400), asked=st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
    def load(self, total: int, asked: list[int] | None) -> None:
        before = self.dies.snapshot()
        self.count += 1
        name = f"m{self.count}"
        try:
            found = self.dies.take(name, halves(total), None if asked is None else tuple(asked)).dies
        except PantheonError as fault:
            assert fault.status in (409, 507)
            assert self.dies.snapshot() == before
        else:
            assert asked is None or found == tuple(asked)
            self.loaded[name] = found

    @precondition(lambda self: self.loaded)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        self.dies.unbind(self.loaded.pop(name), name)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), nbytes=st.integers(0, 30))
    def cache(self, data: st.DataObject, nbytes: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        self.dies.note_cache(self.loaded[name], name, nbytes)

    @invariant()
    def sound(self) -> None:
        self.dies.check_integrity()
        self.dies.refresh()
        placed = {die: name for name, on in self.loaded.items() for die in on}
        for info, size in zip(self.dies.snapshot(), self.sizes, strict=True):
            assert info.model == placed.get(info.index)
            assert info.charged_bytes <= info.budget_bytes == size
            assert info.model is not None or info.free_bytes == size


Dies.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestDies = Dies.TestCase
