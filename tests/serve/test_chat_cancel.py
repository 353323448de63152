"""Clients that leave, servers that stop, models that are busy or unloaded [B19, B24, M049, M252, M253, X23, X34]."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest

from pantheon.engine.generate import PREFILL_CHUNK
from pantheon.serve.context import App
from pantheon.serve.registry import BUSY_MESSAGE
from tests.fakes import FakeClock
from tests.serve.api_server import Api, answer_of, free, scripted, serving
from tests.serve.http_client import read_until

LONG = [{"role": "user", "content": "x" * (PREFILL_CHUNK * 12)}]


def forwards(api: Api) -> int:
    """Pieces that the model m was asked for: one a decode step."""
    state: Any = api.app.registry.all_entries()[0].state
    return int(state.asked[0])


def leave(sock: socket.socket, how: str) -> None:
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


def run_out(clock: FakeClock, api: Api, steps: int) -> None:
    """Let the model go on for at most so many sleeps; the generation must end within them."""
    entry = api.app.registry.all_entries()[0]
    for _ in range(steps):
        if not entry.gen_lock.locked():
            break
        try:
            clock.wait_for_sleepers()
        except AssertionError:
            break
        clock.advance(1.0)
        if entry.gen_lock.acquire(timeout=0.35):
            entry.gen_lock.release()
            break
    free(entry)


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_decoding_B24a_B24b(fake_clock: FakeClock, stream: bool, how: str) -> None:
    with serving() as api:
        entry = api.add(pieces=["a"], eog=False, decode_ms=1000, clock=fake_clock)
        sock = api.open_chat(stream=stream, max_tokens=4000)
        fake_clock.wait_for_sleepers()
        if stream:
            read_until(sock, b'"content":"a"')
        leave(sock, how)
        run_out(fake_clock, api, 6)
        assert forwards(api) <= 8
        assert api.app.metrics.value("cancelled_total") == 1
        assert api.app.metrics.value("requests_in_flight") == 0
        assert entry.refs <= 1
        assert api.app.metrics.value("requests_total", outcome="cancelled") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_request_right_behind_is_answered_B24a_B24b(stream: bool) -> None:
    """A client that stops and asks again at once is not told that the model is busy with what nobody reads."""
    with serving() as api:
        api.add(pieces=["a", "b"], decode_ms=20, eog=False)
        for _ in range(3):
            sock = api.open_chat(stream=stream, max_tokens=4000)
            if stream:
                read_until(sock, b'"content":"a"')
            else:
                wait_until_held(api)
            leave(sock, "fin")
            assert api.chat(max_tokens=2).status == 200


def wait_until_held(api: Api) -> None:
    """Until the generation of m has begun."""
    entry = api.app.registry.all_entries()[0]
    deadline = time.monotonic() + 10
    while entry.left is None:
        assert time.monotonic() < deadline, "no generation began"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_the_prompt_is_read_B24c(fake_clock: FakeClock, stream: bool) -> None:
    with serving() as api:
        api.add(pieces=["a"], prefill_ms=1000, clock=fake_clock)
        sock = api.open_chat(stream=stream, messages=LONG)
        fake_clock.wait_for_sleepers()
        leave(sock, "fin")
        run_out(fake_clock, api, 6)
        assert forwards(api) == 0, "the whole prompt was read for nobody"
        assert api.app.metrics.value("cancelled_total") == 1


def test_the_next_answer_is_clean_M076(fake_clock: FakeClock) -> None:
    with serving() as api:
        api.add(pieces=["a", "b", "c"], decode_ms=1000, clock=fake_clock)
        sock = api.open_chat(stream=True)
        fake_clock.wait_for_sleepers()
        leave(sock, "reset")
        run_out(fake_clock, api, 3)
        pump = threading.Thread(target=lambda: [pump_once(fake_clock) for _ in range(3)])
        pump.start()
        assert api.whole()["choices"][0]["message"]["content"] == "abc"
        pump.join()


def pump_once(clock: FakeClock) -> None:
    clock.wait_for_sleepers()
    clock.advance(1.0)


def test_a_half_closed_client_still_gets_its_answer_B24() -> None:
    for stream in (False, True):
        with scripted("Hel", "lo") as api:
            sock = api.open_chat(stream=stream)
            sock.shutdown(socket.SHUT_WR)
            answer = answer_of(sock)
            assert answer.status == 200
            assert (b'"lo"' if stream else b"Hello") in answer.body


def test_busy_is_429_at_once_and_other_routes_answer_M028_M049(fake_clock: FakeClock) -> None:
    with serving() as api:
        api.add(pieces=["a"], decode_ms=1000, clock=fake_clock)
        api.add("other", pieces=["fine"])
        sock = api.open_chat(stream=True, model="m")
        fake_clock.wait_for_sleepers()
        for stream in (False, True):
            busy = api.chat(model="m", stream=stream)
            assert busy.status == 429 and int(busy.headers["retry-after"]) >= 1
            error = busy.json()["error"]
            assert (error["type"], error["code"], error["message"]) == ("server_busy", "server_busy", BUSY_MESSAGE)
        assert api.get("/v1/models").status == api.get("/health").status == api.get("/admin/dies").status == 200
        assert api.get("/").json() == {"service": "pantheon", "status": "ok"}
        # another model is not held up [M073]
        assert api.whole(model="other")["choices"][0]["message"]["content"] == "fine"
        fake_clock.advance(1.0)
        assert answer_of(sock).events[-1] == "[DONE]"
        assert api.app.metrics.value("requests_total", outcome="server_busy") == 2


def test_the_turn_is_over_before_the_client_knows() -> None:
    """A client that asks again right behind [DONE] is never told that the model is busy."""
    with scripted("a") as api:
        for i in range(60):
            assert api.chat(stream=bool(i % 2)).status == 200


def test_headers_and_progress_come_before_a_long_prompt_is_read_B19(fake_clock: FakeClock) -> None:
    with serving() as api:
        api.add(pieces=["a"], prefill_ms=1000, clock=fake_clock)
        sock = api.open_chat(stream=True, messages=LONG)
        begin = read_until(sock, b"prefill 0/")
        assert b"text/event-stream" in begin and b'"role":"assistant"' in begin
        total = int(begin.split(b"prefill 0/")[1].split(b"\n")[0])
        chunks = -(-total // PREFILL_CHUNK)
        for _ in range(chunks):
            pump_once(fake_clock)
        answer = begin + sock_rest(sock)
        assert answer.count(b": prefill ") == chunks + 1
        assert b"\nid:" not in answer and b"\nevent:" not in answer


def sock_rest(sock: socket.socket) -> bytes:
    out = b""
    with sock:
        while data := sock.recv(65536):
            out += data
    return out


def test_headers_come_after_half_a_second_of_silence_B19(fake_clock: FakeClock) -> None:
    with serving(App(early_head_s=0.01)) as api:
        api.add(pieces=["a"], prefill_ms=1000, clock=fake_clock, template="x")
        sock = api.open_chat(stream=True)
        fake_clock.wait_for_sleepers()
        assert b"text/event-stream" in read_until(sock, b'"role":"assistant"')
        fake_clock.advance(1.0)
        assert b'"content":"a"' in sock_rest(sock)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_says_so_M098(fake_clock: FakeClock, stream: bool) -> None:
    with serving() as api:
        api.add(pieces=["a"], eog=False, decode_ms=1000, clock=fake_clock)
        sock = api.open_chat(stream=stream, max_tokens=4000)
        fake_clock.wait_for_sleepers()
        stopper = threading.Thread(target=api.server.stop, args=(5.0,))
        stopper.start()
        assert api.server.stopping.wait(5)
        fake_clock.advance(1.0)
        answer = answer_of(sock)
        stopper.join(10)
        assert not stopper.is_alive()
        error = json.loads(answer.events[-2])["error"] if stream else answer.json()["error"]
        assert error["code"] == "shutting_down"
        assert answer.status == (200 if stream else 503)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_wall_limit_X34(fake_clock: FakeClock, stream: bool) -> None:
    with serving(App(request_timeout_s=0.5, clock=fake_clock)) as api:
        api.add(pieces=["a"], eog=False, decode_ms=1000, clock=fake_clock)
        sock = api.open_chat(stream=stream)
        fake_clock.wait_for_sleepers()
        fake_clock.advance(1.0)
        answer = answer_of(sock)
        assert b'"code":"request_timeout"' in answer.body
        assert answer.status == (200 if stream else 504)


def test_forced_unload_ends_a_stream_with_an_error_event_X02(fake_clock: FakeClock) -> None:
    with serving() as api:
        api.add(pieces=["a"], eog=False, decode_ms=1000, clock=fake_clock)
        api.add("other", pieces=["x"])
        sock = api.open_chat(stream=True, model="m")
        fake_clock.wait_for_sleepers()
        gone: list[Any] = []
        body = {"name": "m", "timeout_s": 0, "force": True}
        unload = threading.Thread(target=lambda: gone.append(api.post("/admin/models/unload", body)))
        unload.start()
        entry = api.app.registry.all_entries()[0]
        assert entry.evicting.wait(5)
        fake_clock.advance(1.0)
        answer = answer_of(sock)
        assert b'"code":"model_unloading"' in answer.body and answer.events[-1] == "[DONE]"
        unload.join(10)
        assert gone[0].status == 200
        assert api.chat(model="m", stream=True).status == 200, "one model left: any name will do"
