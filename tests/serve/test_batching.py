"""Several users on one model, seen from outside: places, the queue, refusals, clients that leave, the end.

Spec: M083-M085, M092-M101, M109-M112, M117, M142, M254, X06, X08, X10, X11, X22, X23, X30, B24, B29.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest

from pantheon.engine.generate import PREFILL_CHUNK
from pantheon.errors import PantheonError
from pantheon.mem.mem_state import Level
from pantheon.serve.context import App
from pantheon.serve.http_connection import Connection
from pantheon.serve.loading import free as free_entry
from pantheon.serve.loading import unload
from pantheon.serve.router_client import loads
from pantheon.serve.seating import seat
from tests.serve.api_server import answer_of, post_bytes, scripted, serving
from tests.serve.batch_server import PATIENCE_S, Later, Valve, batching
from tests.serve.http_client import Answer, eventually, read_until

LONG = [{"role": "user", "content": "x" * (PREFILL_CHUNK * 6)}]


def leave(sock: socket.socket, how: str) -> None:
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


def refusal(answer: Answer, status: int, code: str) -> dict[str, Any]:
    """The error of a refusal that carries all that X08 and X10 ask for."""
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status, error["code"], error["reason"]) == (status, code, code), answer.body
    assert 1 <= error["retry_after"] <= 60 and answer.headers["retry-after"] == str(error["retry_after"])
    assert error["queue_depth"] >= 0
    return error


# ---- places and the queue -------------------------------------------------------------------------------------------


def test_by_default_the_second_request_is_429_M117_M049() -> None:
    with scripted("a", eog=False) as api:
        entry = api.app.registry.all_entries()[0]
        valve = Valve(entry)
        first = Later(lambda: api.chat(max_tokens=3))
        assert eventually(lambda: valve.begun == 1)
        refusal(api.chat(), 429, "server_busy")
        valve.open()
        assert first.get().status == 200 and entry.sched is None


def test_two_at_a_time_and_the_third_waits_M083_M092_M094_M099() -> None:
    with batching(2, queue_depth=1, script={"eog": False}) as b:
        valve = Valve(b.entry)
        inside = [b.ask(max_tokens=3), b.ask(max_tokens=3)]
        b.until_load(2)
        waiting = b.ask(max_tokens=3)
        b.until_load(2, 1)
        assert b.sched.view()["queue"]["waiting"] == 1
        refusal(b.api.chat(), 429, "queue_full")
        valve.open()
        assert [later.get().status for later in (*inside, waiting)] == [200] * 3
        assert b.total["runs"] == 3


def test_a_full_queue_refuses_unread_and_a_bad_request_does_not_wait_M095_X08_X10() -> None:
    """429 before the prompt is made; 400 before a wait, not behind it."""
    template = "{{ raise_exception('no') if messages|length > 1 else 'x' }}"
    with batching(1, queue_depth=1, script={"template": template}) as b:
        valve = Valve(b.entry)
        first = b.ask()
        b.until_load(1)
        bad = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        answer = b.api.chat(messages=bad)
        assert (answer.status, answer.code) == (400, "template_error")
        second = b.ask()
        b.until_load(1, 1)
        error = refusal(b.api.chat(messages=bad), 429, "queue_full")
        assert (error["queue_depth"], error["slots"]) == (1, 1)
        valve.open()
        assert first.get().status == second.get().status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_wait_that_is_too_long_M097_X10(stream: bool) -> None:
    """A plain request, and a stream of which nothing was sent, get the status; a stream that was opened, an event."""
    for early_head_s in (0.0, 60.0):
        with batching(1, App(early_head_s=early_head_s), wait_s=0.15) as b:
            valve = Valve(b.entry)
            first = b.ask()
            b.until_load(1)
            late = b.api.chat(stream=stream)
            if stream and not early_head_s:
                error = json.loads(late.events[-2])["error"]
                assert (late.status, error["code"]) == (200, "queue_timeout") and error["retry_after"] >= 1
                assert late.events[-1] == "[DONE]" and b": queued pos=1 eta=" in late.body
            else:
                refusal(late, 429, "queue_timeout")
            valve.open()
            assert first.get().status == 200
            assert b.sched.view()["queue"]["refused"] == {"queue_timeout": 1}


def test_critical_memory_holds_then_sheds_M096_M100_M102_K01_K03(monkeypatch: pytest.MonkeyPatch) -> None:
    level = Level.OK
    with batching(2, queue_depth=1, grace_s=0.15) as b:
        monkeypatch.setattr(b.api.app.memory, "level", lambda entry: level)
        assert b.api.chat().status == 200
        level = Level.TIGHT
        assert b.api.chat().status == 200, "TIGHT alone refuses nobody"
        level = Level.CRITICAL
        began = time.monotonic()
        refusal(b.api.chat(), 503, "memory_critical")
        assert time.monotonic() - began >= 0.15, "it was held for a while"
        held = b.ask()
        b.until_load(0, 1)
        full = b.api.chat()
        refusal(full, 503, "memory_critical")
        level = Level.OK
        # the level is told at each arrival: the one that waits gets in with the next that comes
        assert b.api.chat().status == 200
        assert held.get().status in (200, 503)


def test_the_order_of_completion_is_that_of_arrival_B29_X29_X30() -> None:
    with batching(1, script={"eog": False}) as b:
        valve, laters = Valve(b.entry), []
        for i in range(6):
            laters.append(b.ask(max_tokens=2))
            b.until_load(1, i)
        for i, later in enumerate(laters):
            # the prompt and one step
            valve.let(2)
            assert later.get().status == 200
            assert not any(other.here for other in laters[i + 1 :])
        valve.open()


def test_waiting_streams_are_told_where_they_are_X11() -> None:
    with batching(1, App(early_head_s=0.0), script={"eog": False}) as b:
        valve = Valve(b.entry)
        first = b.ask(max_tokens=2)
        b.until_load(1)
        second = b.ask(max_tokens=2)
        b.until_load(1, 1)
        third = b.open(stream=True, max_tokens=2)
        read_until(third, b": queued pos=2 eta=")
        valve.open()
        assert first.get().status == second.get().status == 200
        rest = answer_tail(third)
        assert b'"content":"a"' in rest and rest.count(b"data: [DONE]") == 1
        assert b": queued pos=2" not in rest, "once for each change"


def answer_tail(sock: socket.socket) -> bytes:
    with sock:
        return read_until(sock, b"data: [DONE]")


def test_several_answers_of_one_request_keep_its_place_M092() -> None:
    with batching(1, script={"eog": False}) as b:
        valve = Valve(b.entry)
        first = b.ask(n=3, max_tokens=2)
        b.until_load(1)
        second = b.ask(max_tokens=2)
        b.until_load(1, 1)
        valve.open()
        assert len(first.get().json()["choices"]) == 3
        assert second.get().status == 200 and b.total["runs"] == 4


def test_replicas_share_the_load_and_a_full_one_is_passed_by_M104_X01() -> None:
    with batching(1, queue_depth=0, script={"eog": False}) as b:
        other = b.api.add(batch=b.sched.config, pieces=["a"], eog=False, name="other")
        other.name = "m"
        valves = [Valve(b.entry), Valve(other)]
        laters = [b.ask(max_tokens=2, session_id="s"), b.ask(max_tokens=2, session_id="s")]
        assert eventually(lambda: all(valve.begun for valve in valves))
        assert b.sched.load().wait_s > 0 and b.entry.wait_s(0.0) > 0
        load = loads(b.api.app.registry.all_entries())["m"]
        assert (load.in_flight, load.capacity) == (2, 2)
        refusal(b.api.chat(), 429, "queue_full")
        for valve in valves:
            valve.open()
        assert [later.get().status for later in laters] == [200, 200]
        assert b.sched.load().wait_s == 0 == b.entry.wait_s(0.0)
        other.name = "other"


# ---- answers --------------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_slot_within_two_tokens_X06_X35_M111() -> None:
    with batching(2, pieces=("a", "b", "STOP", "c"), script={"eog": False}) as b:
        reply = b.api.whole(stop=["STOP"], max_tokens=2000)
        assert reply["choices"][0]["message"]["content"] == "ab"
        assert reply["usage"]["completion_tokens"] == 3
        b.until(lambda: b.sched.resting)
        assert b.total["tokens"] <= 3 + 2 and b.total["wasted_tokens"] <= 2


def test_a_reader_that_stalls_stops_nobody_M109_M110_B28() -> None:
    """Its tokens are all made, its neighbours' answers complete, and it still gets every byte."""
    budget = 600
    with batching(4, pieces=("y" * 20_000,), script={"eog": False, "filler": "y" * 20_000}) as b:
        stalled = b.open(stream=True, max_tokens=budget)
        read_until(stalled, b"yyy")
        b.until(lambda: b.total["tokens"] >= budget)
        others = [b.ask(max_tokens=3) for _ in range(6)]
        assert [later.get().status for later in others] == [200] * 6
        slots = [slot for slot in b.sched.view()["slots"] if slot["state"] != "idle"]
        assert len(slots) == 1 and slots[0]["made_tokens"] == budget and slots[0]["unread_tokens"] > 0
        whole = 0
        with stalled:
            while data := stalled.recv(1 << 20):
                whole += len(data)
        assert whole > 20_000 * (budget - 2)


