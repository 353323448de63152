"""When the head of an event stream goes out.

With the first token, so that a failure before it is still a plain JSON error [B23b]; but at once for a prompt of more
than one chunk, and after half a second of silence, since clients give up on a server that says nothing [B19].  Who
waits in a queue is told where in it, at each change and every five seconds [X11].  How far the prompt is read goes out
as comments, or as events for a client that asked for them (`return_progress`).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pantheon.engine.generate import PREFILL_CHUNK
from pantheon.errors import Cancelled
from pantheon.serve.routes import Responder, SseStream

#: between two comments on a wait in the queue, when its position stays the same
QUEUE_S = 5.0


class StreamHead:
    """Opens the stream of one answer, once; used as a context manager around the generation."""

    def __init__(
        self, responder: Responder, headers: dict[str, str], first: Sequence[bytes] | None, after_s: float
    ) -> None:
        """`first`: events that follow the head, framed already."""
        #: makes an event of `total`, `cache`, `processed` and `time_ms` of the prompt; None: comments will do
        self.progress: Callable[[dict[str, Any]], bytes] | None = None
        self._cached, self._read, self._began_s = 0, -1, 0.0
        responder.will_stream = True
        self._responder, self._headers, self._first = responder, headers, first
        #: guards _stream and the responder's change to a stream; held across the head, which an empty socket takes
        self._lock = threading.Lock()
        self._stream: SseStream | None = None
        self._after_s, self._since_s = after_s, time.monotonic()
        self._position, self._told_s = 0, -math.inf
        self._timer = threading.Timer(after_s, self._late)
        self._timer.daemon = True

    def __enter__(self) -> StreamHead:
        return self

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()
        if self._timer.ident is not None:
            self._timer.join()

    def open(self) -> SseStream:
        """The stream; the head goes out now if it has not.  Raises Cancelled when the client is gone."""
        if self._stream is not None:
            return self._stream
        with self._lock:
            if self._stream is None:
                stream = self._responder.begin_sse(self._headers)
                for event in self._first or ():
                    stream.send_frame(event)
                self._stream = stream
            return self._stream

    def know(self, headers: dict[str, str]) -> None:
        """Headers that have become known; those of a head that is out already stay unsaid."""
        self._headers = {**self._headers, **headers}

    def on_wait(self, position: int, eta_s: float) -> None:
        """Progress in the queue, as comments; called many times a second."""
        now = time.monotonic()
        if self._stream is None and now - self._since_s < self._after_s:
            return
        if position != self._position or now - self._told_s >= QUEUE_S:
            self._position, self._told_s = position, now
            self.open().comment(f"queued pos={position} eta={math.ceil(eta_s)}s")

    def on_prefill(self, done: int, total: int) -> None:
        """Progress of the prompt: when its first token is about to be read, and after each chunk."""
        if self.progress is not None:
            self.open().send_frame(self.progress(self._report(done, total)))
        elif total > PREFILL_CHUNK:
            self.open().comment(f"prefill {done}/{total}")
        elif done == 0 and self._stream is None and self._timer.ident is None:
            self._timer.start()

    def _report(self, done: int, total: int) -> dict[str, Any]:
        now = time.monotonic()
        if not self._cached <= self._read < done:
            # the first look at an answer: what is there now was there before
            self._cached, self._began_s = done, now
        self._read = done
        ms = round(1000 * (now - self._began_s), 3)
        return {"total": total, "cache": self._cached, "processed": done, "time_ms": ms}

    def guard(self, cancelled: Callable[[], bool]) -> Callable[[], bool]:
        """`cancelled`, kept apart from an opening on the timer's thread: both may write a head."""

        def check() -> bool:
            if self._stream is not None:
                return cancelled()
            with self._lock:
                return cancelled()

        return check

    def _late(self) -> None:
        with contextlib.suppress(Cancelled):  # the next check of the generation finds the client gone
            self.open()
