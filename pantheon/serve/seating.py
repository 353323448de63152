"""Who may generate on an entry now: the holder of its gen_lock, or whoever has a place in its scheduler.

`seat` finds the entry and asks for a place, at once; both kinds of place have the same face (`wait`, `begin`, `end`,
`leave`).  Must not know HTTP, prompts or what is generated.  Spec: M049, M072, M092, X08, X10, B24.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from pantheon.engine.generate import Token, generate, never
from pantheon.engine.prefix_cache import Marks, Warm
from pantheon.engine.sampler import Constraint, SamplingParams
from pantheon.errors import Busy, Cancelled, Unavailable
from pantheon.mem.mem_state import Level
from pantheon.sched.handle import Handle
from pantheon.sched.scheduler import Place
from pantheon.seams import Clock
from pantheon.serve.entry import Entry
from pantheon.serve.registry import BUSY_MESSAGE, Registry, retry_s

#: how often and how long a try for the lock of a generation that nobody reads any more lasts
_TRIES, _TRY_S = 40, 0.05


class SoloRun:
    """An answer in the making on an entry that makes one at a time: iterate over its tokens."""

    def __init__(self, warm: Warm, tokens: Generator[Token, None, None]) -> None:
        self._warm, self._tokens = warm, tokens
        self.reused = warm.reused

    @property
    def held(self) -> list[int]:
        """The tokens that lie in the slot."""
        return self._warm.held

    def cancel(self) -> None:
        """Nothing runs between two tokens."""

    def __iter__(self) -> Generator[Token, None, None]:
        return self._tokens


class SoloPlace:
    """The one right to generate on an entry without a scheduler: its gen_lock, held.  Methods as of `sched.Place`."""

    def __init__(self, entry: Entry, clock: Clock) -> None:
        self._entry, self._clock = entry, clock
        self._warm: Warm | None = None
        self._held = True

    def wait(self, cancelled: Callable[[], bool] = never, on_wait: Callable[[int, float], None] | None = None) -> None:
        """Whoever has it need not wait for it."""

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
    ) -> SoloRun:
        """See `Place.begin`.  No token runs before it is asked for, so that nothing is looked ahead."""
        self.end()
        entry = self._entry
        if entry.model is None or entry.state is None:
            raise Unavailable(f"the model {entry.name!r} was unloaded", code="model_unloading", retry_after=5)
        warm = entry.seat(ids, session, marks)
        if admit is not None:
            try:
                admit(warm.reused)
            except BaseException:
                warm.end(keep=warm.reused > 0)
                raise
        self._warm, self._keep = warm, keep
        tokens = generate(
            entry.model, entry.state, ids, params, max_tokens=max_tokens, slot=warm.slot, reused=warm.reused,
            held=warm.held, cancelled=cancelled, on_prefill=on_prefill, constraint=constraint, ignore_eog=ignore_eog,
        )  # fmt: skip
        return SoloRun(warm, tokens)

    def end(self, *, keep: bool = True) -> None:
        """The answer that was begun last is over; keep: a later prompt may go on from what it left."""
        warm, self._warm = self._warm, None
        if warm is not None:
            warm.end(keep=keep and self._keep)

    def leave(self, *, keep: bool = True) -> None:
        """Let the next one in; idempotent."""
        if not self._held:
            return
        self._held = False
        self.end(keep=keep)
        _leave(self._entry, self._clock)


class Seat(NamedTuple):
    """An entry that is in use, and the place on it: had, or waited for."""

    entry: Entry
    place: Place | SoloPlace


Run = Handle | SoloRun


@contextmanager
def seat(
    registry: Registry,
    name: str | None,
    *,
    strict: bool = False,
    session: str | None = None,
    prefix: Marks = (),
    left: Callable[[], bool] | None = None,
    level: Callable[[Entry], Level] | None = None,
) -> Iterator[Seat]:
    """`acquire` and a place in one; both are given back at the end.

    With a scheduler the place is had at once or stands in its queue: `place.wait`.  Without one, a warm replica that is
    busy is waited for as long as reading the prompt elsewhere would take; then any other one will do.

    left: whether the client has hung up.  level: the live memory level of an entry, pushed before each arrival [M100].

    Raises as `acquire` does; Busy (queue_full, server_busy) or Unavailable (memory_critical, shutting_down) when there
    is no place; Cancelled when the client has left meanwhile.
    """
    found = _sit(registry, name, strict, session, prefix, left, level)
    try:
        yield found
    finally:
        try:
            found.place.leave()
        finally:
            registry.release(found.entry)


def _sit(
    registry: Registry,
    name: str | None,
    strict: bool,
    session: str | None,
    prefix: Marks,
    left: Callable[[], bool] | None,
    level: Callable[[Entry], Level] | None,
) -> Seat:
    fault: Busy | None = None
    for loyal in (True, False):
        entry, patience_s = registry.route(name, strict, session if loyal else None, prefix if loyal else ())
        try:
            return Seat(entry, _place(registry, entry, left, patience_s, level))
        except Busy as busy:
            registry.release(entry)
            fault = busy
        except BaseException:
            registry.release(entry)
            raise
        if not patience_s:
            break
    assert fault is not None
    raise fault


def _place(
    registry: Registry,
    entry: Entry,
    left: Callable[[], bool] | None,
    patience_s: float,
    level: Callable[[Entry], Level] | None,
) -> Place | SoloPlace:
    sched = entry.sched
    if sched is not None:
        return sched.enter(level(entry) if level is not None else None)
    if not _enter(entry, registry.clock, left, patience_s):
        raise _busy(entry, registry.clock)
    return SoloPlace(entry, registry.clock)


# ---- the lock of an entry that has no scheduler -------------------------------------------------------------------


@contextmanager
def generation(registry: Registry, entry: Entry, left: Callable[[], bool] | None = None) -> Iterator[None]:
    """Hold the entry's gen_lock.  Raises Busy at once when another request holds it [M049, M072], unless that
    one's client has hung up: it ends within a step, so it is waited for [B24].

    `left`: whether the client of this request has hung up; asked from the threads of other requests.
    """
    if not _enter(entry, registry.clock, left, 0.0):
        raise _busy(entry, registry.clock)
    try:
        yield
    finally:
        _leave(entry, registry.clock)


def _busy(entry: Entry, clock: Clock) -> Busy:
    """When to come back follows from the answers before [X08]."""
    left_s = entry.service_s - (clock.monotonic() - entry.began_at)
    return Busy(BUSY_MESSAGE, retry_after=retry_s(left_s), queue_depth=0, slots=1)


def _enter(entry: Entry, clock: Clock, left: Callable[[], bool] | None, patience_s: float) -> bool:
    if not _take(entry) and not _await(entry, clock, left, patience_s):
        return False
    entry.began_at, entry.left = clock.monotonic(), left
    return True


def _leave(entry: Entry, clock: Clock) -> None:
    entry.left = None
    entry.served(clock.monotonic() - entry.began_at)
    entry.gen_lock.release()


def _await(entry: Entry, clock: Clock, left: Callable[[], bool] | None, patience_s: float) -> bool:
    """Wait for the gen_lock of a warm replica; looks up now and then whether that still makes sense."""
    until = clock.monotonic() + patience_s
    while (rest := until - clock.monotonic()) > 0 and not entry.evicting.is_set():
        if entry.gen_lock.acquire(timeout=min(rest, _TRY_S)):
            return True
        if left is not None and left():
            raise Cancelled("the client left while its model was busy")
    return False


def _take(entry: Entry) -> bool:
    """Whether the gen_lock is held now.  Waits only while the running generation's client has hung up."""
    for _ in range(_TRIES):
        if entry.gen_lock.acquire(blocking=False):
            return True
        left = entry.left
        if left is None or not left():
            break
        if entry.gen_lock.acquire(timeout=_TRY_S):
            return True
    # it may have ended between the try and the question
    return entry.gen_lock.acquire(blocking=False)