# ---- clients that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_a_client_that_leaves_frees_its_slot_within_a_step_X23_B24(phase: str, stream: bool, how: str) -> None:
    with batching(1, App(early_head_s=0.0), script={"eog": False}) as b:
        valve = Valve(b.entry)
        if phase == "queue":
            first = b.ask(max_tokens=2)
            b.until_load(1)
            sock = b.open(stream=stream)
            b.until_load(1, 1)
            leave(sock, how)
            b.until_load(1, 0)
            valve.open()
            assert first.get().status == 200 and b.total["runs"] == 1
        else:
            sock = b.open(stream=stream, messages=LONG, max_tokens=4000)
            b.until(lambda: valve.begun == 1)
            valve.let(7 if phase == "decode" else 1)
            before = valve.begun
            leave(sock, how)
            # a client is asked for while a forward is in flight; this one ends, and it was the last
            b.until(lambda: b.total["cancelled"] == 1)
            assert valve.begun == before
            next_one = b.ask(max_tokens=1)
            b.until_load(1, 1)
            valve.let(1)
            b.until(lambda: b.total["runs"] == 2)
            assert valve.begun <= before + 1, "a step for nobody"
            valve.open()
            assert next_one.get().status == 200
        b.until_load(0)
        assert b.api.app.metrics.value("requests_in_flight") == 0


