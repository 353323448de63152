"""Who is served now: GET /slots, /admin/sched, /metrics, while a generation runs and after it [M028, M104]."""

from __future__ import annotations

import json
import logging
import re
import threading
from typing import Any

import pytest

from pantheon import log
from pantheon.sched.scheduler import Scheduler
from pantheon.sched.shared import SchedConfig
from pantheon.serve import slots
from pantheon.serve.admin_views import instance_of
from pantheon.serve.context import App
from pantheon.serve.entry import Entry
from pantheon.serve.models_api import describe
from pantheon.serve.router_client import loads
from pantheon.serve.slots import slots_of
from tests.serve.api_server import Api, free, scripted, serving

VIEWS = ("/slots", "/admin/sched", "/metrics", "/health", "/v1/models", "/admin/memory", "/admin/dies")


def until_token(sock: Any) -> None:
    got = b""
    while b'"content":"' not in got.replace(b'"content":""', b""):
        got += sock.recv(65536)


# ---- one user at a time ---------------------------------------------------------------------------------------------


def test_an_idle_slot_has_nothing_of_the_last_answer() -> None:
    with scripted("a", "b") as api:
        for _ in range(2):
            (slot,) = api.get("/slots").json()
            assert slot["is_processing"] is False and slot["state"] == "idle" and slot["id"] == 0
            assert (slot["model"], slot["replica"], slot["n_prompt_tokens"]) == ("m", 0, 0)
            assert slot["next_token"] == [
                {"has_next_token": False, "has_new_line": False, "n_remain": -1, "n_decoded": 0}
            ]
            assert "prompt" not in slot and "params" not in slot
            api.whole()


def test_views_show_a_running_answer_and_never_wait_for_it_M028() -> None:
    with scripted("a", eog=False, decode_ms=5) as api:
        entry = api.app.registry.all_entries()[0]
        sock = api.open_chat(stream=True, max_tokens=400, session_id="secret session")
        until_token(sock)
        answers = {path: api.get(path) for path in VIEWS}
        assert all(answer.status == 200 for answer in answers.values())
        assert entry.gen_lock.locked(), "it still runs"
        (slot,) = answers["/slots"].json()
        assert slot["is_processing"] and slot["state"] == "decode" and slot["n_prompt_tokens"] > 0
        token = slot["next_token"][0]
        assert token["n_decoded"] > 0 and token["n_remain"] == 400 - token["n_decoded"]
        (row,) = answers["/admin/sched"].json()["entries"]
        assert (row["mode"], row["capacity"], row["busy"], row["active"]) == ("single", 1, True, 1)
        assert row["totals"]["completion_tokens"] > 0, "as they are made"
        (asked,) = row["requests"]
        assert asked["phase"] == "decode" and asked["made_tokens"] > 0 and asked["id"].startswith("req_")
        text = answers["/metrics"].body.decode()
        labels = 'die="cpu",model="m",model_name="m",replica="0"'
        assert f"vllm:num_requests_running{{{labels}}} 1\n" in text
        assert "llamacpp:requests_processing 1\n" in text
        assert re.search(r"vllm:kv_cache_usage_perc\{[^}]*\} 0\.\d+\n", text)
        assert not any(b"secret session" in answer.body for answer in answers.values())
        sock.close()
        free(entry)


def test_slots_of_one_model_and_the_answer_when_none_is_free() -> None:
    with scripted("a", eog=False, decode_ms=5) as api:
        api.add("n", pieces=["x"])
        assert [slot["model"] for slot in api.get("/slots").json()] == ["m", "n"]
        assert [slot["model"] for slot in api.get("/slots?model=n").json()] == ["n"]
        sock = api.open_chat(model="m", stream=True, max_tokens=400)
        until_token(sock)
        assert api.get("/slots?fail_on_no_slot=1").status == 200
        answer = api.get("/slots?model=m&fail_on_no_slot=1")
        assert (answer.status, answer.code) == (503, "no_free_slot") and answer.headers["retry-after"] == "1"
        assert api.get("/slots?model=m&fail_on_no_slot=0").status == 200
        sock.close()
        free(api.app.registry.all_entries()[0])


