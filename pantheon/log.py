"""Greppable log lines on stderr: `2026-11-29T18:01:38Z INFO  serve  listening url=http://127.0.0.1:8201`.

One event a line, `key=value` behind the words, values with blanks quoted as JSON strings; or, as `json`, one object a
line with the same keys.  A server writes them through a bounded queue, so that a reader of stderr who has gone to sleep
stops the lines and not the requests.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_ROOT = "pantheon"
FORMATS = ("text", "json")
#: bytes of lines that wait for a slow reader of stderr
MOST_BYTES = 4 << 20
_DRAIN_S = 0.5


class Fields(str):
    """`key=value` pairs as text, which remembers what it was made of."""

    values: dict[str, Any]

    def __new__(cls, values: dict[str, Any]) -> Fields:
        """values: without None."""
        self = super().__new__(cls, " ".join(f"{k}={_word(v)}" for k, v in values.items()))
        self.values = values
        return self


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        area = record.name.removeprefix(_ROOT + ".")
        line = f"{stamp} {record.levelname:<7} {area:<8} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _Json(logging.Formatter):
    """`time`, `level`, `area`, `event`, then the fields; one of those names gets a `_` behind it."""

    def format(self, record: logging.LogRecord) -> str:
        event, values = _taken_apart(record)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "area": record.name.removeprefix(_ROOT + "."),
            "event": event,
        }
        line |= {f"{key}_" if key in line else key: value for key, value in values.items()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, separators=(",", ":"))


def _taken_apart(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """What happened and the values to it: those of `extra=structured(…)`, else those that went through `fields`."""
    given = getattr(record, "structured", None)
    if given is not None:
        event, values = given
        return event, values
    if not isinstance(record.args, tuple):
        return record.getMessage(), {}
    values = {key: value for arg in record.args if isinstance(arg, Fields) for key, value in arg.values.items()}
    words = str(record.msg) % tuple("" if isinstance(arg, Fields) else arg for arg in record.args)
    return " ".join(words.split()), values


def structured(event: str, **values: Any) -> dict[str, Any]:
    """`extra` of a log call whose JSON line says more, or something else, than its text."""
    return {"structured": (event, {key: value for key, value in values.items() if value is not None})}


#: `extra` of a log call whose facts a JSON log tells elsewhere
TEXT_ONLY = {"text_only": True}


class LineWriter:
    """Writes to a descriptor on a thread of its own.  What finds no room while nobody reads is dropped and counted."""

    def __init__(self, fd: int, most_bytes: int = MOST_BYTES, notice: Callable[[int], str] = str) -> None:
        """notice(n): the line that says that n lines are missing."""
        self._fd, self._most, self._notice = fd, most_bytes, notice
        #: guards all below
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._writing = False
        self._told = 0
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def write(self, line: str) -> None:
        """Never waits for the reader."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if self._bytes + len(data) > self._most:
                self.dropped += 1
                return
            self._lines.append(data)
            self._bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pantheon-log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Wait until everything is written, but not longer; whether it is."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._lines or self._writing:
                if (left := deadline - time.monotonic()) <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                while not self._lines:
                    self._changed.wait()
                data, self._bytes, self._writing = b"".join(self._lines), 0, True
                self._lines.clear()
                lost, self._told = self.dropped - self._told, self.dropped
            if lost:
                # near enough to where they stood
                data += self._notice(lost).encode() + b"\n"
            with contextlib.suppress(OSError):  # whoever read this is gone
                while data:
                    data = data[os.write(self._fd, data) :]


class _Bounded(logging.Handler):
    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """One line; what can not be formatted is a bug of ours and must not end a request."""
        try:
            self.writer.write(self.format(record))
        except Exception:
            self.handleError(record)


_writer: LineWriter | None = None


def logger(area: str) -> logging.Logger:
    """The logger of one area (`serve`, `engine`, `load` …)."""
    return logging.getLogger(f"{_ROOT}.{area}")


def setup(level: str = "info", form: str = "text", *, bounded: bool = False) -> None:
    """Send Pantheon's log lines to stderr; called by the command line only, never on import.

    bounded: through a LineWriter, for a process that must not wait for whoever reads its stderr.
    """
    global _writer
    formatter = _Json() if form == "json" else _Line()

    def notice(lost: int) -> str:
        line = "log lines were dropped, nobody read them %s", (fields(lines=lost),)
        return formatter.format(logging.LogRecord(f"{_ROOT}.log", logging.WARNING, "", 0, *line, None))

    fd = _fileno() if bounded else None
    _writer = LineWriter(fd, notice=notice) if fd is not None else None
    handler = logging.StreamHandler(sys.stderr) if _writer is None else _Bounded(_writer)
    handler.setFormatter(formatter)
    if bounded:
        atexit.register(drain)
    if form == "json":
        handler.addFilter(lambda record: not getattr(record, "text_only", False))
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def drain(seconds: float = _DRAIN_S) -> None:
    """Before the process ends, or writes to stderr itself: let the lines out that are on their way."""
    if _writer is not None:
        _writer.drain(seconds)


def dropped() -> int:
    """Lines that nobody read, so far."""
    return _writer.dropped if _writer is not None else 0


def _fileno() -> int | None:
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def fields(**values: Any) -> Fields:
    """`key=value` pairs for a log line; None is left out."""
    return Fields({key: value for key, value in values.items() if value is not None})


def _word(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and text != "" and not any(c in text for c in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)
