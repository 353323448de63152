"""The gate in front of the slots: in at once, queued in order, or refused with the numbers [M092-M102, X08, X10, X29].

First the decisions, which are pure; then `Overflow`, which carries them out.  Whoever gives a place back hands it to
the head of the queue, so that the order of asking is the order of entering and a newcomer can not barge.  A place is
the right to one of the slots; which one is chosen later, when the prompt is known.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from pantheon.engine.generate import never
from pantheon.errors import Busy, Cancelled, PantheonError, Unavailable
from pantheon.mem.mem_state import Level
from pantheon.seams import Clock

#: at this level nobody new comes in; at lower ones the ladder shrinks the number of places instead [K01]
HOLD_LEVEL = Level.CRITICAL
LEAST_RETRY_S, MOST_RETRY_S = 1, 60
#: who is sent away is told to come back a little later than expected: to come early is in vain
LATER = 1.2
#: a held place before any was timed
FIRST_SERVICE_S = 2.0
#: how often a waiter looks whether its client is still there
LOOK_S = 0.1


# ---- decisions ------------------------------------------------------------------------------------------------------


class Verdict(Enum):
    """What happens to someone who asks for a place."""

    ENTER = "enter"
    WAIT = "wait"
    QUEUE_FULL = "queue_full"
    MEMORY_CRITICAL = "memory_critical"
    SHUTTING_DOWN = "shutting_down"


class Gate(NamedTuple):
    """All that the decision depends on."""

    free: int
    queued: int
    depth: int
    level: Level
    closing: bool = False


def arrive(gate: Gate) -> Verdict:
    """For a newcomer [M093-M096, M098]: the fast path is for an empty queue only."""
    if gate.closing:
        return Verdict.SHUTTING_DOWN
    if gate.level < HOLD_LEVEL and gate.free > 0 and not gate.queued:
        return Verdict.ENTER
    if gate.queued < gate.depth:
        return Verdict.WAIT
    return Verdict.MEMORY_CRITICAL if gate.level >= HOLD_LEVEL else Verdict.QUEUE_FULL


def eta_s(position: int, ages_s: Sequence[float], service_s: float) -> float:
    """When the waiter at a position (0 is the head) gets in.

    ages_s: for how long each place has been held (0 for one that is free).  Each is given back when service_s have
    passed, a quarter of that later when they have passed already, and then again after each service_s.
    """
    free_at = sorted(max(service_s - age, service_s / 4) for age in ages_s)
    # all of them come free within one service_s, so that they do in the same order again and again
    rounds, place = divmod(position, len(free_at))
    return free_at[place] + rounds * service_s


def retry_after_s(seconds: float) -> int:
    """Whole seconds for the header, 1 to 60 [X08]."""
    return max(LEAST_RETRY_S, min(MOST_RETRY_S, math.ceil(seconds)))


class Promises:
    """When those who were turned away were told to come back, so that they do not all come at once."""

    def __init__(self) -> None:
        self._due: list[float] = []

    def next_due_s(self, now: float, eta: Callable[[int], float]) -> float:
        """Seconds until there should be room for one more.  eta(k): until the k-th place from now is free, k from 0;
        the first of them are promised away."""
        self._due = [due for due in self._due if due > now]
        seconds = LATER * eta(len(self._due))
        if seconds >= MOST_RETRY_S:
            # nobody is told to come later than that: to remember more of them would change no answer, and who is
            # sent away holds the scheduler's mutex
            return float(MOST_RETRY_S)
        self._due.append(now + seconds)
        return seconds


# ---- effects --------------------------------------------------------------------------------------------------------


class Ticket:
    """Someone's wait for a place, or the place."""

    __slots__ = ("arrived_s", "entered_s", "gone", "inside")

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s, self.entered_s = arrived_s, arrived_s
        self.inside = self.gone = False


