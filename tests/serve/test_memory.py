"""A server whose host is squeezed step by step: rungs in order, honest refusals, everything back afterwards.

The host is a folder (`PN_HOST_ROOT`), the clock stands still between looks.
Spec: M047, M102, M200-M203, M205-M215, X14, X15, X17-X21, K06.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from pantheon.mem.memwatch import MemWatch
from pantheon.plan.state_spec import KVType
from pantheon.serve.context import App
from pantheon.serve.loading import LoadOptions, ModelSpec, load_spec, unload
from pantheon.serve.registry import Entry
from tests.fakes import FakeClock
from tests.golden_data import model_path
from tests.mem.fake_host import GIB, FakeHost
from tests.serve.api_server import Api, answer_of, free, serving
from tests.serve.http_client import eventually

POLL_S = 0.25
TOTAL = 80 * GIB
RESERVE = TOTAL * 15 // 100
#: slack above the reserve at which each level begins to hold
SLACK = {"OK": 40 * GIB, "WATCH": RESERVE // 2, "TIGHT": RESERVE // 8, "CRITICAL": -GIB}
MODEL = "tiny-llama.Q8_0"


@dataclass
class Squeezed:
    """A server, its host, and the time between two looks."""

    api: Api
    host: FakeHost
    watch: MemWatch
    clock: FakeClock

    def at(self, level: str, looks: int = 1) -> None:
        """Bring the host to a level and let the watcher look."""
        self.host.available(RESERVE + SLACK[level])
        for _ in range(looks):
            self.clock.advance(POLL_S)
            self.watch.poll_once()

    def load(self, name: str = "m", ctx: int = 512) -> Entry:
        path = model_path(MODEL)
        return load_spec(self.api.app.registry, ModelSpec(str(path), name, ctx=ctx), self.api.app.load_options)

    @property
    def rungs(self) -> list[str]:
        """Those of the first model, from outside."""
        found: list[str] = self.api.get("/admin/memory").json()["ladder"][0]["rungs"]
        return found


@contextmanager
def squeezed(tmp_path: Path) -> Iterator[Squeezed]:
    host, clock = FakeHost(tmp_path, TOTAL), FakeClock()
    watch = MemWatch(host.root, 3600, clock)
    watch.start()
    try:
        with serving(App(load_options=LoadOptions(threads=1, watch=watch), clock=clock)) as api:
            yield Squeezed(api, host, watch, clock)
    finally:
        watch.stop()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Squeezed]:
    with squeezed(tmp_path) as box:
        yield box


# ---- the ladder -------------------------------------------------------------------------------------------------


def test_x17_rungs_engage_in_order_and_everything_is_back_within_a_second(box: Squeezed) -> None:
    """Each within one look of the watcher, the window clamp with the next one; never anything but 200 or 503."""
    box.load()
    box.api.whole(max_tokens=2)
    seen = []
    for level in ("WATCH", "TIGHT", "TIGHT", "CRITICAL"):
        box.at(level)
        seen.append(box.rungs)
        answer = box.api.chat(max_tokens=2)
        assert answer.status == (503 if level == "CRITICAL" else 200), level
    assert seen == [["4a"], ["4a", "2", "4b"], ["4a", "2", "3", "4b"], ["4a", "2", "3", "4b"]]
    box.at("OK", looks=4)
    assert box.rungs == [] and POLL_S * 4 <= 1.0
    row = box.api.get("/admin/memory").json()["ladder"][0]
    assert (row["max_slots"], row["prefill_window"], row["level"]) == (8, 512, "OK")
    assert box.api.chat(max_tokens=2).status == 200


def test_m213_x18_one_line_for_each_transition_whatever_is_asked_meanwhile(
    box: Squeezed, caplog: pytest.LogCaptureFixture
) -> None:
    box.load()
    with caplog.at_level(logging.INFO, "pantheon.mem"):
        for _ in range(6):
            box.at("TIGHT")
            assert box.api.chat(max_tokens=1).status == 200, "M102: TIGHT alone never refuses"
        box.at("OK", looks=6)
    lines = [line for line in caplog.messages if line.startswith("[ladder]")]
    assert lines == [
        "[ladder] TIGHT -> new conversations keep a smaller KV cache, slots 8 -> 4, idle conversations are dropped"
        " model=m",
        "[ladder] TIGHT -> prefill window clamped 512 -> 256 model=m",
        "[ladder] OK -> full capacity again model=m",
    ]


def test_m207_x15_4a_changes_the_format_of_new_conversations_and_ok_changes_it_back(box: Squeezed) -> None:
    entry = box.load()
    before = entry.state.nbytes()
    assert entry.state.kv_type is KVType.F16
    warm = [{"role": "user", "content": "the conversation that was there before"}]
    first = box.api.whole(messages=warm, max_tokens=4)
    box.at("WATCH")
    going_on = [*warm, {"role": "assistant", "content": first["choices"][0]["message"]["content"]}, warm[0]]
    assert box.api.whole(messages=going_on, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert entry.state.kv_type is KVType.F16, "M212: a live one is never converted"
    box.api.whole(max_tokens=1)
    assert entry.state.kv_type is KVType.Q8_0 and entry.state.nbytes() < before
    row = box.api.get("/admin/memory").json()["ladder"][0]
    assert (row["kv_type"], row["kv_configured"]) == ("q8_0", "f16")
    box.at("OK", looks=4)
    box.api.whole(messages=warm, max_tokens=1)
    assert entry.state.kv_type is KVType.F16 and entry.state.nbytes() == before
    entry.prefix_cache.check_integrity()


def test_m210_x14_4b_really_gives_idle_conversations_up(box: Squeezed) -> None:
    entry = box.load()
    dropped: list[int] = []
    real = entry.state.reset
    entry.state.reset = lambda slot: (dropped.append(slot), real(slot))
    for i in range(3):
        box.api.whole(messages=[{"role": "user", "content": f"{i} conversation"}], max_tokens=2)
    assert entry.prefix_cache.tokens() > 0
    dropped.clear()
    box.at("TIGHT")
    assert (entry.prefix_cache.tokens(), entry.prefix_cache.used_bytes()) == (0, 0)
    assert len(dropped) == 3


def test_m214_x17_a_level_that_changes_within_a_turn_fails_nothing(box: Squeezed) -> None:
    """A generation that runs goes on to its end under any pressure."""
    entry = box.load()
    began, go_on = threading.Event(), threading.Event()
    real = entry.model.runner.forward

    def forward(state: object, columns: object) -> object:
        began.set()
        assert go_on.wait(20)
        return real(state, columns)

    entry.model.runner.forward = forward
    sock = box.api.open_chat(max_tokens=8, ignore_eos=True)
    assert began.wait(20)
    for level in ("WATCH", "TIGHT", "CRITICAL", "OK", "CRITICAL"):
        box.at(level)
    go_on.set()
    answer = answer_of(sock)
    assert answer.status == 200 and answer.json()["usage"]["completion_tokens"] == 8
    free(entry)
    assert box.api.chat(max_tokens=1).status == 503
    entry.prefix_cache.check_integrity()


def test_m215_m169_a_ladder_that_is_off_changes_nothing(box: Squeezed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PN_LADDER_DISABLE", "1")
    entry = box.load()
    box.at("TIGHT", looks=3)
    box.api.whole(max_tokens=1)
    row = box.api.get("/admin/memory").json()["ladder"][0]
    assert (row["rungs"], row["enabled"]) == ([], False) and entry.state.kv_type is KVType.F16
    box.at("CRITICAL")
    assert box.api.chat(max_tokens=1).status == 503, "admission is no rung"


def test_m208_m100_k02_a_scheduler_hears_of_levels_and_ceilings_and_moves_house(box: Squeezed) -> None:
    entry = box.load()
    heard: list[tuple[str, object]] = []
    entry.sched = SimpleNamespace(
        config=SimpleNamespace(users=6),
        resting=True,
        notify_pressure=lambda level: heard.append(("level", level.name)),
        set_ceiling=lambda slots: heard.append(("ceiling", slots)),
        rehouse=lambda state, cache: heard.append(("rehouse", state.kv_type.value)) or len(heard) > 3,
    )
    for level in ("TIGHT", "CRITICAL"):
        box.at(level)
    box.at("OK", looks=4)
    assert list(dict.fromkeys(heard)) == [
        ("level", "TIGHT"), ("ceiling", 3), ("level", "CRITICAL"), ("ceiling", 1), ("level", "OK"), ("ceiling", 6)
    ]  # fmt: skip
    box.at("WATCH")
    heard.clear()
    before = entry.state
    box.api.app.memory.settle(entry, 0)
    assert heard == [("rehouse", "q8_0")] and entry.state is before, "a slot was in use"
    heard += [("", 0)] * 3
    box.api.app.memory.settle(entry, 0)
    assert entry.state is not before and entry.state.kv_type is KVType.Q8_0
    entry.sched = None


def test_x19_a_full_die_is_the_trouble_of_its_own_models_only(box: Squeezed) -> None:
    box.load("on-cpu")
    other = box.load("on-die")
    # no virtual dies in this server: only the number matters to the level
    other.dies = (1,)
    box.watch.set_die(1, 1 << 20, 0, budget_bytes=1 << 20)
    box.at("OK", looks=2)
    rows = {row["name"]: row for row in box.api.get("/admin/memory").json()["ladder"]}
    assert rows["on-cpu"]["rungs"] == [] and rows["on-die"]["level"] == "CRITICAL"


# ---- admission --------------------------------------------------------------------------------------------------


def test_m201_m202_a_refusal_comes_before_any_forward_and_carries_the_numbers(box: Squeezed) -> None:
    entry = box.load()
    ran: list[int] = []
    real = entry.model.runner.forward
    entry.model.runner.forward = lambda *args: (ran.append(1), real(*args))[1]
    box.at("CRITICAL")
    for body in ({}, {"stream": True}):
        answer = box.api.chat(max_tokens=1, **body)
        error = answer.json()["error"]
        assert answer.status == 503 and error["code"] == "memory_critical"
        assert int(answer.headers["retry-after"]) == error["retry_after"] >= 1
        assert (error["have_bytes"], error["reserve_bytes"]) == (0, RESERVE) and error["need_bytes"] > 0
        assert "reserve" in error["message"]
    assert box.api.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 503
    assert ran == []
    assert box.api.get("/v1/models").status == 200 == box.api.get("/health").status
    text = box.api.get("/metrics").body.decode()
    assert "pantheon_turns_refused_total 3" in text and 'requests_total{outcome="memory_critical"} 3' in text


def test_m189_m184_a_stall_refuses_and_its_decay_does_not(box: Squeezed) -> None:
    box.load()
    box.host.psi(40, 20)
    box.at("OK")
    answer = box.api.chat(max_tokens=1)
    assert answer.status == 503 and answer.json()["error"]["reason"] == "sustained memory stall - retry"
    assert 1 <= int(answer.headers["retry-after"]) <= 10, "20 % is below 15 % in three seconds"
    for full in (14.0, 5.0, 0.5):
        box.host.psi(10, full)
        box.at("OK")
        assert box.api.chat(max_tokens=1).status == 200


def test_k08_a_refusal_raises_no_level_and_a_warm_conversation_survives_it(box: Squeezed) -> None:
    entry = box.load()
    talk = [{"role": "user", "content": "a conversation that will be refused once"}]
    box.api.whole(messages=talk, max_tokens=2)
    held = entry.prefix_cache.tokens()
    box.host.psi(40, 20)
    box.watch.poll_once()
    assert box.api.chat(messages=talk, max_tokens=2).status == 503
    box.host.psi(0, 0)
    # before the ladder has moved: rung 4b takes idle conversations, a refusal does not
    assert held > 0 and box.watch.poll_once().level.name == "OK"
    assert box.api.chat(messages=talk, max_tokens=2).status == 200


def test_idle_conversations_go_before_a_turn_is_refused(box: Squeezed, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they hold is memory that a turn can have, ladder or not."""
    monkeypatch.setenv("PN_LADDER_DISABLE", "1")
    entry = box.load(ctx=2048)
    box.api.whole(messages=[{"role": "user", "content": "idle " * 20}], max_tokens=2)
    assert entry.prefix_cache.tokens() > 0
    gate = box.api.app.memory.gate(entry)
    real = gate._decide
    asked: list[int] = []

    def decide(*args: object) -> object:
        asked.append(entry.prefix_cache.tokens())
        if len(asked) == 1:
            box.host.available(RESERVE + 1024)
            box.watch.poll_once()
        found = real(*args)
        box.host.available(RESERVE + SLACK["OK"])
        return found

    gate._decide = decide
    assert box.api.chat(messages=[{"role": "user", "content": "new"}], max_tokens=1).status == 200
    assert len(asked) == 2 and asked[1] <= 6 < asked[0], "what the new one reuses of it stays"


