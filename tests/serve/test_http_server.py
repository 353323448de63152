"""The server over real sockets: framing, time-outs, admission, access, TLS, shutdown [areas A, B; B13, B41, B44]."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pantheon import seams
from pantheon.errors import Cancelled, PantheonError
from pantheon.serve.http_connection import Timeouts
from pantheon.serve.http_parser import Limits
from pantheon.serve.http_server import HttpConfig, PantheonServer
from pantheon.serve.routes import Request, Responder, Router
from tests.serve.http_client import (
    Answer,
    ask,
    connect,
    eventually,
    parse_answer,
    read_all,
    read_until,
    request,
    trusting,
)

CHAT = "/v1/chat/completions"
TLS = Path(__file__).parents[1] / "data" / "tls"  # a key that opens nothing
Make = Callable[..., PantheonServer]


class Gate:
    """A handler that waits: tests decide when it goes on, and see that it has begun."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.left = threading.Semaphore(0)

    def __call__(self, request: Request, responder: Responder) -> None:
        self.entered.release()
        try:
            while not self.open.wait(0.01):
                if responder.should_stop():
                    raise Cancelled("stop")
            responder.send_json(200, {"gate": "open"})
        finally:
            self.left.release()


def echo(request: Request, responder: Responder) -> None:
    """Answers with what it was asked; with `stream`, as three events."""
    body = request.json()
    if not body.get("stream"):
        return responder.send_json(200, {"echo": body})
    stream = responder.begin_sse()
    for i in range(3):
        stream.send({"i": i})
    stream.done()


def seen(request: Request, responder: Responder) -> None:
    names = ("query", "tail", "client", "id", "method")
    responder.send_json(200, {name: getattr(request, name) for name in names})


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def make(gate: Gate) -> Iterator[Make]:
    servers: list[PantheonServer] = []

    def start(**config: Any) -> PantheonServer:
        router = Router()
        router.add("POST", CHAT, echo)
        router.add("GET", "/v1/models/", seen)
        router.add("GET", "/gate", gate)
        router.add("POST", "/admin/models/unload", echo)
        router.add("GET", "/admin/dies", seen)
        server = PantheonServer(router, HttpConfig(port=0, **config))
        server.start(poll_interval=0.02)
        servers.append(server)
        return server

    yield start
    gate.open.set()
    for server in servers:
        server.stop(5)


@pytest.fixture
def server(make: Make) -> PantheonServer:
    return make()


BODY = json.dumps({"messages": [{"role": "user", "content": "hi é"}]}, ensure_ascii=False).encode()
POST = request("POST", CHAT, BODY)


def is_echo(answer: Answer, body: bytes = BODY) -> bool:
    return answer.status == 200 and bool(answer.json() == {"echo": json.loads(body)})


# ---- requests


def test_root_and_every_answer_closes(server: PantheonServer) -> None:
    """M026, M031."""
    answer = ask(server, request())
    assert answer.body == b'{"service":"pantheon","status":"ok"}'
    assert answer.headers["connection"] == "close" and answer.headers["x-request-id"].startswith("req_")
    assert ask(server, request()).headers["x-request-id"] != answer.headers["x-request-id"]


def test_it_is_a_threading_http_server() -> None:
    """M015."""
    assert "ThreadingHTTPServer" in [cls.__name__ for cls in PantheonServer.__mro__]


