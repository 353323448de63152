"""Runs the command line as a person or a shell does: in a child process, on a pipe or on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


def environment() -> dict[str, str]:
    """The child's environment: this tree's package, a dumb terminal, no seams."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PN_", "QWEN35_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")]), "TERM": "dumb"}


def command(words: Sequence[str]) -> list[str]:
    """The command line of `pantheon WORDS`."""
    return [sys.executable, "-m", "pantheon", *words]


def run(*words: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run to the end on pipes."""
    return subprocess.run(
        command(words), input=stdin, capture_output=True, text=True, timeout=PATIENCE_S, env=environment() | env
    )


def write_script(folder: Path, *pieces: Any, name: str = "script.json", **options: Any) -> str:
    """A script file; returns its `script:` path."""
    file = folder / name
    file.write_text(json.dumps({"pieces": list(pieces), **options}))
    return f"script:{file}"


class Terminal:
    """A child on a pseudo-terminal that is its controlling one, so that ^C typed here is a signal there."""

    def __init__(self, *words: str) -> None:
        self._words = words
        self.seen = ""

    def __enter__(self) -> Terminal:
        self._master, slave = pty.openpty()

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command(self._words), stdin=slave, stdout=slave, stderr=slave, env=environment(),
            start_new_session=True, preexec_fn=take_terminal,
        )  # fmt: skip
        os.close(slave)
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> str:
        """Read until `text` has come; returns everything since the last wait.  Fails after a minute."""
        until = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            if not self._read(until):
                raise AssertionError(f"{text!r} did not come; so far: {self.seen!r}")
        end = self.seen.index(text) + len(text)
        part, self.seen = self.seen[:end], self.seen[end:]
        return part

    def end(self, again: str = "") -> int:
        """Read to the end; returns the exit code.

        `again` is typed every 2 s: readline sleeps through a signal that arrives just before it waits, as people know.
        """
        until = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < until:
            if not self._read(min(until, time.monotonic() + 2)) and again and self.process.poll() is None:
                self.type(again)
        return self.process.wait(max(0.1, until - time.monotonic()))

    def _read(self, until: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, until - time.monotonic()))
        try:
            data = os.read(self._master, 65536) if ready else b""
        except OSError:  # the child closed its end
            return False
        self.seen += data.decode("utf-8", "replace")
        return bool(data)
