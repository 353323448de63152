"""What owners and the driver of one scheduler share: slots, state, counters, and the one way to run a forward.

Buffers are made once, as wide as they can ever get: nothing that a forward may read is resized [M216, M218, M221].
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pantheon import seams
from pantheon.accel.executor import Columns, Row, RunnerState
from pantheon.engine.generate import PREFILL_CHUNK, Token, checkpoints
from pantheon.engine.prefix_cache import Marks, PrefixCache, Warm
from pantheon.errors import Unavailable
from pantheon.sched.compaction import Step
from pantheon.sched.overflow import Overflow
from pantheon.sched.run import Run
from pantheon.sched.slot import Actor, Phase, Slot
from pantheon.sched.turnstile import Turnstile
from pantheon.seams import Clock

if TYPE_CHECKING:
    from pantheon.engine.model import Model


@dataclass(frozen=True)
class SchedConfig:
    """How a scheduler works.

    users: how many at a time.  mixed: prompts ride in the driver's forwards, else owners read theirs in turns of their
    own.  chunk: prompt tokens of one turn.  lockstep: a slot is stepped when its owner has taken what there is
    [M112].  stats: a log line for each step [M103].
    """

    users: int = 8
    queue_depth: int = 32
    wait_s: float = 30.0
    grace_s: float = 2.0
    chunk: int = PREFILL_CHUNK
    mixed: bool = True
    lockstep: bool = False
    stats: bool = False


@dataclass
class Counters:
    """Totals since the start.  Guarded by mu."""

    steps: int = 0
    mixed_steps: int = 0
    busy_slots: int = 0
    decode_columns: int = 0
    prompt_columns: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    wasted_tokens: int = 0
    runs: int = 0
    cancelled: int = 0
    faults: int = 0
    forward_s: float = field(default=0.0)


class Shared:
    """One scheduler's common ground.  See the package's docstring for who may touch what."""

    def __init__(
        self, model: Model, state: RunnerState, cache: PrefixCache | None, config: SchedConfig, clock: Clock
    ) -> None:
        if not 1 <= config.users <= state.n_slots:
            raise ValueError(f"{config.users} users do not fit a state of {state.n_slots} slots")
        self.model, self.state, self.cache = model, state, cache
        self.config, self.clock = config, clock
        self.max_columns = model.runner.max_columns
        #: guards slots' phases, rings and flags of runs, `prompts`, counters, the turnstile and the overflow queue
        self.mu = threading.Lock()
        self.turnstile = Turnstile(self.mu)
        self.overflow = Overflow(
            self.mu, clock, config.users, config.queue_depth, config.wait_s, config.grace_s
        )  # fmt: skip
        #: on mu: the driver may have something to do
        self.cv_work = threading.Condition(self.mu)
        self.slots = [Slot(i) for i in range(state.n_slots)]
        #: slots whose prompts ride in the driver's forwards, in the order in which they are served
        self.prompts: list[Slot] = []
        self.counters = Counters()
        self.closing = False
        # touched by the holder of the turn only
        self._rows = np.empty((state.n_slots, model.n_vocab), np.float32)
        self._in_flight = 0

    # ---- for the holder of the turn ---------------------------------------------------------------------------------

    def forward(self, columns: Columns) -> NDArray[np.float32] | Sequence[Row]:
        """A row of logits for each wanted column, valid until the next forward.  One at a time [M090, M217, M222]."""
        assert self.turnstile.mine, "a forward without the turn"
        assert self._in_flight == 0, "two forwards of one model at once"
        self._in_flight += 1
        try:
            return self.model.rows(self.state, columns, self._rows[: len(columns.wanted)])
        finally:
            self._in_flight -= 1

    def seat(self, run: Run, session: str | None, marks: Marks, admit: Callable[[int], None] | None) -> Slot:
        """A slot for a run, what is warm in place there: IDLE -> PREFILL, unless admit(reused) raises."""
        assert self.turnstile.mine
        with self.mu:
            if self.closing:
                raise shutting_down()
        run.warm = self._warm(run.ids, session, marks)
        try:
            if admit is not None:
                admit(run.warm.reused)
        except BaseException:
            run.warm.end(keep=run.warm.reused > 0)
            raise
        try:
            seams.hit("bind")
            if run.warm.reused:
                self.state.truncate(run.warm.slot, run.warm.reused)
            else:
                self.state.reset(run.warm.slot)
        except BaseException:
            run.warm.end(keep=False)
            raise
        if not getattr(self.state, "can_truncate", True):
            run.stops = checkpoints(run.ids, self.model.tokenizer.eog_ids)
        slot = self.slots[run.warm.slot]
        with self.mu:
            slot.move(Phase.PREFILL, Actor.OWNER)
            slot.run = run
            self.counters.runs += 1
            self.counters.cached_tokens += run.warm.reused
            if self.config.mixed:
                self.prompts.append(slot)
                self.cv_work.notify()
        return slot

    def _warm(self, ids: Sequence[int], session: str | None, marks: Marks) -> Warm:
        if self.cache is not None:
            return self.cache.begin(ids, session, marks)
        free = next(slot.index for slot in self.slots if slot.phase is Phase.IDLE)
        return Warm(None, free, 0, ids)

    def unseat(self, slot: Slot, keep: bool) -> None:
        """Any phase -> IDLE, by the owner; keep: what lies there may be reused."""
        assert self.turnstile.mine
        run = slot.run
        assert run is not None
        run.warm.end(keep=keep and run.fault is None)
        with self.mu:
            if slot in self.prompts:
                self.prompts.remove(slot)
            self.counters.wasted_tokens += len(run.ring)
            slot.move(Phase.IDLE, Actor.OWNER)
            slot.run = None

    def catch_up(self, slot: Slot) -> None:
        """Before a chunk of a prompt: take what another one that begins alike has read meanwhile [X12]."""
        assert self.turnstile.mine
        if self.cache is not None and slot.run is not None:
            found = self.cache.look_again(slot.run.warm, slot.run.ids)
            if found:
                with self.mu:
                    self.counters.cached_tokens += found

    def carry_out(self, step: Step, who: Actor) -> None:
        """Run a step's forward, sample every row of it in order, hand the tokens over [M108].

        A forward that fails ends the runs that ride in it, a sampler that fails ends its own; nobody else notices.
        """
        runs = {index: self._run(index) for index in (*step.decodes, *(part.slot for part in step.parts))}
        try:
            began = self.clock.monotonic()
            rows = self.forward(step.columns)
            took = self.clock.monotonic() - began
        except Exception as fault:
            with self.mu:
                for run in runs.values():
                    self._fail_locked(run, fault)
            return
        for index in step.decodes:
            runs[index].warm.held.append(runs[index].token)
        for part in step.parts:
            runs[part.slot].warm.held += runs[part.slot].ids[part.first : part.end]
            if part.end in runs[part.slot].stops:
                self.state.checkpoint(part.slot, part.end)  # type: ignore[attr-defined]
            if self.cache is not None:
                self.cache.note_progress(part.slot, part.end)
        landed = [(index, _taken(runs[index], rows[i])) for i, index in enumerate(step.landing)]
        with self.mu:
            for index, token in landed:
                self._hand_over_locked(self.slots[index], token, who)
            for part in step.parts:
                runs[part.slot].cv.notify()
            self._count_locked(step, took, len(landed))

    def rehouse(self, state: RunnerState, cache: PrefixCache | None) -> bool:
        """Go on in another state of as many slots, if no slot is in use [M216]."""
        assert self.turnstile.mine and state.n_slots == len(self.slots)
        with self.mu:
            if any(slot.phase is not Phase.IDLE for slot in self.slots):
                return False
            self.state, self.cache = state, cache
            return True

    def fail(self, slot: Slot, fault: BaseException) -> None:
        """End the run of one slot."""
        with self.mu:
            if slot.run is not None:
                self._fail_locked(slot.run, fault)

    def fail_all(self, fault: BaseException) -> None:
        """The driver itself has failed: nobody waits for tokens that will not come."""
        with self.mu:
            for slot in self.slots:
                if slot.run is not None:
                    self._fail_locked(slot.run, fault)

    def _run(self, index: int) -> Run:
        run = self.slots[index].run
        assert run is not None, f"slot {index} is in a step and empty"
        return run

    # ---- with mu held -----------------------------------------------------------------------------------------------

    def _hand_over_locked(self, slot: Slot, token: Token | BaseException, who: Actor) -> None:
        run = slot.run
        assert run is not None
        if isinstance(token, BaseException):
            self._fail_locked(run, token)
            return
        run.ring.push(token)
        run.finished = token.is_last
        if slot.phase is Phase.PREFILL:
            slot.move(Phase.BOUND, who)
            if slot in self.prompts:
                self.prompts.remove(slot)
            self.cv_work.notify()
        run.cv.notify()

    def _fail_locked(self, run: Run, fault: BaseException) -> None:
        run.fault = fault
        self.counters.faults += 1
        run.cv.notify()

    def _count_locked(self, step: Step, took_s: float, tokens: int) -> None:
        count, prompt = self.counters, sum(part.end - part.first for part in step.parts)
        count.steps += 1
        count.mixed_steps += bool(step.decodes and step.parts)
        count.busy_slots += len(step.decodes) + len(step.parts)
        count.decode_columns += len(step.decodes)
        count.prompt_columns += prompt
        count.tokens += tokens
        count.forward_s += took_s

    def wait_locked(self, condition: threading.Condition, seconds: float) -> None:
        """Wait on a condition of mu.  The holder of the turn may not [M091]."""
        assert not self.turnstile.mine, "the holder of the turn waits for nothing"
        condition.wait(seconds)


def _taken(run: Run, row: NDArray[np.float32] | Row) -> Token | BaseException:
    """The next token of a run, or what its sampler raised."""
    try:
        return run.take(row)
    except Exception as fault:
        return fault


def shutting_down() -> Unavailable:
    """What is said to whoever still runs when the end comes."""
    return Unavailable("the server is shutting down", code="shutting_down", retry_after=5)
