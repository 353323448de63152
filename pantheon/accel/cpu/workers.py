"""Compiling kernels in processes of their own, several at once, into the store.

The parent writes one key a line to a worker's stdin and reads one answer a line; a worker ends when its stdin does,
so none outlives its parent by more than one kernel.  Whatever fails here is left to the caller to compile.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from typing import Any

from pantheon.accel.cpu import store
from pantheon.accel.executor import Progress

log = logging.getLogger("pantheon.cpu")
#: the name under which the store keeps what `families.tile_widths` says
WIDTHS = "tile-widths"
#: kernels that take longest, first: the last ones then end together
_SLOW = ("attend", "matmul", "team")


def build(keys: list[Any], processes: int, progress: Progress | None) -> None:
    """Compile these keys, and note the tile widths of this CPU."""
    todo = deque(sorted(keys, key=lambda key: key[0] not in _SLOW))
    answers: queue.SimpleQueue[tuple[bool, str]] = queue.SimpleQueue()
    made: list[subprocess.Popen[str]] = []
    try:
        for _ in range(max(1, min(processes, len(keys)))):
            made.append(_start())
        feeders = [threading.Thread(target=_feed, args=(w, todo, answers), daemon=True) for w in made]
        for f in feeders:
            f.start()
        if progress is not None:
            progress("kernels", 0, len(keys))
        for done in range(1, len(keys) + 1):
            ok, text = answers.get()
            if not ok:
                log.warning("kernel worker failed: %s", text)
                return
            if progress is not None and done < len(keys):
                progress("kernels", done, len(keys))
        for f in feeders:
            f.join()
    except OSError as fault:
        log.warning("no kernel worker: %s", fault)
    finally:
        for worker in made:
            worker.kill()
            worker.communicate()


def _start() -> subprocess.Popen[str]:
    """A worker; in a session of its own, so that Ctrl-C at the terminal reaches only the parent."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    code = "from pantheon.accel.cpu.workers import work; work()"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(store.folder())], env=env, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _feed(worker: subprocess.Popen[str], todo: deque[Any], answers: queue.SimpleQueue[tuple[bool, str]]) -> None:
    assert worker.stdin is not None and worker.stdout is not None
    with contextlib.suppress(OSError, ValueError):
        ready = worker.stdout.readline()
        if ready != "ready\n":
            answers.put((False, ready.strip() or f"it ended with {worker.wait()}"))
            return
        while True:
            try:
                key = todo.popleft()
            except IndexError:
                return
            worker.stdin.write(json.dumps(key) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline().strip()
            answers.put((answer == "ok", answer or f"it ended at {key}"))
            if answer != "ok":
                return


def work() -> None:
    """The life of a worker."""
    where, out = sys.argv[1], sys.stdout
    try:
        store.use(where)
        families = importlib.import_module("pantheon.accel.cpu.families")
        store.write(WIDTHS, json.dumps(families.tile_widths()).encode())
        print("ready", file=out, flush=True)
        for line in sys.stdin:
            key = tuple(json.loads(line))
            store.write(store.name_of(key), families.compiled(key))
            print("ok", file=out, flush=True)
    except Exception as fault:
        print(f"{type(fault).__name__}: {fault}".replace("\n", " "), file=out, flush=True)
