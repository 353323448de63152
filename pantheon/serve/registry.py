"""The table of loaded models: who may use which, and who is still using it.

An `Entry` is one loaded model instance in one of 16 places.  Life of a place: free -> reserved (name taken, no model)
-> published (ready) -> unloading (no new requests) -> free.  The lock is held for scans of the table only; loading,
generating and freeing happen outside it.  Must not know HTTP, prompts or how a model is loaded.  Spec: area D.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pantheon.accel.die_manager import DieManager
from pantheon.engine.prefix_cache import Marks
from pantheon.errors import NotFound, PantheonError, Unavailable
from pantheon.seams import SYSTEM_CLOCK, Clock
from pantheon.serve.entry import Entry
from pantheon.serve.placement import Candidate, choose

if TYPE_CHECKING:
    from pantheon.accel.executor import RunnerState
    from pantheon.engine.model import Model
    from pantheon.engine.prefix_cache import PrefixCache
    from pantheon.sched.scheduler import Scheduler

__all__ = ["BUSY_MESSAGE", "MR_MAX_MODELS", "Entry", "Registry"]

MR_MAX_MODELS = 16
BUSY_MESSAGE = "a generation is already in progress on this model; retry shortly"
_ANY_NAME = (None, "", "default")


class Registry:
    """Up to 16 entries and the dies they are on.  Lock order: upload_lock, lock, then a prefix cache's, a
    scheduler's mu or the die manager's; gen_locks are tried, or waited for with no other lock held."""

    def __init__(
        self, capacity: int = MR_MAX_MODELS, clock: Clock = SYSTEM_CLOCK, dies: DieManager | None = None
    ) -> None:
        """`dies`: the dies that models are placed on; none by default, so that all are on the CPU."""
        self.clock = clock
        self.dies = dies or DieManager()
        #: called, with no lock held, after a publish, when an unload begins and when a place is free again [X28]
        self.on_change: Callable[[], None] = _nothing
        #: guards entries and each entry's fields as Entry says; held for O(16) scans only [M071]
        self.lock = threading.Lock()
        #: on lock: an entry's refs fell to 0
        self.drained = threading.Condition(self.lock)
        #: at most one load moves weights at a time [M060]; guards nothing else
        self.upload_lock = threading.Lock()
        self.entries: list[Entry | None] = [None] * capacity
        self._uses = 0

    # ---- loading ------------------------------------------------------------------------------------------------

    def reserve(self, name: str, path: str, dies: Sequence[int] | None = ()) -> Entry:
        """Take a place and the name.  dies: () for the CPU, None when they are chosen later (`place`) if there are any.

        The same name on other dies is a replica; on the same ones, or with dies that nobody named, it is a duplicate
        [K11].  Raises PantheonError: 409 duplicate, 507 table full.
        """
        if dies is None and not self.dies.usable:
            dies = ()
        with self.lock:
            for entry in self._used():
                if entry.name == name and _clash(entry, dies):
                    what = "is being unloaded" if entry.unloading else "is loaded" if entry.ready else "is loading"
                    hint = "; name other dies to add a replica" if self.dies.usable and not entry.unloading else ""
                    raise _conflict(f"a model named {name!r} {what} already{hint}", "model_exists")
            if None not in self.entries:
                limit = len(self.entries)
                raise PantheonError(
                    f"all {limit} model places are taken; unload one first", status=507, code="model_table_full"
                )
            index = self.entries.index(None)
            entry = Entry(name, path, index, tuple(dies or ()), auto=dies is None)
            entry.reserved_at = self.clock.monotonic()
            self.entries[index] = entry
            return entry

    def place(self, entry: Entry, dies: Sequence[int], vram_bytes: int = 0) -> None:
        """The dies of a reserved entry are settled."""
        with self.lock:
            entry.dies, entry.auto, entry.vram_bytes = tuple(dies), False, vram_bytes

    def publish(
        self,
        entry: Entry,
        model: Model,
        state: RunnerState,
        prefix_cache: PrefixCache | None = None,
        sched: Scheduler | None = None,
    ) -> None:
        """Open the entry for requests: model, state, cache and scheduler become visible at once [M061]."""
        with self.lock:
            entry.state, entry.prefix_cache, entry.created = state, prefix_cache, int(time.time())
            entry.sched = sched
            entry.stage, entry.progress = "ready", 1.0
            entry.model = model
        self.on_change()

    def withdraw(self, entry: Entry) -> None:
        """Give the place of a failed load back [M204]."""
        with self.lock:
            entry.used = False
            if self.entries[entry.index] is entry:
                self.entries[entry.index] = None
        self.on_change()

    # ---- using --------------------------------------------------------------------------------------------------

    def acquire(
        self, name: str | None, *, strict: bool = False, session: str | None = None, prefix: Marks = ()
    ) -> Entry:
        """The entry that answers a request for `name`; each call is paired with `release`.

        With one distinct name resident any name will do unless `strict` [M067, X25, X26].  Among replicas it is the one
        that is warm for the session or the prefix, else the one with the fewest requests, then the least recently used
        [M064, X01, X03].

        Raises:
            NotFound: several models, none of that name.
            Unavailable: none is loaded, or the named one is loading or being unloaded.
        """
        return self.route(name, strict, session, prefix)[0]

    def route(self, name: str | None, strict: bool, session: str | None, prefix: Marks) -> tuple[Entry, float]:
        """The acquired entry, and how long its running generation may be waited for; arguments as for `acquire`."""
        with self.lock:
            found = self._candidates(name, strict)
            patience_s, entry = 0.0, found[0]
            if len(found) > 1:
                now = self.clock.monotonic()
                index, patience_s = choose([_candidate(e, now, session, prefix) for e in found])
                entry = next(e for e in found if e.index == index)
            entry.refs += 1
            self._uses += 1
            entry.last_use = self._uses
            return entry, patience_s

    def release(self, entry: Entry) -> None:
        """Pair of acquire."""
        with self.lock:
            entry.refs -= 1
            if entry.refs == 0:
                self.drained.notify_all()

    @contextmanager
    def lease(self, name: str | None, *, strict: bool = False) -> Iterator[Entry]:
        """acquire … release."""
        entry = self.acquire(name, strict=strict)
        try:
            yield entry
        finally:
            self.release(entry)

    def _candidates(self, name: str | None, strict: bool) -> list[Entry]:
        ready = [entry for entry in self._used() if entry.ready]
        exact = [entry for entry in ready if entry.name == name]
        if exact:
            return exact
        pending = [entry for entry in self._used() if not entry.ready]
        for entry in pending:
            if entry.name == name or not ready:
                raise self._not_now(entry)
        if not ready:
            raise Unavailable("no model is loaded", code="no_model_loaded", retry_after=5)
        names = list(dict.fromkeys(entry.name for entry in ready))
        if name in _ANY_NAME or (len(names) == 1 and not strict):
            return [entry for entry in ready if entry.name == names[0]]
        known = ", ".join(names)
        raise NotFound(f"the model {name!r} does not exist; loaded: {known}", code="model_not_found", param="model")

    def _not_now(self, entry: Entry) -> Unavailable:
        if entry.unloading:
            return Unavailable(f"the model {entry.name!r} is being unloaded", code="model_unloading", retry_after=5)
        gone = self.clock.monotonic() - entry.reserved_at
        left = gone / entry.progress - gone if entry.progress > 0.05 else 5
        return Unavailable(
            f"the model {entry.name!r} is loading ({entry.stage}, {entry.progress:.0%}); retry shortly",
            code="model_loading",
            retry_after=retry_s(left),
        )

    # ---- unloading ----------------------------------------------------------------------------------------------

    def unload(
        self,
        name: str,
        *,
        timeout_s: float = 30.0,
        force: bool = False,
        slot: int | None = None,
        dies: Sequence[int] | None = None,
    ) -> list[Entry]:
        """Close every entry of that name to new requests, wait for those running, free the places [M069, X02].

        `slot` or `dies` name one replica [X04].  Returns the detached entries; the caller frees their models.  With
        `force`, generations still running at the deadline are told to stop.  Raises PantheonError: 404 unknown, 409
        loading, already unloading or still busy at the deadline (then the model serves on).
        """
        with self.lock:
            going = self._going(name, slot, dies)
            for entry in going:
                entry.unloading = True
        self.on_change()
        with self.lock:
            in_flight = self._close_down(going, timeout_s, force)
        self.on_change()
        if in_flight:
            raise _conflict(
                f"the model {name!r} is still busy after {timeout_s:g} s; it keeps serving",
                "still_busy",
                in_flight=in_flight,
            )
        return going

    def _going(self, name: str, slot: int | None, dies: Sequence[int] | None) -> list[Entry]:
        named = [entry for entry in self._used() if entry.name == name]
        if not named:
            raise NotFound(f"no model named {name!r} is loaded", code="model_not_found", param="name")
        going = [e for e in named if slot in (None, e.index) and (dies is None or set(dies) == set(e.dies))]
        if not going:
            have = "; ".join(f"slot {e.index} on {_where(e.dies)}" for e in named)
            param = "slot" if slot is not None else "dies"
            raise NotFound(
                f"{param}: {name!r} has no such replica; it has {have}", code="replica_not_found", param=param
            )
        if any(entry.unloading for entry in going):
            raise _conflict(f"the model {name!r} is being unloaded already", "model_unloading")
        if any(entry.model is None for entry in going):
            raise _conflict(f"the model {name!r} is still loading", "model_loading")
        return going

    def _close_down(self, going: list[Entry], timeout_s: float, force: bool) -> int:
        """Drain and detach; how many requests still run, when they do not end (then all is as before)."""
        if not self._drain(going, timeout_s) and force:
            for entry in going:
                entry.evicting.set()
            self._drain(going, 5.0)
        in_flight = sum(entry.refs for entry in going)
        for entry in going:
            if in_flight:
                entry.unloading = False
                entry.evicting.clear()
            else:
                entry.used = False
                self.entries[entry.index] = None
        return in_flight

    def _drain(self, going: list[Entry], timeout_s: float) -> bool:
        return self.drained.wait_for(lambda: not any(entry.refs for entry in going), timeout_s)

    # ---- looking ------------------------------------------------------------------------------------------------

    def count(self) -> int:
        """Distinct names that answer requests [X26]."""
        with self.lock:
            return len({entry.name for entry in self._used() if entry.ready})

    def snapshot(self) -> list[Entry]:
        """The ready entries, one per name, in order of their places [M068]."""
        with self.lock:
            ready = [entry for entry in self._used() if entry.ready]
        return list({entry.name: entry for entry in reversed(ready)}.values())[::-1]

    def loading(self) -> list[dict[str, Any]]:
        """Name, stage and progress of what is reserved and not yet published."""
        with self.lock:
            pending = [entry for entry in self._used() if entry.model is None]
            return [{"name": e.name, "progress": round(e.progress, 3), "stage": e.stage} for e in pending]

    def all_entries(self) -> list[Entry]:
        """Every taken place."""
        with self.lock:
            return self._used()

    def _used(self) -> list[Entry]:
        return [entry for entry in self.entries if entry is not None]

    def check_integrity(self) -> None:
        """Raise AssertionError when the table contradicts itself."""
        with self.lock:
            for index, entry in enumerate(self.entries):
                if entry is None:
                    continue
                assert entry.used and entry.index == index, f"place {index}: {entry}"
                assert entry.refs >= 0, f"{entry.name}: refs {entry.refs}"
                assert (entry.model is None) == (entry.state is None), f"{entry.name}: half published"
                assert entry.sched is None or entry.model is not None, f"{entry.name}: a scheduler without a model"
                assert entry.model is not None or (entry.refs == 0 and not entry.unloading), f"{entry.name}: early use"
            settled = [entry for entry in self._used() if not entry.auto]
            places = [(entry.name, die) for entry in settled for die in entry.dies or (-1,)]
            assert len(places) == len(set(places)), f"a name twice on one die: {places}"
            owners = {(info.index, info.model) for info in self.dies.snapshot() if info.model is not None}
            for entry in settled:
                on = {(die, entry.name) for die in entry.dies}
                assert entry.model is None or not len(self.dies) or on <= owners, (
                    f"{entry.name}: not bound to {on - owners}"
                )
        self.dies.check_integrity()


def _candidate(entry: Entry, now: float, session: str | None, prefix: Marks) -> Candidate:
    cache, tokens, own = entry.prefix_cache, 0, False
    if cache is not None and (session is not None or prefix):
        tokens, own = cache.warmth(session, prefix)
    saved_s = tokens * entry.prompt_s
    return Candidate(entry.index, entry.refs, entry.last_use, entry.wait_s(now), saved_s, own)


def _clash(entry: Entry, dies: Sequence[int] | None) -> bool:
    """Whether a load of the entry's name on these dies would be the same model twice."""
    if dies is None or entry.auto:
        return True
    return entry.dies == tuple(dies) or bool(set(entry.dies) & set(dies))


def _where(dies: Sequence[int]) -> str:
    return f"dies {', '.join(map(str, dies))}" if dies else "the CPU"


def _nothing() -> None:
    """The on_change of a registry that nobody watches."""


def retry_s(left: float) -> int:
    """Seconds until a retry makes sense, for Retry-After [X08]."""
    return int(min(60, max(1, round(left))))


def _conflict(message: str, code: str, **extra: Any) -> PantheonError:
    return PantheonError(message, status=409, type="invalid_request_error", code=code, **extra)
