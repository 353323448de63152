"""Levels from numbers: the thresholds of the memory layer, pure [M181-M187, K04, K05].

Must not read files or settings: the watcher passes both in.
"""

from __future__ import annotations

from dataclasses import dataclass

from pantheon.mem.host_signals import HostSample
from pantheon.mem.mem_state import DieState, HostState, Level

GIB = 1 << 30
#: PN_HOST_RESERVE_MIN_BYTES: the host keeps this much, or 15 % when that is more
RESERVE_MIN_BYTES = GIB
RESERVE_PERCENT = 15


@dataclass(frozen=True)
class Thresholds:
    """What an operator may set.  `host_reserve_bytes` None: max(1 GiB, 15 %); PSI in percent."""

    host_reserve_bytes: int | None = None
    psi_full_reject: float = 15.0
    psi_some_tight: float = 10.0
    die_reserve_bytes: int = GIB


def host_reserve(total_bytes: int, override: int | None = None) -> int:
    """Bytes of the machine that are never given to a model: max(1 GiB, 15 %) unless overridden [M181]."""
    return max(RESERVE_MIN_BYTES, total_bytes * RESERVE_PERCENT // 100) if override is None else override


def cgroup_reserve(limit_bytes: int, override: int | None = None) -> int:
    """The same within a cgroup, without the floor of 1 GiB: a container of 1 GiB would have nothing left."""
    return limit_bytes * RESERVE_PERCENT // 100 if override is None else override


def level_of_bytes(available_bytes: int, reserve_bytes: int) -> Level:
    """available <= reserve CRITICAL; slack < reserve/4 TIGHT; slack < reserve WATCH; else OK [M182, K04]."""
    slack = available_bytes - reserve_bytes
    if slack <= 0:
        return Level.CRITICAL
    if slack < reserve_bytes // 4:
        return Level.TIGHT
    return Level.WATCH if slack < reserve_bytes else Level.OK


def level_of_psi(some_avg10: float, full_avg10: float, thresholds: Thresholds) -> Level:
    """full >= 15 CRITICAL; full > 0 or some >= 10 TIGHT; some > 0 WATCH; else OK [M183]."""
    if full_avg10 >= thresholds.psi_full_reject:
        return Level.CRITICAL
    if full_avg10 > 0 or some_avg10 >= thresholds.psi_some_tight:
        return Level.TIGHT
    return Level.WATCH if some_avg10 > 0 else Level.OK


def host_state(sample: HostSample, thresholds: Thresholds, at_s: float) -> HostState:
    """The published host state of one sample: the tighter of machine and cgroup binds, PSI can only raise it."""
    override = thresholds.host_reserve_bytes
    bounds = [("host", sample.total_bytes, sample.available_bytes, host_reserve(sample.total_bytes, override))]
    if sample.cgroup_limit_bytes is not None:
        limit, free = sample.cgroup_limit_bytes, sample.cgroup_free_bytes
        bounds.append(("cgroup", limit, min(free, sample.available_bytes), cgroup_reserve(limit, override)))
    levels = [level_of_bytes(available, reserve) for _, _, available, reserve in bounds]
    # the bound with the higher level binds; among equals the one with less left
    at = max(range(len(bounds)), key=lambda i: (levels[i], bounds[i][3] - bounds[i][2]))
    bound_by, total, available, reserve = bounds[at]
    level_psi = level_of_psi(sample.psi_some_avg10, sample.psi_full_avg10, thresholds)
    return HostState(
        total_bytes=total,
        available_bytes=available,
        psi_some_avg10=sample.psi_some_avg10,
        psi_full_avg10=sample.psi_full_avg10,
        cgroup_limit_bytes=sample.cgroup_limit_bytes,
        cgroup_used_bytes=sample.cgroup_used_bytes,
        swap_total_bytes=sample.swap_total_bytes,
        swap_free_bytes=sample.swap_free_bytes,
        level=max(levels[at], level_psi),
        at_s=at_s,
        reserve_bytes=reserve,
        level_bytes=levels[at],
        level_psi=level_psi,
        bound_by=bound_by,
        mem_total_bytes=sample.total_bytes,
        mem_available_bytes=sample.available_bytes,
        cgroup_high_bytes=sample.cgroup_high_bytes,
    )


def level_of_die(free_bytes: int, budget_bytes: int, resident_bytes: int = 0) -> Level:
    """budget 0 is skipped; free 0 CRITICAL; < budget/16 TIGHT; < budget/8 WATCH; else OK [M185].

    A die that only its own resident model fills is not under pressure [X19]: bytes are scarce there when something
    else took them, so free memory counts as pressure only below what the residents leave of the budget.
    """
    if budget_bytes <= 0 or (resident_bytes > 0 and free_bytes >= budget_bytes - resident_bytes):
        return Level.OK
    if free_bytes <= 0:
        return Level.CRITICAL
    if free_bytes < budget_bytes // 16:
        return Level.TIGHT
    return Level.WATCH if free_bytes < budget_bytes // 8 else Level.OK


def die_state(
    index: int,
    total_bytes: int,
    free_bytes: int,
    thresholds: Thresholds,
    budget_bytes: int | None = None,
    resident_bytes: int = 0,
) -> DieState:
    """One die.  budget_bytes None: its total less the die reserve [M186]."""
    budget = max(0, total_bytes - thresholds.die_reserve_bytes) if budget_bytes is None else budget_bytes
    level = level_of_die(free_bytes, budget, resident_bytes)
    return DieState(index, total_bytes, free_bytes, level, budget, resident_bytes)
