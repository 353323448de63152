"""The owner's side of a run: its prompt is read, its tokens are pulled, its slot is given back.

A handle belongs to one thread; only `cancel` may be called from others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from pantheon.engine.generate import Token, never
from pantheon.errors import Cancelled
from pantheon.sched.compaction import compose
from pantheon.sched.overflow import LOOK_S
from pantheon.sched.run import Run
from pantheon.sched.shared import Shared, shutting_down
from pantheon.sched.slot import Actor, Phase, Slot


class Handle:
    """An answer in the making.  Iterate over its tokens; leaving the iteration early gives the slot back as well.

    Raises Cancelled when `cancelled` says so (asked before each chunk and each token) or after `cancel`, Unavailable at
    a shutdown, and whatever its forwards or its sampler raised.
    """

    def __init__(
        self,
        shared: Shared,
        run: Run,
        slot: Slot,
        cancelled: Callable[[], bool] = never,
        on_prefill: Callable[[int, int], None] | None = None,
        keep: bool = True,
    ) -> None:
        self._keep = keep
        self._shared, self._run, self._slot = shared, run, slot
        self._cancelled, self._on_prefill = cancelled, on_prefill
        self._shown = -1
        self._open = True

    @property
    def reused(self) -> int:
        """Tokens of the prompt that were not read, because they were there."""
        return self._run.warm.reused

    @property
    def held(self) -> list[int]:
        """The tokens that lie in the slot."""
        return self._run.warm.held

    @property
    def wasted(self) -> int:
        """Tokens that were made and not pulled [X06]."""
        return len(self._run.ring)

    def cancel(self) -> None:
        """Stop it, from any thread: it is in no step that begins from now on [X23]."""
        with self._shared.mu:
            self._run.cancelled = True
            self._run.cv.notify()

    def __iter__(self) -> Generator[Token, None, None]:
        try:
            while True:
                token = self._next()
                yield token
                if token.is_last:
                    return
        finally:
            self.close()

    def _next(self) -> Token:
        """The next token, however long it takes."""
        while True:
            if self._cancelled():
                raise self._note_cancelled()
            token = self.poll()
            if token is not None:
                return token
            if self.wants_chunk:
                self.read_chunk()
            else:
                with self._shared.mu:
                    if self._waits_locked():
                        self._shared.wait_locked(self._run.cv, LOOK_S)

    def poll(self) -> Token | None:
        """The next token if there is one; never waits."""
        self._tell_progress()
        run, shared = self._run, self._shared
        with shared.mu:
            cancelled = run.cancelled
            # what was made before a fault is still the client's
            token = None if cancelled else run.ring.pop()
            if token is not None and run.lookahead is not None:
                shared.cv_work.notify()
            fault, closing = run.fault, shared.closing
        if cancelled:
            raise self._note_cancelled()
        if token is not None:
            return token
        if fault is not None:
            raise fault
        if closing:
            raise shutting_down()
        return None

    def _waits_locked(self) -> bool:
        run = self._run
        nothing = not len(run.ring) and run.fault is None and not run.cancelled and not self._shared.closing
        return nothing and min(len(run.warm.held), len(run.ids)) == self._shown

    @property
    def wants_chunk(self) -> bool:
        """The prompt is read by its owner, and not to its end yet."""
        return not self._shared.config.mixed and self._slot.phase is Phase.PREFILL

    def read_chunk(self) -> None:
        """One chunk of the prompt in a turn of its own; the last one samples and binds [M113, M115]."""
        shared = self._shared
        with shared.turnstile.turn():
            shared.catch_up(self._slot)
            step = compose((), (self._run.reading,), shared.config.chunk, shared.max_columns)
            assert step is not None, "the prompt has been read"
            shared.carry_out(step, Actor.OWNER)
        self._tell_progress()

    def _tell_progress(self) -> None:
        total = len(self._run.ids)
        done = min(len(self._run.warm.held), total)
        if done > self._shown:
            self._shown = done
            if self._on_prefill is not None:
                self._on_prefill(done, total)

    def _note_cancelled(self) -> Cancelled:
        with self._shared.mu:
            self._shared.counters.cancelled += 1
        reading = self._slot.phase is Phase.PREFILL
        return Cancelled(f"cancelled while {'reading the prompt' if reading else 'decoding'}")

    def close(self, *, keep: bool = True) -> None:
        """Give the slot back; idempotent.  keep: a later prompt may go on from what lies there [M076]."""
        if not self._open:
            return
        self._open = False
        with self._shared.mu:
            self._run.cancelled = True
        with self._shared.turnstile.turn():
            self._shared.unseat(self._slot, keep and self._keep)
