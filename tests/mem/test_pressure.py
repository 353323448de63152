"""Levels and thresholds, exactly as the tables say [M180-M188, K04, K05]."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pantheon.mem.host_signals import HostSample
from pantheon.mem.mem_state import HostState, Level, MemState
from pantheon.mem.pressure import (
    Thresholds,
    cgroup_reserve,
    die_state,
    host_reserve,
    host_state,
    level_of_bytes,
    level_of_die,
    level_of_psi,
)

GIB = 1 << 30
OK, WATCH, TIGHT, CRITICAL = Level
DEFAULT = Thresholds()


def test_m180_levels_are_numbered() -> None:
    assert [(level.name, int(level)) for level in Level] == [("OK", 0), ("WATCH", 1), ("TIGHT", 2), ("CRITICAL", 3)]


@pytest.mark.parametrize(
    ("total", "reserve"), [(4 * GIB, GIB), (8 * GIB, 8 * GIB * 15 // 100), (64 * GIB, 64 * GIB * 15 // 100)]
)
def test_m181_the_reserve_is_15_percent_and_at_least_1_gib(total: int, reserve: int) -> None:
    assert host_reserve(total) == reserve


def test_m165_m181_the_reserve_can_be_set() -> None:
    assert host_reserve(64 * GIB, 5) == cgroup_reserve(GIB, 5) == 5
    state = host_state(HostSample(8 * GIB, 2 * GIB), Thresholds(host_reserve_bytes=GIB), 0.0)
    assert (state.reserve_bytes, state.level) == (GIB, OK)


def test_m182_k04_every_edge_of_the_host_table() -> None:
    reserve = 400
    for slack, level in [
        (-1, CRITICAL), (0, CRITICAL), (1, TIGHT), (99, TIGHT), (100, WATCH), (399, WATCH), (400, OK), (10**12, OK),
    ]:  # fmt: skip
        assert level_of_bytes(reserve + slack, reserve) is level, slack


@pytest.mark.parametrize(
    ("some", "full", "level"),
    [
        (0, 0, OK), (0.01, 0, WATCH), (9.99, 0, WATCH), (10, 0, TIGHT), (99, 0, TIGHT), (0, 0.01, TIGHT),
        (0, 14.99, TIGHT), (0, 15, CRITICAL), (100, 100, CRITICAL),
    ],
)  # fmt: skip
def test_m183_m166_every_edge_of_the_psi_table(some: float, full: float, level: Level) -> None:
    assert level_of_psi(some, full, DEFAULT) is level


def test_m166_the_psi_thresholds_can_be_set() -> None:
    assert level_of_psi(0, 5, Thresholds(psi_full_reject=5)) is CRITICAL
    assert level_of_psi(4, 0, Thresholds(psi_some_tight=4)) is TIGHT


def test_k05_bytes_and_stalls_are_told_apart_and_the_worse_counts() -> None:
    """8 GiB, reserve 1.2 GiB, slack about 5 GiB: fine by bytes; only stalls can make it TIGHT [M188]."""
    state = host_state(HostSample(8 * GIB, 6 * GIB, psi_some_avg10=1, psi_full_avg10=0.2), DEFAULT, 1.0)
    assert (state.level, state.level_bytes, state.level_psi) == (TIGHT, OK, TIGHT)
    state = host_state(HostSample(8 * GIB, 2 * GIB), DEFAULT, 1.0)
    assert (state.level, state.level_bytes, state.level_psi) == (WATCH, WATCH, OK)


def test_m184_the_decay_of_a_load_burst_is_tight_at_most() -> None:
    """A stall of 12 % at the end of a load fades over a minute; the box has long recovered and is never refused."""
    for second in range(0, 70, 2):
        state = host_state(HostSample(8 * GIB, 6 * GIB, psi_full_avg10=12 * math.exp(-second / 10)), DEFAULT, second)
        assert state.level is TIGHT and state.level_bytes is OK


def test_the_tighter_of_machine_and_cgroup_binds() -> None:
    sample = HostSample(64 * GIB, 60 * GIB, cgroup_limit_bytes=2 * GIB, cgroup_used_bytes=GIB)
    state = host_state(sample, DEFAULT, 0.0)
    assert (state.bound_by, state.total_bytes, state.available_bytes) == ("cgroup", 2 * GIB, GIB)
    assert state.reserve_bytes == cgroup_reserve(2 * GIB) < GIB
    assert (state.mem_total_bytes, state.mem_available_bytes, state.level) == (64 * GIB, 60 * GIB, OK)
    sample = HostSample(64 * GIB, 9 * GIB, cgroup_limit_bytes=32 * GIB, cgroup_used_bytes=GIB)
    assert host_state(sample, DEFAULT, 0.0).bound_by == "host"


def test_a_container_of_one_gib_is_not_critical_by_its_size() -> None:
    sample = HostSample(64 * GIB, 60 * GIB, cgroup_limit_bytes=GIB, cgroup_used_bytes=GIB // 4)
    assert host_state(sample, DEFAULT, 0.0).level is OK


def test_m185_every_edge_of_the_die_table() -> None:
    budget = 1600
    for free, level in [(0, CRITICAL), (1, TIGHT), (99, TIGHT), (100, WATCH), (199, WATCH), (200, OK), (1600, OK)]:
        assert level_of_die(free, budget) is level, free
    assert level_of_die(0, 0) is OK, "a die without a budget is skipped"


def test_m186_m167_the_budget_is_the_total_less_the_reserve() -> None:
    assert die_state(0, 12 * GIB, 12 * GIB, DEFAULT).budget_bytes == 11 * GIB
    assert die_state(0, 12 * GIB, 12 * GIB, Thresholds(die_reserve_bytes=2 * GIB)).budget_bytes == 10 * GIB
    assert die_state(0, GIB // 2, GIB // 2, DEFAULT).budget_bytes == 0


def test_x19_a_die_that_its_own_model_fills_is_not_under_pressure() -> None:
    assert level_of_die(10, 1000, resident_bytes=990) is OK
    assert level_of_die(0, 1000, resident_bytes=1000) is OK
    assert level_of_die(9, 1000, resident_bytes=990) is TIGHT, "somebody else has taken what was left"
    assert level_of_die(0, 1000, resident_bytes=400) is CRITICAL


def test_x19_m187_a_full_die_is_the_trouble_of_its_own_models_only() -> None:
    full = die_state(1, 1000, 0, Thresholds(die_reserve_bytes=0))
    roomy = die_state(0, 1000, 900, Thresholds(die_reserve_bytes=0))
    state = MemState(HostState(1, 1, level=WATCH), {0: roomy, 1: full}, 1, True)
    assert state.level is WATCH
    assert state.level_for(()) is state.level_for((0,)) is WATCH
    assert state.level_for((1,)) is state.level_for((0, 1)) is CRITICAL
    assert state.level_for((7,)) is WATCH, "a die that nobody has reported"


sizes = st.integers(0, 1 << 45)


@given(sizes, sizes, sizes)
def test_less_memory_is_never_a_lower_level(available: int, more: int, reserve: int) -> None:
    assert level_of_bytes(available, reserve) >= level_of_bytes(available + more, reserve)
    assert level_of_die(available, reserve) >= level_of_die(available + more, reserve)


percent = st.floats(0, 100)


@given(sizes, sizes, percent, percent, st.none() | sizes, sizes)
def test_m187_the_published_level_is_the_worst_of_its_parts(
    total: int, available: int, some: float, full: float, limit: int | None, used: int
) -> None:
    sample = HostSample(total, available, some, full, limit, None, None if limit is None else used)
    state = host_state(sample, DEFAULT, 0.0)
    assert state.level == max(state.level_bytes, state.level_psi)
    assert state.level_bytes == level_of_bytes(state.available_bytes, state.reserve_bytes)
    assert state.level_bytes >= level_of_bytes(available, host_reserve(total))
    assert state.slack_bytes == state.available_bytes - state.reserve_bytes
