"""How long to sleep between two looks at a device: 50 µs, then half as long again each time, up to PN_ASYNC_POLL_US.

A thread that spins would keep a core for each card; one that sleeps lets two cores drive eight [M080, M081, M163].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pantheon import settings
from pantheon.seams import SYSTEM_CLOCK, Clock

FIRST_US, GROWTH = 50, 1.5


def pauses(longest_us: int) -> Iterator[float]:
    """Seconds of one sleep after the other."""
    pause = float(FIRST_US)
    while True:
        yield min(pause, longest_us) / 1e6
        pause = min(pause * GROWTH, longest_us)


def wait(ready: Callable[[], bool], clock: Clock = SYSTEM_CLOCK) -> None:
    """Return when `ready` says so; what it raises passes through."""
    for pause in pauses(settings.get("PN_ASYNC_POLL_US")):
        if ready():
            return
        clock.sleep(pause)
