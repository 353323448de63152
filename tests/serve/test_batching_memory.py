"""Memory and several users: levels, ceilings and formats under load, promises, what dies are charged, locks.

Spec: M134-M140, M208, M214, M216, M219, M220, M222, X15, X17, K17.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from pantheon import seams
from pantheon.accel.die import virtual_dies
from pantheon.accel.die_manager import DieManager
from pantheon.engine import admit
from pantheon.engine.footprint import footprint
from pantheon.errors import PantheonError, Unavailable
from pantheon.mem import ledger
from pantheon.mem.costs import REPLY_TOKENS
from pantheon.mem.memwatch import MemWatch
from pantheon.plan.state_spec import KVType
from pantheon.sched import shared
from pantheon.sched.shared import SchedConfig
from pantheon.sched.slot import Actor, Phase, Slot
from pantheon.serve import loading, memory, registry
from pantheon.serve.context import App
from pantheon.serve.loading import LoadOptions, ModelSpec, load_spec
from pantheon.serve.registry import Registry
from tests.fakes import FakeClock
from tests.golden_data import model_path
from tests.mem.fake_host import FakeHost
from tests.serve.api_server import serving
from tests.serve.batch_server import Later, Valve, batching
from tests.serve.test_memory import POLL_S, RESERVE, TOTAL, Squeezed

pytestmark = pytest.mark.usefixtures("kernels")
USERS = 4
BATCH = SchedConfig(users=USERS, grace_s=0.1)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Squeezed]:
    """A server of four users whose host can be squeezed."""
    host, clock = FakeHost(tmp_path, TOTAL), FakeClock()
    watch = MemWatch(host.root, 3600, clock)
    watch.start()
    try:
        with serving(App(load_options=LoadOptions(threads=1, watch=watch, batch=BATCH), clock=clock)) as api:
            yield Squeezed(api, host, watch, clock)
    finally:
        watch.stop()


def test_levels_that_change_under_load_fail_nobody_X17_M208_M214_M220_K17(box: Squeezed) -> None:
    entry = box.load()
    assert entry.sched is not None and entry.sched.load().slots == USERS
    box.at("TIGHT")
    assert entry.sched.load().slots == USERS // 2
    statuses: list[int] = []
    over = threading.Event()

    def user(i: int) -> None:
        while not over.is_set():
            answer = box.api.chat(max_tokens=3, messages=[{"role": "user", "content": f"{i} {len(statuses)}"}])
            statuses.append(answer.status)

    users = [threading.Thread(target=user, args=(i,)) for i in range(6)]
    for thread in users:
        thread.start()
    for level in ("OK", "WATCH", "TIGHT", "CRITICAL", "TIGHT", "OK", "CRITICAL", "OK"):
        box.at(level)
        threading.Event().wait(0.05)
    over.set()
    for thread in users:
        thread.join(20)
    assert set(statuses) <= {200, 503} and statuses.count(200) > 0
    box.at("OK", looks=4)
    assert POLL_S * 4 <= 1 and entry.sched.load().slots == USERS, "all slots are back within a second"
    assert box.api.chat(max_tokens=1).status == 200


def test_the_kv_format_changes_when_nobody_sits_in_the_state_X15_M216(box: Squeezed) -> None:
    entry = box.load()
    valve = Valve(entry)
    first = Later(lambda: box.api.chat(max_tokens=4))
    assert entry.sched is not None
    while not valve.begun:
        threading.Event().wait(0.01)
    box.at("WATCH")
    before = entry.state
    second = Later(lambda: box.api.chat(max_tokens=1, messages=[{"role": "user", "content": "another one"}]))
    while entry.sched.load().active < 2:
        threading.Event().wait(0.01)
    valve.open()
    assert first.get().status == second.get().status == 200
    assert entry.state is before and entry.state.kv_type is KVType.F16, "somebody sat in it"
    box.api.whole(max_tokens=1, messages=[{"role": "user", "content": "a third"}])
    assert entry.state is not before and entry.state.kv_type is KVType.Q8_0
    entry.sched.check_integrity()


def test_what_a_running_turn_was_promised_is_not_free(box: Squeezed) -> None:
    entry, keeper = box.load(), box.api.app.memory
    assert entry.state is not None
    box.api.whole(max_tokens=1)  # the scratch is there
    costs = keeper.gate(entry).costs(entry.state)
    need = costs.bytes_for(100, min(REPLY_TOKENS, 300))
    rows = 400 * costs.kv_bytes_per_token
    box.host.available(RESERVE + need + rows // 2)
    box.watch.poll_once()
    written = [0]
    one = keeper.promise(entry, 100, 300, 0, lambda: written[0])
    with pytest.raises(Unavailable) as refused:
        keeper.promise(entry, 100, 300, 0, lambda: 0)
    assert refused.value.code == "memory_critical" and refused.value.extra["have_bytes"] < rows
    assert refused.value.retry_after is not None and 1 <= refused.value.retry_after <= 60
    keeper.settled(one)
    keeper.settled(one)
    with pytest.raises(Unavailable):
        keeper.promise(entry, 100, 300, 0, lambda: 0)
    box.watch.poll_once()
    keeper.settled(keeper.promise(entry, 100, 300, 0, lambda: 0))


def test_a_second_prompt_that_is_longer_than_the_first_is_asked_for_as_well_M201(box: Squeezed) -> None:
    entry, keeper = box.load(), box.api.app.memory
    assert entry.state is not None
    box.api.whole(max_tokens=1)  # the scratch is there
    costs = keeper.gate(entry).costs(entry.state)
    box.host.available(RESERVE + costs.bytes_for(64, 1))
    box.watch.poll_once()
    short, long = "a", "long " * 80
    for prompts, status in (([short, short], 200), ([short, long], 503), ([long, short], 503)):
        answer = box.api.post("/v1/completions", {"prompt": prompts, "max_tokens": 1, "n": 2})
        assert answer.status == status, answer.body
    assert answer.json()["error"]["code"] == "memory_critical"
    assert box.api.post("/v1/completions", {"prompt": short, "max_tokens": 1}).status == 200, "nothing stays promised"


def test_dies_are_charged_a_conversation_of_each_user() -> None:
    path = str(model_path("tiny-llama.Q8_0"))
    one, four = (footprint(path, ctx=256, threads=1, users=n) for n in (1, 4))
    budget = 1 << 30
    kv = one.parts["kv"]
    assert four.parts["kv"] == kv and four.need([budget])[0] - one.need([budget])[0] == 3 * kv  # type: ignore[index]
    size = one.need([budget])[0] + kv  # type: ignore[index]
    options = LoadOptions(ctx=256, threads=1, batch=BATCH)
    tight = Registry(dies=DieManager(virtual_dies((size,))))
    with pytest.raises(PantheonError) as full:
        load_spec(tight, ModelSpec(path, "m", dies=(0,)), options)
    assert full.value.status == 507 and 2 <= full.value.extra["largest_ctx"] < 256
    fits = full.value.extra["largest_ctx"]
    entry = load_spec(tight, ModelSpec(path, "m", dies=(0,), ctx=fits), options)
    assert entry.prefix_cache is not None and entry.prefix_cache.extra_bytes() == 0
    loading.unload(tight, "m")
    load_spec(tight, ModelSpec(path, "m", dies=(0,)), replace(options, batch=None))
    loading.unload(tight, "m")
    plan = admit.plan_load(path, ctx=256, threads=1, users=4)
    assert plan.as_dict()["users"] == 4


def test_a_scheduler_that_can_not_be_made_leaves_nothing_behind_M204(tmp_path: Path) -> None:
    script = tmp_path / "s.json"
    script.write_text(json.dumps({"pieces": ["x"]}))
    table = Registry()
    for point in ("scheduler", "publish"):
        seams.arm(point)
        with pytest.raises(seams.InjectedFailure, match=point):
            load_spec(table, ModelSpec(f"script:{script}", "m"), LoadOptions(batch=BATCH))
        assert table.all_entries() == []
    seams.arm("")
    assert not [thread for thread in threading.enumerate() if thread.name == "pantheon-driver-m"]


def test_nothing_that_a_forward_reads_is_ever_resized_M216_M217_M218_M221(box: Squeezed) -> None:
    """One state, one buffer of logits, whoever comes and goes, and every forward under the turn."""
    entry = box.load()
    assert entry.sched is not None and entry.model is not None
    common: Any = entry.sched._shared
    runner: Any = entry.model.runner
    seen: set[tuple[int, int, bool]] = set()
    forward = runner.forward

    def noted(state: Any, columns: Any) -> Any:
        seen.add((id(state), id(common._rows), common.turnstile.mine))
        return forward(state, columns)

    runner.forward = noted
    for users in (1, USERS, 2, USERS):
        laters = [
            Later(lambda i=i: box.api.chat(max_tokens=2 + i, messages=[{"role": "user", "content": f"{i}"}]))
            for i in range(users)
        ]
        assert {later.get().status for later in laters} == {200}
    assert seen == {(id(entry.state), id(common._rows), True)}


def test_a_slot_goes_through_its_phases_in_order_M087_M115(monkeypatch: pytest.MonkeyPatch) -> None:
    trace: list[str] = []
    move = Slot.move

    def noted(slot: Slot, to: Phase, who: Actor) -> None:
        trace.append(f"{to.value} by {who.value}")
        move(slot, to, who)

    monkeypatch.setattr(Slot, "move", noted)
    for mixed, reader in ((True, "driver"), (False, "owner")):
        trace.clear()
        with batching(2, pieces=("a", "b"), mixed=mixed) as b:
            assert b.api.chat(messages=[{"role": "user", "content": "x" * 300}]).status == 200
        assert trace == ["prefill by owner", f"bound by {reader}", "decode by driver", "idle by owner"]


def test_a_second_forward_while_one_is_in_flight_is_a_bug_of_ours_M219_M222() -> None:
    with batching(2) as b:
        common: Any = b.sched._shared
        with common.turnstile.turn():
            common._in_flight += 1
            with pytest.raises(AssertionError, match="two forwards"):
                common.forward(None)
            common._in_flight -= 1
        with pytest.raises(AssertionError, match="without the turn"):
            common.forward(None)


# ---- locks ----------------------------------------------------------------------------------------------------------


class Watched:
    """A lock that notes which others its thread holds when it is taken."""

    held = threading.local()
    edges: ClassVar[set[tuple[str, str]]] = set()

    def __init__(self, name: str, lock: Any) -> None:
        self.name, self._lock = name, lock

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        mine: list[str] = self.held.__dict__.setdefault("names", [])
        taken: bool = self._lock.acquire(*args, **kwargs)
        if taken:
            Watched.edges |= {(other, self.name) for other in mine}
            mine.append(self.name)
        return taken

    def release(self) -> None:
        self.held.names.remove(self.name)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


def watched(name: str) -> SimpleNamespace:
    """`threading` for a module whose locks are to be watched."""
    return SimpleNamespace(**{**vars(threading), "Lock": lambda: Watched(name, threading.Lock())})


def test_locks_are_taken_in_the_order_of_the_table_M134_M135_M136_M137_M138_M139_M140(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Several users, an unload and looks of the watcher beside them: who held what when it took what."""
    order = ["registry", "cache", "mu", "ledger"]
    from pantheon.engine import prefix_cache

    for name, module in (
        ("registry", registry), ("cache", prefix_cache), ("mu", shared), ("ledger", ledger), ("keeper", memory)
    ):  # fmt: skip
        monkeypatch.setattr(module, "threading", watched(name))
    Watched.edges = set()
    host = FakeHost(tmp_path, TOTAL)
    watch = MemWatch(host.root, 0.02)
    watch.start()
    try:
        with serving(App(load_options=LoadOptions(threads=1, ctx=256, watch=watch, batch=BATCH))) as api:
            for name in ("a", "b"):
                load_spec(api.app.registry, ModelSpec(str(model_path("tiny-llama.Q8_0")), name), api.app.load_options)

            def one(i: int) -> Any:
                messages = [{"role": "user", "content": f"{i % 3} and more"}]
                return api.chat(model="ab"[i % 2], max_tokens=4, messages=messages, session_id=str(i % 3))

            laters = [Later(lambda i=i: one(i)) for i in range(24)]
            assert {later.get().status for later in laters} <= {200, 503}
            loading.unload(api.app.registry, "b")
    finally:
        watch.stop()
    assert ("registry", "mu") in Watched.edges or ("registry", "cache") in Watched.edges
    # an upload_lock is the registry's as well
    backwards = {
        (a, b) for a, b in Watched.edges if a != b and a in order and b in order and order.index(a) > order.index(b)
    }
    assert not backwards, backwards
    assert not {edge for edge in Watched.edges if edge[0] == "mu"}, "mu is the last"
