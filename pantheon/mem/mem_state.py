"""What is known of memory, as values that never change [M172, M173].

The watcher publishes a new `MemState` by one reference swap, so readers neither wait nor see half of one: that is what
a seqlock buys in C.  Must not know where the numbers come from or what is done about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any


class Level(IntEnum):
    """How tight memory is [M180]; the larger one wins."""

    OK = 0
    WATCH = 1
    TIGHT = 2
    CRITICAL = 3


@dataclass(frozen=True)
class HostState:
    """Host memory at one moment.

    `total_bytes`, `available_bytes` and `reserve_bytes` belong to whatever binds first: the whole machine ("host") or
    our cgroup ("cgroup"); `mem_total_bytes` and `mem_available_bytes` are the machine's own.  `level` is the larger of
    `level_bytes` and `level_psi`, which are told apart because stalls outlive their cause by a minute [K05, M184].
    Cgroup fields are None without a limit; PSI is 0 where there is none [M177, M178].
    """

    total_bytes: int
    available_bytes: int
    psi_some_avg10: float = 0.0
    psi_full_avg10: float = 0.0
    cgroup_limit_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    swap_total_bytes: int = 0
    swap_free_bytes: int = 0
    level: Level = Level.OK
    at_s: float = 0.0
    reserve_bytes: int = 0
    level_bytes: Level = Level.OK
    level_psi: Level = Level.OK
    bound_by: str = "host"
    mem_total_bytes: int = 0
    mem_available_bytes: int = 0
    cgroup_high_bytes: int | None = None

    @property
    def slack_bytes(self) -> int:
        """What may be used before the reserve is touched; negative inside the reserve."""
        return self.available_bytes - self.reserve_bytes


@dataclass(frozen=True)
class DieState:
    """One die.  `budget_bytes`: what models may use of it; `resident_bytes`: what our own model there was charged."""

    index: int
    total_bytes: int
    free_bytes: int
    level: Level = Level.OK
    budget_bytes: int = 0
    resident_bytes: int = 0


def _no_dies() -> Mapping[int, DieState]:
    return MappingProxyType({})


@dataclass(frozen=True)
class MemState:
    """One published snapshot; `seq` only grows.  `alive`: a watcher keeps it fresh, so decisions may lean on it."""

    host: HostState
    dies: Mapping[int, DieState] = field(default_factory=_no_dies)
    seq: int = 0
    alive: bool = False

    @property
    def level(self) -> Level:
        """The host's level: what holds for every model [X19]."""
        return self.host.level

    def level_for(self, dies: tuple[int, ...] = ()) -> Level:
        """The level of a model on these dies: the worst of the host and of its own dies [X19, M187]."""
        return max([self.host.level, *(self.dies[i].level for i in dies if i in self.dies)])

    def stale(self) -> MemState:
        """The same numbers, known to be old: at least WATCH, and not alive [X20]."""
        return replace(self, host=replace(self.host, level=max(self.host.level, Level.WATCH)), alive=False)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: the fields by name, levels as words."""
        host = {key: value.name if isinstance(value, Level) else value for key, value in vars(self.host).items()}
        host["slack_bytes"] = self.host.slack_bytes
        dies = [
            {key: value.name if isinstance(value, Level) else value for key, value in vars(die).items()}
            for _, die in sorted(self.dies.items())
        ]
        return {"level": self.level.name, "seq": self.seq, "alive": self.alive, "host": host, "dies": dies}
