"""One connection, one request, one answer: read, check before the body, dispatch, log, close in order.

Runs on the connection's own thread.  Must not know how connections are accepted.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
import time
import uuid
from dataclasses import dataclass, field
from urllib.parse import quote

from pantheon import log
from pantheon.seams import SYSTEM_CLOCK, Clock
from pantheon.serve.http_access import Access
from pantheon.serve.http_body import BodyReader, body_reader, content_coding, decode_content
from pantheon.serve.http_connection import Connection, PeerTimeout
from pantheon.serve.http_errors import HttpError, bad_http
from pantheon.serve.http_parser import Head, HeadParser, Limits
from pantheon.serve.http_request import Request
from pantheon.serve.http_responder import Responder
from pantheon.serve.routes import Router, dispatch
from pantheon.serve.sse import Pulse

_LOG = log.logger("http")
#: what orchestrators and the status page ask every few seconds; logged at debug
_PROBES = frozenset({
    "/health", "/v1/health", "/ready", "/metrics", "/slots", "/v1/models", "/admin/models", "/admin/dies",
    "/admin/memory", "/admin/sched",
})  # fmt: skip
#: characters of an error's message in the log
_WHY = 200
#: what a caller may name its request; anything else gets a name of ours
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True)
class Site:
    """What every exchange of one server shares."""

    router: Router
    access: Access = field(default_factory=Access)
    limits: Limits = field(default_factory=Limits)
    tls: ssl.SSLContext | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    pulse: Pulse = field(default_factory=Pulse)
    clock: Clock = SYSTEM_CLOCK


def serve_connection(connection: Connection, site: Site) -> None:
    """Serve the one request of a connection and close it.  Raises nothing that a client can cause."""
    exchange = _Exchange(connection, site)
    try:
        if exchange.open():
            exchange.run()
    finally:
        connection.close(unread=exchange.unread)


class _Exchange:
    def __init__(self, connection: Connection, site: Site) -> None:
        self._connection = connection
        self._site = site
        self._started = time.monotonic()
        self._deadline = self._started + connection.timeouts.head_s
        self._head: Head | None = None
        self._responder = Responder(connection, stopping=site.stopping, pulse=site.pulse, clock=site.clock)
        self._call(f"req_{uuid.uuid4().hex}")
        self.unread = True

    def _call(self, name: str) -> None:
        """The id under which the answer and the log know this request."""
        self._id = self._responder.request_id = name
        self._responder.headers = {"X-Request-Id": name}

    def open(self) -> bool:
        """The TLS handshake, where there is one; False when it fails."""
        if self._site.tls is None:
            return True
        try:
            self._connection.start_tls(self._site.tls, self._deadline)
        except (OSError, PeerTimeout) as fault:
            _LOG.debug("handshake failed %s", log.fields(client=self._connection.client, why=str(fault)))
            self._connection.abort()
            return False
        return True

    def run(self) -> None:
        delivered = True
        try:
            request = self._read_request()
            if request is None:
                return
            delivered = self._answer(request)
        except HttpError as fault:
            self._responder.fail(fault)
        self._log(delivered)

    def _answer(self, request: Request) -> bool:
        if request.method == "OPTIONS":
            headers = self._site.access.preflight_headers(request.path, request.headers)
            self._responder.headers = {"X-Request-Id": self._id}
            self._responder.send_json(200, {}, headers)
            return True
        return dispatch(self._site.router, request, self._responder)

    def _read_request(self) -> Request | None:
        """The whole request; None when the client left without asking.  Raises HttpError."""
        parser = HeadParser(self._site.limits)
        head = self._read_head(parser)
        if head is None:
            self.unread = False
            return None
        self._head = head
        if _REQUEST_ID.fullmatch(given := head.headers.get("x-request-id") or ""):
            self._call(given)
        self._responder.http_version = head.http_version
        self._responder.head_only = head.method == "HEAD"
        self._responder.voice = self._site.router.voice(head.path)
        self._responder.headers |= self._site.access.answer_headers(head.path, head.headers)
        self._site.access.check(head.method, head.path, head.host, head.headers, self._connection.client)
        if head.method != "OPTIONS":
            self._site.router.find(head.method, head.path)
        coding = content_coding(head.headers)
        reader = body_reader(head.length, self._site.limits)
        self._read_body(reader, parser.rest, head.expects_continue)
        self.unread = False
        body = decode_content(coding, reader.body(), self._site.limits.body_bytes)
        client, self._responder.arrived = self._connection.client, time.perf_counter()
        return Request(head.method, head.path, head.query, head.headers, body, head.http_version, client, self._id)

    def _read_head(self, parser: HeadParser) -> Head | None:
        while parser.head is None:
            try:
                data = self._connection.read(self._deadline)
            except PeerTimeout:
                if parser.started:
                    raise HttpError(408, "the request header did not arrive in time", code="request_timeout") from None
                return None
            if not data:
                if parser.started and not self._connection.gone():
                    raise bad_http("the request ends inside its header")
                return None
            parser.feed(data)
        return parser.head

    def _read_body(self, reader: BodyReader, first: bytes, expects_continue: bool) -> None:
        timeouts = self._connection.timeouts
        end = time.monotonic() + timeouts.body_s
        reader.feed(first)
        if expects_continue and not reader.complete:
            self._connection.write(_CONTINUE)
        while not reader.complete:
            try:
                data = self._connection.read(min(end, time.monotonic() + timeouts.body_idle_s))
            except PeerTimeout:
                raise HttpError(408, "the request body did not arrive in time", code="request_timeout") from None
            if not data:
                raise bad_http("the request ends inside its body")
            reader.feed(data)

    def _log(self, delivered: bool) -> None:
        method, path = (self._head.method, quote(self._head.path)) if self._head else ("-", "-")
        answer = self._responder
        status = answer.status if delivered or answer.status else 499
        ms = (time.monotonic() - self._started) * 1000
        word = "" if delivered else " cancelled"
        why = answer.why and answer.why[:_WHY]
        extra = log.fields(id=self._id, client=self._connection.client, why=why)
        outcome = "cancelled" if not delivered else "error" if answer.why is not None else "ok"
        line = log.structured(
            "request", id=self._id, client=self._connection.client, method=method, path=path, status=status,
            outcome=outcome, ms=round(ms, 3), code=answer.code, why=why, **answer.facts,
        )  # fmt: skip
        level = logging.DEBUG if path in _PROBES and why is None else logging.INFO
        _LOG.log(level, "%s %s %s %s%s %s", method, path, status, f"{ms:.0f}ms", word, extra, extra=line)
