"""When the head of an event stream goes out.

With the first token, so that a failure before it is still a plain JSON error [B23b]; but at once for a prompt of more
than one chunk, and after half a second of silence, since clients give up on a server that says nothing [B19].
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from pantheon.engine.generate import PREFILL_CHUNK
from pantheon.errors import Cancelled
from pantheon.serve.routes import Responder, SseStream


class StreamHead:
    """Opens the stream of one answer, once; used as a context manager around the generation."""

    def __init__(self, responder: Responder, headers: dict[str, str], first_event: Any, after_s: float) -> None:
        """`first_event` follows the head; None for none."""
        responder.will_stream = True
        self._responder, self._headers, self._first = responder, headers, first_event
        #: guards _stream and the responder's change to a stream; held across the head, which an empty socket takes
        self._lock = threading.Lock()
        self._stream: SseStream | None = None
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
                if self._first is not None:
                    stream.send(self._first)
                self._stream = stream
            return self._stream

    def on_prefill(self, done: int, total: int) -> None:
        """Progress of the prompt, as comments when it is long."""
        if total > PREFILL_CHUNK:
            self.open().comment(f"prefill {done}/{total}")
        elif done == 0 and self._stream is None and self._timer.ident is None:
            self._timer.start()

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
