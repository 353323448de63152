"""Who is still there: full close, half-close and reset, before, during and between bytes [B24, X23, M252, M253]."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pantheon.errors import Busy, Cancelled
from pantheon.serve.http_connection import Connection
from pantheon.serve.http_server import HttpConfig, PantheonServer
from pantheon.serve.routes import Request, Responder, Router
from tests.serve.http_client import connect, parse_answer, read_all, read_until, request, trusting

TLS = Path(__file__).parents[1] / "data" / "tls"
STEP_S = 0.01


class Generation:
    """A handler that works in steps, asking before each whether to go on, as the generate loop does."""

    def __init__(self) -> None:
        self.steps = 0
        self.begun = threading.Semaphore(0)
        self.finish = threading.Event()
        self.ended = threading.Event()
        self.result = ""
        self.fault: Exception | None = None

    def __call__(self, request: Request, responder: Responder) -> None:
        mode = request.query.get("mode", "json")
        stream = responder.begin_sse() if mode == "stream" else None
        responder.will_stream = mode != "json"
        self.result = "cancelled"
        try:
            while not self.finish.wait(STEP_S):
                if responder.should_stop():
                    raise Cancelled("stop")
                self.steps += 1
                if stream is not None and request.query.get("talk"):
                    stream.send({"i": self.steps})
                self.begun.release()
            self.result = "finished"
            if self.fault is not None:
                raise self.fault
            if mode == "json":
                return responder.send_json(200, {"steps": self.steps}, {"X-Late": "1"})
            stream = stream or responder.begin_sse()
            stream.send({"last": True})
            stream.done()
        finally:
            self.ended.set()


@pytest.fixture
def work() -> Generation:
    return Generation()


def serve(work: Generation, config: HttpConfig) -> Iterator[PantheonServer]:
    router = Router()
    router.add("GET", "/work", work)
    server = PantheonServer(router, config)
    server.start(poll_interval=0.02)
    yield server
    work.finish.set()
    server.stop(5)


@pytest.fixture
def server(work: Generation) -> Iterator[PantheonServer]:
    yield from serve(work, HttpConfig(port=0))


@pytest.fixture
def tls_server(work: Generation) -> Iterator[PantheonServer]:
    cert, key = str(TLS / "localhost.pem"), str(TLS / "localhost.key")
    yield from serve(work, HttpConfig(port=0, tls_cert=cert, tls_key=key))


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a half-closed client begins early at once, not after 3 s."""
    monkeypatch.setattr("pantheon.serve.http_responder._GRACE_S", 0.0)


MODES = ["json", "stream", "stream&talk=1", "late"]


def close(sock: socket.socket) -> None:
    sock.close()


def reset(sock: socket.socket) -> None:
    """Close with a reset, as a killed client with unread data does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def begin(sock: socket.socket, work: Generation, mode: str, version: str = "1.1") -> None:
    sock.sendall(request("GET", f"/work?mode={mode}", version=version))
    assert all(work.begun.acquire(timeout=10) for _ in range(3))


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_leaves_cancels_within_a_step(
    server: PantheonServer,
    work: Generation,
    mode: str,
    leave: Callable[[socket.socket], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B24a, B24b, X23: streamed or not, talking or silent (prefill, queue)."""
    sock = connect(server)
    with caplog.at_level(logging.INFO, "pantheon.http"):
        begin(sock, work, mode)
        leave(sock)
        steps = work.steps
        assert work.ended.wait(10) and work.steps - steps <= 2
        assert work.result == "cancelled"
        server.stop(5)
    (record,) = caplog.records
    assert " cancelled " in record.getMessage() and record.exc_info is None and record.levelno == logging.INFO


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("mode", MODES)
def test_a_half_closed_client_gets_its_whole_answer(
    server: PantheonServer, work: Generation, mode: str, version: str
) -> None:
    """B24: the end of the request is not the end of the client.  Nothing of the probe shows in a JSON answer."""
    with connect(server) as sock:
        begin(sock, work, mode, version)
        sock.shutdown(socket.SHUT_WR)
        assert all(work.begun.acquire(timeout=10) for _ in range(8))
        work.finish.set()
        answer = parse_answer(read_all(sock))
    assert work.result == "finished" and answer.raw.startswith(b"HTTP/1.1 200 OK\r\n")
    if mode == "json":
        assert answer.json() == {"steps": work.steps} and answer.body.startswith(b"{")
        assert int(answer.headers["content-length"]) == len(answer.body) and answer.headers["x-late"] == "1"
    else:
        assert answer.events[-2:] == ['{"last":true}', "[DONE]"]


