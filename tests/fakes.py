"""Stand-ins that tests of several parts share."""

from __future__ import annotations

import threading

#: real seconds that a stuck test may wait for a fake clock before it fails
PATIENCE_S = 20.0


class FakeClock:
    """A `seams.Clock` whose time passes only in `advance`; safe to share between threads."""

    def __init__(self, now: float = 1000.0) -> None:
        # guards _now and _sleepers
        self._changed = threading.Condition()
        self._now = now
        self._sleepers: list[float] = []

    def monotonic(self) -> float:
        """Seconds on this clock."""
        with self._changed:
            return self._now

    def sleep(self, seconds: float) -> None:
        """Block until other threads have advanced the clock by so much."""
        with self._changed:
            until = self._now + seconds
            self._sleepers.append(until)
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: self._now >= until, PATIENCE_S):
                    raise AssertionError(f"nobody advanced the fake clock to {until}")
            finally:
                self._sleepers.remove(until)

    def advance(self, seconds: float) -> None:
        """Let time pass and wake whoever has slept enough."""
        if seconds < 0:
            raise ValueError("time does not run backwards")
        with self._changed:
            self._now += seconds
            self._changed.notify_all()

    def wait_for_sleepers(self, n: int = 1) -> None:
        """Block until n threads sleep on this clock and none of them is due."""
        with self._changed:
            ready = self._changed.wait_for(lambda: sum(t > self._now for t in self._sleepers) >= n, PATIENCE_S)
            if not ready:
                raise AssertionError(f"{len(self._sleepers)} of {n} sleepers after {PATIENCE_S:.0f} s")


class Ticks:
    """A clock that remembers what slept on it, and waits for nobody."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def monotonic(self) -> float:
        """All that was slept."""
        return sum(self.slept)

    def sleep(self, seconds: float) -> None:
        """Note it."""
        self.slept.append(seconds)