def test_m203_m198_a_load_is_refused_with_the_numbers_and_works_once_memory_is_back(box: Squeezed) -> None:
    path = str(model_path(MODEL))
    box.api.app.model_roots = (Path(path).parent,)
    box.host.available(RESERVE + (1 << 20))
    box.watch.poll_once()
    answer = box.api.post("/admin/models/load", {"path": path, "name": "m"})
    error = answer.json()["error"]
    assert answer.status == 507 and error["code"] == "out_of_memory"
    assert error["need_bytes"] > error["have_bytes"] == 1 << 20 and error["reserve_bytes"] == RESERVE
    assert box.api.app.registry.all_entries() == []
    box.at("OK")
    assert box.api.post("/admin/models/load", {"path": path, "name": "m"}).status == 200


# ---- cutting ----------------------------------------------------------------------------------------------------


def long_talk(turns: int, words: int = 40) -> list[dict[str, str]]:
    talk = [{"role": "system", "content": "SYSTEM"}]
    for i in range(turns):
        talk += [{"role": "user", "content": f"u{i} " * words}, {"role": "assistant", "content": f"a{i} " * words}]
    return [*talk, {"role": "user", "content": "LAST"}]


def test_x21_too_long_is_a_400_by_default_and_with_truncation_the_oldest_turns_go(box: Squeezed) -> None:
    entry = box.load()
    prompts: list[str] = []
    real = entry.model.prompt
    entry.model.prompt = lambda *args, **kwargs: (made := real(*args, **kwargs), prompts.append(made.text))[0]
    answer = box.api.chat(messages=long_talk(9), max_tokens=8)
    error = answer.json()["error"]
    assert answer.status == 400 and error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > error["n_ctx"] == 512
    answer = box.api.chat(messages=long_talk(9), max_tokens=8, truncation="auto")
    body = answer.json()
    assert answer.status == 200 and answer.headers["x-pantheon-context-capped"] == "true"
    assert body["context_capped"] is True
    assert body["dropped_tokens"] == error["n_prompt_tokens"] - body["usage"]["prompt_tokens"] > 0
    assert body["usage"]["prompt_tokens"] <= 512 - 8, "the answer has its room"
    assert "SYSTEM" in prompts[-1] and "LAST" in prompts[-1] and "u0" not in prompts[-1] and "u8" in prompts[-1]
    assert "pantheon_turns_capped_total 1" in box.api.get("/metrics").body.decode()


