"""A `pantheon serve` process of its own, for tests of start, signals and several processes."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

START_S = 60.0


class Served:
    """A `pantheon serve` process; its lines are read as they come."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.lines: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pantheon", "serve", "--port", "0", *words],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._new.put(line)
        self._new.put(None)

    def wait_line(self, part: str, seconds: float = START_S) -> str:
        """The first line that holds `part`."""
        deadline = time.monotonic() + seconds
        while True:
            line = self._new.get(timeout=max(0.01, deadline - time.monotonic()))
            assert line is not None, f"ended without {part!r}: {self.lines}"
            self.lines.append(line.rstrip("\n"))
            if part in line:
                return line

    @property
    def url(self) -> str:
        return self.wait_line("listening url=").split("url=")[1].strip()

    def end(self, timeout: float = 5.0) -> int:
        """The exit code; all lines are in `lines` then."""
        code = self.process.wait(timeout)
        self._reader.join(5)
        while (line := self._new.get(timeout=5)) is not None:
            self.lines.append(line.rstrip("\n"))
        return code


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as fault:
        return fault.code, json.load(fault)
