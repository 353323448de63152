"""A run's tokens on their way from the driver to the owner [M109, M257].

Room for every token that the run may ever make, so that a push never waits for the reader and never fails; what a fast
reader has taken costs no memory.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Ring(Generic[T]):
    """First in, first out.  `capacity`: the token budget; pushing more is a bug.  Guarded by the caller's lock."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.written = self.read = 0
        self._items: deque[T] = deque()

    def push(self, item: T) -> None:
        """Never waits.  Raises RuntimeError when the budget is spent."""
        if self.written >= self.capacity:
            raise RuntimeError(f"more than the {self.capacity} tokens of the budget")
        self.written += 1
        self._items.append(item)

    def pop(self) -> T | None:
        """The oldest item, or None."""
        if not self._items:
            return None
        self.read += 1
        return self._items.popleft()

    def __len__(self) -> int:
        """Items that nobody has read yet."""
        return len(self._items)

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts contradict each other."""
        assert 0 <= self.read <= self.written <= self.capacity, (self.read, self.written, self.capacity)
        assert self.written - self.read == len(self._items)