def test_m047_the_last_chunk_of_a_stream_says_so_too(box: Squeezed) -> None:
    box.load()
    events = box.api.stream(messages=long_talk(9), max_tokens=2, truncation="auto").chunks
    assert [chunk.get("context_capped") for chunk in events if chunk["choices"][0]["finish_reason"]] == [True]
    assert not any("context_capped" in chunk for chunk in box.api.stream(max_tokens=2, truncation="auto").chunks)


def test_m131_a_capped_turn_leaves_nothing_warm(box: Squeezed) -> None:
    entry = box.load()
    box.api.whole(messages=long_talk(9), max_tokens=2, truncation="auto", session_id="s")
    assert entry.prefix_cache.tokens() == 0
    again = box.api.whole(messages=long_talk(9), max_tokens=2, truncation="auto", session_id="s")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_m209_m213_a_lasting_tight_clamps_the_window_of_those_who_may_be_cut(box: Squeezed) -> None:
    box.load()
    talk = long_talk(4, words=22)
    whole = box.api.whole(messages=talk, max_tokens=2)["usage"]["prompt_tokens"]
    assert 256 < whole < 512
    box.at("TIGHT", looks=2)
    assert box.api.whole(messages=talk, max_tokens=2)["usage"]["prompt_tokens"] == whole
    body = box.api.whole(messages=talk, max_tokens=2, truncation="auto")
    assert body["context_capped"] and body["usage"]["prompt_tokens"] < 256
    box.at("OK", looks=4)
    assert "context_capped" not in box.api.whole(messages=talk, max_tokens=2, truncation="auto")


