"""The turn: the right to run the one forward in flight, handed out in the order of asking [M089-M091].

A prefill chunk, a bind and a decode step are a turn each.  Nobody barges: the driver that wants its next step queues
behind an owner who asked before.  A turn is a bounded piece of work whose holder waits for nothing, so that waiting for
one needs no deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: how often a waiter looks for itself
_LOOK_S = 1.0


class Turnstile:
    """Tickets under the caller's mutex."""

    def __init__(self, mu: threading.Lock) -> None:
        self._mu = mu
        #: cv_gpu, on mu: `serving` has moved on
        self._cv = threading.Condition(mu)
        # guarded by mu
        self.next_ticket = self.serving = 0
        self._holder: int | None = None
        self._given_up: set[int] = set()

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Wait for the turn and hold it; yields the ticket's number."""
        with self._mu:
            ticket = self._take_locked()
        try:
            yield ticket
        finally:
            with self._mu:
                self._holder = None
                self._advance_locked()

    def _take_locked(self) -> int:
        assert not self.mine, "the holder of the turn waits for nothing"
        ticket = self.next_ticket
        self.next_ticket += 1
        try:
            while self.serving != ticket:
                self._cv.wait(_LOOK_S)
        except BaseException:  # an interrupted main thread: those behind it must not wait for ever
            if self.serving == ticket:
                self._advance_locked()
            else:
                self._given_up.add(ticket)
            raise
        self._holder = threading.get_ident()
        return ticket

    def _advance_locked(self) -> None:
        self.serving += 1
        while self.serving in self._given_up:
            self._given_up.remove(self.serving)
            self.serving += 1
        self._cv.notify_all()

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds the turn."""
        return self._holder == threading.get_ident()

    @property
    def waiting(self) -> int:
        """Tickets that wait behind the one that is served.  The caller holds mu."""
        return max(0, self.next_ticket - self.serving - 1 - len(self._given_up))

    def check_integrity(self) -> None:
        """Raise AssertionError when the counters contradict each other.  The caller holds mu."""
        assert self.serving <= self.next_ticket, (self.serving, self.next_ticket)
        assert all(self.serving < ticket < self.next_ticket for ticket in self._given_up)
        assert self._holder is None or self.serving < self.next_ticket, "a holder without a ticket"