class Overflow:
    """Places and the queue for them, under the caller's mutex."""

    def __init__(
        self, mu: threading.Lock, clock: Clock, places: int, depth: int, wait_s: float, grace_s: float
    ) -> None:
        """depth: waiters; wait_s: the longest wait; grace_s: how long waiters stay once the level is CRITICAL [K03]."""
        self._mu, self._clock = mu, clock
        #: cv_idle, on mu: a place was handed over, the level or the number of places changed, or the end has come
        self._cv = threading.Condition(mu)
        self.depth, self.wait_s, self.grace_s = depth, wait_s, grace_s
        # ---- guarded by mu
        self.places = self.ceiling = places
        self.within: list[Ticket] = []
        self.queue: list[Ticket] = []
        self.level, self._held_since = Level.OK, math.inf
        self.closing = False
        self.service_s = FIRST_SERVICE_S
        self.refused: Counter[str] = Counter()
        self._promises = Promises()

    @property
    def inside(self) -> int:
        """Places that are taken."""
        return len(self.within)

    def arrive(self) -> Ticket:
        """A place at once or a ticket in the queue.  Raises Busy or Unavailable at once when there is neither."""
        with self._mu:
            gate = Gate(self.ceiling - self.inside, len(self.queue), self.depth, self.level, self.closing)
            verdict, ticket = arrive(gate), Ticket(self._clock.monotonic())
            if verdict is Verdict.ENTER:
                self._let_in(ticket)
            elif verdict is Verdict.WAIT:
                self.queue.append(ticket)
            else:
                raise self._refusal(verdict.value, self._come_back_s())
            return ticket

    def poll(self, ticket: Ticket) -> bool:
        """Whether the ticket has its place; never waits.  Raises Busy (queue_timeout) or Unavailable, and then the
        ticket is gone."""
        with self._mu:
            return self._poll_locked(ticket)

    def wait(
        self,
        ticket: Ticket,
        cancelled: Callable[[], bool] = never,
        on_wait: Callable[[int, float], None] | None = None,
    ) -> None:
        """Block until the ticket has its place.  on_wait(position from 1, seconds left) is called at every look.

        Raises as `poll` does, Cancelled when `cancelled` says so; the ticket is gone after any of them.
        """
        try:
            while not self.poll(ticket):
                if cancelled():
                    raise Cancelled("cancelled while waiting for a slot")
                position, left_s = self.outlook(ticket)
                if not position:  # let in since
                    continue
                if on_wait is not None:
                    on_wait(position, left_s)
                with self._mu:
                    if not self._poll_locked(ticket):
                        self._cv.wait(self._pause_s(ticket))
        except BaseException:
            self.leave(ticket)
            raise

    def outlook(self, ticket: Ticket) -> tuple[int, float]:
        """(position from 1, seconds until it should get in); (0, 0) for one that is inside."""
        with self._mu:
            if ticket not in self.queue:
                return 0, 0.0
            position = self.queue.index(ticket)
            return position + 1, self._eta_s(position)

    def leave(self, ticket: Ticket) -> None:
        """Give the place, or the place in the queue, back; idempotent."""
        with self._mu:
            self._leave_locked(ticket)

    def set_level(self, level: Level) -> None:
        """The live memory level: pushed before every arrival and whenever the watcher sees it change [M100, K02]."""
        with self._mu:
            if level == self.level:
                return
            if level >= HOLD_LEVEL > self.level:
                self._held_since = self._clock.monotonic()
            self.level = level
            self._admit_locked()

    def set_ceiling(self, ceiling: int) -> None:
        """How many may be inside: the ladder's rung 2.  Those who are stay; the rest come as places get free [X17]."""
        with self._mu:
            self.ceiling = max(1, min(ceiling, self.places))
            self._admit_locked()

    def close(self) -> None:
        """Nobody comes in any more; waiters are told so [M098]."""
        with self._mu:
            self.closing = True
            self._cv.notify_all()

    def wait_locked_s(self) -> float:
        """How long someone who comes now would wait.  The caller holds mu."""
        if not self.queue and self.inside < self.ceiling and self.level < HOLD_LEVEL:
            return 0.0
        return self._eta_s(len(self.queue))

    # ---- with mu held -----------------------------------------------------------------------------------------------

    def _poll_locked(self, ticket: Ticket) -> bool:
        if ticket.inside:
            return True
        assert not ticket.gone, "the ticket was given back"
        refusal = self._overdue(ticket)
        if refusal is not None:
            self._leave_locked(ticket)
            raise refusal
        return False

    def _overdue(self, ticket: Ticket) -> PantheonError | None:
        now = self._clock.monotonic()
        left_s = self._eta_s(self.queue.index(ticket))
        if self.closing:
            return self._refusal("shutting_down", left_s)
        if self.level >= HOLD_LEVEL and now - max(ticket.arrived_s, self._held_since) >= self.grace_s:
            return self._refusal("memory_critical", left_s)
        if now - ticket.arrived_s >= self.wait_s:
            return self._refusal("queue_timeout", left_s)
        return None

    def _refusal(self, code: str, seconds: float) -> PantheonError:
        self.refused[code] += 1
        facts: dict[str, Any] = {
            "retry_after": retry_after_s(seconds),
            "queue_depth": len(self.queue),
            "slots": self.ceiling,
        }
        if code == "queue_full":
            return Busy(f"all {self.ceiling} slots are busy and {len(self.queue)} requests wait", code=code, **facts)
        if code == "queue_timeout":
            return Busy(f"no slot became free within {self.wait_s:g} s", code=code, **facts)
        if code == "memory_critical":
            return Unavailable("memory is critical: no new generation is started", code=code, **facts)
        return Unavailable("the server is shutting down", code=code, **facts)

    def _come_back_s(self) -> float:
        # the queue has room for one more whenever its head gets in
        return self._promises.next_due_s(self._clock.monotonic(), self._eta_s)

    def _eta_s(self, position: int) -> float:
        now = self._clock.monotonic()
        ages = [now - ticket.entered_s for ticket in self.within]
        # those who are inside for longer than the last ones were say that things have become slower
        service_s = max(self.service_s, sum(ages) / max(1, len(ages)))
        ages += [0.0] * (self.ceiling - len(ages))
        return eta_s(position, sorted(ages)[-self.ceiling :], service_s)

    def _pause_s(self, ticket: Ticket) -> float:
        left_s = self.wait_s - (self._clock.monotonic() - ticket.arrived_s)
        return max(0.001, min(LOOK_S, left_s))

    def _let_in(self, ticket: Ticket) -> None:
        ticket.inside, ticket.entered_s = True, self._clock.monotonic()
        self.within.append(ticket)

    def _admit_locked(self) -> None:
        """Hand free places to the head of the queue."""
        while self.queue and not self.closing and self.level < HOLD_LEVEL and self.inside < self.ceiling:
            self._let_in(self.queue.pop(0))
        self._cv.notify_all()

    def _leave_locked(self, ticket: Ticket) -> None:
        if ticket.gone:
            return
        ticket.gone = True
        if ticket.inside:
            ticket.inside = False
            self.within.remove(ticket)
            took_s = self._clock.monotonic() - ticket.entered_s
            self.service_s += 0.2 * (took_s - self.service_s)
            self._admit_locked()
        else:
            self.queue.remove(ticket)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other.  The caller holds mu."""
        assert 0 <= self.inside <= self.places and 1 <= self.ceiling <= self.places
        assert len(self.queue) <= self.depth, "more waiters than the queue holds"
        assert not any(ticket.inside or ticket.gone for ticket in self.queue), "a waiter that does not wait"
        assert all(ticket.inside and not ticket.gone for ticket in self.within), "somebody inside who is not"
        arrivals = [ticket.arrived_s for ticket in self.queue]
        assert arrivals == sorted(arrivals), "the queue is out of order"
        stuck = self.queue and self.inside < self.ceiling and self.level < HOLD_LEVEL and not self.closing
        assert not stuck, "a place is free and somebody waits"
