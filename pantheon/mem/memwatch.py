"""The watcher: one thread that looks at the host every 250 ms and publishes what it saw [M174, M175].

Whoever owns dies pushes their bytes in with `set_die`.  The thread's death is noticed by the thread itself, by every
reader, and in the numbers; it is replaced [X20].  Must not know models, plans or what is done about a level.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pantheon import log, settings
from pantheon.mem.host_signals import HostSample, read_host
from pantheon.mem.mem_state import DieState, HostState, Level, MemState
from pantheon.mem.pressure import Thresholds, die_state, host_state
from pantheon.seams import SYSTEM_CLOCK, Clock

POLL_S = 0.25
#: a snapshot older than this is no basis for a decision [X20]
STALE_S = 2.0
_log = log.logger("mem")

Listener = Callable[[MemState], None]


def log_level(old: Level, new: Level, why: str) -> None:
    """One line for each change of the host's level."""
    (_log.warning if new > old else _log.info)("host memory %s -> %s %s", old.name, new.name, why)


def from_settings() -> MemWatch:
    """A watcher as the environment wants it (PN_HOST_ROOT, PN_MEMWATCH_POLL_MS and the thresholds); not started."""
    return MemWatch(
        Path(settings.get("PN_HOST_ROOT")),
        settings.get("PN_MEMWATCH_POLL_MS") / 1000,
        thresholds=Thresholds(
            host_reserve_bytes=settings.get("PN_HOST_RESERVE_BYTES"),
            psi_full_reject=settings.get("PN_PSI_FULL_REJECT"),
            psi_some_tight=settings.get("PN_PSI_SOME_TIGHT"),
            die_reserve_bytes=settings.get("PN_DIE_RESERVE_BYTES"),
        ),
    )


