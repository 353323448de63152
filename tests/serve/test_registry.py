"""The registry: names, replicas, reference counts, drain, busy [area D, M049, X02, X03, X25, X26]."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from pantheon.accel.die import virtual_dies
from pantheon.accel.die_manager import DieManager
from pantheon.engine.prefix_cache import Marks, Warmth
from pantheon.errors import Busy, Cancelled, NotFound, PantheonError, Unavailable
from pantheon.serve.registry import BUSY_MESSAGE, MR_MAX_MODELS, Entry, Registry
from pantheon.serve.seating import generation, seat
from tests.fakes import FakeClock


class FakeModel:
    n_ctx = 64


class FakeCache:
    """Warm for one session."""

    def __init__(self, session: str, tokens: int = 1000) -> None:
        self.session, self.tokens = session, tokens

    def warmth(self, session: str | None, prefix: Marks) -> Warmth:
        return Warmth(self.tokens, True) if session == self.session else Warmth(0, False)


def published(registry: Registry, name: str, dies: tuple[int, ...] = (), cache: Any = None) -> Entry:
    entry = registry.reserve(name, f"/{name}.gguf", dies)
    model: Any = FakeModel()
    registry.publish(entry, model, model, cache)
    registry.check_integrity()
    return entry


def test_entry_has_the_fields_of_M055() -> None:
    entry = published(Registry(), "a", (1, 2))
    fields = "name model state gen_lock sched prefix_cache pc_lock dies n_dies vram_bytes refs unloading used"
    assert all(hasattr(entry, field) for field in fields.split())
    assert entry.n_dies == 2 and entry.sched is None


def test_seventeenth_model_is_507_M056() -> None:
    registry = Registry()
    for i in range(MR_MAX_MODELS):
        published(registry, f"m{i}")
    with pytest.raises(PantheonError) as fault:
        registry.reserve("one more", "x")
    assert MR_MAX_MODELS == 16
    assert (fault.value.status, fault.value.code) == (507, "model_table_full")


def test_reserved_name_is_taken_but_not_served_M057() -> None:
    registry = Registry()
    published(registry, "a")
    entry = registry.reserve("b", "x")
    entry.report("weights", 1, 4)
    with pytest.raises(PantheonError) as fault:
        registry.reserve("b", "x")
    assert fault.value.status == 409
    with pytest.raises(Unavailable) as loading:
        registry.acquire("b")
    assert loading.value.code == "model_loading" and loading.value.retry_after
    assert [e.name for e in registry.snapshot()] == ["a"]
    assert registry.loading() == [{"name": "b", "progress": 0.25, "stage": "weights"}]
    registry.withdraw(entry)
    registry.check_integrity()
    published(registry, "b")


def test_names_of_one_resident_model_M013_M067() -> None:
    registry = Registry()
    with pytest.raises(Unavailable) as none:
        registry.acquire("a")
    assert (none.value.status, none.value.code) == (503, "no_model_loaded")
    entry = published(registry, "a")
    for name in ("a", "nonsense", "", None, "default"):
        with registry.lease(name) as got:
            assert got is entry
    with pytest.raises(NotFound) as strict:
        registry.acquire("nonsense", strict=True)
    assert strict.value.code == "model_not_found"
    with registry.lease(None, strict=True) as got:
        assert got is entry


def test_names_of_several_models_M048_M066() -> None:
    registry = Registry()
    first, second = published(registry, "a"), published(registry, "b")
    with registry.lease("b") as got:
        assert got is second
    with registry.lease("") as got:
        assert got is first
    with pytest.raises(NotFound) as fault:
        registry.acquire("c")
    assert (fault.value.status, fault.value.code, fault.value.param) == (404, "model_not_found", "model")


def test_replicas_count_as_one_name_X26_M068() -> None:
    registry = Registry()
    published(registry, "a", (0,))
    published(registry, "a", (1,))
    assert registry.count() == 1
    assert [entry.name for entry in registry.snapshot()] == ["a"]
    with registry.lease("whatever"):
        pass
    with pytest.raises(PantheonError) as fault:
        registry.reserve("a", "x", (1,))
    assert fault.value.status == 409


def test_fewest_requests_then_least_recently_used_M064_X03() -> None:
    registry = Registry()
    replicas = [published(registry, "a", (die,)) for die in range(2)]
    used = []
    for _ in range(20):
        with registry.lease("a") as entry:
            used.append(entry.index)
    assert used.count(0) == used.count(1) == 10
    with registry.lease("a") as one, registry.lease("a") as two:
        assert {one.index, two.index} == {0, 1}
        with registry.lease("a"):
            assert sum(e.refs for e in replicas) == 3
    assert [e.refs for e in replicas] == [0, 0]


def test_busy_is_at_once_with_the_seeds_words_M049_M072_X08() -> None:
    clock = FakeClock()
    registry = Registry(clock=clock)
    entry = published(registry, "a")
    entry.service_s = 10.0
    with generation(registry, entry):
        clock.advance(4)
        with pytest.raises(Busy) as fault, generation(registry, entry):
            pass
    assert fault.value.message == BUSY_MESSAGE
    assert BUSY_MESSAGE == "a generation is already in progress on this model; retry shortly"
    assert (fault.value.status, fault.value.type, fault.value.code) == (429, "server_busy", "server_busy")
    assert fault.value.retry_after == 6
    with generation(registry, entry):
        pass
    assert entry.service_s < 10


@pytest.mark.parametrize("leaves", [True, False])
def test_a_generation_whose_client_hung_up_is_waited_for_briefly_B24(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pantheon.serve.seating._TRIES", 400 if leaves else 2)
    registry = Registry()
    entry = published(registry, "a")
    asked, over = threading.Event(), threading.Event()

    def hung_up() -> bool:
        asked.set()
        return True

    def first() -> None:
        with generation(registry, entry, hung_up):
            held.set()
            assert over.wait(10)

    def end() -> None:
        assert asked.wait(10)
        over.set()

    held = threading.Event()
    thread = threading.Thread(target=first)
    thread.start()
    assert held.wait(10)
    if leaves:
        ender = threading.Thread(target=end)
        ender.start()
        with generation(registry, entry):
            assert entry.left is None
        ender.join()
    else:
        with pytest.raises(Busy), generation(registry, entry):
            pass
        over.set()
    thread.join()
    assert not entry.gen_lock.locked() and entry.left is None


def test_gen_lock_is_freed_by_a_failure() -> None:
    registry = Registry()
    entry = published(registry, "a")
    with pytest.raises(KeyError), generation(registry, entry):
        raise KeyError
    assert not entry.gen_lock.locked()


def test_unload_waits_for_the_running_ones_M069() -> None:
    registry = Registry()
    entry = published(registry, "a")
    published(registry, "b")
    registry.acquire("a")
    gone: list[list[Entry]] = []
    thread = threading.Thread(target=lambda: gone.append(registry.unload("a", timeout_s=20)))
    thread.start()
    with registry.drained:  # its wait has begun once unloading is set, since it holds the lock in between
        while not entry.unloading:
            registry.drained.wait(0.01)
    with pytest.raises(Unavailable) as fault:
        registry.acquire("a")
    assert fault.value.code == "model_unloading"
    with pytest.raises(PantheonError) as twice:
        registry.unload("a")
    assert twice.value.status == 409
    assert [e.name for e in registry.snapshot()] == ["b"]
    registry.release(entry)
    thread.join(20)
    assert gone == [[entry]]
    registry.check_integrity()
    with pytest.raises(NotFound):
        registry.unload("a")


def test_unload_gives_up_at_its_deadline_and_serves_on_X02() -> None:
    registry = Registry()
    entry = published(registry, "a")
    registry.acquire("a")
    with pytest.raises(PantheonError) as fault:
        registry.unload("a", timeout_s=0)
    assert (fault.value.status, fault.value.code, fault.value.extra) == (409, "still_busy", {"in_flight": 1})
    registry.release(entry)
    with registry.lease("a") as again:
        assert again is entry
    assert registry.unload("a", timeout_s=0) == [entry]


def test_forced_unload_tells_the_generation_to_stop_X02() -> None:
    registry = Registry()
    entry = published(registry, "a")
    registry.acquire("a")

    def generation() -> None:
        entry.evicting.wait(20)
        registry.release(entry)

    thread = threading.Thread(target=generation)
    thread.start()
    assert registry.unload("a", timeout_s=0, force=True) == [entry]
    thread.join(20)
    assert not thread.is_alive()


def test_unload_takes_all_replicas_X04() -> None:
    registry = Registry()
    pair = [published(registry, "a", (0,)), published(registry, "a", (1,))]
    assert registry.unload("a") == pair
    assert registry.all_entries() == []


def test_one_replica_is_unloaded_by_slot_or_dies_X04_M070() -> None:
    registry = Registry()
    first, second, third = (published(registry, "a", dies) for dies in ((0,), (1, 2), (3,)))
    with pytest.raises(NotFound) as fault:
        registry.unload("a", dies=(1,))
    assert fault.value.code == "replica_not_found" and "slot 1 on dies 1, 2" in fault.value.message
    with pytest.raises(NotFound):
        registry.unload("a", slot=7)
    assert registry.unload("a", dies=(2, 1)) == [second]
    assert registry.unload("a", slot=first.index) == [first]
    assert registry.snapshot() == [third]


def test_the_same_name_on_other_dies_is_a_replica_on_the_same_a_duplicate_K11_M004() -> None:
    registry = Registry(dies=DieManager(virtual_dies([100] * 4)))
    registry.reserve("a", "x", (0, 1))
    registry.reserve("a", "x", ())
    for dies in ((0, 1), (1, 2), (), None):
        with pytest.raises(PantheonError) as fault:
            registry.reserve("a", "x", dies)
        assert (fault.value.status, fault.value.code) == (409, "model_exists")
    entry = registry.reserve("b", "x", None)
    assert entry.auto and entry.dies == ()
    with pytest.raises(PantheonError):  # where b will be is not known yet
        registry.reserve("b", "x", (3,))
    registry.place(entry, (2,))
    registry.reserve("b", "x", (3,))


def test_on_change_is_told_with_no_lock_held_X28() -> None:
    registry = Registry()
    seen: list[tuple[list[str], bool]] = []
    registry.on_change = lambda: seen.append(([e.name for e in registry.snapshot()], registry.lock.locked()))
    published(registry, "a")
    registry.unload("a")
    registry.withdraw(registry.reserve("b", "x"))
    assert seen == [(["a"], False), ([], False), ([], False), ([], False)]


def test_a_session_stays_with_the_replica_that_is_warm_for_it_X01() -> None:
    registry = Registry()
    published(registry, "a", (0,))
    warm = published(registry, "a", (1,), FakeCache("s"))
    for _ in range(5):
        with seat(registry, "a", session="s") as (entry, _):
            assert entry is warm
    with seat(registry, "a", session="t") as (entry, _):
        assert entry is not warm


def test_a_busy_warm_replica_is_waited_for_when_that_is_cheaper_X01() -> None:
    registry = Registry()
    published(registry, "a", (0,))
    warm = published(registry, "a", (1,), FakeCache("s", 20_000))
    warm.service_s = 0.1
    held, over = threading.Event(), threading.Event()

    def first() -> None:
        with seat(registry, "a", session="s") as (entry, _):
            assert entry is warm
            held.set()
            assert over.wait(20)

    thread = threading.Thread(target=first)
    thread.start()
    assert held.wait(20)
    threading.Timer(0.05, over.set).start()
    with seat(registry, "a", session="s") as (entry, _):
        assert entry is warm and over.is_set()
    thread.join(20)


def test_a_warm_replica_that_stays_busy_is_given_up_for_another_X01(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pantheon.serve.placement.HOP_S", 0.01)
    registry = Registry()
    cold = published(registry, "a", (0,))
    warm = published(registry, "a", (1,), FakeCache("s", 60))
    warm.service_s = 0.01
    with seat(registry, "a", session="s"):
        # its end is expected any moment, and does not come
        with seat(registry, "a", session="s") as (entry, _):
            assert entry is cold
        warm.service_s = 100
        with seat(registry, "a", session="s") as (entry, _):
            assert entry is cold
            with pytest.raises(Busy), seat(registry, "a", session="s"):
                pass
    assert [entry.refs for entry in (cold, warm)] == [0, 0]
    assert not (cold.gen_lock.locked() or warm.gen_lock.locked())


def test_nobody_waits_for_a_client_that_has_left_X23() -> None:
    registry = Registry()
    published(registry, "a", (0,))
    warm = published(registry, "a", (1,), FakeCache("s", 60_000))
    warm.service_s = 1.0
    with (
        seat(registry, "a", session="s"),
        pytest.raises(Cancelled),
        seat(registry, "a", session="s", left=lambda: True),
    ):
        pass
    assert warm.refs == 0 and not warm.gen_lock.locked()


def test_unload_of_a_loading_model_is_409() -> None:
    registry = Registry()
    registry.reserve("a", "x")
    with pytest.raises(PantheonError) as fault:
        registry.unload("a")
    assert (fault.value.status, fault.value.code) == (409, "model_loading")


def test_nobody_sees_half_an_entry_M061_M063() -> None:
    """Threads acquire while models come and go; every acquired entry is whole, and all references come back."""
    registry = Registry()
    published(registry, "base")
    faults: list[str] = []
    stop = threading.Event()

    def user(seed: int) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            try:
                with registry.lease(chance.choice(["base", "x", "y", None])) as entry:
                    if entry.model is None or entry.state is None or not entry.used:
                        faults.append(f"half an entry: {entry}")
            except (NotFound, Unavailable):
                pass

    threads = [threading.Thread(target=user, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for i in range(200):
        name = "xy"[i % 2]
        published(registry, name)
        registry.unload(name, timeout_s=20)
        registry.check_integrity()
    stop.set()
    for thread in threads:
        thread.join(20)
    assert not faults
    assert [entry.refs for entry in registry.all_entries()] == [0]
