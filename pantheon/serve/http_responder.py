"""The one answer to a request: JSON, bytes or an event stream, and whether anybody still waits for it.

States of an answer: NONE -> SENT; NONE -> EARLY (the head of a 200 is out) -> SENT or STREAM; NONE -> STREAM.
Must not know routes.
"""

from __future__ import annotations

import email.utils
import math
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from pantheon.errors import Cancelled, PantheonError
from pantheon.seams import SYSTEM_CLOCK, Clock
from pantheon.serve.http_connection import Connection
from pantheon.serve.http_json import dump_json
from pantheon.serve.sse import Pulse, SseStream
from pantheon.serve.voice import OPENAI, Voice

JSON_TYPE = "application/json"
SSE_FIELDS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_NONE, _EARLY, _STREAM, _SENT = "none", "early", "stream", "sent"
_PROBE_S = 0.3  # between two probes in the stream
_GRACE_S = 3.0  # that a half-closed client may wait before its answer has to begin early


def head_bytes(status: int, headers: Mapping[str, str]) -> bytes:
    """Status line and header fields up to the empty line.  Values are cut to one line of latin-1."""
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = "Client Closed Request" if status == 499 else "Unknown"
    lines = [f"HTTP/1.1 {status} {reason}"]
    all_headers = {**headers, "Date": email.utils.formatdate(usegmt=True), "Server": "pantheon", "Connection": "close"}
    for name, value in all_headers.items():
        lines.append(f"{name}: {''.join(c for c in value if c.isprintable())}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def error_headers(fault: PantheonError) -> dict[str, str]:
    """`Retry-After` (whole seconds, always on 429 and 503) and what the error itself asks for."""
    headers = dict(getattr(fault, "headers", {}))
    if fault.retry_after is None and fault.status in (429, 503):
        fault.retry_after = 1.0
    if fault.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(fault.retry_after)))
    return headers


def error_bytes(fault: PantheonError) -> bytes:
    """A whole error answer, for a client whose request is not read."""
    headers = error_headers(fault)
    body = dump_json(fault.body())
    return head_bytes(fault.status, {"Content-Type": JSON_TYPE, "Content-Length": str(len(body)), **headers}) + body


