"""Greppable log lines on stderr: `2026-11-29T18:01:38Z INFO  serve  listening url=http://127.0.0.1:8201`.

One event a line, `key=value` behind the words, values with blanks quoted as JSON strings.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_ROOT = "pantheon"


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        area = record.name.removeprefix(_ROOT + ".")
        line = f"{stamp} {record.levelname:<7} {area:<8} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def logger(area: str) -> logging.Logger:
    """The logger of one area (`serve`, `engine`, `load` …)."""
    return logging.getLogger(f"{_ROOT}.{area}")


def setup(level: str = "info") -> None:
    """Send Pantheon's log lines to stderr; called by the command line only, never on import."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def fields(**values: Any) -> str:
    """`key=value` pairs for a log line; None is left out."""
    return " ".join(f"{k}={_word(v)}" for k, v in values.items() if v is not None)


def _word(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and text != "" and not any(c in text for c in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)
