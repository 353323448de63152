"""Server-sent events: one write per event, comments while silent, one clean end [B19, M034, M037, X11, X34].

An event is `data: ` and one line of JSON; APIs whose clients want an `event:` line make their own frames (voice.py).
`Pulse` is the one thread that keeps silent streams alive.  Must not know what is in the events.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from pantheon.errors import Cancelled, PantheonError
from pantheon.seams import SYSTEM_CLOCK, Clock
from pantheon.serve.http_connection import Connection
from pantheon.serve.voice import OPENAI, Voice, frame

HEARTBEAT_S = 10.0


class SseStream:
    """An open event stream.  Any thread may call any method; events never interleave.

    `heartbeat` is the text of the keep-alive comment, or a function that makes it (`queued pos=3 eta=4s`); it must not
    block.
    """

    def __init__(
        self, connection: Connection, *, chunked: bool, clock: Clock = SYSTEM_CLOCK, voice: Voice = OPENAI
    ) -> None:
        self.heartbeat: str | Callable[[], str] = "keep-alive"
        self._connection = connection
        self._chunked = chunked
        self._clock, self._voice = clock, voice
        self._last = clock.monotonic()
        self._closed = False
        self.delivered = False  # whether the end has been handed to the socket

    @property
    def closed(self) -> bool:
        """Whether the end has been sent; later calls do nothing."""
        return self._closed

    def send(self, event: Any) -> None:
        """One event, `data: {compact JSON}`.  Raises Cancelled when the client is gone or stalled."""
        self._write(frame(event))

    def send_json(self, data: bytes) -> None:
        """One event that is JSON already, compact and in one line.  Raises Cancelled as `send` does."""
        self._write(b"data: " + data + b"\n\n")

    def send_frame(self, data: bytes) -> None:
        """One event, framed already.  Raises Cancelled as `send` does."""
        self._write(data)

    def comment(self, text: str) -> None:
        """One comment line, which clients ignore.  Raises Cancelled when the client is gone."""
        self._write(_comment(text))

    def error(self, fault: PantheonError) -> None:
        """The stream's error event and the end.  Does nothing once the stream is closed."""
        if not self._closed:
            self._finish(self._voice.error_frames(fault))

    def done(self, last: bytes = b"") -> None:
        """The last events, framed already, and the end.  Does nothing once the stream is closed."""
        self._finish(last + self._voice.closing)

    def keep_alive(self, now: float) -> float:
        """Send a comment without waiting when silent for 10 s; returns when to ask again."""
        due = self._last + HEARTBEAT_S
        if self._closed or now < due:
            return due
        self._last = now
        self._connection.try_write(self._frame(_comment(self._heartbeat_text())))
        return now + HEARTBEAT_S

    def _heartbeat_text(self) -> str:
        if isinstance(self.heartbeat, str):
            return self.heartbeat
        try:
            return self.heartbeat()
        except Exception:  # the text is decoration; one stream's fault must not silence the others
            return "keep-alive"

    def probe(self) -> None:
        """A comment that makes a client that is gone reset the connection; does not wait."""
        if not self._closed:
            self._connection.try_write(self._frame(b":\n\n"))

    def _write(self, data: bytes) -> None:
        if self._closed:
            return
        self._last = self._clock.monotonic()
        if not self._connection.write(self._frame(data)):
            raise Cancelled("the client is gone")

    def _finish(self, data: bytes) -> None:
        if self._closed:
            return
        self._closed = True
        out = self._frame(data) if data else b""
        self.delivered = self._connection.write(out + (b"0\r\n\r\n" if self._chunked else b""), last=True)

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data


def _comment(text: str) -> bytes:
    line = text.replace("\r", " ").replace("\n", " ")
    return b": " + line.encode("utf-8", "replace") + b"\n\n"


class Pulse:
    """Keeps silent streams alive from one thread, which lives only while there are streams."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._mutex = threading.Condition()  # guards _streams, _thread
        self._streams: set[SseStream] = set()
        self._thread: threading.Thread | None = None

    def add(self, stream: SseStream) -> None:
        """Look after a stream until `remove`."""
        with self._mutex:
            self._streams.add(stream)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pantheon-sse-pulse", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread to be had: streams go without comments
                    thread.start()
                    self._thread = thread

    def remove(self, stream: SseStream) -> None:
        """Stop looking after a stream."""
        with self._mutex:
            self._streams.discard(stream)
            self._mutex.notify_all()

    def tick(self) -> float:
        """Send what is due; returns the seconds until the next comment can be."""
        now = self._clock.monotonic()
        with self._mutex:
            streams = list(self._streams)
        return min((stream.keep_alive(now) for stream in streams), default=now + HEARTBEAT_S) - now

    def _run(self) -> None:
        while True:
            pause = self.tick()
            with self._mutex:
                if not self._streams:
                    self._thread = None
                    return
                self._mutex.wait(min(max(pause, 0.05), HEARTBEAT_S))
