"""One client's socket: timed reads, whole writes, and the question whether anybody is still there.

The socket never blocks; waiting is `poll` with a deadline.  Works the same over TLS.  Must not know HTTP.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_BLOCK = 64 << 10
_BROKEN = select.POLLERR | select.POLLHUP | select.POLLNVAL
_PEER_FIN = getattr(select, "POLLRDHUP", 0)  # Linux; elsewhere a departed client is noticed by the next write only
_RETRY = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

#: how often a write that waits for its reader looks whether it should
_LOOK_S = 0.25


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a client may take."""

    head_s: float = 20.0  # from accept to the end of the request head (and of the TLS handshake)
    body_idle_s: float = 15.0  # between two pieces of the body
    body_s: float = 300.0  # for the whole body
    write_idle_s: float = 60.0  # without taking a byte of the answer [X34]
    linger_s: float = 0.5  # to close after the answer
    linger_unread_s: float = 2.0  # to stop sending a body that was refused


class PeerTimeout(Exception):
    """The client took too long to send."""


class Connection:
    """A connected, non-blocking socket.

    One thread reads; any thread may write, since each write takes its turn whole.  A connection that is gone stays
    gone: writes return False and do nothing.
    """

    def __init__(self, sock: socket.socket, client: str, timeouts: Timeouts | None = None) -> None:
        self.client = client
        self.timeouts = timeouts or Timeouts()
        self.bytes_in = 0
        self.last_write = time.monotonic()
        #: asked while a client takes nothing: whether the answer is wanted no more, so that nobody waits for it
        self.hopeless: Callable[[], bool] = _never
        self._sock = sock
        self._gone = False
        self._turn = threading.Condition()  # guards _writing, _unsent, _ended
        self._writing = False
        self._ended = False
        self._unsent = b""
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # not every socket is TCP; a reset one refuses
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start_tls(self, context: ssl.SSLContext, deadline: float) -> None:
        """Server side of the handshake.  Raises OSError (ssl.SSLError) or PeerTimeout."""
        tls = context.wrap_socket(self._sock, server_side=True, do_handshake_on_connect=False)
        self._sock = tls
        while True:
            try:
                return tls.do_handshake()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)

    def read(self, deadline: float) -> bytes:
        """Up to 64 KiB; b"" at the end of what the client sends or when it is gone.  Raises PeerTimeout."""
        while not self._gone:
            try:
                data = self._sock.recv(_BLOCK)
            except _RETRY:
                self._wait(select.POLLIN, deadline)
            except OSError:
                self._gone = True
            else:
                self.bytes_in += len(data)
                return data
        return b""

    def write(self, data: bytes, *, last: bool = False) -> bool:
        """Send all of `data`; False when the client is gone or takes no byte for `write_idle_s`.

        After a write marked `last` every further one is dropped, so that nothing can follow a finished answer.
        """
        with self._turn:
            while self._writing and not self._gone:
                self._turn.wait(1.0)
            if self._gone or self._ended:
                return not self._gone
            self._writing, self._ended = True, last
            data, self._unsent = self._unsent + data, b""
        try:
            self._send_all(data)
        finally:
            self._end_turn(b"")
        return not self._gone

    def try_write(self, data: bytes) -> bool:
        """Send `data` without waiting.  What the socket does not take now goes ahead of the next write; while a write
        is under way or something is still unsent, `data` is dropped.  False when the client is gone."""
        with self._turn:
            if self._writing or self._gone or self._ended:
                return not self._gone
            self._writing = True
            data, self._unsent = self._unsent or data, b""
        left = data
        try:
            left = data[self._sock.send(data) :]
            self.last_write = time.monotonic()
        except _RETRY:
            pass
        except OSError:
            self._gone = True
        finally:
            self._end_turn(left)
        return not self._gone

    def watch(self) -> tuple[bool, bool]:
        """(gone, sending_side_closed) with one system call."""
        if self._gone:
            return True, True
        found = self._poll(_PEER_FIN, 0.0)
        if found & _BROKEN:
            self._gone = True
        return self._gone, bool(found & _PEER_FIN)

    def gone(self) -> bool:
        """Whether the client has reset or fully closed the connection, as far as the kernel knows.  One system call."""
        if not self._gone and self._poll(0, 0.0) & _BROKEN:
            self._gone = True
        return self._gone

    def sending_side_closed(self) -> bool:
        """Whether the client has sent its FIN: it half-closed, or it closed and has not heard yet that we go on."""
        return bool(self._poll(_PEER_FIN, 0.0) & _PEER_FIN)

    def provoke(self) -> bool:
        """Make a client that has fully closed reset the connection, without touching what a half-closed one reads.

        One urgent byte: it travels outside the stream (RFC 6093), yet is data that a closed socket refuses.  Call it
        once.  False where that is not to be had (TLS, other kernels), so that only data in the stream can tell.
        """
        if isinstance(self._sock, ssl.SSLSocket):
            return False
        try:
            return self._sock.send(b"\n", socket.MSG_OOB) == 1
        except (BrokenPipeError, ConnectionError):
            self._gone = True
            return True
        except OSError:
            return False

    def abort(self) -> None:
        """Cut the connection from another thread; whoever waits on it wakes up and finds it gone."""
        self._gone = True
        with contextlib.suppress(OSError, ValueError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self, *, unread: bool = False) -> None:
        """Close in order: our FIN, then wait briefly for the client's, so that no reset overtakes the answer.

        `unread` says that the client may still be sending a body nobody wants; it gets longer to notice.
        """
        with contextlib.suppress(OSError, ValueError):
            if not self._gone:
                self._say_goodbye()
                self._drain(self.timeouts.linger_unread_s if unread else self.timeouts.linger_s)
        with contextlib.suppress(OSError):
            self._sock.close()

    def _say_goodbye(self) -> None:
        if self._unsent:
            self._send_all(self._unsent)
        if isinstance(self._sock, ssl.SSLSocket):
            with contextlib.suppress(*_RETRY):
                self._sock.unwrap()
        self._sock.shutdown(socket.SHUT_WR)

    def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with contextlib.suppress(PeerTimeout):
            while time.monotonic() < deadline and self.read(deadline):
                pass

    def _send_all(self, data: bytes) -> None:
        view = memoryview(data)
        deadline = time.monotonic() + self.timeouts.write_idle_s
        while view and not self._gone:
            try:
                sent = self._sock.send(view)
            except _RETRY:
                self._wait_writable(deadline)
            except OSError:
                self._gone = True
            else:
                view = view[sent:]
                self.last_write = time.monotonic()
                deadline = self.last_write + self.timeouts.write_idle_s

    def _wait_writable(self, deadline: float) -> None:
        while True:
            now = time.monotonic()
            try:
                self._wait(select.POLLOUT, min(deadline, now + _LOOK_S))
                break
            except PeerTimeout:
                if now >= deadline or self.hopeless():  # a reader this slow is treated as gone
                    self._gone = True
                    return
        if self._poll(0, 0.0) & _BROKEN:
            self._gone = True

    def _wait(self, events: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0 or not self._poll(events, left):
            raise PeerTimeout

    def _poll(self, events: int, seconds: float) -> int:
        number = self._sock.fileno()
        if number < 0:
            return _BROKEN
        poller = select.poll()  # a fresh one: a poll object must not be shared between threads
        poller.register(number, events)
        found = poller.poll(seconds * 1000)
        return found[0][1] if found else 0

    def _end_turn(self, unsent: bytes) -> None:
        with self._turn:
            self._unsent = unsent
            self._writing = False
            self._turn.notify_all()
