"""The table of loaded models: who may use which, and who is still using it.

An `Entry` is one loaded model instance in one of 16 places.  Life of a place: free -> reserved (name taken, no model)
-> published (ready) -> unloading (no new requests) -> free.  The lock is held for scans of the table only; loading,
generating and freeing happen outside it.  Must not know HTTP, prompts or how a model is loaded.  Spec: area D.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pantheon.errors import Busy, NotFound, PantheonError, Unavailable
from pantheon.seams import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from pantheon.accel.executor import RunnerState
    from pantheon.engine.model import Model

MR_MAX_MODELS = 16
BUSY_MESSAGE = "a generation is already in progress on this model; retry shortly"
_ANY_NAME = (None, "", "default")
#: how often and how long a try for the lock of a generation that nobody reads any more lasts
_TRIES, _TRY_S = 40, 0.05


@dataclass(eq=False)
class Entry:
    """One model instance [M055].  The fields down to `last_use` are guarded by the registry's lock.

    `model` and `state` are None until published.  `gen_lock` is held by the one request that generates; `sched`,
    `prefix_cache` and `pc_lock` are None on the single-user path.  `evicting` tells a running generation to stop;
    `left` asks whether the client of the running one has hung up.
    """

    name: str
    path: str
    index: int
    dies: tuple[int, ...] = ()
    model: Model | None = None
    state: RunnerState | None = None
    used: bool = True
    unloading: bool = False
    refs: int = 0
    last_use: int = 0
    created: int = 0
    vram_bytes: int = 0
    stage: str = "waiting"
    progress: float = 0.0
    reserved_at: float = 0.0
    sched: None = None
    prefix_cache: None = None
    pc_lock: None = None
    gen_lock: threading.Lock = field(default_factory=threading.Lock)
    evicting: threading.Event = field(default_factory=threading.Event)
    # written by the holder of gen_lock only
    began_at: float = 0.0
    service_s: float = 2.0
    left: Callable[[], bool] | None = None

    @property
    def n_dies(self) -> int:
        """0: resident on the CPU [M006]."""
        return len(self.dies)

    @property
    def ready(self) -> bool:
        """Published and open for new requests."""
        return self.used and self.model is not None and not self.unloading

    def report(self, stage: str, done: int, total: int) -> None:
        """Note how far a load is: kernels after weights, each counted from 0 to 1."""
        self.stage, self.progress = stage, (done / total if total else 0.0)


class Registry:
    """Up to 16 entries.  Lock order: upload_lock before lock; gen_locks are tried, or waited for briefly with no
    other lock held."""

    def __init__(self, capacity: int = MR_MAX_MODELS, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        #: guards entries and each entry's fields as Entry says; held for O(16) scans only [M071]
        self.lock = threading.Lock()
        #: on lock: an entry's refs fell to 0
        self.drained = threading.Condition(self.lock)
        #: at most one load moves weights at a time [M060]; guards nothing else
        self.upload_lock = threading.Lock()
        self.entries: list[Entry | None] = [None] * capacity
        self._uses = 0

    # ---- loading ------------------------------------------------------------------------------------------------

    def reserve(self, name: str, path: str, dies: tuple[int, ...] = ()) -> Entry:
        """Take a place and the name.  Raises PantheonError: 409 duplicate, 507 table full."""
        with self.lock:
            for entry in self._used():
                if entry.name == name and (entry.dies == dies or set(entry.dies) & set(dies)):
                    what = "is being unloaded" if entry.unloading else "is loaded" if entry.ready else "is loading"
                    raise _conflict(f"a model named {name!r} {what} already", "model_exists")
            if None not in self.entries:
                limit = len(self.entries)
                raise PantheonError(
                    f"all {limit} model places are taken; unload one first", status=507, code="model_table_full"
                )
            entry = Entry(name, path, self.entries.index(None), tuple(dies), reserved_at=self._clock.monotonic())
            self.entries[entry.index] = entry
            return entry

    def publish(self, entry: Entry, model: Model, state: RunnerState, vram_bytes: int = 0) -> None:
        """Open the entry for requests: model, state and numbers become visible at once [M061]."""
        with self.lock:
            entry.state, entry.vram_bytes, entry.created = state, vram_bytes, int(time.time())
            entry.stage, entry.progress = "ready", 1.0
            entry.model = model

    def withdraw(self, entry: Entry) -> None:
        """Give the place of a failed load back [M204]."""
        with self.lock:
            entry.used = False
            if self.entries[entry.index] is entry:
                self.entries[entry.index] = None

    # ---- using --------------------------------------------------------------------------------------------------

    def acquire(self, name: str | None, *, strict: bool = False) -> Entry:
        """The entry that answers a request for `name`; each call is paired with `release`.

        With one distinct name resident any name will do unless `strict` [M067, X25, X26]; among replicas the one with
        the fewest requests, then the least recently used [M064, X03].

        Raises:
            NotFound: several models, none of that name.
            Unavailable: none is loaded, or the named one is loading or being unloaded.
        """
        with self.lock:
            entry = min(self._candidates(name, strict), key=lambda e: (e.refs, e.last_use, e.index))
            entry.refs += 1
            self._uses += 1
            entry.last_use = self._uses
            return entry

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

    @contextmanager
    def generation(self, entry: Entry, left: Callable[[], bool] | None = None) -> Iterator[None]:
        """Hold the entry's gen_lock.  Raises Busy at once when another request holds it [M049, M072], unless that
        one's client has hung up: it ends within a step, so it is waited for [B24].

        `left`: whether the client of this request has hung up; asked from the threads of other requests.
        """
        if not _take(entry):
            raise Busy(BUSY_MESSAGE, retry_after=self._wait_s(entry))
        entry.began_at, entry.left = self._clock.monotonic(), left
        try:
            yield
        finally:
            entry.left = None
            took = self._clock.monotonic() - entry.began_at
            entry.service_s += 0.3 * (took - entry.service_s)
            entry.gen_lock.release()

    def _wait_s(self, entry: Entry) -> int:
        """Seconds until the running generation should be over, from those before it [X08]."""
        left = entry.service_s - (self._clock.monotonic() - entry.began_at)
        return int(min(60, max(1, round(left))))

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
        gone = self._clock.monotonic() - entry.reserved_at
        left = gone / entry.progress - gone if entry.progress > 0.05 else 5
        return Unavailable(
            f"the model {entry.name!r} is loading ({entry.stage}, {entry.progress:.0%}); retry shortly",
            code="model_loading",
            retry_after=int(min(60, max(1, round(left)))),
        )

    # ---- unloading ----------------------------------------------------------------------------------------------

    def unload(self, name: str, *, timeout_s: float = 30.0, force: bool = False) -> list[Entry]:
        """Close every entry of that name to new requests, wait for those running, free the places [M069, X02].

        Returns the detached entries; the caller closes their models.  With `force`, generations still running at the
        deadline are told to stop.  Raises PantheonError: 404 unknown, 409 loading, already unloading or still busy
        at the deadline (then the model serves on).
        """
        with self.lock:
            going = [entry for entry in self._used() if entry.name == name]
            if not going:
                raise NotFound(f"no model named {name!r} is loaded", code="model_not_found", param="name")
            if any(entry.unloading for entry in going):
                raise _conflict(f"the model {name!r} is being unloaded already", "model_unloading")
            if any(entry.model is None for entry in going):
                raise _conflict(f"the model {name!r} is still loading", "model_loading")
            for entry in going:
                entry.unloading = True
            if not self._drain(going, timeout_s) and force:
                for entry in going:
                    entry.evicting.set()
                self._drain(going, 5.0)
            in_flight = sum(entry.refs for entry in going)
            if in_flight:
                for entry in going:
                    entry.unloading = False
                    entry.evicting.clear()
                raise _conflict(
                    f"the model {name!r} is still busy after {timeout_s:g} s; it keeps serving",
                    "still_busy",
                    in_flight=in_flight,
                )
            for entry in going:
                entry.used = False
                self.entries[entry.index] = None
            return going

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
                assert entry.model is not None or (entry.refs == 0 and not entry.unloading), f"{entry.name}: early use"
            places = [(entry.name, die) for entry in self._used() for die in entry.dies or (-1,)]
            assert len(places) == len(set(places)), f"a name twice on one die: {places}"


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


def _conflict(message: str, code: str, **extra: Any) -> PantheonError:
    return PantheonError(message, status=409, type="invalid_request_error", code=code, **extra)