def test_a_cancel_touches_no_other_request_X23_M076() -> None:
    with batching(4, pieces=("a", "b", "c", "d"), script={"decode_ms": 1}) as b:
        for _ in range(3):
            socks = [b.open(stream=True, max_tokens=4000) for _ in range(2)]
            others = [b.ask() for _ in range(2)]
            for sock in socks:
                read_until(sock, b'"content":"a"')
                leave(sock, "reset")
            for later in others:
                assert later.get().json()["choices"][0]["message"]["content"] == "abcd"
        b.until_load(0)


# ---- unloading and the end ------------------------------------------------------------------------------------------


def test_an_unload_answers_those_who_wait_M142_X02() -> None:
    with batching(1, script={"eog": False}) as b:
        valve = Valve(b.entry)
        laters = [b.ask(max_tokens=2), b.ask(max_tokens=2)]
        b.until_load(1, 1)
        gone = Later(lambda: unload(b.api.app.registry, "m", timeout_s=20) and None)  # type: ignore[arg-type,return-value]
        b.until(lambda: b.entry.unloading)
        refusal_now = b.api.chat()
        assert (refusal_now.status, refusal_now.code) == (503, "model_unloading")
        valve.open()
        assert [later.get().status for later in laters] == [200, 200]
        assert gone.get() is None and b.entry.sched is None and not b.sched.driver.running


