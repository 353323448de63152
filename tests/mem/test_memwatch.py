"""The watcher [M172-M176, X20]."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pantheon.errors import PantheonError
from pantheon.mem import memwatch
from pantheon.mem.host_signals import HostSample, read_host
from pantheon.mem.mem_state import Level, MemState
from pantheon.mem.memwatch import STALE_S, MemWatch
from pantheon.mem.pressure import Thresholds
from tests.fakes import FakeClock
from tests.mem.fake_host import GIB, FakeHost

PATIENCE_S = 20


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


@pytest.fixture
def watch(host: FakeHost, fake_clock: FakeClock) -> Iterator[MemWatch]:
    """Its thread sleeps for an hour: the test looks itself."""
    watch = MemWatch(host.root, 3600, fake_clock)
    yield watch
    watch.stop()


def test_m175_start_looks_at_once_in_the_caller_and_is_idempotent(watch: MemWatch, host: FakeHost) -> None:
    host.available(20 * GIB)
    watch.start()
    first = watch.state
    assert (first.host.available_bytes, first.seq, first.alive) == (20 * GIB, 1, True)
    thread = watch._thread
    watch.start()
    assert watch._thread is thread and watch.running and watch.state.seq == 1


def test_m175_stop_ends_the_thread_and_start_begins_anew(watch: MemWatch) -> None:
    watch.start()
    watch.stop()
    watch.stop()
    assert not watch.running and not watch.state.alive
    watch.start()
    assert watch.running and watch.state.alive and watch.restarts == 0


def test_m174_the_thread_looks_every_interval(host: FakeHost) -> None:
    watch = MemWatch(host.root, 0.005)
    seen, enough = [], threading.Event()

    def listen(state: MemState) -> None:
        seen.append(state.seq)
        if len(seen) == 5:
            enough.set()

    watch.subscribe(listen)
    watch.start()
    assert enough.wait(PATIENCE_S)
    watch.stop()
    assert seen[:5] == [1, 2, 3, 4, 5]
    assert memwatch.POLL_S == MemWatch().interval_s == 0.25


def test_m172_the_state_as_json_has_every_field(watch: MemWatch, host: FakeHost) -> None:
    host.psi(1, 0)
    host.cgroup("/job", max=32 * GIB, current=GIB)
    watch.start()
    watch.set_die(0, 12 * GIB, 10 * GIB)
    body = watch.state.as_dict()
    assert body["level"] == body["host"]["level"] == "WATCH" and body["seq"] == 2 and body["alive"] is True
    assert body["host"]["psi_some_avg10"] == 1 and body["host"]["cgroup_limit_bytes"] == 32 * GIB
    assert body["dies"] == [
        {"index": 0, "total_bytes": 12 * GIB, "free_bytes": 10 * GIB, "level": "OK", "budget_bytes": 11 * GIB,
         "resident_bytes": 0}
    ]  # fmt: skip


def test_m173_readers_only_ever_see_whole_states(host: FakeHost) -> None:
    """Every published value is built before it is swapped in: its parts always belong together."""
    samples = iter(range(1, 1 << 30))

    def read(root: Path) -> HostSample:
        n = next(samples)
        return HostSample(64 * GIB, n, swap_total_bytes=n, swap_free_bytes=n)

    watch = MemWatch(host.root, 3600, read=read, on_level=lambda *_: None)
    watch.start()
    ended = threading.Event()

    def write() -> None:
        for _ in range(3000):
            watch.poll_once()
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    last, torn = 0, 0
    while not ended.is_set():
        state = watch.state
        parts = {state.host.available_bytes, state.host.swap_total_bytes, state.host.swap_free_bytes, state.seq}
        torn += len(parts) != 1 or state.seq < last
        last = state.seq
    writer.join()
    watch.stop()
    assert not torn and watch.state.seq == 3001


def test_m176_set_die_merges_and_derives_and_publishes(watch: MemWatch) -> None:
    watch.start()
    watch.set_die(0, 4 * GIB, 3 * GIB)
    watch.set_die(1, 4 * GIB, 0)
    state = watch.set_die(0, 4 * GIB, GIB // 8)
    assert {i: die.level for i, die in state.dies.items()} == {0: Level.TIGHT, 1: Level.CRITICAL}
    assert watch.level_for((0,)) is Level.TIGHT and watch.level_for() is Level.OK
    assert watch.drop_die(1).dies.keys() == {0} and watch.drop_die(9).seq == 6
    with pytest.raises(TypeError):
        state.dies[5] = state.dies[0]  # type: ignore[index]


def test_m167_the_die_reserve_of_the_operator_counts(host: FakeHost) -> None:
    watch = MemWatch(host.root, thresholds=Thresholds(die_reserve_bytes=2 * GIB))
    assert watch.set_die(0, 12 * GIB, 1).dies[0].budget_bytes == 10 * GIB
    assert watch.set_die(0, 12 * GIB, 1, budget_bytes=3).dies[0].budget_bytes == 3


def test_the_environment_sets_root_interval_and_thresholds(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PN_HOST_ROOT": str(host.root), "PN_MEMWATCH_POLL_MS": "100", "PN_HOST_RESERVE_BYTES": "2GiB",
        "PN_PSI_FULL_REJECT": "30", "PN_PSI_SOME_TIGHT": "20", "PN_DIE_RESERVE_BYTES": "3GiB",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    watch = memwatch.from_settings()
    assert (watch.root, watch.interval_s) == (host.root, 0.1)
    assert watch.thresholds == Thresholds(2 * GIB, 30.0, 20.0, 3 * GIB)


# ---- levels -----------------------------------------------------------------------------------------------------


def test_a_level_is_told_once_for_each_change(host: FakeHost, fake_clock: FakeClock) -> None:
    told: list[tuple[Level, Level]] = []
    watch = MemWatch(host.root, 3600, fake_clock, lambda old, new, why: told.append((old, new)))
    for available in (60, 60, 10, 10, 9, 60, 60):
        host.available(available * GIB)
        watch.poll_once()
        watch.poll_once()
    reserve = 64 * GIB * 15 // 100
    assert 9 * GIB < reserve < 10 * GIB
    assert told == [(Level.OK, Level.TIGHT), (Level.TIGHT, Level.CRITICAL), (Level.CRITICAL, Level.OK)]


def test_the_log_line_of_a_change_has_the_numbers(
    watch: MemWatch, host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    host.available(GIB)
    with caplog.at_level(logging.INFO, "pantheon.mem"):
        watch.poll_once()
        watch.poll_once()
    (line,) = caplog.messages
    assert line.startswith("host memory OK -> CRITICAL available=1073741824 reserve=") and "psi=OK" in line


def test_how_long_a_level_has_lasted(watch: MemWatch, host: FakeHost, fake_clock: FakeClock) -> None:
    watch.start()
    host.available(GIB)
    fake_clock.advance(5)
    watch.poll_once()
    fake_clock.advance(7)
    watch.poll_once()
    assert watch.level_age_s() == 7


# ---- faults -----------------------------------------------------------------------------------------------------


def test_a_listener_that_fails_hurts_nobody(watch: MemWatch, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    watch.subscribe(lambda state: 1 / 0)
    end = watch.subscribe(lambda state: seen.append(state.seq))
    watch.add_source(lambda: 1 / 0)
    watch.start()
    end()
    watch.poll_once()
    assert seen == [1] and watch.state.seq == 2
    assert "a listener of the memory watcher failed" in caplog.text


def test_sources_push_dies_in_before_each_look(watch: MemWatch) -> None:
    frees = iter([5, 4, 3])
    watch.add_source(lambda: watch.set_die(0, 10, next(frees), budget_bytes=10) and None)
    watch.start()
    assert watch.state.dies[0].free_bytes == 5
    assert watch.poll_once().dies[0].free_bytes == 4


def test_a_host_that_can_not_be_read_stops_the_start(tmp_path: Path) -> None:
    watch = MemWatch(tmp_path)
    with pytest.raises(PantheonError, match="PN_HOST_ROOT"):
        watch.start()
    assert not watch.running and not watch.started


def test_x20_a_host_that_can_not_be_read_any_more_is_logged_once_and_grows_stale(
    watch: MemWatch, host: FakeHost, fake_clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    watch.start()
    host.write("proc/meminfo", "")
    fake_clock.advance(STALE_S / 2)
    for _ in range(3):
        watch._look()
    assert watch.errors == 3 and caplog.text.count("can not be read") == 1
    assert watch.state.alive, "two seconds have not passed"
    fake_clock.advance(STALE_S)
    for _ in range(3):
        state = watch.state
        assert (state.level, state.alive, watch.alive) == (Level.WATCH, False, False)
    assert caplog.text.count("taken as WATCH") == 1
    host.available(60 * GIB)
    watch._look()
    assert watch.errors == 0 and watch.state.alive and watch.state.level is Level.OK


def test_m199_a_watcher_that_nobody_started_knows_nothing_and_is_not_alive(watch: MemWatch, host: FakeHost) -> None:
    host.available(GIB)
    assert not watch.state.alive and watch.state.level is Level.OK and watch.restarts == 0
    watch.poll_once()
    assert not watch.state.alive


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_x20_a_watcher_that_dies_leaves_a_successor(host: FakeHost, caplog: pytest.LogCaptureFixture) -> None:
    looks, replaced = [], threading.Event()

    def read(root: Path) -> HostSample:
        looks.append(threading.current_thread())
        if len(looks) == 2:
            raise SystemExit("killed")
        if len(looks) == 4:
            replaced.set()
        return read_host(root)

    watch = MemWatch(host.root, 0.005, read=read)
    watch.start()
    assert replaced.wait(PATIENCE_S)
    assert watch.restarts == 1 and watch.state.alive
    watch.stop()
    assert looks[1] is not looks[2] and looks[2] is looks[3]
    assert "memory watcher restarted restarts=1" in caplog.text


def test_x20_a_reader_notices_a_dead_watcher_and_replaces_it(watch: MemWatch, fake_clock: FakeClock) -> None:
    """Whatever killed it, even its own last words."""
    watch.start()
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    real, watch._thread = watch._thread, dead
    assert not watch.alive
    assert watch.state.alive and watch.restarts == 1 and watch._thread not in (dead, real)
    assert not watch.revive(), "there is nothing left to do"


def test_x20_a_machine_without_a_thread_to_spare_is_asked_again(
    watch: MemWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.start()
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    watch._thread = dead
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
        assert not watch.revive() and not watch.running and watch.restarts == 0
    assert watch.revive() and watch.running