def test_x21_what_can_not_be_dropped_must_fit(box: Squeezed) -> None:
    box.load()
    answer = box.api.chat(messages=[{"role": "user", "content": "word " * 900}], max_tokens=2, truncation="auto")
    assert answer.status == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "last turn" in answer.json()["error"]["message"]
    answer = box.api.chat(max_tokens=1, truncation="middle")
    assert answer.status == 400 and answer.json()["error"]["param"] == "truncation"


def test_x21_a_critical_host_refuses_those_who_may_be_cut_as_well(box: Squeezed) -> None:
    box.load()
    box.at("CRITICAL")
    assert box.api.chat(messages=long_talk(2), max_tokens=2, truncation="auto").status == 503


# ---- the watcher ------------------------------------------------------------------------------------------------


def test_x20_a_watcher_that_sees_nothing_any_more_is_visible_and_degrades_to_watch(box: Squeezed) -> None:
    box.load()
    box.host.write("proc/meminfo", "")
    box.watch._look()
    box.clock.advance(3)
    body = box.api.get("/admin/memory").json()
    assert body["admission"] == "stale" and body["alive"] is False and body["level"] == "WATCH"
    assert body["watcher"]["errors"] == 1 and body["watcher"]["age_s"] >= 3
    assert box.api.chat(max_tokens=1).status == 200
    assert "pantheon_memory_watcher_alive 0" in box.api.get("/metrics").body.decode()
    assert box.api.get("/health").json() == {"status": "ok", "degraded": ["memory_watcher"]}
    box.at("OK")
    assert box.api.get("/health").json() == {"status": "ok"}
    assert box.api.get("/admin/memory").json()["admission"] == "on"