def test_a_forced_unload_tells_all_of_them_M069_X02() -> None:
    with batching(1, script={"eog": False, "decode_ms": 5}) as b:
        laters = [b.ask(max_tokens=10_000), b.ask(max_tokens=10_000)]
        b.until_load(1, 1)
        unload(b.api.app.registry, "m", timeout_s=0.05, force=True)
        for later in laters:
            assert (later.get().status, later.get().code) == (503, "model_unloading")
        assert not b.sched.driver.running


def test_the_parts_are_freed_in_order_M069(monkeypatch: pytest.MonkeyPatch) -> None:
    with batching(2) as b:
        trace: list[str] = []
        cache, model, sched = b.entry.prefix_cache, b.entry.model, b.sched
        assert cache is not None and model is not None
        monkeypatch.setattr(cache, "close", lambda: trace.append("cache"))
        monkeypatch.setattr(model, "close", lambda: trace.append("model"))
        close = sched.close
        monkeypatch.setattr(sched, "close", lambda: (trace.append("scheduler"), close()))
        monkeypatch.setattr(b.api.app.registry.dies, "unbind", lambda dies, owner: trace.append("dies"))
        [entry] = b.api.app.registry.unload("m")
        free_entry(b.api.app.registry, entry)
        assert trace == ["cache", "scheduler", "dies", "model"] and entry.state is None is entry.sched


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_tells_waiters_M098(stream: bool) -> None:
    with batching(1, App(early_head_s=60.0), script={"eog": False, "decode_ms": 5}) as b:
        socks = [b.open(stream=stream, max_tokens=100_000) for _ in range(3)]
        b.until_load(1, 2)
        began = time.monotonic()
        b.api.server.stop(4.0)
        answers = [answer_of(sock) for sock in socks]
        assert time.monotonic() - began < 5
        for answer in answers[1:]:
            refusal(answer, 503, "shutting_down")
        assert b"shutting_down" in answers[0].body


# ---- seats ----------------------------------------------------------------------------------------------------------


def test_what_was_taken_is_given_back_whatever_is_raised() -> None:
    with batching(1) as b:
        registry = b.api.app.registry
        with pytest.raises(KeyError), seat(registry, "m") as (entry, place):
            place.wait()
            assert entry.refs == 1 and b.sched.load().active == 1
            raise KeyError
        b.until_load(0)
        assert b.entry.refs == 0


def test_a_fault_of_ours_frees_the_slot_and_the_next_answer_is_right_M116() -> None:
    with batching(1, pieces=("a", "b"), script={"fail_at": 1}) as b:
        assert b.api.chat().status == 500
    with batching(2, pieces=("a", "b")) as b:
        b.sched.close()
        assert b.api.chat().status == 503


def test_no_model_and_loading_have_codes_of_their_own_X10() -> None:
    with serving() as api:
        answer = api.chat()
        assert (answer.status, answer.code) == (503, "no_model_loaded") and answer.headers["retry-after"]
        api.app.registry.reserve("m", "/m")
        refusal = api.chat()
        assert (refusal.status, refusal.code) == (503, "model_loading") and refusal.headers["retry-after"]
        assert isinstance(PantheonError("x", status=503, code="y").body(), dict)




def test_a_reader_that_takes_nothing_holds_up_no_forced_unload_X02_X23_M257(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in a write, up to a minute, and not for a token: there it is told as well."""
    stuck, wait = threading.Event(), Connection._wait_writable

    def waits(self: Connection, deadline: float) -> None:
        stuck.set()
        wait(self, deadline)

    with batching(2, pieces=("much " * 20_000,) * 100) as b, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(b.api.server.server_address[:2])
        monkeypatch.setattr(Connection, "_wait_writable", waits)
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 100}
        sock.sendall(post_bytes("/v1/chat/completions", body))
        assert stuck.wait(PATIENCE_S)
        assert unload(b.api.app.registry, "m", timeout_s=0, force=True) == [b.entry], "or 409 still_busy"
