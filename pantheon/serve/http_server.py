"""The listening side: a ThreadingHTTPServer that bounds what strangers can take and stops when told [M008, M015, M020].

Each accepted connection gets a thread; nothing on the accept loop waits for a client.  Must not know requests.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import socket
import socketserver
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from pantheon import log, seams
from pantheon.errors import PantheonError, Unavailable
from pantheon.seams import SYSTEM_CLOCK, Clock
from pantheon.serve.http_access import Access, is_loopback
from pantheon.serve.http_connection import Connection, Timeouts
from pantheon.serve.http_exchange import Site, serve_connection
from pantheon.serve.http_parser import Limits
from pantheon.serve.http_responder import error_bytes
from pantheon.serve.routes import Router
from pantheon.serve.sse import Pulse

_LOG = log.logger("http")
_FILES_RESERVED = 96  # descriptors kept for models, logs and those on their way out
_LEAVING = 128  # refused connections that may linger, so that their 503 is not lost to a reset
_LEAVE_S = 1.0
_SWEEP_S = 0.05
_IDLE_S = 2.0  # a connection that has said nothing for so long makes room for a new one
_POLL_S = 0.25


@dataclass(frozen=True)
class HttpConfig:
    """What the command line sets.  `threads` None: one per connection; 0: inline; N: a pool of N [M021]."""

    host: str = "127.0.0.1"
    port: int = 8201
    max_connections: int = 512
    threads: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    admin_key: str | None = field(default=None, repr=False)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)


class PantheonServer(ThreadingHTTPServer):
    """Bound and listening once constructed.  `start()` serves on a thread of its own, `stop()` ends it.

    Raises PantheonError, naming the flag, when the address can not be bound or the certificate not be read.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, router: Router, config: HttpConfig | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.config = config = config or HttpConfig()
        host = config.host.strip("[]")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.stopping = threading.Event()
        access = Access(host, config.api_keys, config.allowed_hosts, config.allowed_origins, config.admin_key)
        tls = _tls_context(config)
        self._site = Site(router, access, config.limits, tls, self.stopping, Pulse(clock), clock)
        self._mutex = threading.Condition()  # guards _live, _workers
        self._live: dict[Connection, float] = {}  # -> time of accept; oldest first
        self._workers = 0
        self._jobs: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._leaving: deque[tuple[socket.socket, float]] = deque()  # accept loop only; oldest first
        self._next_sweep = 0.0
        self._capacity = _capacity(config.max_connections)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._loop: threading.Thread | None = None
        self._next_complaint = 0.0
        try:
            super().__init__((host, config.port), socketserver.BaseRequestHandler)
        except OSError as fault:
            where = f"{config.host}:{config.port}"
            hint = "; choose another --port" if fault.errno == errno.EADDRINUSE else ""
            raise PantheonError(
                f"can not listen on {where}: {fault.strerror}{hint}", code="bind_failed", param="--port"
            ) from None
        if not is_loopback(host) and not config.api_keys:
            _LOG.warning("listening beyond loopback without an API key: anyone who can connect can use this server")

    @property
    def port(self) -> int:
        """The port in use (the one chosen by the system when 0 was asked for)."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        host = self.config.host.strip("[]")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        scheme = "https" if self._site.tls else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def connections(self) -> int:
        """How many connections are open and counted."""
        with self._mutex:
            return len(self._live)

    def server_bind(self) -> None:
        # not HTTPServer's: that one asks the name service for the host's full name, which can take seconds
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.config.host, self.port

    def start(self, poll_interval: float = _POLL_S) -> None:
        """Serve on a thread of its own until `stop`."""
        args = (poll_interval,)
        self._loop = threading.Thread(target=self.serve_forever, args=args, name="pantheon-accept", daemon=True)
        self._loop.start()

    def serve_forever(self, poll_interval: float = _POLL_S) -> None:
        """Accept until `stop`."""
        super().serve_forever(poll_interval)

    def stop(self, deadline_s: float = 5.0) -> None:
        """Stop accepting, let what runs end by itself until the deadline, then cut it.  Not from the accept thread."""
        deadline = time.monotonic() + deadline_s
        self.stopping.set()
        if self._loop is not None:
            closer = threading.Thread(target=self.shutdown, name="pantheon-stop", daemon=True)
            closer.start()  # shutdown() waits without a deadline for a loop that may be serving inline
            closer.join(max(0.1, deadline - time.monotonic()))
        self.server_close()
        for _ in range(self._workers):
            self._jobs.put(None)
        for connection in self._connections():
            if connection.bytes_in == 0:
                connection.abort()
        if not self._wait_empty(deadline):
            for connection in self._connections():
                connection.abort()
            self._wait_empty(time.monotonic() + 0.5)

    def server_close(self) -> None:
        """Close the listening socket and everything that waits to leave."""
        super().server_close()
        while self._leaving:
            self._leaving.pop()[0].close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as fault:
            if fault.errno in (errno.EMFILE, errno.ENFILE):
                self._shed()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hand a connection to a thread, or turn it away with a 503; never waits [M009, X24]."""
        connection = self._admit(request, str(client_address[0]))
        if connection is None:
            retry = Unavailable("too many connections; retry shortly", code="too_many_connections", retry_after=1)
            return self._turn_away(request, retry)
        if self.config.threads == 0:
            return self._serve(connection)
        try:
            self._hand_over(connection)
        except RuntimeError as fault:  # no thread to be had: a generation on this loop would stall everybody
            self._forget(connection)
            self._complain("no thread for a connection", why=str(fault))
            self._turn_away(request, Unavailable("no thread is free; retry shortly", code="no_thread", retry_after=1))

    def service_actions(self) -> None:
        """Let go of those turned away that have read their 503."""
        now = time.monotonic()
        if self._leaving and now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_S
            self._leaving = deque(item for item in self._leaving if not _has_left(item[0], now >= item[1]))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A fault of ours on the accept loop: to the log, not to stderr as a bare traceback."""
        _LOG.exception("connection failed %s", log.fields(client=str(client_address[0])))

    def _admit(self, sock: socket.socket, client: str) -> Connection | None:
        now = time.monotonic()
        with self._mutex:
            if len(self._live) >= self._capacity:
                idle = next((c for c, since in self._live.items() if c.bytes_in == 0 and now - since > _IDLE_S), None)
                if idle is None:
                    return None
                del self._live[idle]
                idle.abort()
            connection = Connection(sock, client, self.config.timeouts)
            self._live[connection] = now
        return connection

    def _hand_over(self, connection: Connection) -> None:
        pooled = self.config.threads is not None
        with self._mutex:
            full = pooled and self._workers >= (self.config.threads or 0)
        if full:
            return self._jobs.put(connection)
        target = self._work if pooled else self._serve
        seams.hit("thread_start")
        threading.Thread(target=target, args=(connection,), name="pantheon-http", daemon=True).start()
        if pooled:
            with self._mutex:
                self._workers += 1

    def _work(self, connection: Connection) -> None:
        job: Connection | None = connection
        while job is not None:
            self._serve(job)
            job = self._jobs.get()

    def _serve(self, connection: Connection) -> None:
        try:
            serve_connection(connection, self._site)
        except Exception:  # the thread ends here; a pool's must live on
            _LOG.exception("connection failed %s", log.fields(client=connection.client))
        finally:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with self._mutex:
            self._live.pop(connection, None)
            self._mutex.notify_all()

    def _turn_away(self, sock: socket.socket, fault: PantheonError) -> None:
        if self._site.tls is not None:  # a handshake would have to come first
            return sock.close()
        if len(self._leaving) >= _LEAVING:
            self._leaving.popleft()[0].close()
        try:
            sock.setblocking(False)
            sock.send(error_bytes(fault))
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            return sock.close()
        self._leaving.append((sock, time.monotonic() + _LEAVE_S))

    def _shed(self) -> None:
        """Out of descriptors: give up the spare one to accept and close one waiting client."""
        self._complain("out of file descriptors; dropping connections")
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
            with contextlib.suppress(OSError):
                self.socket.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)
        if self._spare is None:
            time.sleep(0.05)  # nothing to accept with; do not spin

    def _complain(self, what: str, **values: Any) -> None:
        now = time.monotonic()
        if now >= self._next_complaint:  # one line a second, however many are refused
            self._next_complaint = now + 1.0
            _LOG.warning("%s %s", what, log.fields(**values))

    def _connections(self) -> list[Connection]:
        with self._mutex:
            return list(self._live)

    def _wait_empty(self, deadline: float) -> bool:
        with self._mutex:
            while self._live and (left := deadline - time.monotonic()) > 0:
                self._mutex.wait(left)
            return not self._live


def _has_left(sock: socket.socket, overdue: bool) -> bool:
    """Read and drop what a refused client sends; True once it has closed or is overdue (then it is closed)."""
    with contextlib.suppress(BlockingIOError, InterruptedError):
        try:
            if not overdue and sock.recv(65536):
                return False
        except BlockingIOError:
            raise
        except OSError:
            pass
        sock.close()
        return True
    return False


def _capacity(wanted: int) -> int:
    """Connections to admit: what was asked for, less where the descriptor limit would not carry it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _FILES_RESERVED - _LEAVING))


def _no_passphrase() -> str:
    raise PantheonError(
        "--ssl-key: needs a passphrase; give a key without one", code="bad_certificate", param="--ssl-key"
    )  # fmt: skip


def _tls_context(config: HttpConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None and config.tls_key is None:
        return None
    if config.tls_cert is None:
        raise PantheonError("--ssl-key needs --ssl-cert", code="bad_certificate", param="--ssl-cert")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # without a password function OpenSSL would ask on the terminal, and wait
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_passphrase)
    except (OSError, ssl.SSLError) as fault:
        raise PantheonError(
            f"can not use the certificate {config.tls_cert}: {fault}", code="bad_certificate", param="--ssl-cert"
        ) from None
    context.set_alpn_protocols(["http/1.1"])
    return context
