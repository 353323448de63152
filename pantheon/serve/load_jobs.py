"""Loads and unloads that nobody waits for, and what became of those that failed [X36, X02].

Keeps the last error of each model name until the next attempt.  Must not know HTTP or how a model is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pantheon import log, seams
from pantheon.errors import PantheonError, Unavailable

_REMEMBERED = 32
_log = log.logger("admin")


class LoadJobs:
    """Shared by the admin handlers of one server."""

    def __init__(self) -> None:
        #: guards _failed and _threads
        self._lock = threading.Lock()
        self._failed: dict[str, dict[str, Any]] = {}
        self._threads: set[threading.Thread] = set()

    @contextmanager
    def noting(self, what: str, name: str) -> Iterator[None]:
        """Remember how the block ended: nothing after a success, the error object after a failure."""
        with self._lock:
            self._failed.pop(name, None)
        try:
            yield
        except PantheonError as fault:
            self._fail(what, name, fault)
            raise
        except Exception as fault:
            self._fail(what, name, PantheonError(f"internal error: {type(fault).__name__}", code="internal_error"))
            raise

    def spawn(self, what: str, name: str, work: Callable[[], None], undo: Callable[[], None]) -> None:
        """Run `work` in a thread of its own, its outcome noted.  Raises Unavailable, after `undo`, when there is none
        to be had."""

        def run() -> None:
            try:
                with self.noting(what, name):
                    work()
            except PantheonError as fault:
                _log.warning("%s failed %s", what, log.fields(model=name, why=fault.message))
            except Exception:
                _log.exception("%s failed %s", what, log.fields(model=name))
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=f"{what}-{name}", daemon=True)
        with self._lock:
            self._threads.add(thread)
        try:
            seams.hit("thread_start")
            thread.start()
        except RuntimeError:
            with self._lock:
                self._threads.discard(thread)
            undo()
            raise Unavailable("no thread for it can be started", code="no_thread", retry_after=1) from None

    def failure(self, name: str) -> dict[str, Any] | None:
        """The error object of the last attempt on this name, with `action`; None when it went well or never was."""
        with self._lock:
            return self._failed.get(name)

    def failures(self) -> dict[str, dict[str, Any]]:
        """All of them by name, oldest first."""
        with self._lock:
            return dict(self._failed)

    @property
    def running(self) -> bool:
        """Something is under way."""
        with self._lock:
            return bool(self._threads)

    def _fail(self, what: str, name: str, fault: PantheonError) -> None:
        with self._lock:
            self._failed.pop(name, None)
            self._failed[name] = {"action": what, "status": fault.status, **fault.body()["error"]}
            while len(self._failed) > _REMEMBERED:
                del self._failed[next(iter(self._failed))]
