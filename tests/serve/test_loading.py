"""Loading into the registry and out of it: one code path, nothing left behind by a failure
[M057-M062, M069, M143-M145, M204, K12, X22, X31, R M227]."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from pantheon import seams
from pantheon.accel.die import virtual_dies
from pantheon.accel.die_manager import DieManager
from pantheon.engine import load
from pantheon.engine.admit import decide_load
from pantheon.engine.footprint import footprint
from pantheon.errors import PantheonError
from pantheon.mem.memwatch import MemWatch
from pantheon.mem.pressure import Thresholds
from pantheon.serve import loading
from pantheon.serve.loading import LoadOptions, ModelSpec, StartUp, default_name, load_spec
from pantheon.serve.registry import Registry
from tests.golden_data import model_path
from tests.mem.fake_host import FakeHost

PATIENCE_S = 20.0
pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({"pieces": ["x"]}))
    return f"script:{path}"


def start(registry: Registry, *specs: ModelSpec) -> StartUp:
    """Load and wait for the end."""
    start_up = StartUp(registry, specs, LoadOptions())
    done = threading.Event()
    start_up.start(done.set)
    assert done.wait(PATIENCE_S)
    return start_up


def test_load_publishes_under_the_given_name(script: str) -> None:
    registry = Registry()
    entry = load_spec(registry, ModelSpec(script, "a"), LoadOptions())
    assert entry.ready and registry.snapshot() == [entry] and entry.created > 1_700_000_000
    registry.check_integrity()


TINY = str(model_path("tiny-llama-k.Q4_K_M"))
SMALL = LoadOptions(ctx=128, threads=1)


def on_dies(*sizes: int) -> Registry:
    return Registry(dies=DieManager(virtual_dies(sizes)))


@pytest.mark.parametrize("point", ["admit", "bind", "load", "upload", "state", "publish"])
@pytest.mark.parametrize("dies", [None, (1,), (0, 1), ()])
def test_a_load_that_fails_anywhere_leaves_nothing_and_may_be_tried_again_M204(
    point: str, dies: tuple[int, ...] | None
) -> None:
    registry = on_dies(1 << 30, 1 << 30)
    before = registry.dies.snapshot()
    seams.arm(point)
    with pytest.raises(seams.InjectedFailure):
        load_spec(registry, ModelSpec(TINY, "a", dies), SMALL)
    assert registry.all_entries() == [] and not registry.upload_lock.locked()
    assert registry.dies.snapshot() == before
    registry.check_integrity()
    entry = load_spec(registry, ModelSpec(TINY, "a", dies), SMALL)
    assert entry.ready and (dies is None or entry.dies == dies)
    registry.check_integrity()
    loading.unload(registry, "a")
    assert registry.dies.snapshot() == before


@pytest.mark.parametrize("point", ["state", "publish"])
def test_a_failed_load_gives_its_memory_back_M204(point: str) -> None:
    """Of 64 MiB of conversations, which the load has touched before it fails."""
    registry = on_dies(1 << 30)
    kept = load_spec(registry, ModelSpec(TINY, "warm-up", ()), SMALL)
    process = psutil.Process()
    new_state = load.Model.new_state

    def touched(self: Any, n_slots: int = 1) -> Any:
        state = new_state(self, n_slots)
        ballast = bytearray(64 << 20)
        ballast[::4096] = b"x" * len(ballast[::4096])
        self.ballast = ballast
        return state

    before = process.memory_info().rss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load.Model, "new_state", touched)
        seams.arm(point)
        with pytest.raises(seams.InjectedFailure):
            load_spec(registry, ModelSpec(TINY, "a"), SMALL)
    assert process.memory_info().rss < before + (16 << 20)
    assert kept.ready


def test_a_cache_that_can_not_be_made_leaves_a_model_that_serves_M062_M132() -> None:
    registry = Registry()
    seams.arm("cache")
    entry = load_spec(registry, ModelSpec(TINY, "a"), SMALL)
    assert entry.ready and entry.prefix_cache is None and entry.pc_lock is None
    assert entry.seat([1, 2], "s", ()).reused == 0


def test_a_load_is_charged_to_its_dies_and_given_back_M058_M143() -> None:
    need = footprint(TINY, ctx=128, threads=1)
    registry = on_dies(1 << 30, 1 << 30)
    entry = load_spec(registry, ModelSpec(TINY, "a", (1,)), SMALL)
    first, second = registry.dies.snapshot()
    assert (first.model, second.model) == (None, "a")
    assert second.charged_bytes == need.total_bytes == entry.vram_bytes
    assert entry.prefix_cache is not None
    loading.unload(registry, "a")
    assert registry.dies.snapshot()[1].free_bytes == 1 << 30


def test_a_plan_is_split_over_dies_that_are_too_small_for_all_of_it_M226() -> None:
    need = footprint(TINY, ctx=128, threads=1)
    room = need.total_bytes * 7 // 10
    registry = on_dies(room, room, room)
    entry = load_spec(registry, ModelSpec(TINY, "a"), SMALL)
    assert entry.dies == (0, 1)
    charged = [info.charged_bytes for info in registry.dies.snapshot()]
    assert need.total_bytes <= sum(charged) <= need.total_bytes + 2 and all(charged[:2]) and charged[2] == 0
    assert entry.model is not None and list(entry.model.generate([1, 2, 3], max_tokens=2, temperature=0))
    with pytest.raises(PantheonError) as fault:
        load_spec(registry, ModelSpec(TINY, "b"), SMALL)
    assert fault.value.status == 507
    with pytest.raises(PantheonError) as fault:
        load_spec(registry, ModelSpec(TINY, "b", (1,)), SMALL)
    assert (fault.value.status, fault.value.code) == (409, "die_taken")
    registry.check_integrity()


def test_what_does_not_fit_says_which_context_would_X31() -> None:
    need = footprint(TINY, ctx=256, threads=1)
    registry = on_dies(need.total_bytes)
    with pytest.raises(PantheonError) as fault:
        load_spec(registry, ModelSpec(TINY, "a", ctx=1024), SMALL)
    assert (fault.value.status, fault.value.code) == (507, "die_full")
    largest = fault.value.extra["largest_ctx"]
    assert 128 < largest < 300
    load_spec(registry, ModelSpec(TINY, "a", ctx=largest), SMALL)


def test_idle_conversations_get_what_is_left_of_the_die() -> None:
    need = footprint(TINY, ctx=128, threads=1)
    registry = on_dies(need.total_bytes + 50 * need.token_bytes)
    entry = load_spec(registry, ModelSpec(TINY, "a"), SMALL)
    cache = entry.prefix_cache
    assert cache is not None
    for ids in (range(60), range(100, 160), range(200, 220)):
        warm = cache.begin(list(ids))
        warm.held[:] = ids
        warm.end()
    # one conversation runs, and 60 tokens of another are more than may lie idle beside it
    assert cache.tokens() == 20 and cache.used_bytes() == 20 * need.token_bytes


def test_freed_in_the_order_of_the_spec_M069(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = on_dies(1 << 30)
    entry = load_spec(registry, ModelSpec(TINY, "a"), SMALL)
    seen: list[str] = []
    cache, model = entry.prefix_cache, entry.model
    assert cache is not None and model is not None

    def note(what: str, then: Any) -> Any:
        def call(*args: Any) -> Any:
            seen.append(f"{what}:{'state' if entry.state is not None else '-'}")
            return then(*args)

        return call

    monkeypatch.setattr(cache, "close", note("cache", cache.close))
    monkeypatch.setattr(registry.dies, "unbind", note("binding", registry.dies.unbind))
    monkeypatch.setattr(model, "close", note("model", model.close))
    loading.unload(registry, "a")
    assert seen == ["cache:state", "binding:state", "model:-"]
    assert (entry.model, entry.state, entry.prefix_cache, entry.used) == (None, None, None, False)


def test_a_part_that_can_not_be_freed_keeps_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = on_dies(1 << 30)
    entry = load_spec(registry, ModelSpec(TINY, "a"), SMALL)
    monkeypatch.setattr(entry.prefix_cache, "close", lambda: 1 / 0)
    loading.unload(registry, "a")
    assert registry.dies.snapshot()[0].model is None and entry.model is None


def test_ten_loads_of_one_name_at_once_are_one_load_K11_K12(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = on_dies(*[1 << 30] * 4)
    together, loads, refused = threading.Barrier(10), [], []

    def counted(path: str, **options: Any) -> Any:
        loads.append(path)
        return load.load_model(path, **options)

    def one() -> None:
        together.wait(PATIENCE_S)
        try:
            load_spec(registry, ModelSpec(TINY, "a"), SMALL)
        except PantheonError as fault:
            refused.append(fault.status)

    monkeypatch.setattr(loading, "load_model", counted)
    threads = [threading.Thread(target=one) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(loads) == 1 and refused == [409] * 9
    assert [info.model for info in registry.dies.snapshot()].count("a") == 1
    registry.check_integrity()


def test_loads_side_by_side_never_share_a_die_M242() -> None:
    registry = on_dies(*[1 << 30] * 3)
    faults: list[int] = []

    def one(name: str) -> None:
        try:
            load_spec(registry, ModelSpec(TINY, name), SMALL)
        except PantheonError as fault:
            faults.append(fault.status)

    threads = [threading.Thread(target=one, args=(name,)) for name in "abcde"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert faults == [507, 507] and registry.count() == 3
    registry.check_integrity()


def test_start_up_holds_the_dies_that_are_named_M003() -> None:
    registry = on_dies(*[1 << 30] * 3)
    specs = [ModelSpec(TINY, "auto"), ModelSpec(TINY, "w", (0,)), ModelSpec(TINY, "w", (2,))]
    start_up = StartUp(registry, specs, SMALL)
    assert [info.model for info in registry.dies.snapshot()] == ["w", None, "w"]
    done = threading.Event()
    start_up.start(done.set)
    assert done.wait(PATIENCE_S) and start_up.failure is None
    assert [info.model for info in registry.dies.snapshot()] == ["w", "auto", "w"]
    assert registry.count() == 2
    with pytest.raises(PantheonError) as fault:
        StartUp(registry, [ModelSpec(TINY, "x", (7,))], SMALL)
    assert fault.value.status == 400


def test_a_state_that_does_not_fit_is_507(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, n_slots: int = 1) -> None:
        raise MemoryError

    registry = Registry()
    monkeypatch.setattr("pantheon.engine.model.Model.new_state", full)
    with pytest.raises(PantheonError) as fault:
        load_spec(registry, ModelSpec(script, "a"), LoadOptions())
    assert (fault.value.status, fault.value.code) == (507, "out_of_memory")
    assert registry.all_entries() == []


def test_missing_file_is_404(tmp_path: Path) -> None:
    with pytest.raises(PantheonError) as fault:
        load_spec(Registry(), ModelSpec(str(tmp_path / "nope.gguf"), "a"), LoadOptions())
    assert fault.value.status == 404 and "nope.gguf" in fault.value.message


def test_start_up_reserves_all_names_first(script: str) -> None:
    registry = Registry()
    start_up = StartUp(registry, [ModelSpec(script, "a"), ModelSpec(script, "b")], LoadOptions())
    assert [item["name"] for item in registry.loading()] == ["a", "b"]
    assert not start_up.running
    with pytest.raises(PantheonError):
        StartUp(registry, [ModelSpec(script, "a")], LoadOptions())


def test_start_up_loads_all_in_order_M002(script: str) -> None:
    registry = Registry()
    start_up = start(registry, *(ModelSpec(script, name) for name in "abc"))
    assert start_up.failure is None
    assert [entry.name for entry in registry.snapshot()] == ["a", "b", "c"]


def test_start_up_tells_why_it_failed(script: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    registry = Registry()
    start_up = start(registry, ModelSpec(script, "a"), ModelSpec(str(bad), "b"), ModelSpec(script, "c"))
    assert start_up.failure is not None and "bad.gguf" in start_up.failure
    assert registry.loading() == [{"name": "c", "progress": 0.0, "stage": "waiting"}]


def test_a_fault_of_ours_is_told_in_one_line(script: str) -> None:
    seams.arm("load")
    start_up = start(Registry(), ModelSpec(script, "a"))
    assert start_up.failure is not None and "injected failure at load" in start_up.failure


def test_progress_is_seen_while_it_loads_X22(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    seen: list[Any] = []
    reports: list[Any] = []

    def slow(path: str, *, progress: Any, **options: Any) -> Any:
        progress("weights", 1, 4)
        seen.append(registry.loading())
        return load.load_model(path)

    monkeypatch.setattr(loading, "load_model", slow)
    load_spec(registry, ModelSpec(script, "a"), LoadOptions(), lambda *report: reports.append(report))
    assert seen == [[{"name": "a", "progress": 0.25, "stage": "weights"}]]
    assert reports == [("a", "weights", 1, 4)]


def test_only_one_load_at_a_time_M060(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    inside, most = [0], [0]

    def counted(path: str, **options: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        assert registry.upload_lock.locked()
        # readers of the table are not held up by a load
        registry.snapshot()
        inside[0] -= 1
        return load.load_model(path)

    monkeypatch.setattr(loading, "load_model", counted)
    specs = [ModelSpec(script, name) for name in "abcd"]
    threads = [threading.Thread(target=load_spec, args=(registry, spec, LoadOptions())) for spec in specs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert most[0] == 1 and registry.count() == 4


def test_a_load_is_admitted_against_what_those_before_it_took_M198(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are admitted at once, and the first takes the memory: the second is refused, not loaded on top."""
    host, reserve = FakeHost(tmp_path), 1 << 30
    watch = MemWatch(host.root, 3600, thresholds=Thresholds(host_reserve_bytes=reserve))
    watch.start()
    need = decide_load(TINY, footprint(TINY, ctx=128, threads=1), watch.state).decision.need_bytes
    host.available(reserve + need + (1 << 20))
    watch.poll_once()
    registry, admitted, faults = Registry(), threading.Barrier(2), list[PantheonError]()
    really, upload = loading.place, loading._upload

    def place(*args: Any) -> Any:
        found = really(*args)
        admitted.wait(PATIENCE_S)
        return found

    def uploaded(*args: Any) -> Any:
        made = upload(*args)
        host.available(reserve + (1 << 20))
        return made

    def run(name: str) -> None:
        try:
            load_spec(registry, ModelSpec(TINY, name), LoadOptions(ctx=128, threads=1, watch=watch))
        except PantheonError as fault:
            faults.append(fault)

    monkeypatch.setattr(loading, "place", place)
    monkeypatch.setattr(loading, "_upload", uploaded)
    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    finally:
        watch.stop()
    assert [fault.status for fault in faults] == [507] and registry.count() == 1
    assert len(registry.all_entries()) == 1, "nothing of the refused one is left"


@pytest.mark.parametrize(
    ("path", "name"),
    [("/a/b/Model-Q4.gguf", "Model-Q4"), ("script:/x/fake.json", "fake"), ("m.v1.gguf", "m.v1")],
)
def test_default_name(path: str, name: str) -> None:
    assert default_name(path) == name
