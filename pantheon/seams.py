"""Test seams: an injectable clock, named failure points and a slow decode.

The seams are part of the product, so that the in-flight windows of a running server (busy, cancel, drain, error
after the first byte) can be driven from outside and deterministically.  With no seam set, each costs one `if`.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from pantheon import settings

#: Every failure point that the code can hit; `PN_FAIL_AT` naming another one is refused at start.
POINTS = (
    "thread_start", "load", "upload", "forward", "sample", "handler", "render", "admit", "bind", "state", "cache",
    "scheduler", "publish",
)  # fmt: skip


class Clock(Protocol):
    """Seconds that only grow, and a way to let them pass."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()


class InjectedFailure(RuntimeError):
    """Raised by a failure point that `PN_FAIL_AT` or a test has armed."""


# guards _armed and _hits; nothing is called while it is held
_lock = threading.Lock()
_armed: dict[str, int] = {}
_hits: dict[str, int] = {}


def arm(spec: str) -> None:
    """Arm failure points: `point[@k][,point…]` fails the k-th hit (counted from 1, default 1) of each; '' disarms.

    Raises ValueError for an unknown point or a count below 1.
    """
    wanted: dict[str, int] = {}
    for item in filter(None, (s.strip() for s in spec.split(","))):
        point, _, count = item.partition("@")
        if point not in POINTS or (count and (not count.isdigit() or int(count) < 1)):
            raise ValueError(f"unknown failure point {item!r}; known: {', '.join(POINTS)} (point@k for the k-th hit)")
        wanted[point] = int(count or 1)
    with _lock:
        _armed.clear()
        _hits.clear()
        _armed.update(wanted)


def hit(point: str) -> None:
    """Pass a failure point; raises InjectedFailure when this hit was asked for."""
    if not _armed:
        return
    with _lock:
        if point not in _armed:
            return
        _hits[point] = _hits.get(point, 0) + 1
        due = _hits[point] == _armed[point]
    if due:
        raise InjectedFailure(f"injected failure at {point}")


def arm_from_settings() -> None:
    """Arm what `PN_FAIL_AT` names; called once by the command line."""
    arm(settings.get("PN_FAIL_AT"))