class Responder:
    """Answers one request, once.

    `headers` go on whatever the answer will be (CORS, X-Request-Id).  A handler sets `will_stream` when the answer
    will be an event stream, so that a head that must go out early is that of a stream.  `voice` is the form of its
    errors and of the end of its stream; a stream keeps the one that it began with.  What a handler puts into `facts`
    goes into the log's JSON line of the request.  `request_id` and `arrived` (time.perf_counter) are the exchange's.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        stopping: threading.Event | None = None,
        pulse: Pulse | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.headers: dict[str, str] = {}
        self.http_version = (1, 1)
        self.head_only = False
        self.will_stream = False
        self.voice: Voice = OPENAI
        self.delivered = True
        self.status: int | None = None
        #: the words of the error that was answered, for the log; the error itself would close a circle through its
        #: traceback, and keep a model that is unloaded after a refusal
        self.why: str | None = None
        self.code: str | None = None
        self.facts: dict[str, Any] = {}
        self.request_id = ""
        self.arrived = time.perf_counter()
        self._connection = connection
        self._stopping = stopping or threading.Event()
        self._pulse = pulse or Pulse(clock)
        self._clock = clock
        self._state = _NONE
        self._stream: SseStream | None = None
        self._head = b""
        self._next_probe: float | None = None

    @property
    def finished(self) -> bool:
        """Whether the whole answer has been handed to the socket; `delivered` says whether the socket took it."""
        return self._state == _SENT or (self._stream is not None and self._stream.closed)

    def send_json(self, status: int, obj: Any, headers: Mapping[str, str] | None = None) -> None:
        """Answer with JSON.  Does nothing when the client is gone.  Raises RuntimeError for a second answer."""
        self.send_bytes(status, JSON_TYPE, dump_json(obj), headers)

    def send_bytes(self, status: int, content_type: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Answer with any body.  After an early JSON head, status and headers are already settled."""
        if self._state in (_SENT, _STREAM):
            raise RuntimeError("a second answer to one request")
        if self._state == _EARLY:
            out = self._frame(data) + (b"0\r\n\r\n" if self._chunked else b"")
        else:
            self.status = status
            fields = {"Content-Type": content_type, "Content-Length": str(len(data)), **self.headers, **(headers or {})}
            out = head_bytes(status, fields) + (b"" if self.head_only else data)
        self._state = _SENT
        self.delivered = self._connection.write(out, last=True)

    def begin_sse(self, headers: Mapping[str, str] | None = None) -> SseStream:
        """Send the head of an event stream at once.  Raises Cancelled when the client is gone."""
        if self._state in (_SENT, _STREAM):
            raise RuntimeError("a second answer to one request")
        if self._state == _NONE:
            self._begin(SSE_FIELDS, headers)
            if not self._connection.write(self._head):
                raise Cancelled("the client is gone")
        self._state = _STREAM
        self._stream = self._new_stream()
        self._pulse.add(self._stream)
        return self._stream

    def client_gone(self) -> bool:
        """Whether nobody waits for the answer any more.  One system call; see routes.py for the early JSON head."""
        gone, half_closed = self._connection.watch()
        if gone or not half_closed or self.head_only or self.finished:
            return gone
        now = time.monotonic()
        if self._next_probe is None:
            asked = self._state == _NONE and self._connection.provoke()
            self._next_probe = now + _GRACE_S if asked else now
        if now >= self._next_probe:
            self._next_probe = now + _PROBE_S
            self._probe()
        return self._connection.gone()

    def hung_up(self) -> bool:
        """Whether the client is gone or has at least closed its sending side.  Sends nothing; safe from any thread."""
        return self._connection.gone() or self._connection.sending_side_closed()

    def stopping(self) -> bool:
        """Whether the server is shutting down."""
        return self._stopping.is_set()

    def should_stop(self) -> bool:
        """Whether work for this answer should end: nobody waits, or the server stops."""
        return self.stopping() or self.client_gone()

    def stop_waiting_when(self, over: Callable[[], bool]) -> None:
        """Take a client that takes nothing for gone once `over` says so: a write to it is waited for no longer."""
        self._connection.hopeless = over

    def fail(self, fault: PantheonError) -> None:
        """Answer with an error in the form that the state of the answer still allows."""
        self.why, self.code = fault.message, fault.code
        if self._state == _EARLY and self.will_stream:
            self._stream = self._new_stream()
        if self._stream is not None:
            self._stream.error(fault)
        elif self._state != _SENT:
            headers = error_headers(fault)
            self.send_json(fault.status, self.voice.error_body(fault), headers)

    def finish(self) -> None:
        """Called when the handler is done: ends a stream it left open.  Raises RuntimeError when it never answered."""
        if self._stream is not None:
            self._stream.done()
        elif self._state != _SENT:
            raise RuntimeError("the handler gave no answer")

    def release(self) -> None:
        """Stop the keep-alive of a stream, if there is one."""
        if self._stream is not None:
            self._pulse.remove(self._stream)
            self.delivered = self._stream.delivered

    def _new_stream(self) -> SseStream:
        return SseStream(self._connection, chunked=self._chunked, clock=self._clock, voice=self.voice)

    def _begin(self, fields: Mapping[str, str], headers: Mapping[str, str] | None = None) -> None:
        """Settle status 200 and the framing of an answer whose length is not known."""
        self.status = 200
        framing = {"Transfer-Encoding": "chunked"} if self._chunked else {}
        self._head = head_bytes(200, {**fields, **framing, **self.headers, **(headers or {})})

    def _probe(self) -> None:
        """Send what the client will ignore; a client that is gone answers it with a reset."""
        if self._stream is not None:
            return self._stream.probe()
        filler = self._frame(b":\n\n" if self.will_stream else b" ")
        if self._state == _NONE:
            self._state = _EARLY
            self._begin(SSE_FIELDS if self.will_stream else {"Content-Type": JSON_TYPE})
            filler = self._head + filler
        self._connection.try_write(filler)

    @property
    def _chunked(self) -> bool:
        return self.http_version >= (1, 1)

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data
