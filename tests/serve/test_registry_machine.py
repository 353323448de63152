"""The registry and the die manager under any order of loads, failures, requests and unloads, `check_integrity` after
each step [M055-M071, X01, X03, X04, K11]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pantheon.accel.die import virtual_dies
from pantheon.accel.die_manager import DieManager
from pantheon.engine.prefix_cache import PrefixCache
from pantheon.errors import PantheonError
from pantheon.serve.registry import Entry, Registry

NAMES = st.sampled_from(["a", "b", "c"])


class State:
    n_slots, n_ctx = 2, 50

    def reset(self, slot: int) -> None: ...

    def copy_prefix(self, source: int, target: int, n: int, first: int = 0) -> None: ...


class Server(RuleBasedStateMachine):
    """What the load code, the handlers and the admin API do with the two, one step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(capacity=5, dies=DieManager(virtual_dies([100, 100, 200])))
        self.loading: list[Entry] = []
        self.held: list[Entry] = []
        self.changes = 0
        self.registry.on_change = self.changed

    def changed(self) -> None:
        assert not self.registry.lock.locked()
        self.changes += 1

    @rule(name=NAMES, dies=st.none() | st.just(()) | st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True))
    def reserve(self, name: str, dies: Sequence[int] | None) -> None:
        taken = [e for e in self.registry.all_entries() if e.name == name]
        try:
            self.loading.append(self.registry.reserve(name, "x", None if dies is None else tuple(dies)))
        except PantheonError as fault:
            assert fault.code in ("model_exists", "model_table_full")
            assert fault.code != "model_exists" or taken

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), size=st.integers(1, 150), fails=st.booleans())
    def load(self, data: st.DataObject, size: int, fails: bool) -> None:
        entry = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
        asked = None if entry.auto else entry.dies
        try:
            dies = () if asked == () else self.registry.dies.take(entry.name, self.need(size), asked).dies
            self.registry.place(entry, dies)
            if fails:
                raise PantheonError("no")
        except PantheonError:
            self.registry.dies.unbind(entry.dies, entry.name)
            self.registry.withdraw(entry)
        else:
            state: Any = State()
            self.registry.publish(entry, state, state, PrefixCache(state))
            assert entry.ready and not entry.auto

    @staticmethod
    def need(size: int) -> Any:
        return lambda budgets: [size // len(budgets)] * len(budgets)

    @rule(name=NAMES | st.none(), session=st.none() | st.sampled_from("xyz"))
    def request(self, name: str | None, session: str | None) -> None:
        try:
            entry = self.registry.acquire(name, session=session)
        except PantheonError as fault:
            assert fault.status in (404, 503)
        else:
            assert entry.ready and entry.refs > 0
            self.held.append(entry)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), session=st.none() | st.sampled_from("xyz"))
    def answer(self, data: st.DataObject, session: str | None) -> None:
        entry = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        warm = entry.seat([1, 2, 3], session, ())
        warm.held[:] = [1, 2, 3]
        warm.end()
        assert entry.prefix_cache is not None
        entry.prefix_cache.check_integrity()
        if session is not None:
            assert entry.prefix_cache.warmth(session, ()).own
        self.registry.release(entry)

    @rule(name=NAMES, slot=st.none() | st.integers(0, 4))
    def unload(self, name: str, slot: int | None) -> None:
        try:
            gone = self.registry.unload(name, timeout_s=0, slot=slot)
        except PantheonError as fault:
            assert fault.code in ("model_not_found", "replica_not_found", "model_loading", "still_busy")
            return
        for entry in gone:
            assert entry.refs == 0 and entry.name == name and entry not in self.held
            self.registry.dies.unbind(entry.dies, entry.name)

    @invariant()
    def sound(self) -> None:
        self.registry.check_integrity()
        entries = self.registry.all_entries()
        assert sum(entry.refs for entry in entries) == len(self.held)
        bound = {info.index for info in self.registry.dies.snapshot() if info.model is not None}
        assert bound == {die for entry in entries if entry.model is not None for die in entry.dies}
        names = [entry.name for entry in self.registry.snapshot()]
        assert len(names) == len(set(names)) == self.registry.count()


Server.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestServer = Server.TestCase
