"""Servers whose models several users share, and the means to hold them where a test wants them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pantheon.sched.scheduler import Scheduler
from pantheon.sched.shared import SchedConfig
from pantheon.serve.context import App
from pantheon.serve.registry import Entry
from tests.serve.api_server import Api, serving
from tests.serve.http_client import Answer, eventually

PATIENCE_S = 20.0


class Valve:
    """Lets the forwards of a model through: a number of them, or all."""

    def __init__(self, entry: Entry) -> None:
        assert entry.model is not None
        runner: Any = entry.model.runner
        self._forward, runner.forward = runner.forward, self._pass
        self._allowed = threading.Semaphore(0)
        self._free = threading.Event()
        #: forwards that have begun, and the slots of the last one
        self.begun = 0
        self.slots: set[int] = set()

    def _pass(self, state: Any, columns: Any) -> Any:
        self.begun += 1
        self.slots = {int(slot) for slot in columns.slots}
        while not self._free.is_set() and not self._allowed.acquire(timeout=0.02):
            pass
        return self._forward(state, columns)

    def let(self, n: int) -> None:
        """So many forwards end; the next one has begun, if there is one to begin."""
        for _ in range(n):
            before = self.begun
            self._allowed.release()
            eventually(lambda before=before: self.begun > before, 0.5)  # type: ignore[misc]

    def open(self) -> None:
        """Hold nothing any more."""
        self._free.set()


class Batch:
    """One server with one scripted model that several users share."""

    def __init__(self, api: Api, entry: Entry) -> None:
        self.api, self.entry = api, entry
        assert entry.sched is not None
        self.sched: Scheduler = entry.sched
        self._threads: list[threading.Thread] = []

    def until(self, condition: Callable[[], bool]) -> None:
        assert eventually(condition, PATIENCE_S), self.sched.view()

    def until_load(self, active: int, queued: int = 0) -> None:
        """So many have a place and so many wait for one."""
        self.until(lambda: self.sched.load()[:2] == (active, queued))

    @property
    def total(self) -> dict[str, Any]:
        """The scheduler's totals."""
        found: dict[str, Any] = self.sched.view()["totals"]
        return found

    def ask(self, **body: Any) -> Later:
        """A chat in a thread of its own."""
        return Later(lambda: self.api.chat(**body))

    def open(self, **body: Any) -> socket.socket:
        return self.api.open_chat(**body)


class Later:
    """An answer that a thread waits for."""

    def __init__(self, ask: Callable[[], Answer]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(ask,), daemon=True)
        self._thread.start()

    def _run(self, ask: Callable[[], Answer]) -> None:
        try:
            self._found.append(ask())
        except BaseException as fault:
            self._found.append(fault)

    @property
    def here(self) -> bool:
        return bool(self._found)

    def get(self) -> Answer:
        """The answer, once it is here."""
        self._thread.join(PATIENCE_S)
        assert self._found, "no answer"
        if isinstance(self._found[0], BaseException):
            raise self._found[0]
        found: Answer = self._found[0]
        return found


@contextmanager
def batching(
    users: int = 2, app: App | None = None, pieces: tuple[Any, ...] = ("a",), script: dict[str, Any] | None = None,
    **config: Any,
) -> Iterator[Batch]:  # fmt: skip
    """A server with the scripted model m for so many users; config: of its scheduler."""
    with serving(app) as api:
        entry = api.add(batch=SchedConfig(users=users, **config), pieces=list(pieces), **(script or {}))
        yield Batch(api, entry)