def test_views_that_are_switched_off_are_501() -> None:
    with serving(App(metrics_view=False, slots_view=False)) as api:
        for path in ("/metrics", "/slots"):
            answer = api.get(path)
            assert answer.status == 501 and answer.json()["error"]["type"] == "not_supported_error"
            assert f"--no-{path[1:]}" in answer.json()["error"]["message"]


def test_metrics_say_when_the_process_began() -> None:
    with scripted("a") as api:
        began = int(api.get("/metrics").headers["process-start-time-unix"])
        text = api.get("/metrics").body.decode()
        assert f"pantheon_process_start_time_seconds {began}" in text
        assert re.search(r"pantheon_process_resident_memory_bytes [1-9]\d{6,}\n", text)


def test_tokens_of_replies_and_of_the_metrics_are_the_same() -> None:
    """As llama-server's own test of its metrics has it."""
    with scripted("a", "b", "c") as api:
        replies = [api.whole(max_tokens=n) for n in (1, 2, 9)] + [api.whole(n=2)]
        text = api.get("/metrics").body.decode()
        made = sum(reply["usage"]["completion_tokens"] for reply in replies)
        assert f"llamacpp:tokens_predicted_total {made}\n" in text
        single = [reply["timings"] for reply in replies[:3]]
        assert single[0]["predicted_per_second"] == 0.0 and single[0]["predicted_n"] == 1
        labels = 'die="cpu",model="m",model_name="m",replica="0"'
        assert f"vllm:time_to_first_token_seconds_count{{{labels}}} 4\n" in text
        assert f"vllm:e2e_request_latency_seconds_count{{{labels}}} 4\n" in text
        reasons = re.findall(r'vllm:request_success_total\{[^}]*finished_reason="(\w+)"[^}]*\} (\d+)', text)
        assert sorted(reasons) == [("length", "2"), ("stop", "3")]


def test_headers_say_who_answered_and_what_was_known_by_then() -> None:
    with scripted("a") as api:
        for stream in (False, True):
            headers = api.chat(stream=stream).headers
            assert headers["x-pantheon-model"] == "m" and headers["x-pantheon-replica"] == "0"
            assert int(headers["x-pantheon-queue-ms"]) >= 0 and int(headers["x-pantheon-cached-tokens"]) >= 0


# ---- many at a time -------------------------------------------------------------------------------------------------


def batched(api: Api, users: int = 2, **script: Any) -> Scheduler:
    """Give model m a scheduler."""
    entry = api.app.registry.all_entries()[0]
    assert entry.model is not None
    entry.sched = Scheduler(entry.model, entry.model.new_state(users + 2), None, SchedConfig(users=users))
    return entry.sched


def test_slots_of_a_scheduler_are_as_many_as_its_users() -> None:
    with scripted("a", eog=False, decode_ms=5) as api:
        sched = batched(api, 2)
        try:
            assert [slot["id"] for slot in api.get("/slots").json()] == [0, 1], "spare ones keep conversations warm"
            socks = [api.open_chat(stream=True, max_tokens=400) for _ in range(2)]
            for sock in socks:
                until_token(sock)
            socks.append(api.open_chat(stream=True, max_tokens=400))
            pause = threading.Event()
            while not sched.load().queued:
                pause.wait(0.005)
            slots = api.get("/slots").json()
            assert len(slots) == 2 and all(slot["is_processing"] for slot in slots)
            assert all(slot["n_prompt_tokens"] > 0 and slot["next_token"][0]["n_decoded"] > 0 for slot in slots)
            assert api.get("/slots?fail_on_no_slot=1").status == 503
            (row,) = api.get("/admin/sched").json()["entries"]
            assert (row["mode"], row["capacity"], row["active"], row["waiting"]) == ("batch", 2, 2, 1)
            assert [asked["phase"] for asked in row["requests"]] == ["decode", "decode", "queued"]
            assert row["scheduler"]["queue"]["waiting"] == 1 and row["wait_s"] > 0
            text = api.get("/metrics").body.decode()
            assert 'pantheon_slots{die="cpu",model="m",replica="0"} 2\n' in text
            assert 'pantheon_slots_busy{die="cpu",model="m",replica="0"} 2\n' in text
            assert "llamacpp:requests_deferred 1\n" in text
            busy = re.search(r"^llamacpp:n_busy_slots_per_decode (\S+)$", text, re.M)
            assert busy is not None and 1 <= float(busy[1]) <= 2
            for sock in socks:
                sock.close()
            while not sched.resting:
                pause.wait(0.01)
        finally:
            sched.close()