class MemWatch:
    """Reads the host, keeps the dies, publishes `MemState`s.  Safe to use from several threads."""

    def __init__(
        self,
        root: Path | str = "/",
        interval_s: float = POLL_S,
        clock: Clock = SYSTEM_CLOCK,
        on_level: Callable[[Level, Level, str], None] = log_level,
        *,
        thresholds: Thresholds | None = None,
        read: Callable[[Path], HostSample] = read_host,
    ) -> None:
        """`on_level(old, new, why)` is called once for each change of the host's level, with no lock held."""
        self.root, self.interval_s = Path(root), interval_s
        self.thresholds = thresholds or Thresholds()
        self._clock, self._on_level, self._read = clock, on_level, read
        #: guards _seq, _host, _dies, _thread, restarts and publication; no listener is called while it is held
        self._mu = threading.Lock()
        self._seq = 0
        self._host: HostState | None = None
        self._dies: dict[int, DieState] = {}
        self._state = MemState(HostState(0, 0))
        # replaced as a whole, so that publishing reads it without the lock
        self._listeners: tuple[Listener, ...] = ()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._told_stale = False
        self._level_since_s = clock.monotonic()
        self._sources: tuple[Callable[[], None], ...] = ()
        self.restarts = 0
        self.errors = 0

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Poll once in the caller, so that the first read is real, then watch; idempotent [M175].

        Raises PantheonError when the host's memory can not be read at all.
        """
        if self.running:
            return
        self._stopping.clear()
        self.poll_once()
        self._spawn(self._thread)

    def stop(self) -> None:
        """End the thread and wait for it; idempotent.  The last state stays readable, but is not alive."""
        self._stopping.set()
        with self._mu:
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)

    @property
    def running(self) -> bool:
        """A watcher thread lives."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def started(self) -> bool:
        """`start` was called and `stop` was not: somebody relies on this watcher."""
        return self._thread is not None

    @property
    def alive(self) -> bool:
        """The thread lives and its last look is fresh [X20]."""
        return self.running and self.age_s() <= STALE_S

    def age_s(self) -> float:
        """Seconds since the last look at the host; infinite before the first."""
        host = self._host
        return float("inf") if host is None else self._clock.monotonic() - host.at_s

    def level_age_s(self) -> float:
        """For how long the host has had its level."""
        return self._clock.monotonic() - self._level_since_s

    def revive(self) -> bool:
        """Replace a thread that died; whether it was.  Readers call it, so that nobody has to watch the watcher."""
        dead = self._thread
        if dead is None or dead.is_alive() or self._stopping.is_set():
            return False
        return self._spawn(dead)

    def _spawn(self, dead: threading.Thread | None) -> bool:
        """Start a thread in place of `dead`, unless another caller was faster."""
        with self._mu:
            if self._thread is not dead or self._stopping.is_set():
                return False
            self._thread = threading.Thread(target=self._run, name="pantheon-memwatch", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                # no thread to be had now: the next reader tries again
                return False
            if dead is not None:
                self.restarts += 1
        if dead is not None:
            _log.warning("memory watcher restarted %s", log.fields(restarts=self.restarts))
        return True

    def _run(self) -> None:
        me = threading.current_thread()
        try:
            while not self._stopping.wait(self.interval_s):
                self._look()
        finally:
            # reached by what no poll may raise: leave a successor behind
            if self._thread is me and not self._stopping.is_set():
                self._spawn(me)

    def _look(self) -> None:
        """A poll whose faults are counted and logged once in a row: the snapshot then grows stale by itself."""
        try:
            self.poll_once()
        except Exception as fault:
            self.errors += 1
            if self.errors == 1:
                _log.warning("host memory can not be read %s", log.fields(fault=str(fault) or type(fault).__name__))
        else:
            self.errors = 0

    # ---- writing --------------------------------------------------------------------------------------------------

    def poll_once(self) -> MemState:
        """Ask the sources, look at the host now and publish.  Raises PantheonError when it can not be read."""
        for source in self._sources:
            _guarded(source)
        host = host_state(self._read(self.root), self.thresholds, self._clock.monotonic())
        return self._publish(host=host)

    def set_die(
        self,
        index: int,
        total_bytes: int,
        free_bytes: int,
        *,
        budget_bytes: int | None = None,
        resident_bytes: int = 0,
    ) -> MemState:
        """Merge one die and publish [M176].

        budget_bytes: what models may use of it (default: its total less the die reserve [M186]); resident_bytes: what
        the model that lives there was charged, which is no pressure [X19].
        """
        die = die_state(index, total_bytes, free_bytes, self.thresholds, budget_bytes, resident_bytes)
        return self._publish(die=die)

    def drop_die(self, index: int) -> MemState:
        """Forget a die and publish."""
        return self._publish(drop=index)

    def add_source(self, fn: Callable[[], None]) -> None:
        """Call `fn()` before each look at the host: it may push dies in with `set_die`."""
        with self._mu:
            self._sources = (*self._sources, fn)

    def subscribe(self, fn: Listener) -> Callable[[], None]:
        """Call `fn(state)` after each publication, in the publishing thread, with no lock held; it must not block.

        Returns a function that ends the subscription.
        """
        with self._mu:
            self._listeners = (*self._listeners, fn)

        def end() -> None:
            with self._mu:
                self._listeners = tuple(one for one in self._listeners if one is not fn)

        return end

    def _publish(self, host: HostState | None = None, die: DieState | None = None, drop: int | None = None) -> MemState:
        with self._mu:
            old = self._host
            if host is not None:
                self._host = host
            if die is not None:
                self._dies[die.index] = die
            if drop is not None:
                self._dies.pop(drop, None)
            self._seq += 1
            now = self._host or self._state.host
            state = MemState(now, MappingProxyType(dict(self._dies)), self._seq, alive=self._host is not None)
            self._state = state
        if host is not None:
            self._told_stale = False
            before = Level.OK if old is None else old.level
            if host.level != before:
                self._level_since_s = host.at_s
                self._on_level(before, host.level, _why(host))
        for listener in self._listeners:
            _guarded(listener, state)
        return state

    # ---- reading --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> MemState:
        """The newest snapshot; never waits.  A stale one is at least WATCH and not alive [X20]; without `start` none is
        alive."""
        state = self._state
        if not self.started:
            # nobody watches: nothing is known, and nothing may be refused for it [M199]
            return replace(state, alive=False)
        self.revive()
        if self.age_s() <= STALE_S:
            return state
        if not self._told_stale:
            self._told_stale = True
            _log.warning("host memory was last seen too long ago, taken as WATCH %s", log.fields(age_s=self.age_s()))
        return state.stale()

    def level_for(self, dies: tuple[int, ...] = ()) -> Level:
        """The level of a model on these dies: the worst of the host and of its own dies [X19]."""
        return self.state.level_for(dies)


def _guarded(fn: Callable[..., None], *args: MemState) -> None:
    """Call what others hung in: its faults are theirs, and must not end the watching."""
    try:
        fn(*args)
    except Exception:
        _log.exception("a listener of the memory watcher failed")


def _why(host: HostState) -> str:
    return log.fields(
        available=host.available_bytes,
        reserve=host.reserve_bytes,
        bytes=host.level_bytes.name,
        psi=host.level_psi.name,
        psi_some=host.psi_some_avg10,
        psi_full=host.psi_full_avg10,
        bound_by=host.bound_by,
    )
