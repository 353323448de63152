"""How long a thread sleeps between two looks at a device (M080, M163)."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from pantheon.accel.cuda.waiting import pauses, wait
from tests.fakes import Ticks


def test_pauses_grow_from_50_to_500_us() -> None:
    found = [round(1e6 * pause) for pause in islice(pauses(500), 10)]
    assert found[0] == 50 and found[-1] == 500
    assert all(a < b or a == b == 500 for a, b in pairwise(found))


@pytest.mark.parametrize(("limit", "longest"), [("50", 50), ("120", 120), ("500", 500), ("2000", 2000)])
def test_the_flag_caps_them(monkeypatch, limit, longest) -> None:
    monkeypatch.setenv("PN_ASYNC_POLL_US", limit)
    clock, looks = Ticks(), iter([False] * 20 + [True])
    wait(lambda: next(looks), clock)
    assert round(1e6 * max(clock.slept)) == longest and len(clock.slept) == 20


def test_what_is_ready_costs_no_sleep() -> None:
    clock = Ticks()
    wait(lambda: True, clock)
    assert clock.slept == []


def test_a_fault_passes_through() -> None:
    def lost() -> bool:
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="lost"):
        wait(lost, Ticks())
