"""Compiling kernels in processes of their own, several at once, into the store.

The parent writes one key a line to a worker's stdin and reads one answer a line; a worker ends when its stdin does,
in the middle of a kernel too, so none outlives its parent.  Whatever fails here is left to the caller to compile.
"""

from __future__ import annotations

import atexit
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
#: kernels that take longest, those first: the last ones then end together
_SLOWEST = ("attend", "team", "draw", "pack", "matmul")
#: a worker without work is kept so long, for the next kernels of the same load: starting one takes over a second
_IDLE_S = 5.0


class Worker:
    """One process that compiles into the store's folder."""

    def __init__(self) -> None:
        """In a session of its own, so that Ctrl-C at the terminal reaches only the parent.  Raises OSError."""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        code = "from pantheon.accel.cpu.workers import work; work()"
        self.folder = str(store.folder())
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, self.folder], env=env, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def ask(self, line: str) -> str:
        """Send a line and wait for the answer; "" when the process has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            return self.process.stdout.readline().strip()
        except (OSError, ValueError):
            return ""

    def end(self) -> None:
        """Stop it at once."""
        self.process.kill()
        self.process.communicate()


# guards _idle and _timer
_lock = threading.Lock()
_idle: list[Worker] = []
_timer: threading.Timer | None = None


def _take(count: int) -> list[Worker]:
    """Workers to use: idle ones first.  Raises OSError, having ended those that it started."""
    with _lock:
        usable = [w for w in _idle if w.folder == str(store.folder()) and w.process.poll() is None]
        here = usable[:count]
        others = [w for w in _idle if w not in usable]
        _idle[:] = usable[count:]
    for worker in others:
        worker.end()
    try:
        while len(here) < count:
            here.append(Worker())
    except OSError:
        for worker in here:
            worker.end()
        raise
    return here


def _give_back(workers: list[Worker]) -> None:
    """Keep them for a while."""
    global _timer
    with _lock:
        _idle.extend(workers)
        if _timer is not None:
            _timer.cancel()
        _timer = threading.Timer(_IDLE_S, end_idle)
        _timer.daemon = True
        _timer.start()


def end_idle() -> None:
    """End the workers that have nothing to do."""
    with _lock:
        done, _idle[:] = _idle[:], []
    for worker in done:
        worker.end()


atexit.register(end_idle)


def build(keys: list[Any], processes: int, progress: Progress | None) -> None:
    """Compile these keys, and note the tile widths of this CPU; what fails is logged and left undone."""
    todo = deque(sorted(keys, key=lambda key: _SLOWEST.index(key[0]) if key[0] in _SLOWEST else len(_SLOWEST)))
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        workers = _take(max(1, min(processes, len(keys))))
    except OSError as fault:
        log.warning("no kernel worker: %s", fault)
        return
    sound = False
    try:
        for worker in workers:
            threading.Thread(target=_feed, args=(worker, todo, answers), name="kernel-worker", daemon=True).start()
        if progress is not None and keys:
            progress("kernels", 0, len(keys))
        left, done = len(workers), 0
        while left:
            answer = answers.get()
            if answer == _FINISHED:
                left -= 1
            elif answer != _OK:
                log.warning("kernel worker failed: %s", answer or "it ended")
                return
            else:
                done += 1
                if progress is not None and done < len(keys):
                    progress("kernels", done, len(keys))
        sound = True
    finally:
        if sound:
            _give_back(workers)
        else:
            for worker in workers:
                worker.end()


_READY, _OK, _FINISHED = "ready", "ok", "finished"


def _feed(worker: Worker, todo: deque[Any], answers: queue.SimpleQueue[str]) -> None:
    """Give a worker one key after the other; the first answer is to an empty line."""
    answer = worker.ask("")
    if answer != _READY:
        answers.put(answer)
        return
    while True:
        try:
            key = todo.popleft()
        except IndexError:
            answers.put(_FINISHED)
            return
        answer = worker.ask(json.dumps(key))
        answers.put(answer)
        if answer != _OK:
            return


def _listen(lines: queue.SimpleQueue[str]) -> None:
    """Hand the parent's lines on; end the process when the parent is gone: one kernel may take half a minute."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def work() -> None:
    """The life of a worker."""
    out, lines = sys.stdout, queue.SimpleQueue[str]()
    threading.Thread(target=_listen, args=(lines,), name="listen", daemon=True).start()
    try:
        store.use(sys.argv[1])
        families = importlib.import_module("pantheon.accel.cpu.families")
        store.write(WIDTHS, json.dumps(families.tile_widths()).encode())
        while True:
            line = lines.get()
            if line.strip():
                key = tuple(json.loads(line))
                store.write(store.name_of(key), families.compiled(key))
                print(_OK, file=out, flush=True)
            else:
                print(_READY, file=out, flush=True)
    except Exception as fault:
        print(f"{type(fault).__name__}: {fault}".replace("\n", " "), file=out, flush=True)
        os._exit(1)  # the listener holds stdin's lock, at which an orderly end would abort