def test_a_request_that_waited_says_for_how_long() -> None:
    with scripted("a", "b", decode_ms=20) as api:
        sched = batched(api, 1)
        try:
            first = api.open_chat(stream=True, max_tokens=2)
            until_token(first)
            second = api.chat()
            assert second.json()["timings"]["queue_ms"] > 0 and second.json()["timings"]["ttft_ms"] > 0
            assert int(second.headers["x-pantheon-queue-ms"]) == round(second.json()["timings"]["queue_ms"])
            first.close()
        finally:
            sched.close()


# ---- the log --------------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    form = log._Json()
    return [json.loads(form.format(record)) for record in caplog.records if not getattr(record, "text_only", False)]


def test_each_request_is_one_json_line_with_figures_and_without_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pantheon"), scripted("a", "b") as api:
        api.chat(messages=[{"role": "user", "content": "my secret"}], session_id="bob@example.org", stream=True)
        api.chat(temperature=9)
        api.get("/v1/models/m", "X-Request-Id: trace-7")
        found = [line for line in lines(caplog) if line["event"] == "request"]
    good, bad, models = found
    assert good["status"] == 200 and good["outcome"] == "ok" and good["path"] == "/v1/chat/completions"
    assert good["completion_tokens"] == 2 and good["finish"] == ["stop"] and good["model"] == "m"
    assert good["replica"] == 0 and good["prompt_tokens"] > good["cached_tokens"] >= 0 and good["answers"] == 1
    assert 0 <= good["queue_ms"] <= good["ttft_ms"] <= good["ms"]
    assert re.fullmatch("[0-9a-f]{12}", good["session"]) and good["id"].startswith("req_")
    assert (bad["status"], bad["outcome"]) == (400, "error") and "temperature" in bad["why"] and "model" not in bad
    assert (models["id"], models["method"], models["path"]) == ("trace-7", "GET", "/v1/models/m")
    assert "secret" not in json.dumps(found) and "bob" not in json.dumps(found)


def test_one_whose_client_left_is_cancelled_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pantheon"), scripted("a", eog=False, decode_ms=5) as api:
        sock = api.open_chat(stream=True)
        until_token(sock)
        sock.close()
        free(api.app.registry.all_entries()[0])
        pause = threading.Event()
        while not (found := [line for line in lines(caplog) if line["event"] == "request"]):
            pause.wait(0.01)
    assert found[0]["outcome"] == "cancelled" and found[0]["completion_tokens"] > 0 and found[0]["finish"] == []


# ---- an entry that is freed while somebody looks ---------------------------------------------------------------------


class Freed(Entry):
    """An entry whose parts are there at the first look at each, and gone at the next."""

    def __getattribute__(self, name: str) -> Any:
        if name not in ("sched", "model", "state", "prefix_cache"):
            return super().__getattribute__(name)
        found = self.__dict__.get(name)
        self.__dict__[name] = None
        return found


@pytest.mark.parametrize(
    "look",
    [
        lambda app, entry: slots_of(app, entry),
        lambda app, entry: loads([entry]),
        lambda app, entry: describe(entry),
        lambda app, entry: instance_of(entry),
        lambda app, entry: entry.wait_s(0.0),
        lambda app, entry: entry.pc_lock,
        lambda app, entry: slots._replicas(app, [entry]),
        lambda app, entry: slots._entry(app, entry, 0.0),
        lambda app, entry: app.memory._row(entry),
    ],
)  # fmt: skip
def test_whoever_only_looks_may_meet_an_entry_that_is_freed_just_now_M028(look: Any) -> None:
    with serving() as api:
        there = api.add(batch=SchedConfig(users=2), pieces=["a"])
        going = Freed(**{name: vars(there)[name] for name in ("name", "path", "index", "sched", "model", "state")})
        going.prefix_cache = there.prefix_cache
        look(api.app, going)
