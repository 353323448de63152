"""What turns that run have been promised and have not taken yet.

The free bytes of a snapshot are free for one turn only: whoever is admitted next must not count them again, whether
the watcher has looked in between or not.  What a turn has taken by a look, the watcher sees itself.  Must not know
turns or models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Promise:
    """Bytes for one turn, which it takes evenly over so many tokens.  `written`: tokens that it has put into memory."""

    __slots__ = ("_left", "_nbytes", "_tokens", "_written")

    def __init__(self, nbytes: int, tokens: int, written: Callable[[], int]) -> None:
        self._nbytes, self._tokens, self._written = nbytes, max(1, tokens), written
        self._left = 1.0

    @property
    def tokens(self) -> int:
        """Over how many tokens it is taken."""
        return self._tokens

    @property
    def outstanding(self) -> int:
        """Bytes that were promised and not seen to be taken."""
        return int(self._nbytes * self._left)

    def look(self) -> None:
        """What has been taken until now is part of what the watcher sees."""
        self._left = min(self._left, max(0.0, 1 - self._written() / self._tokens))


class Ledger:
    """The promises to turns that run.  Safe to use from several threads."""

    def __init__(self) -> None:
        #: guards _open; nothing is waited for while it is held
        self._lock = threading.Lock()
        self._open: set[Promise] = set()
        #: of turns that are over; the next look sees what they took
        self._ended = 0

    def add(self, nbytes: int, tokens: int, written: Callable[[], int]) -> Promise:
        """Promise bytes until `settle`."""
        promise = Promise(nbytes, tokens, written)
        with self._lock:
            self._open.add(promise)
        return promise

    def settle(self, promise: Promise) -> None:
        """The turn is over; idempotent."""
        with self._lock:
            if promise in self._open:
                self._open.remove(promise)
                self._ended += promise.outstanding

    def look(self) -> None:
        """Called right after each look of the watcher."""
        with self._lock:
            self._ended = 0
            for promise in self._open:
                promise.look()

    @property
    def outstanding(self) -> int:
        """Bytes that no new turn may count on."""
        with self._lock:
            return self._ended + sum(promise.outstanding for promise in self._open)