def test_body_in_pieces_of_any_size(server: PantheonServer) -> None:
    """M029, B41: one byte per packet works."""
    for size in (1, 3, 40, len(POST) // 3):
        with connect(server) as sock:
            for at in range(0, len(POST), size):
                sock.sendall(POST[at : at + size])
            assert is_echo(parse_answer(read_all(sock)))


def test_chunked_body_with_extensions_and_trailers(server: PantheonServer) -> None:
    """B41b."""
    data = b"%x;ext=1\r\n%s\r\n%x\r\n%s\r\n0\r\nX-T: 1\r\n\r\n" % (5, BODY[:5], len(BODY) - 5, BODY[5:])
    assert is_echo(ask(server, request("POST", CHAT, None, "Transfer-Encoding: chunked") + data))


def test_compressed_body(server: PantheonServer) -> None:
    assert is_echo(ask(server, request("POST", CHAT, gzip.compress(BODY), "Content-Encoding: gzip")))
    answer = ask(server, request("POST", CHAT, BODY, "Content-Encoding: br"))
    assert (answer.status, answer.code) == (415, "unsupported_encoding")
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request("POST", CHAT, None, "Transfer-Encoding: chunked") + b"zz\r\nhi\r\n0\r\n\r\n", 400),  # B41c
        (request("POST", CHAT), 400),  # B41d: no length is no body
        (request("POST", CHAT, None, "Content-Length: -1") + BODY, 400),  # B41e
        (request("POST", CHAT, None, "Content-Length: 999999999999") + b"{", 413),  # B41f
        (request("POST", CHAT, None, "Content-Length: abc") + BODY, 400),  # B41g
        (request("POST", CHAT, None, "Content-Length: 5", "Content-Length: 76") + BODY, 400),  # B41h
        (request("POST", CHAT, BODY, "Transfer-Encoding: chunked"), 400),
        (request("POST", CHAT, None, "Transfer-Encoding: gzip, chunked") + BODY, 501),
        (b"GET / HTTP/1.1\nHost: localhost\n\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n", 400),
        (b"GET /" + b"a" * 20_000, 414),
        (request("GET", "/", None, "X: " + "a" * 20_000), 431),
        (request("GET", "/", None, *(f"X{i}: 1" for i in range(101))), 431),
        (request(host=None), 400),
        (request("GET", "/", version="3.0"), 505),
        (request("GET", "/nope"), 404),
        (request("GET", CHAT), 405),
        (request("POST", CHAT, BODY, "Expect: something"), 417),
        (request("POST", CHAT, b"{:"), 400),  # B13e
        (request("POST", CHAT, b"[1,2]"), 400),  # B13f
        (request("POST", CHAT, b"[" * 100_000 + b"]" * 100_000), 400),  # B13b
    ],
)
def test_refusals_are_prompt_json_and_close(server: PantheonServer, data: bytes, status: int) -> None:
    """M030, M032, B13, B41: without waiting for a body that will not be read."""
    started = time.monotonic()
    answer = ask(server, data)
    assert answer.status == status and answer.headers["connection"] == "close"
    error = answer.json()["error"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error") and error["message"]
    assert time.monotonic() - started < 5.0


def test_an_early_refusal_survives_a_large_body(server: PantheonServer) -> None:
    """The client writes 8 MiB before it reads: the answer must not be lost to a reset."""
    body = b"x" * (8 << 20)
    answer = ask(server, request("POST", "/nope", body))
    assert answer.status == 404
    answer = ask(server, request("POST", CHAT, body + body + body + body + body))
    assert (answer.status, answer.json()["error"]["limit_bytes"]) == (413, 32 << 20)


def test_a_request_cut_short_is_400(server: PantheonServer) -> None:
    for data in (POST[:-3], POST[:30], request("POST", CHAT, None, "Transfer-Encoding: chunked") + b"5\r\nab"):
        assert ask(server, data, half_close=True).status == 400


def test_expect_is_answered_at_once(server: PantheonServer) -> None:
    """B41a: 100 before the body; a refusal where the body is not wanted, nothing when it is here already."""
    head = request("POST", CHAT, None, "Expect: 100-continue", f"Content-Length: {len(BODY)}")
    with connect(server) as sock:
        sock.sendall(head)
        assert read_until(sock, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        assert is_echo(parse_answer(read_all(sock)))
    assert ask(server, head + BODY).interim == ()
    for data, status in (
        (request("POST", "/nope", None, "Expect: 100-continue", "Content-Length: 5"), 404),
        (request("POST", CHAT, None, "Expect: 100-continue", "Content-Length: 99999999999"), 413),
        (request("POST", CHAT, None, "Expect: 100-continue", "Content-Length: 5", host="evil.example"), 403),
    ):
        answer = ask(server, data)
        assert (answer.status, answer.interim) == (status, ())
    chunked = request("POST", CHAT, None, "Expect: 100-continue", "Transfer-Encoding: chunked")
    with connect(server) as sock:
        sock.sendall(chunked)
        read_until(sock, b"100 Continue\r\n\r\n")
        sock.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert is_echo(parse_answer(read_all(sock)))


def test_http_1_0(server: PantheonServer) -> None:
    assert is_echo(ask(server, request("POST", CHAT, BODY, host=None, version="1.0")))
    answer = ask(server, request("POST", CHAT, b'{"stream":true}', version="1.0"))
    assert "transfer-encoding" not in answer.headers and answer.events == ['{"i":0}', '{"i":1}', '{"i":2}', "[DONE]"]


def test_a_stream(server: PantheonServer) -> None:
    answer = ask(server, request("POST", CHAT, b'{"stream":true}'))
    assert answer.headers["content-type"] == "text/event-stream" and answer.events[-1] == "[DONE]"


def test_a_pipelined_second_request_is_ignored(server: PantheonServer) -> None:
    """M031: one answer, and no reset that could eat it."""
    for _ in range(5):
        answer = ask(server, POST + POST)
        assert is_echo(answer) and answer.raw.count(b"HTTP/1.1 200") == 1


def test_head_is_get_without_a_body(server: PantheonServer) -> None:
    get, head = ask(server, request()), ask(server, request("HEAD"))
    assert head.body == b"" and head.status == 200
    assert head.headers["content-length"] == get.headers["content-length"] == "36"
    assert ask(server, request("HEAD", "/nope")).body == b""


def test_prefix_routes_queries_and_absolute_targets(server: PantheonServer) -> None:
    target = "http://localhost/v1/models/org%2Fmodel%20x/y?a=1&b=%C3%A9"
    answer = ask(server, request("GET", target, host="evil.example"))
    assert answer.json() == {
        "query": {"a": "1", "b": "é"},
        "tail": "org/model x/y",
        "client": "127.0.0.1",
        "id": answer.headers["x-request-id"],
        "method": "GET",
    }


def test_an_upgrade_is_ignored(server: PantheonServer) -> None:
    fields = ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQ")
    assert is_echo(ask(server, request("POST", CHAT, BODY, *fields)))


def test_content_type_does_not_matter(server: PantheonServer) -> None:
    for kind in ("application/x-www-form-urlencoded", "application/json; charset=utf-8", "text/plain"):
        assert is_echo(ask(server, request("POST", CHAT, BODY, f"Content-Type: {kind}")))


# ---- access


def test_options_anything_is_200_with_cors(make: Make) -> None:
    """M022, B44a: without a key, whatever the path."""
    server = make(api_keys=("sesame",))
    for path in ("/anything", CHAT, "*"):
        answer = ask(server, request("OPTIONS", path))
        assert (answer.status, answer.body) == (200, b"{}") and "access-control-allow-methods" in answer.headers
    wanted = "authorization,content-type,x-stainless-os,x-stainless-timeout"
    fields = ("Origin: http://localhost:5173", "Access-Control-Request-Method: POST")
    answer = ask(server, request("OPTIONS", CHAT, None, *fields, f"Access-Control-Request-Headers: {wanted}"))
    assert answer.headers["access-control-allow-headers"] == wanted
    assert answer.headers["access-control-allow-origin"] == "http://localhost:5173"


def test_cors_headers_are_on_answers_streams_and_errors(server: PantheonServer) -> None:
    """B44b."""
    origin = "Origin: http://localhost:5173"
    for body, status in ((BODY, 200), (b'{"stream":true}', 200), (b"{:", 400)):
        answer = ask(server, request("POST", CHAT, body, origin))
        assert answer.status == status and answer.headers["access-control-allow-origin"] == "http://localhost:5173"
    for path in ("/nope", CHAT):
        assert "access-control-allow-origin" in ask(server, request("GET", path, None, origin)).headers
    assert (
        "access-control-allow-origin"
        not in ask(server, request("GET", "/", None, "Origin: https://evil.example")).headers
    )
    assert "access-control-allow-origin" not in ask(server, request("GET", "/admin/dies", None, origin)).headers


def test_foreign_hosts_and_pages_are_403(server: PantheonServer) -> None:
    """B44c, B44d."""
    assert ask(server, request(host="evil.example:8201")).code == "host_not_allowed"
    for host in (f"localhost:{server.port}", f"127.0.0.1:{server.port}", f"[::1]:{server.port}"):
        assert ask(server, request(host=host)).status == 200
    answer = ask(server, request("POST", "/admin/models/unload", BODY, "Origin: https://evil.example"))
    assert (answer.status, answer.code) == (403, "origin_not_allowed")


def test_api_key(make: Make) -> None:
    """B44e: 401 JSON on everything but health."""
    server = make(api_keys=("sesame",))
    for fields in ((), ("Authorization: Bearer wrong",)):
        answer = ask(server, request("POST", CHAT, BODY, *fields))
        assert (answer.status, answer.code) == (401, "invalid_api_key")
        assert ask(server, request("GET", "/nope", None, *fields)).status == 401
    assert is_echo(ask(server, request("POST", CHAT, BODY, "Authorization: Bearer sesame")))
    assert ask(server, request()).status == 200


# ---- slow and many clients


QUICK = Timeouts(head_s=0.3, body_idle_s=0.3, body_s=0.6, write_idle_s=0.5, linger_s=0.2, linger_unread_s=0.3)


def test_slow_requests_are_408_and_closed(make: Make) -> None:
    """Slow loris: the whole head has one deadline, the body an idle one and a whole one."""
    server = make(timeouts=QUICK)
    for data in (b"GET / HTTP/1.1\r\nHo", POST[:-3]):
        answer = ask(server, data)
        assert (answer.status, answer.code) == (408, "request_timeout")
    for start in (b"GET / HTTP/1.1\r\n", request("POST", CHAT, None, "Content-Length: 10000")):
        with connect(server) as sock:
            sock.sendall(start)
            pause, sent = threading.Event(), 0
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while not select.select([sock], [], [], 0)[0] and sent < 500:
                    sock.sendall(b"X")
                    sent += 1
                    pause.wait(0.02)
            assert sent < 200 and parse_answer(read_all(sock)).status == 408


def test_a_silent_connection_is_closed_without_a_word(make: Make) -> None:
    server = make(timeouts=QUICK)
    with connect(server) as sock:
        assert read_all(sock) == b""


def test_idle_connections_do_not_keep_others_waiting(server: PantheonServer) -> None:
    """M008."""
    idle = [connect(server) for _ in range(50)]
    try:
        started = time.monotonic()
        assert ask(server, request()).status == 200
        assert time.monotonic() - started < 5.0
        assert eventually(lambda: server.connections >= 50)
    finally:
        for sock in idle:
            sock.close()
    assert eventually(lambda: server.connections == 0)


def test_over_the_connection_limit_is_503(make: Make, gate: Gate) -> None:
    """M020."""
    server = make(max_connections=2)
    busy = [connect(server) for _ in range(2)]
    for sock in busy:
        sock.sendall(request("GET", "/gate"))
        assert gate.entered.acquire(timeout=10)
    for _ in range(100):
        answer = ask(server, POST)
        assert (answer.status, answer.code) == (503, "too_many_connections")
        assert answer.headers["retry-after"] == "1" and answer.headers["connection"] == "close"
    gate.open.set()
    assert [parse_answer(read_all(sock)).status for sock in busy] == [200, 200]
    for sock in busy:
        sock.close()
    assert eventually(lambda: server.connections == 0)
    assert ask(server, request()).status == 200


def test_silent_connections_make_room(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """M020: whoever opens sockets and says nothing does not lock others out."""
    monkeypatch.setattr("pantheon.serve.http_server._IDLE_S", 0.0)
    server = make(max_connections=2)
    idle = [connect(server) for _ in range(6)]
    try:
        assert ask(server, request()).status == 200
        assert eventually(lambda: server.connections <= 2)
    finally:
        for sock in idle:
            sock.close()


def test_many_refused_connections_leave_nothing_open(make: Make, gate: Gate) -> None:
    server = make(max_connections=1)
    busy = connect(server)
    busy.sendall(request("GET", "/gate"))
    assert gate.entered.acquire(timeout=10)
    before = len(os.listdir("/proc/self/fd"))
    refused = [connect(server) for _ in range(150)]
    for sock in refused:
        sock.close()
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    gate.open.set()
    assert parse_answer(read_all(busy)).status == 200
    busy.close()


def test_no_thread_is_a_prompt_503(make: Make) -> None:
    """M009, X24, K15: the accept loop never runs a generation in a thread's place."""
    server = make()
    seams.arm("thread_start")
    answer = ask(server, POST)
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "no_thread", "1")
    assert server.connections == 0
    assert is_echo(ask(server, POST))


def test_thread_start_that_raises_is_survived(server: PantheonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert ask(server, POST).code == "no_thread"
    assert is_echo(ask(server, POST))


def test_out_of_descriptors_sheds_a_client_and_lives(
    server: PantheonServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """M020: no traceback, no spinning; the client waiting first is dropped."""
    plain = socket.socket.accept
    failures = iter([True])

    def accept(self: socket.socket) -> Any:
        if self is server.socket and next(failures, False):
            raise OSError(errno.EMFILE, "Too many open files")
        return plain(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with connect(server) as sock:
        assert read_all(sock) == b""
    monkeypatch.undo()
    assert ask(server, request()).status == 200
    assert "out of file descriptors" in caplog.text and "Traceback" not in caplog.text


@pytest.mark.parametrize("threads", [0, 2])
def test_inline_and_pool(make: Make, threads: int) -> None:
    """M021."""
    server = make(threads=threads, timeouts=QUICK)
    before = threading.active_count()
    assert all(is_echo(ask(server, POST)) for _ in range(6))
    assert threading.active_count() - before == min(threads, 2)


def test_pool_of_n_serves_n_at_once(make: Make, gate: Gate) -> None:
    server = make(threads=2)
    socks = [connect(server) for _ in range(3)]
    for sock in socks:
        sock.sendall(request("GET", "/gate"))
    assert gate.entered.acquire(timeout=10) and gate.entered.acquire(timeout=10)
    assert not gate.entered.acquire(timeout=0.1)
    gate.open.set()
    assert [parse_answer(read_all(sock)).status for sock in socks] == [200] * 3
    for sock in socks:
        sock.close()


def test_other_routes_answer_during_a_generation(server: PantheonServer, gate: Gate) -> None:
    """M010, M028."""
    with connect(server) as sock:
        sock.sendall(request("GET", "/gate"))
        assert gate.entered.acquire(timeout=10)
        assert all(ask(server, request()).status == 200 for _ in range(20))
        gate.open.set()
        assert parse_answer(read_all(sock)).json() == {"gate": "open"}


# ---- start, TLS, stop, log


def test_an_address_in_use_is_one_clear_line(server: PantheonServer) -> None:
    with pytest.raises(PantheonError, match=rf"can not listen on 127.0.0.1:{server.port}: Address already in use; ch"):
        PantheonServer(Router(), HttpConfig(port=server.port))


def test_the_log_says_why_and_keeps_probes_for_debug(server: PantheonServer, caplog: pytest.LogCaptureFixture) -> None:
    server._site.router.add("GET", "/health", seen)
    with caplog.at_level(logging.DEBUG, "pantheon.http"):
        assert ask(server, request("GET", "/health")).status == 200
        assert ask(server, request("POST", CHAT, b"{")).status == 400
        assert eventually(lambda: len(caplog.records) == 2)
    probe, refused = sorted(caplog.records, key=lambda record: record.levelno)
    assert probe.levelno == logging.DEBUG and "GET /health 200" in probe.getMessage()
    assert refused.levelno == logging.INFO and 'why="the request body is not valid JSON' in refused.getMessage()


def test_url_and_beyond_loopback_warning(caplog: pytest.LogCaptureFixture) -> None:
    """M018."""
    assert HttpConfig().host == "127.0.0.1" and HttpConfig().port == 8201
    for host, url, warns in (("127.0.0.1", "127.0.0.1", False), ("0.0.0.0", "127.0.0.1", True)):
        caplog.clear()
        server = PantheonServer(Router(), HttpConfig(host=host, port=0))
        assert server.url == f"http://{url}:{server.port}"
        server.stop()
        assert ("without an API key" in caplog.text) is warns
    caplog.clear()
    PantheonServer(Router(), HttpConfig(host="0.0.0.0", port=0, api_keys=("k",))).stop()
    assert caplog.text == ""


def test_stop_lets_short_work_finish_and_refuses_new(make: Make, gate: Gate) -> None:
    server = make()
    gate.entered.acquire(blocking=False)
    with connect(server) as sock:
        sock.sendall(request("GET", "/gate"))
        assert gate.entered.acquire(timeout=10)
        started = time.monotonic()
        server.stop(5)
        assert time.monotonic() - started < 3
        answer = parse_answer(read_all(sock))
        assert (answer.status, answer.code) == (503, "shutting_down")
    with pytest.raises(ConnectionRefusedError):
        connect(server)


def test_stop_cuts_what_does_not_listen(make: Make) -> None:
    server = make()
    entered, release = threading.Event(), threading.Event()

    def deaf(request: Request, responder: Responder) -> None:
        entered.set()
        release.wait(20)

    server._site.router.add("GET", "/deaf", deaf)
    with connect(server) as sock, connect(server):
        sock.sendall(request("GET", "/deaf"))
        assert entered.wait(10)
        started = time.monotonic()
        server.stop(0.3)
        assert time.monotonic() - started < 2.0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            assert read_all(sock) == b""
        release.set()
        assert eventually(lambda: server.connections == 0)


def test_stop_of_a_server_that_never_started() -> None:
    server = PantheonServer(Router(), HttpConfig(port=0))
    server.stop(1)
    server.stop(1)


def test_the_access_log_has_one_line_per_request(server: PantheonServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pantheon.http"):
        answer = ask(server, request("GET", "/v1/models/a%0Ab?key=secret"))
        ask(server, b"BAD\r\n")
        assert eventually(lambda: len(caplog.records) == 2)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("GET /v1/models/a%0Ab 200 ") and answer.headers["x-request-id"] in first
    assert "secret" not in first and second.startswith("- - 400 ")


def test_limits_are_the_servers_own(make: Make) -> None:
    server = make(limits=Limits(body_bytes=50))
    assert ask(server, request("POST", CHAT, b'{"a":"' + b"x" * 50 + b'"}')).status == 413
    bomb = gzip.compress(b'{"a":"' + b"x" * 5000 + b'"}')
    assert len(bomb) <= 50
    assert ask(server, request("POST", CHAT, bomb, "Content-Encoding: gzip")).status == 413


def test_tls_flags_at_fault_are_named() -> None:
    with pytest.raises(PantheonError, match="--ssl-key needs --ssl-cert"):
        PantheonServer(Router(), HttpConfig(port=0, tls_key="x"))
    with pytest.raises(PantheonError, match="can not use the certificate /nope.pem"):
        PantheonServer(Router(), HttpConfig(port=0, tls_cert="/nope.pem"))
    with pytest.raises(PantheonError, match="--ssl-key: needs a passphrase"):
        PantheonServer(
            Router(), HttpConfig(port=0, tls_cert=str(TLS / "localhost.pem"), tls_key=str(TLS / "locked.key"))
        )


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [("127.0.0.1", (), False), ("0.0.0.0", (), True), ("0.0.0.0", ("k",), False), ("::", (), True)],
)
def test_a_port_that_is_open_to_others_without_a_key_is_warned_of(
    host: str, keys: tuple[str, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 6 point 3."""
    try:
        server = PantheonServer(Router(), HttpConfig(host=host, port=0, api_keys=keys))
    except PantheonError:
        assert host == "::", "only IPv6 may be missing on a machine"
        return
    server.server_close()
    found = [record for record in caplog.records if "beyond loopback without an API key" in record.getMessage()]
    assert bool(found) == warned and all(record.levelname == "WARNING" for record in found)


def test_a_request_may_bring_its_name(server: PantheonServer) -> None:
    """It is echoed when it can not break anything, else ours stands."""
    for name in ("trace-1", "a" * 128, "01JD:x/y+z=@_"):
        assert ask(server, request("GET", "/", None, f"X-Request-Id: {name}")).headers["x-request-id"] == name
    for name in ("a" * 129, "two words", "ä", ""):
        answer = ask(server, request("GET", "/", None, f"X-Request-Id: {name}"))
        assert answer.headers["x-request-id"].startswith("req_")


def test_tls(make: Make) -> None:
    """M019: answers, bodies bigger than a record, and a client that talks plain HTTP."""
    server = make(tls_cert=str(TLS / "localhost.pem"), tls_key=str(TLS / "localhost.key"))
    assert server.url == f"https://127.0.0.1:{server.port}"
    context = trusting()
    big = json.dumps({"a": "x" * 3_000_000}).encode()
    for data in (POST, request("POST", CHAT, big), request("POST", CHAT, b'{"stream":true}')):
        with connect(server) as plain, context.wrap_socket(plain, server_hostname="localhost") as sock:
            sock.sendall(data)
            assert parse_answer(read_all(sock)).status == 200
    with connect(server) as sock, contextlib.suppress(ConnectionResetError):
        sock.sendall(request())
        assert b"HTTP" not in read_all(sock)
    assert eventually(lambda: server.connections == 0)
