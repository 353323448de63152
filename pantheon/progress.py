"""A progress line for whoever waits: a bar on a terminal, now and then a plain line elsewhere.

Knows no units but bytes and counts, and nothing of what is being waited for.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from typing import TextIO

from pantheon.seams import SYSTEM_CLOCK, Clock

_REDRAW_S = 0.1
_LINE_S = 5.0
_QUIET_S = 3.0


class Progress:
    """Prints the progress of stages, each from 0 to its total.  Any thread may report.

    `update` has the shape that loads report with: (stage, done, total); bytes are recognised by totals from 1 MiB
    on.  On a terminal one line is redrawn at most ten times a second; elsewhere a stage prints a line when it
    begins, when it ends, and every five seconds in between, but nothing in the first three seconds: a short wait
    leaves no trace in a log.  `close` ends an open line.
    """

    def __init__(self, label: str = "", out: TextIO | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.label = label
        self._out = out if out is not None else sys.stderr
        # None: a process that was started without stderr
        self._tty = self._out is not None and self._out.isatty()
        self._clock = clock
        #: guards what follows and the stream
        self._lock = threading.Lock()
        self._stage = ""
        self._began_at: float | None = None
        self._drawn_at = -1e9
        self._drawn = 0
        self._finished = False

    def update(self, stage: str, done: int, total: int) -> None:
        """Report: `done` of `total` units of a stage."""
        with self._lock:
            now = self._clock.monotonic()
            begins = stage != self._stage
            ends = total > 0 and done >= total and (begins or not self._finished)
            pause = _REDRAW_S if self._tty else _LINE_S
            if not (begins or ends or now - self._drawn_at >= pause) or (self._finished and not begins):
                return
            if self._began_at is None:
                self._began_at = now
            if not self._tty and now - self._began_at < _QUIET_S:
                self._stage, self._finished = stage, ends
                return
            if begins and self._stage and not self._finished:
                self._end_line()
            self._stage, self._drawn_at, self._finished = stage, now, ends
            self._draw(describe(self.label, stage, done, total), done / total if total > 0 else 0.0)
            if ends:
                self._end_line()

    def close(self) -> None:
        """End the line that is open; further updates begin anew."""
        with self._lock:
            self._end_line()
            self._stage, self._finished, self._began_at, self._drawn_at = "", False, None, -1e9

    def _draw(self, text: str, part: float) -> None:
        if not self._tty:
            self._put(text + "\n")
        else:
            width = shutil.get_terminal_size().columns
            room = min(30, width - len(text) - 4)
            bar = f" [{'#' * int(part * room):{room}}]" if room >= 8 else ""
            line = (text + bar)[: width - 1]
            self._put("\r" + line.ljust(self._drawn))
            self._drawn = len(line)

    def _end_line(self) -> None:
        if self._tty and self._drawn:
            self._put("\n")
        self._drawn = 0

    def _put(self, text: str) -> None:
        """Write and flush; a reader that is gone never ends what is being waited for."""
        if self._out is not None:
            with contextlib.suppress(OSError, ValueError):
                self._out.write(text)
                self._out.flush()


def describe(label: str, stage: str, done: int, total: int) -> str:
    """`label stage 42% (38/90 MiB)`."""
    words = [word for word in (label, stage) if word]
    if total > 0:
        words.append(f"{min(1.0, done / total):.0%}")
        words.append(f"({done >> 20}/{total >> 20} MiB)" if total >= 1 << 20 else f"({done}/{total})")
    return " ".join(words)
