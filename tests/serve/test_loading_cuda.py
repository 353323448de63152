"""Loads onto CUDA dies: where, how much, what is given back, what turns cost; the device itself is played by the CPU
[M006, M058, M190, M195, M197, M204, M226, M242, X07, X31]."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pantheon import seams
from pantheon.accel.cpu.executor import CpuExecutor
from pantheon.accel.cuda import faults
from pantheon.accel.cuda.executor import CudaExecutor
from pantheon.accel.cuda.parts import cut
from pantheon.accel.die import virtual_dies
from pantheon.accel.die_manager import DieManager
from pantheon.engine.footprint import footprint
from pantheon.engine.prefix_cache import SLOTS
from pantheon.errors import BadRequest, PantheonError
from pantheon.mem.ladder import PERSIST_S
from pantheon.mem.mem_state import Level
from pantheon.mem.memwatch import MemWatch
from pantheon.sched.shared import SchedConfig
from pantheon.serve import loading
from pantheon.serve.context import App
from pantheon.serve.dry_run import plan_spec
from pantheon.serve.entry import Entry
from pantheon.serve.loading import LoadOptions, ModelSpec, load_spec
from pantheon.serve.memory import MemoryKeeper
from pantheon.serve.registry import Registry
from tests.fakes import FakeClock
from tests.golden_data import DATA, model_path
from tests.mem.fake_host import GIB, FakeHost
from tests.serve.api_server import serving

pytestmark = pytest.mark.usefixtures("kernels")
TINY = str(model_path("tiny-llama-k.Q4_K_M"))
OPTIONS = LoadOptions(ctx=128, threads=1)
NEED = footprint(TINY, ctx=128, executor="cuda")


class Device:
    """What was asked of the executor, and what it answers."""

    def __init__(self) -> None:
        self.loads: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.closed = 0
        self.at_load: Callable[[], None] = lambda: None
        self.at_state: Callable[[int], None] = lambda n_slots: None
        self.at_forward: Callable[[], None] = lambda: None
        self.at_close: Callable[[], None] = lambda: None


class OnDevice:
    """A CPU runner with the face of a cuda one."""

    def __init__(self, runner: Any, device: Device) -> None:
        self._runner, self._device = runner, device

    def __getattr__(self, name: str) -> Any:
        if name == "variant":
            raise AttributeError(name)
        return getattr(self._runner, name)

    def forward(self, *args: Any) -> Any:
        self._device.at_forward()
        return self._runner.forward(*args)

    def new_state(self, n_slots: int, n_ctx: int) -> Any:
        self._device.at_state(n_slots)
        made = self._runner.new_state(n_slots, n_ctx)
        made.close = self._close
        return made

    def _close(self) -> None:
        self._device.at_close()
        self._device.closed += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()

    def load(self: CudaExecutor, *args: Any, **options: Any) -> OnDevice:
        found.loads.append((self.dies, self.cuts))
        found.at_load()
        return OnDevice(CpuExecutor(1).load(*args, **options), found)

    monkeypatch.setattr(CudaExecutor, "load", load)
    return found


def on_dies(*sizes: int) -> Registry:
    return Registry(dies=DieManager(virtual_dies(sizes, simulated=True)))


def charged(registry: Registry) -> list[int]:
    return [info.charged_bytes for info in registry.dies.snapshot()]


def test_a_load_takes_a_cuda_die_and_is_charged_every_slot_M058(device: Device) -> None:
    registry = on_dies(1 << 30, 1 << 30)
    entry = load_spec(registry, ModelSpec(TINY, "a"), OPTIONS)
    assert device.loads == [((0,), ())] and entry.dies == (0,)
    slots = SLOTS * NEED.parts["kv"]
    assert entry.state is not None and entry.state.n_slots == SLOTS
    assert charged(registry) == [NEED.total_bytes - NEED.parts["kv"] + slots, 0] == [entry.vram_bytes, 0]
    load_spec(registry, ModelSpec(TINY, "a", (1,)), OPTIONS)
    assert device.loads[1] == ((1,), ())
    registry.check_integrity()
    loading.unload(registry, "a")
    assert charged(registry) == [0, 0] and device.closed == 2


@pytest.mark.parametrize(("room", "users", "slots"), [(0, 1, 1), (1.5, 1, 2), (3, 4, 7), (50, 4, 11)])
def test_a_state_has_a_slot_for_each_user_and_more_where_the_die_has_room(
    room: float, users: int, slots: int, device: Device
) -> None:
    batch = SchedConfig(users=users) if users > 1 else None
    kv = NEED.parts["kv"]
    size = NEED.total_bytes + int((users - 1 + room) * kv)
    registry = on_dies(size)
    entry = load_spec(registry, ModelSpec(TINY, "a"), LoadOptions(ctx=128, threads=1, batch=batch))
    assert entry.state is not None and entry.state.n_slots == slots
    assert charged(registry) == [NEED.total_bytes + (slots - 1) * kv] and charged(registry)[0] <= size
    loading.unload(registry, "a")


def test_a_plan_is_split_by_what_its_parts_take_M197_M226(device: Device) -> None:
    room = NEED.total_bytes - NEED.parts["weights"] // 4
    registry = on_dies(room, room, room)
    entry = load_spec(registry, ModelSpec(TINY, "a"), OPTIONS)
    ((dies, cuts),) = device.loads
    assert dies == entry.dies == (0, 1) and len(cuts) == 1 and entry.model is not None
    parts = predicted(TINY, cuts)
    more = entry.state.n_slots - 1  # type: ignore[union-attr]
    assert charged(registry)[:2] == [sum(part.values()) + more * part["kv"] for part in parts]


def predicted(path: str, cuts: tuple[int, ...]) -> list[dict[str, int]]:
    found = footprint(path, ctx=128, executor="cuda")
    assert found.predict is not None
    return found.predict(128, cuts)


@pytest.mark.parametrize("path", sorted((DATA / "models").glob("*.gguf")), ids=lambda path: path.stem)
@pytest.mark.parametrize("n", [2, 3])
def test_every_family_can_be_cut_and_no_part_is_over_its_budget_M226(path: Path, n: int) -> None:
    need = footprint(str(path), ctx=64, executor="cuda")
    whole = sum(share.nbytes for share in need.shares([1 << 40]) or ())
    assert whole == need.total_bytes and need.plan is not None
    # even where one die can hold little more than the scratch that each needs
    for budgets in ([whole] * n, [whole, *[whole * 8 // 10] * (n - 1)], [whole * 6 // 10] * n):
        shares = need.shares(budgets)
        if shares is not None:
            assert len(cut(need.plan, need.cuts(shares))) == n
            assert all(share.nbytes <= budget for share, budget in zip(shares, budgets, strict=True))
    assert need.shares([whole] * n) is not None


def test_what_fits_no_cuda_die_is_refused_and_does_not_go_to_the_cpu(device: Device) -> None:
    registry = on_dies(NEED.total_bytes // 3)
    with pytest.raises(PantheonError) as fault:
        load_spec(registry, ModelSpec(TINY, "a"), OPTIONS)
    assert (fault.value.status, fault.value.code) == (507, "die_full")
    assert fault.value.extra["need_bytes"] == NEED.total_bytes
    assert not device.loads and charged(registry) == [0] and registry.all_entries() == []


def test_the_largest_context_that_fits_is_told_X31(device: Device) -> None:
    registry = on_dies(footprint(TINY, ctx=256, executor="cuda").total_bytes)
    with pytest.raises(PantheonError) as fault:
        load_spec(registry, ModelSpec(TINY, "a", ctx=4096), OPTIONS)
    largest = fault.value.extra["largest_ctx"]
    assert 256 <= largest < 400
    load_spec(registry, ModelSpec(TINY, "a", ctx=largest), OPTIONS)


def test_the_cpu_can_be_asked_for_beside_cuda_dies_M006(device: Device) -> None:
    registry = on_dies(1 << 30)
    entry = load_spec(registry, ModelSpec(TINY, "a", ()), OPTIONS)
    assert entry.dies == () and not device.loads and charged(registry) == [0]
    with pytest.raises(BadRequest, match="--executor cuda"):
        load_spec(registry, ModelSpec(TINY, "b", ()), LoadOptions(ctx=128, executor="cuda"))


@pytest.mark.parametrize("point", ["admit", "bind", "load", "upload", "state", "publish"])
def test_a_load_that_fails_anywhere_gives_its_dies_back_M204(point: str, device: Device) -> None:
    registry = on_dies(1 << 30, 1 << 30)
    before = registry.dies.snapshot()
    seams.arm(point)
    with pytest.raises(seams.InjectedFailure):
        load_spec(registry, ModelSpec(TINY, "a"), OPTIONS)
    assert registry.dies.snapshot() == before and registry.all_entries() == []
    assert device.closed == (point == "publish")
    load_spec(registry, ModelSpec(TINY, "a"), OPTIONS)


def test_a_full_device_is_507_and_named_whatever_was_predicted(device: Device) -> None:
    registry = on_dies(1 << 30, 1 << 30)

    def full(*args: Any) -> None:
        raise MemoryError("CUDA_ERROR_OUT_OF_MEMORY")

    device.at_load = full
    with pytest.raises(PantheonError, match="die 1: out of memory") as fault:
        load_spec(registry, ModelSpec(TINY, "a", (1,)), OPTIONS)
    assert (fault.value.status, fault.value.code) == (507, "out_of_memory") and charged(registry) == [0, 0]
    device.at_load, device.at_state = lambda: None, full
    with pytest.raises(PantheonError, match="die 1: out of memory") as fault:
        load_spec(registry, ModelSpec(TINY, "a", (1,)), OPTIONS)
    assert fault.value.status == 507 and charged(registry) == [0, 0]
    asked: list[int] = []

    def tight(n_slots: int) -> None:
        asked.append(n_slots)
        if n_slots > 1:
            full()

    device.at_state = tight
    entry = load_spec(registry, ModelSpec(TINY, "a", (1,)), OPTIONS)
    assert asked == [SLOTS, 2, 1] and charged(registry) == [0, NEED.total_bytes] and entry.ready


def test_a_plan_says_what_would_be_taken_where(device: Device) -> None:
    registry = on_dies(1 << 30)
    state = MemWatch("/", 3600).poll_once()
    plan = plan_spec(registry, ModelSpec(TINY, "a"), OPTIONS, state)
    told = plan.as_dict()
    assert told["fits"] and told["dies"] == [0] and told["executor"] == "cuda"
    assert told["need_bytes"] == NEED.total_bytes and told["bound_by"] == "die 0"
    # of the host only names and the load's own burst are asked for
    assert plan.costs.bytes_for(1 << 20) == told["bytes"]["vocab"] < NEED.total_bytes


# ---- turns ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(tmp_path: Path) -> Any:
    host = FakeHost(tmp_path, 8 * GIB)
    watch = MemWatch(host.root, 3600)
    watch.start()
    yield host, watch
    watch.stop()


def warm(entry: Entry, ids: list[int]) -> None:
    cache = entry.prefix_cache
    assert cache is not None
    place = cache.begin(ids)
    place.held[:] = ids
    place.end()


def test_turns_on_a_die_cost_the_host_nothing_M190_M195(device: Device, watched: Any) -> None:
    host, watch = watched
    registry = on_dies(1 << 30)
    entry = load_spec(registry, ModelSpec(TINY, "a"), LoadOptions(ctx=128, threads=1, watch=watch))
    clock = FakeClock()
    keeper = MemoryKeeper(registry, watch, clock)
    gate = keeper.gate(entry)
    assert gate.on_die and gate.offered == ("2", "3")
    reserve = watch.state.host.reserve_bytes
    host.available(reserve * 11 // 10)
    watch.poll_once()
    assert gate.level >= Level.TIGHT
    assert keeper.admit(entry, 100, 20).need_bytes == 0
    clock.advance(PERSIST_S)
    assert keeper.fit(entry, 120, 8) < 120, "a prompt that may be cut is, to the ladder's window"
    host.available(reserve // 2)
    watch.poll_once()
    with pytest.raises(PantheonError) as fault:
        keeper.admit(entry, 10, 2)
    assert (fault.value.status, fault.value.code) == (503, "memory_critical")


def test_idle_conversations_on_a_die_stay_whatever_the_host_lacks(device: Device, watched: Any) -> None:
    host, watch = watched
    registry = on_dies(1 << 30)
    entry = load_spec(registry, ModelSpec(TINY, "a"), LoadOptions(ctx=128, threads=1, watch=watch))
    keeper = MemoryKeeper(registry, watch)
    keeper.gate(entry)
    for first in (0, 100, 200):
        warm(entry, list(range(first, first + 100)))
    cache = entry.prefix_cache
    assert cache is not None and cache.tokens() == 300 and cache.extra_bytes() == 0
    host.available(watch.state.host.reserve_bytes // 2)
    watch.poll_once()
    with pytest.raises(PantheonError):
        keeper.admit(entry, 10, 2)
    assert cache.tokens() == 300


@pytest.mark.parametrize("users", [1, 4])
def test_a_device_that_fails_in_a_forward_is_503_and_named(users: int, device: Device) -> None:
    options = LoadOptions(ctx=128, threads=1, batch=SchedConfig(users=users) if users > 1 else None)
    with serving(App(on_dies(1 << 30), load_options=options)) as api:
        load_spec(api.app.registry, ModelSpec(TINY, "a"), options)

        def lost() -> None:
            with faults.named((0,)):
                raise type("CudaAPIError", (Exception,), {"__module__": "numba.cuda.cudadrv.driver"})("lost")

        device.at_forward = lost
        answer = api.chat(max_tokens=2)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "device_error")
        assert "die 0: the device failed" in answer.json()["error"]["message"]
        device.at_forward = lambda: None
        assert api.chat(max_tokens=2).status == 200


@pytest.mark.parametrize("users", [1, 4])
def test_a_text_that_is_read_takes_memory_of_the_die_in_a_turn_and_gives_it_back(users: int, device: Device) -> None:
    """M217: outside of one it would be put on a stream whose step is being captured."""
    options = LoadOptions(ctx=128, threads=1, batch=SchedConfig(users=users) if users > 1 else None)
    with serving(App(on_dies(1 << 30), load_options=options)) as api:
        entry = load_spec(api.app.registry, ModelSpec(TINY, "a"), options)
        turns: list[bool] = []

        def note(n_slots: int = 0) -> None:
            turns.append(entry.gen_lock.locked() if entry.sched is None else entry.sched._shared.turnstile.mine)

        device.at_state = device.at_close = note
        assert api.post("/v1/embeddings", {"model": "a", "input": "some text"}).status == 200
        assert turns == [True, True] and device.closed == 1

        def full(n_slots: int) -> None:
            raise MemoryError("no room for 8 bytes")

        device.at_state = full
        answer = api.post("/v1/embeddings", {"model": "a", "input": "some text"})
        assert (answer.status, answer.json()["error"]["code"]) == (507, "out_of_memory")
        assert "die 0: out of memory" in answer.json()["error"]["message"]
