"""Loads and unloads under way, those that nobody waits for, and what became of the ones that failed [X36, X02].

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
    """Shared by the admin handlers of one server.

    The end of an attempt and its outcome become visible at once: nobody finds a name neither under way nor settled.
    """

    def __init__(self) -> None:
        #: guards _failed, _doing and _spawned
        self._lock = threading.Lock()
        self._failed: dict[str, dict[str, Any]] = {}
        self._doing: list[tuple[str, str]] = []
        self._spawned = 0

    @contextmanager
    def noting(self, what: str, name: str) -> Iterator[None]:
        """An attempt in the caller's thread; what the block raises is remembered and raised on."""
        self._begin(what, name)
        fault: Exception | None = None
        try:
            yield
        except Exception as caught:
            fault = caught
            raise
        finally:
            self._end(what, name, fault)

    def spawn(self, what: str, name: str, work: Callable[[], object], undo: Callable[[], object]) -> None:
        """An attempt in a thread of its own; under way when this returns.

        Raises Unavailable, after `undo`, when there is no thread to be had.
        """

        def run() -> None:
            fault: Exception | None = None
            try:
                work()
            except PantheonError as caught:
                fault = caught
                _log.warning("%s failed %s", what, log.fields(model=name, why=caught.message))
            except Exception as caught:
                fault = caught
                _log.exception("%s failed %s", what, log.fields(model=name))
            finally:
                self._end(what, name, fault, spawned=True)

        self._begin(what, name, spawned=True)
        try:
            seams.hit("thread_start")
            threading.Thread(target=run, name=f"{what}-{name}", daemon=True).start()
        except RuntimeError:
            self._end(what, name, None, spawned=True)
            undo()
            raise Unavailable("no thread for it can be started", code="no_thread", retry_after=1) from None

    def doing(self, name: str) -> str | None:
        """What is under way with a name."""
        with self._lock:
            return next((what for known, what in self._doing if known == name), None)

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
        """Something is under way that nobody waits for."""
        with self._lock:
            return self._spawned > 0

    def _begin(self, what: str, name: str, spawned: bool = False) -> None:
        with self._lock:
            self._failed.pop(name, None)
            self._doing.append((name, what))
            self._spawned += spawned

    def _end(self, what: str, name: str, fault: Exception | None, spawned: bool = False) -> None:
        with self._lock:
            self._doing.remove((name, what))
            self._spawned -= spawned
            if fault is not None:
                self._failed.pop(name, None)
                self._failed[name] = {"action": what, **_described(fault)}
                while len(self._failed) > _REMEMBERED:
                    del self._failed[next(iter(self._failed))]


def _described(fault: Exception) -> dict[str, Any]:
    if not isinstance(fault, PantheonError):
        fault = PantheonError(f"internal error: {type(fault).__name__}", code="internal_error")
    return {"status": fault.status, **fault.body()["error"]}