def test_a_half_closed_client_gets_its_own_status(server: PantheonServer, work: Generation) -> None:
    work.fault = Busy("busy")
    with connect(server) as sock:
        begin(sock, work, "json")
        sock.shutdown(socket.SHUT_WR)
        assert all(work.begun.acquire(timeout=10) for _ in range(5))
        work.finish.set()
        assert parse_answer(read_all(sock)).status == 429


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("mode", ["json", "late"])
def test_an_early_head_fits_the_answer(server: PantheonServer, work: Generation, mode: str, version: str) -> None:
    with connect(server) as sock:
        begin(sock, work, mode, version)
        sock.shutdown(socket.SHUT_WR)
        started = read_until(sock, b"\r\n\r\n")
        work.finish.set()
        answer = parse_answer(started + read_all(sock))
    assert ("transfer-encoding" in answer.headers) is (version == "1.1") and "content-length" not in answer.headers
    if mode == "json":
        assert answer.json() == {"steps": work.steps} and answer.headers["content-type"] == "application/json"
    else:
        assert answer.events == ['{"last":true}', "[DONE]"] and answer.headers["content-type"] == "text/event-stream"


@pytest.mark.usefixtures("no_grace")
def test_the_early_answer_is_valid_json_with_blanks_in_front(server: PantheonServer, work: Generation) -> None:
    with connect(server) as sock:
        begin(sock, work, "json")
        sock.shutdown(socket.SHUT_WR)
        started = read_until(sock, b"1\r\n \r\n")
        started += read_until(sock, b"1\r\n \r\n")  # the probe is repeated: a client may leave later
        work.finish.set()
        answer = parse_answer(started + read_all(sock))
    assert answer.status == 200 and answer.json() == {"steps": work.steps} and answer.body.startswith(b"  {")
    assert answer.headers["content-type"] == "application/json" and "x-late" not in answer.headers


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("mode", ["json", "late"])
def test_an_error_after_an_early_head_is_in_the_body(server: PantheonServer, work: Generation, mode: str) -> None:
    work.fault = Busy("too late for a status", code="late")
    with connect(server) as sock:
        begin(sock, work, mode)
        sock.shutdown(socket.SHUT_WR)
        started = read_until(sock, b"\r\n\r\n")
        work.finish.set()
        answer = parse_answer(started + read_all(sock))
    assert answer.status == 200 and b'"code":"late"' in answer.body
    assert answer.events[1] == "[DONE]" if mode == "late" else answer.code == "late"


@pytest.mark.usefixtures("no_grace")
def test_a_half_closed_client_that_then_leaves_is_noticed(server: PantheonServer, work: Generation) -> None:
    sock = connect(server)
    begin(sock, work, "json")
    sock.shutdown(socket.SHUT_WR)
    read_until(sock, b" \r\n")
    sock.close()
    assert work.ended.wait(10) and work.result == "cancelled"


def test_where_urgent_data_is_not_to_be_had_the_answer_begins_at_once(
    server: PantheonServer, work: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "provoke", lambda self: False)
    sock = connect(server)
    begin(sock, work, "json")
    sock.close()
    assert work.ended.wait(10) and work.result == "cancelled"


def test_an_open_client_is_never_probed(server: PantheonServer, work: Generation) -> None:
    """Status and headers stay the handler's own."""
    work.fault = Busy("busy")
    with connect(server) as sock:
        begin(sock, work, "json")
        work.finish.set()
        answer = parse_answer(read_all(sock))
    assert answer.status == 429 and answer.headers["retry-after"] == "1"


def test_unread_pipelined_bytes_do_not_hide_a_departure(server: PantheonServer, work: Generation) -> None:
    sock = connect(server)
    sock.sendall(request("GET", "/work") + request())
    assert work.begun.acquire(timeout=10)
    sock.close()
    assert work.ended.wait(10) and work.result == "cancelled"


def test_a_close_right_after_done_is_not_a_cancel(
    server: PantheonServer, work: Generation, caplog: pytest.LogCaptureFixture
) -> None:
    """openai-python closes at `[DONE]` without reading the last chunk."""
    work.finish.set()
    with caplog.at_level(logging.INFO, "pantheon.http"):
        sock = connect(server)
        sock.sendall(request("GET", "/work?mode=stream"))
        read_until(sock, b"[DONE]")
        reset(sock)
        server.stop(5)
    (record,) = caplog.records
    assert "cancelled" not in record.getMessage()


@pytest.mark.parametrize("mode", MODES)
def test_a_tls_client_that_leaves_cancels(tls_server: PantheonServer, work: Generation, mode: str) -> None:
    sock = trusting().wrap_socket(connect(tls_server))
    begin(sock, work, mode)
    sock.close()
    assert work.ended.wait(10) and work.result == "cancelled"


def test_a_stop_ends_a_stream_with_its_error_event(server: PantheonServer, work: Generation) -> None:
    with connect(server) as sock:
        begin(sock, work, "stream&talk=1")
        server.stop(5)
        answer = parse_answer(read_all(sock))
    assert '"code":"shutting_down"' in answer.events[-2] and answer.events[-1] == "[DONE]"
