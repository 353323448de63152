"""`Scheduler`: many users on one model.  The facade over the parts of this package.

    place = scheduler.enter()                   at once: inside, queued, or Busy / Unavailable
    with place:
        place.wait(cancelled, on_wait)          until a slot is free
        for token in place.begin(ids, params, max_tokens=100): ...

A place may begin one answer after the other.  Must not know HTTP, text or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from pantheon.accel.executor import RunnerState
from pantheon.engine.generate import check_fits, never
from pantheon.engine.prefix_cache import Marks, PrefixCache
from pantheon.engine.sampler import Constraint, SamplingParams
from pantheon.errors import BadRequest
from pantheon.mem.mem_state import Level
from pantheon.sched.driver import Driver
from pantheon.sched.handle import Handle
from pantheon.sched.overflow import Ticket
from pantheon.sched.run import Run
from pantheon.sched.shared import SchedConfig, Shared
from pantheon.sched.slot import Phase
from pantheon.sched.views import view
from pantheon.seams import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from pantheon.engine.model import Model


class Load(NamedTuple):
    """How busy a scheduler is [M104].  wait_s: how long someone who comes now would wait for a place; service_s: how
    long a place is usually held."""

    active: int
    queued: int
    slots: int
    wait_s: float = 0.0
    service_s: float = 0.0


class Place:
    """One user's right to a slot, or its wait for one.  Belongs to one thread."""

    def __init__(self, shared: Shared, ticket: Ticket) -> None:
        self._shared, self._ticket = shared, ticket
        self._handle: Handle | None = None

    @property
    def inside(self) -> bool:
        """Whether it may begin; never waits.  Raises Busy or Unavailable when the wait is over in vain."""
        return self._shared.overflow.poll(self._ticket)

    def outlook(self) -> tuple[int, float]:
        """(position in the queue from 1, seconds until it should get in); (0, 0) inside."""
        return self._shared.overflow.outlook(self._ticket)

    def wait(self, cancelled: Callable[[], bool] = never, on_wait: Callable[[int, float], None] | None = None) -> None:
        """Until there is a slot.  on_wait(position, seconds left) is called at least ten times a second.

        Raises Busy (queue_timeout), Unavailable (memory_critical, shutting_down) or Cancelled.
        """
        self._shared.overflow.wait(self._ticket, cancelled, on_wait)

    def begin(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        session: str | None = None,
        marks: Marks = (),
        constraint: Constraint | None = None,
        ignore_eog: bool = False,
        lookahead: int | None = None,
        cancelled: Callable[[], bool] = never,
        on_prefill: Callable[[int, int], None] | None = None,
        admit: Callable[[int], None] | None = None,
        keep: bool = True,
    ) -> Handle:
        """Begin an answer; the one before it is over.  Arguments as for `engine.generate.generate`.

        session, marks: whose conversation it is, for the prefix cache.  lookahead: see Run; 2 for an answer that its
        owner may end by its text, so that no more than 2 tokens are made in vain [X06].  admit(reused tokens): asked
        before the first forward, in the turn; what it raises comes out here, and what was warm stays [M201].
        keep False: nothing may go on from what this answer leaves [M131].
        """
        assert self._ticket.inside, "a place that is still waiting"
        self.end()
        shared = self._shared
        if not ids:
            raise BadRequest("the prompt is empty: this model adds no begin token", param="prompt")
        check_fits(len(ids), shared.state.n_ctx)
        limit = min(max_tokens, shared.state.n_ctx - len(ids))
        if limit < 1:
            raise BadRequest("max_tokens must be at least 1", param="max_tokens")
        run = Run(
            shared.model, shared.mu, ids, params, limit=limit, constraint=constraint, ignore_eog=ignore_eog,
            lookahead=1 if shared.config.lockstep else lookahead,
        )  # fmt: skip
        with shared.turnstile.turn():
            slot = shared.seat(run, session, marks, admit)
        self._handle = Handle(shared, run, slot, cancelled, on_prefill, keep)
        return self._handle

    def end(self, *, keep: bool = True) -> None:
        """End the answer that was begun last; the place stays."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close(keep=keep)

    def leave(self, *, keep: bool = True) -> None:
        """Give the slot and the place back; idempotent."""
        try:
            self.end(keep=keep)
        finally:
            self._shared.overflow.leave(self._ticket)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()


class Scheduler:
    """Up to `config.users` answers of one model at a time.  Safe to use from any thread."""

    def __init__(
        self,
        model: Model,
        state: RunnerState,
        cache: PrefixCache | None = None,
        config: SchedConfig | None = None,
        clock: Clock = SYSTEM_CLOCK,
        *,
        start: bool = True,
    ) -> None:
        """state: at least as many slots as users; the rest keep conversations warm.  cache: over that state, or None
        for no reuse [M132].  start False: the driver's steps are the caller's [tests].  Raises ValueError."""
        self._shared = Shared(model, state, cache, config or SchedConfig(), clock)
        self.driver = Driver(self._shared)
        if start:
            self.driver.start()

    @property
    def config(self) -> SchedConfig:
        """As it was made."""
        return self._shared.config

    def enter(self, level: Level | None = None) -> Place:
        """A place at once, or one in the queue.  level: the live memory level, seen first [M100].

        Raises Busy (queue_full) or Unavailable (memory_critical, shutting_down), each with `retry_after`.
        """
        if level is not None:
            self.notify_pressure(level)
        return Place(self._shared, self._shared.overflow.arrive())

    def submit(
        self, ids: Sequence[int], params: SamplingParams, *, cancelled: Callable[[], bool] = never,
        on_wait: Callable[[int, float], None] | None = None, **options: Any,
    ) -> tuple[Place, Handle]:  # fmt: skip
        """enter, wait and begin in one; the caller leaves the place.  options: as for `Place.begin`."""
        place = self.enter()
        try:
            place.wait(cancelled, on_wait)
            return place, place.begin(ids, params, cancelled=cancelled, **options)
        except BaseException:
            place.leave()
            raise

    def notify_pressure(self, level: Level) -> None:
        """The memory level: before every `enter` and whenever the watcher sees it change [M100, K02]."""
        self._shared.overflow.set_level(level)

    def set_ceiling(self, slots: int) -> None:
        """The ladder's rung 2: how many users may be inside from now on; nobody is thrown out [M208, M220, X17]."""
        self._shared.overflow.set_ceiling(slots)

    def turn(self) -> AbstractContextManager[object]:
        """The right to run one forward, for a caller that reads into a state of its own; waits its time."""
        return self._shared.turnstile.turn()

    def rehouse(self, state: RunnerState, cache: PrefixCache | None) -> bool:
        """Go on in another state of as many slots, with an empty cache over it; False while a slot is in use."""
        with self._shared.turnstile.turn():
            return self._shared.rehouse(state, cache)

    @property
    def resting(self) -> bool:
        """Whether no slot is in use just now."""
        with self._shared.mu:
            return all(slot.phase is Phase.IDLE for slot in self._shared.slots)

    def load(self) -> Load:
        """Users inside, users waiting, users at most now, and the times that follow from them."""
        with self._shared.mu:
            gate = self._shared.overflow
            return Load(gate.inside, len(gate.queue), gate.ceiling, gate.wait_locked_s(), gate.service_s)

    def view(self) -> dict[str, Any]:
        """What /admin/sched and /slots show."""
        return view(self._shared)

    def close(self) -> None:
        """Tell waiters and owners that it is over and end the driver; idempotent.  Owners still give their slots
        back afterwards."""
        shared = self._shared
        shared.overflow.close()
        with shared.mu:
            shared.closing = True
            shared.cv_work.notify_all()
            for slot in shared.slots:
                if slot.run is not None:
                    slot.run.cv.notify()
        self.driver.join()

    def check_integrity(self) -> None:
        """Raise AssertionError when anything contradicts anything.  Waits its turn: within one, a token may be sampled
        and not handed over yet."""
        shared = self._shared
        with shared.turnstile.turn():
            with shared.mu:
                self._check_locked()
            if shared.cache is not None:
                shared.cache.check_integrity()

    def _check_locked(self) -> None:
        shared = self._shared
        shared.turnstile.check_integrity()
        shared.overflow.check_integrity()
        taken = [slot for slot in shared.slots if slot.phase is not Phase.IDLE]
        for slot in shared.slots:
            assert (slot.run is None) == (slot.phase is Phase.IDLE), f"slot {slot.index}: {slot.phase} {slot.run}"
            if slot.run is not None:
                assert slot.run.warm.slot == slot.index
                slot.run.check_integrity(slot.phase is not Phase.PREFILL)
        assert len(taken) <= shared.overflow.inside, "a slot in use without a place"
        reading = {slot.index for slot in taken if slot.phase is Phase.PREFILL} if shared.config.mixed else set()
        assert {slot.index for slot in shared.prompts} == reading, "prompts that nobody reads"
        assert len(shared.prompts) == len(reading), "a prompt that is read twice"
