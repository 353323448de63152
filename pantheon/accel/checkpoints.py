"""Recurrent state of several conversations, and how it stood after so many positions.

What recurrent layers keep is a sum over all that was read: it can not be cut, only taken back to where a copy was made.
A conversation keeps its newest copies.  Must not know executors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

#: copies of one conversation: of its last two prompts, each before its last token and behind its last whole message
MOST = 4


class Rows(Protocol):
    """A row of float32 [n] for each slot, wherever it lies; reading one may give a copy."""

    @property
    def nbytes(self) -> int: ...

    def __iter__(self) -> Iterator[object]: ...

    def __getitem__(self, slot: int) -> NDArray[np.float32]: ...

    def __setitem__(self, slot: int, row: NDArray[np.float32] | int) -> None: ...


class Checkpoints:
    """Copies of rows of a float32 [n_slots, n] array, by slot and position.  Not safe to use from several threads."""

    def __init__(self, rows: NDArray[np.float32] | Rows) -> None:
        self._rows = rows
        self._saved: list[dict[int, NDArray[np.float32]]] = [{} for _ in rows]
        #: positions that each slot has read
        self.stands_at = [0] * len(self._saved)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows themselves."""
        return self._rows.nbytes

    def go_on(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        """These columns are read next.  Raises ValueError when a slot stands elsewhere."""
        stands = self.stands_at.copy()
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            if position != stands[slot]:
                raise ValueError(f"slot {slot} stands at {stands[slot]}, and can not go on at {position}")
            stands[slot] = position + 1
        self.stands_at = stands

    def remember(self, slot: int, n: int) -> None:
        """How the slot stands now, after n positions.  Raises ValueError when it stands elsewhere."""
        if n != self.stands_at[slot] or n < 1:
            raise ValueError(f"slot {slot} stands at {self.stands_at[slot]}, not at {n}")
        saved = self._saved[slot]
        saved.pop(n, None)
        while len(saved) >= MOST:
            del saved[next(iter(saved))]
        saved[n] = self._rows[slot].copy()

    def positions(self, slot: int) -> list[int]:
        """Where a slot can be taken back to, ascending."""
        return sorted(self._saved[slot])

    def take_back(self, slot: int, n: int) -> None:
        """Let the slot stand where it stood after n positions.  Raises ValueError when that is not known."""
        if n != self.stands_at[slot]:
            self._rows[slot] = self._copy(slot, n)
            self.stands_at[slot] = n
        self._saved[slot] = {at: copy for at, copy in self._saved[slot].items() if at <= n}

    def adopt(self, source: int, target: int, n: int) -> None:
        """Let target stand where source stood after n positions.  Raises ValueError when that is not known."""
        known = self._copy(source, n) if n != self.stands_at[source] else self._rows[source].copy()
        self._rows[target] = known
        self.stands_at[target] = n
        self._saved[target] = {n: known}

    def forget(self, slot: int) -> None:
        """Back to nothing."""
        self._rows[slot] = 0
        self.stands_at[slot] = 0
        self._saved[slot].clear()

    def _copy(self, slot: int, n: int) -> NDArray[np.float32]:
        found = self._saved[slot].get(n)
        if found is None:
            raise ValueError(f"slot {slot} was not remembered after {n} positions")
        return found


class Conversations:
    """What the states of the fast executors have in common; `_points` is of their recurrent state, if they have one."""

    n_slots: int
    n_ctx: int
    #: whether a conversation can be cut anywhere
    can_truncate: bool
    _points: Checkpoints

    def truncate(self, slot: int, n: int) -> None:
        """Keep the first n positions.  Reads are bounded by position, so that KV rows stay as they are.  Raises
        ValueError for a recurrent state that was not remembered there."""
        if not self.can_truncate:
            self._points.take_back(slot, n)

    def checkpoint(self, slot: int, n: int) -> None:
        """Remember on the host how a slot's recurrent state stands after n positions [M130]."""
        self._points.remember(slot, n)

    def checkpoints(self, slot: int) -> list[int]:
        """Where a slot with recurrent state can be taken back to, ascending."""
        return self._points.positions(slot)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.n_slots:
            raise ValueError(f"slot out of range 0..{self.n_slots - 1}")

    def _adopt(self, source: int, target: int, n: int) -> None:
        """The recurrent part of a prefix copy.  Raises ValueError for slots and lengths that can not be copied."""
        if not (0 <= source < self.n_slots and 0 <= target < self.n_slots and source != target and 0 < n <= self.n_ctx):
            raise ValueError(f"can not copy {n} positions from slot {source} to slot {target}")
        if not self.can_truncate:
            self._points.adopt(source, target, n)
