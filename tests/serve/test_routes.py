"""The route table and what becomes of a handler's errors [M026, M027, M033, M034, M036]."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator

import pytest

from pantheon import seams
from pantheon.errors import BadRequest, Busy, Cancelled, PantheonError, Unavailable
from pantheon.serve.http_connection import Connection
from pantheon.serve.http_errors import HttpError
from pantheon.serve.http_request import Headers
from pantheon.serve.routes import Handler, Request, Responder, Router, dispatch
from tests.serve.http_client import Answer, parse_answer, read_all


def nothing(request: Request, responder: Responder) -> None:
    raise AssertionError("not to be called")


class Wire:
    """A responder on one end of a socket pair, and what arrives at the other."""

    def __init__(self) -> None:
        self.client, server = socket.socketpair()
        self.client.settimeout(10)
        self.connection = Connection(server, "test")
        self.stopping = threading.Event()
        self.responder = Responder(self.connection, stopping=self.stopping)

    def run(self, handler: Handler, method: str = "GET") -> bool:
        router = Router()
        router.add(method, "/x", handler)
        return dispatch(router, Request(method, "/x"), self.responder)

    def answer(self) -> Answer:
        self.client.shutdown(socket.SHUT_WR)
        self.connection.close()
        return parse_answer(read_all(self.client))

    def close(self) -> None:
        self.client.close()
        self.connection.abort()
        self.connection.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


def refusal(router: Router, method: str, path: str) -> HttpError:
    with pytest.raises(HttpError) as caught:
        router.find(method, path)
    return caught.value


def test_exact_paths_then_the_longest_prefix() -> None:
    router = Router()
    handlers = [lambda q, r, i=i: None for i in range(4)]  # type: ignore[misc]
    for path, handler in zip(("/a", "/a/", "/a/b/", "/a/b/c"), handlers, strict=True):
        router.add("GET", path, handler)
    assert router.find("GET", "/a") == (handlers[0], "")
    assert router.find("GET", "/a/x/y") == (handlers[1], "x/y")
    assert router.find("GET", "/a/b/x") == (handlers[2], "x")
    assert router.find("GET", "/a/b/c") == (handlers[3], "")
    assert router.find("GET", "/a/b/") == (handlers[1], "b/")
    assert refusal(router, "GET", "/a/").status == 404
    with pytest.raises(ValueError, match="has a handler"):
        router.add("GET", "/a", nothing)


def test_unknown_path_404_known_path_wrong_method_405() -> None:
    """M027."""
    router = Router()
    router.add("POST", "/v1/chat/completions", nothing)
    router.add("GET", "/v1/models/", nothing)
    assert refusal(router, "GET", "/nope").status == 404
    assert refusal(router, "GET", "/V1/chat/completions").status == 404
    assert refusal(router, "GET", "/v1/chat/completions/").status == 404
    assert refusal(router, "GET", "/v1/models/").status == 404
    for path in ("/chat/completions", "/v1/chat/completions/", "/v1/v1/chat/completions", "/v1/chat/completion"):
        assert refusal(router, "POST", path).message.endswith("did you mean /v1/chat/completions?")
    for path in ("/nope", "/api/chat", "//", "/v1", "/v1/"):
        assert refusal(router, "POST", path).message == f"no such path: {path}"
    fault = refusal(router, "GET", "/v1/chat/completions")
    assert (fault.status, fault.headers) == (405, {"Allow": "OPTIONS, POST"})
    assert refusal(router, "BREW", "/v1/models/x").headers == {"Allow": "GET, HEAD, OPTIONS"}
    assert refusal(router, "HEAD", "/v1/chat/completions").status == 405
    assert router.find("HEAD", "/v1/models/x")[1] == "x"


def test_the_root_answers_exactly(wire: Wire) -> None:
    """M026."""
    dispatch(Router(), Request("GET", "/"), wire.responder)
    answer = wire.answer()
    assert (answer.status, answer.body) == (200, b'{"service":"pantheon","status":"ok"}')
    assert answer.headers["content-type"] == "application/json" and answer.headers["connection"] == "close"


def test_a_browser_is_sent_to_the_status_page(wire: Wire) -> None:
    accept = Headers([("Accept", "text/html,application/xhtml+xml,*/*;q=0.8")])
    dispatch(Router(), Request("GET", "/", headers=accept), wire.responder)
    answer = wire.answer()
    assert (answer.status, answer.headers["location"]) == (302, "/ui")
    assert answer.body == b'{"service":"pantheon","status":"ok"}'


@pytest.mark.parametrize(
    ("fault", "status", "kind", "retry"),
    [
        (BadRequest("no", param="messages"), 400, "invalid_request_error", None),
        (Busy("a generation is already in progress", retry_after=2.1), 429, "server_busy", "3"),
        (Unavailable("loading", retry_after=0.2), 503, "server_error", "1"),
        (Unavailable("loading"), 503, "server_error", "1"),
    ],
)
def test_refusals_keep_their_status_and_shape(
    wire: Wire, fault: PantheonError, status: int, kind: str, retry: str | None
) -> None:
    """M036: the OpenAI error object, and Retry-After on every 429 and 503."""

    def handler(request: Request, responder: Responder) -> None:
        raise fault

    assert wire.run(handler)
    answer = wire.answer()
    error = answer.json()["error"]
    assert (answer.status, error["type"], error["message"]) == (status, kind, fault.message)
    assert answer.headers.get("retry-after") == retry and set(error) >= {"message", "type", "param", "code"}


def test_a_fault_of_ours_is_500_json_without_a_traceback(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    """M033."""

    def handler(request: Request, responder: Responder) -> None:
        raise ZeroDivisionError("secret detail")

    with caplog.at_level(logging.ERROR, "pantheon.http"):
        wire.run(handler)
    answer = wire.answer()
    assert answer.status == 500 and answer.json()["error"]["type"] == "server_error"
    assert b"secret" not in answer.body and b"Traceback" not in answer.body
    assert "secret detail" in caplog.text


def test_the_handler_failure_point_is_500(wire: Wire) -> None:
    seams.arm("handler")
    wire.run(nothing)
    assert wire.answer().status == 500


def test_a_handler_without_an_answer_is_500(wire: Wire) -> None:
    wire.run(lambda request, responder: None)
    assert wire.answer().status == 500


@pytest.mark.parametrize("fault", [Busy("late", code="late"), RuntimeError("secret")])
def test_after_the_first_byte_an_error_is_an_event_and_a_clean_end(wire: Wire, fault: Exception) -> None:
    """M034, B23: never a second status line, never a cut stream."""

    def handler(request: Request, responder: Responder) -> None:
        responder.begin_sse().send({"i": 1})
        raise fault

    assert wire.run(handler)
    answer = wire.answer()
    assert answer.raw.count(b"HTTP/1.1") == 1 and b"secret" not in answer.raw
    assert answer.status == 200 and answer.events[0] == '{"i":1}' and answer.events[2:] == ["[DONE]"]
    assert json.loads(answer.events[1])["error"]["code"] == ("late" if isinstance(fault, Busy) else "internal_error")


def test_a_stream_left_open_is_ended(wire: Wire) -> None:
    def handler(request: Request, responder: Responder) -> None:
        responder.begin_sse().send({"i": 1})

    wire.run(handler)
    assert wire.answer().events == ['{"i":1}', "[DONE]"]


def test_an_error_after_the_answer_changes_nothing(wire: Wire) -> None:
    def handler(request: Request, responder: Responder) -> None:
        responder.send_json(200, {"ok": True})
        raise RuntimeError("late")

    wire.run(handler)
    assert wire.answer().json() == {"ok": True}


def test_a_stopping_server_answers_503(wire: Wire) -> None:
    wire.stopping.set()
    wire.run(nothing)
    answer = wire.answer()
    assert (answer.status, answer.code) == (503, "shutting_down") and int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_by_a_stopping_server_says_so(wire: Wire, stream: bool) -> None:
    def handler(request: Request, responder: Responder) -> None:
        if stream:
            responder.begin_sse()
        wire.stopping.set()
        assert responder.should_stop()
        raise Cancelled("stopped")

    wire.run(handler)
    answer = wire.answer()
    error = json.loads(answer.events[0]) if stream else answer.json()
    assert error["error"]["code"] == "shutting_down" and answer.status == (200 if stream else 503)
    assert not stream or answer.events[1] == "[DONE]"


def test_cancelled_by_a_client_that_is_gone_is_silent(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    """B24: no error, no stack."""

    def handler(request: Request, responder: Responder) -> None:
        wire.client.close()
        assert responder.client_gone()
        raise Cancelled("gone")

    with caplog.at_level(logging.DEBUG, "pantheon.http"):
        assert not wire.run(handler)
    assert caplog.text == ""


def test_head_sends_the_length_and_no_body(wire: Wire) -> None:
    wire.responder.head_only = True
    wire.run(lambda request, responder: responder.send_json(200, {"a": 1}))
    answer = wire.answer()
    assert answer.headers["content-length"] == "7" and answer.body == b""


def test_header_values_can_not_split_the_answer(wire: Wire) -> None:
    wire.run(lambda request, responder: responder.send_json(200, {}, {"X-Model": "a\r\nSet-Cookie: b\x00é\u4e00"}))
    answer = wire.answer()
    assert "set-cookie" not in answer.headers and answer.headers["x-model"] == "aSet-Cookie: bé?"


def test_bytes_of_any_type(wire: Wire) -> None:
    wire.run(lambda request, responder: responder.send_bytes(200, "text/plain; version=0.0.4", b"a 1\n"))
    answer = wire.answer()
    assert (answer.body, answer.headers["content-type"]) == (b"a 1\n", "text/plain; version=0.0.4")


def test_http_1_0_gets_no_chunks(wire: Wire) -> None:
    wire.responder.http_version = (1, 0)

    def handler(request: Request, responder: Responder) -> None:
        responder.begin_sse().send(1)

    wire.run(handler)
    answer = wire.answer()
    assert "transfer-encoding" not in answer.headers and answer.body == b"data: 1\n\ndata: [DONE]\n\n"


def test_request_json_is_parsed_once_and_keeps_to_objects() -> None:
    request = Request("POST", "/x", body=b'{"a":[1]}')
    assert request.json() is request.json() and request.json() == {"a": [1]}
    with pytest.raises(BadRequest):
        Request("POST", "/x", body=b"[1,2]").json()
