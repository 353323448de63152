"""Floor 0: the test seams are deterministic and cost nothing when unarmed."""

from __future__ import annotations

import threading

import pytest

from pantheon import seams
from pantheon.seams import POINTS, InjectedFailure


def test_unarmed_points_pass() -> None:
    for point in POINTS:
        seams.hit(point)


def test_the_kth_hit_fails_and_only_that_one() -> None:
    seams.arm("sample@3")
    outcomes = []
    for _ in range(5):
        try:
            seams.hit("sample")
            outcomes.append("ok")
        except InjectedFailure as fault:
            outcomes.append(str(fault))
    assert outcomes == ["ok", "ok", "injected failure at sample", "ok", "ok"]


def test_points_count_on_their_own_and_default_to_the_first_hit() -> None:
    seams.arm(" forward , sample@2 ")
    with pytest.raises(InjectedFailure):
        seams.hit("forward")
    seams.hit("sample")
    seams.hit("render")
    with pytest.raises(InjectedFailure):
        seams.hit("sample")


def test_arming_starts_counting_afresh_and_an_empty_spec_disarms() -> None:
    seams.arm("load@2")
    seams.hit("load")
    seams.arm("load@2")
    seams.hit("load")
    seams.arm("")
    seams.hit("load")


@pytest.mark.parametrize("spec", ["nowhere", "sample@0", "sample@x", "sample@-1", "sample,nowhere@2", "sample@1.5"])
def test_an_unknown_point_or_count_is_refused_and_leaves_the_old_arming(spec: str) -> None:
    seams.arm("render")
    with pytest.raises(ValueError, match="unknown failure point .*known: thread_start, load"):
        seams.arm(spec)
    with pytest.raises(InjectedFailure):
        seams.hit("render")


def test_the_flag_arms_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PN_FAIL_AT", "handler@2")
    seams.arm_from_settings()
    seams.hit("handler")
    with pytest.raises(InjectedFailure):
        seams.hit("handler")


def test_of_many_threads_exactly_one_meets_the_failure() -> None:
    seams.arm("forward@40")
    failed: list[int] = []

    def work(n: int) -> None:
        for _ in range(25):
            try:
                seams.hit("forward")
            except InjectedFailure:
                failed.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(failed) == 1


def test_the_system_clock_only_grows() -> None:
    clock = seams.SYSTEM_CLOCK
    start = clock.monotonic()
    clock.sleep(0.002)
    assert clock.monotonic() >= start + 0.002
