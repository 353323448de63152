"""The fake clock is as strict as the tests that stand on it."""

from __future__ import annotations

import threading

import pytest

from tests.fakes import FakeClock


def test_time_stands_still_until_advanced(fake_clock: FakeClock) -> None:
    start = fake_clock.monotonic()
    assert fake_clock.monotonic() == start
    fake_clock.advance(2.5)
    assert fake_clock.monotonic() == start + 2.5
    with pytest.raises(ValueError, match="backwards"):
        fake_clock.advance(-1)


def test_sleepers_wake_in_the_order_of_their_deadlines(fake_clock: FakeClock) -> None:
    woken: list[int] = []
    threads = [threading.Thread(target=lambda s=s: (fake_clock.sleep(s), woken.append(s))) for s in (3, 1, 2)]
    for thread in threads:
        thread.start()
    fake_clock.wait_for_sleepers(3)
    for after, thread in ((1, threads[1]), (2, threads[2]), (3, threads[0])):
        fake_clock.advance(1)
        thread.join(10)
        assert woken == list(range(1, after + 1))
