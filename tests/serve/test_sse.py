"""Event streams: framing, keep-alive, stalled and departed readers [B16, B19, M034, M037, X11, X34]."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from pantheon.errors import Busy, Cancelled
from pantheon.serve.http_connection import Connection, Timeouts
from pantheon.serve.http_responder import Responder
from pantheon.serve.sse import HEARTBEAT_S, Pulse, SseStream
from tests.fakes import FakeClock
from tests.serve.http_client import parse_answer, read_all, unchunk


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Connection]]:
    client, server = socket.socketpair()
    client.settimeout(10)
    connection = Connection(server, "test", Timeouts(write_idle_s=0.3, linger_s=0.1))
    yield client, connection
    client.close()
    connection.close()


Pair = tuple[socket.socket, Connection]


def received(pair: Pair) -> bytes:
    """All that the stream has sent."""
    pair[0].shutdown(socket.SHUT_WR)
    pair[1].close()
    return read_all(pair[0])


def test_one_event_is_one_write(pair: Pair) -> None:
    stream = SseStream(pair[1], chunked=True)
    stream.send({"a": "é\n", "b": [1, 2.5, None]})
    expected = 'data: {"a":"é\\n","b":[1,2.5,null]}\n\n'.encode()
    assert pair[0].recv(65536) == b"%x\r\n%s\r\n" % (len(expected), expected)
    stream.done()
    assert pair[0].recv(65536) == b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def test_events_are_valid_utf8_and_json_whatever_they_hold(pair: Pair) -> None:
    stream = SseStream(pair[1], chunked=False)
    stream.send({"text": "\ud83d half", "logprob": float("-inf")})
    assert json.loads(received(pair).decode("utf-8").removeprefix("data: ")) == {"text": "\ufffd half", "logprob": None}


def test_error_is_an_event_then_done_then_the_end(pair: Pair) -> None:
    stream = SseStream(pair[1], chunked=True)
    stream.error(Busy("later", retry_after=3))
    assert stream.closed and stream.delivered
    stream.send(1), stream.comment("x"), stream.done(), stream.probe()
    stream.error(Busy("again"))
    blocks = unchunk(received(pair)).split(b"\n\n")
    assert json.loads(blocks[0].removeprefix(b"data: "))["error"]["type"] == "server_busy"
    assert blocks[1:] == [b"data: [DONE]", b""]


def test_a_comment_stays_one_line(pair: Pair) -> None:
    SseStream(pair[1], chunked=False).comment("queued\r\n\ndata: x pos=3")
    assert received(pair) == b": queued   data: x pos=3\n\n"


def test_the_head_of_a_stream(pair: Pair) -> None:
    """M037, and chunked framing for 1.1."""
    responder = Responder(pair[1])
    responder.headers = {"X-Request-Id": "r1"}
    responder.begin_sse({"X-Extra": "1"}).done()
    responder.release()
    answer = parse_answer(received(pair))
    assert answer.headers["content-type"] == "text/event-stream" and answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no" and answer.headers["connection"] == "close"
    assert (answer.headers["x-request-id"], answer.headers["x-extra"]) == ("r1", "1")
    assert answer.events == ["[DONE]"]


def test_keep_alive_comes_every_ten_silent_seconds(pair: Pair) -> None:
    """B19: a comment, never an event."""
    clock = FakeClock()
    stream = SseStream(pair[1], chunked=False, clock=clock)
    start = clock.monotonic()
    assert stream.keep_alive(start + 9.9) == start + HEARTBEAT_S
    assert stream.keep_alive(start + 10) == start + 20
    stream.heartbeat = lambda: "queued pos=3"
    stream.keep_alive(start + 20)
    stream.heartbeat = lambda: str(1 // 0)
    stream.keep_alive(start + 30)
    clock.advance(35)
    stream.send(1)
    assert stream.keep_alive(start + 44) == start + 45
    assert received(pair) == b": keep-alive\n\n: queued pos=3\n\n: keep-alive\n\ndata: 1\n\n"


def test_no_comment_follows_the_end(pair: Pair) -> None:
    clock = FakeClock()
    stream = SseStream(pair[1], chunked=True, clock=clock)
    stream.done()
    stream.keep_alive(clock.monotonic() + 100)
    pair[1].try_write(b"late")
    assert unchunk(received(pair)) == b"data: [DONE]\n\n"


def test_pulse_serves_every_stream_and_ends_with_the_last(pair: Pair) -> None:
    clock = FakeClock()
    pulse = Pulse(clock)
    stream = SseStream(pair[1], chunked=False, clock=clock)
    pulse.add(stream)
    (thread,) = [t for t in threading.enumerate() if t.name == "pantheon-sse-pulse"]
    assert pulse.tick() == HEARTBEAT_S
    clock.advance(HEARTBEAT_S)
    assert pulse.tick() == HEARTBEAT_S
    assert pair[0].recv(100) == b": keep-alive\n\n"
    pulse.remove(stream)
    thread.join(10)
    assert not thread.is_alive()


def test_heartbeats_never_cut_into_events(pair: Pair) -> None:
    """Many small comments against big events over a full socket: each event arrives whole."""
    client, connection = pair
    big, n = "x" * 300_000, 12
    stream = SseStream(connection, chunked=False)
    stop = threading.Event()
    beats = threading.Thread(target=lambda: [stream.probe() for _ in iter(lambda: stop.wait(0.0005), True)])
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(read_all(client)))
    beats.start(), reader.start()
    for i in range(n):
        stream.send([i, big])
    stop.set()
    beats.join(10)
    stream.done()
    client.shutdown(socket.SHUT_WR)
    connection.close()
    reader.join(10)
    blocks = [b for b in got[0].split(b"\n\n") if b not in (b":", b"")]
    assert [json.loads(b[6:]) for b in blocks[:-1]] == [[i, big] for i in range(n)] and blocks[-1] == b"data: [DONE]"


def test_a_stalled_reader_is_gone_after_the_idle_time(pair: Pair) -> None:
    """X34."""
    stream = SseStream(pair[1], chunked=True)
    with pytest.raises(Cancelled):
        for _ in range(100):
            stream.send("x" * 1_000_000)
    assert pair[1].gone()


def test_a_departed_reader_cancels_the_next_event(pair: Pair) -> None:
    stream = SseStream(pair[1], chunked=True)
    stream.send(1)
    pair[0].close()
    with pytest.raises(Cancelled):
        stream.send(2)
    stream.done()
    assert stream.closed and not stream.delivered


def test_begin_sse_to_nobody_is_cancelled(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(Cancelled):
        Responder(pair[1]).begin_sse()