def test_m199_x20_without_a_watcher_nothing_is_refused_and_it_says_so() -> None:
    with serving() as api:
        api.add(pieces=["a"])
        assert api.get("/admin/memory").json()["admission"] == "off"
        assert api.whole(max_tokens=1)
        assert "pantheon_memory_watcher_alive 0" in api.get("/metrics").body.decode()


def test_m172_the_view_and_the_metrics_show_what_is_known(box: Squeezed) -> None:
    box.load()
    box.at("TIGHT", looks=2)
    body = box.api.get("/admin/memory").json()
    assert body["level"] == "TIGHT" and body["admission"] == "on" and body["host"]["reserve_bytes"] == RESERVE
    assert body["thresholds"]["psi_full_reject"] == 15.0
    assert body["ladder"][0]["offered"] == ["4a", "2", "3", "4b"]
    seq = body["seq"]
    box.watch.poll_once()
    assert box.api.get("/admin/memory").json()["seq"] == seq + 1
    text = box.api.get("/metrics").body.decode()
    for line in ("memory_level 2", f"memory_reserve_bytes {RESERVE}", "ladder_degraded_models 1", "ladder_level 2"):
        assert f"pantheon_{line}" in text


def test_what_watches_a_model_does_not_keep_it_alive(box: Squeezed) -> None:
    box.load()
    box.api.whole(max_tokens=1)
    box.at("WATCH")
    model = weakref.ref(box.api.app.registry.all_entries()[0].model)
    unload(box.api.app.registry, "m")
    gc.collect()
    assert model() is None
    box.at("TIGHT")
    assert box.api.get("/admin/memory").json()["ladder"] == []


@pytest.mark.parametrize("answer", ["whole", "stream", "503", "503 stream", "400", "field", "capped"])
def test_an_answer_of_any_kind_leaves_no_circle_that_keeps_a_model(box: Squeezed, answer: str) -> None:
    """Memory comes back with the unload, not with some later collection, which `gc.freeze` may make never."""
    gc.collect()
    gc.disable()
    try:
        box.load()
        if answer.startswith("503"):
            box.at("CRITICAL")
        said = {
            "400": {"messages": long_talk(9)},
            "field": {"temperature": "x"},
            "capped": {"messages": long_talk(9), "truncation": "auto"},
        }.get(answer, {"stream": "stream" in answer})
        expected = 400 if answer == "field" else int(answer[:3]) if answer[:3].isdigit() else 200
        assert box.api.chat(max_tokens=2, **said).status == expected
        model = weakref.ref(box.api.app.registry.all_entries()[0].model)
        unload(box.api.app.registry, "m")
        # the thread of the answer may have its last lines to run
        assert eventually(lambda: model() is None)
    finally:
        gc.enable()


def test_an_entry_that_is_freed_while_it_is_looked_at_is_passed_over(
    box: Squeezed, caplog: pytest.LogCaptureFixture
) -> None:
    entry = box.load()
    entry.state, kept = None, entry.state
    box.at("TIGHT")
    assert box.api.get("/admin/memory").json()["ladder"] == [] and "failed" not in caplog.text
    entry.state = kept
