"""Memory that kernels reach by address: zeroed, lazily touched mappings, cut into aligned pieces.

One arena on huge pages holds all packed weights: a mapping for each tensor would leave small tensors on 4 KB pages,
and streaming them then costs up to half of the bandwidth in TLB misses.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

LINE, HUGE = 64, 2 << 20


def round_up(n: int, step: int) -> int:
    """The next multiple of step."""
    return -(-n // step) * step


class Arena:
    """`capacity` bytes of anonymous memory; pages cost nothing until they are written."""

    def __init__(self, capacity: int, *, huge: bool = False) -> None:
        self.capacity = max(round_up(capacity, mmap.PAGESIZE), mmap.PAGESIZE)
        spare = HUGE if huge else 0
        self._map = mmap.mmap(-1, self.capacity + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, np.uint8)
        self._skip = -whole.ctypes.data % HUGE if huge else 0
        self._bytes: NDArray[np.uint8] = whole[self._skip : self._skip + self.capacity]
        self.address: int = self._bytes.ctypes.data
        self.used = 0

    def take(self, nbytes: int, align: int = LINE) -> NDArray[np.uint8]:
        """The next `nbytes` zeroed bytes at a multiple of `align`; raises MemoryError when the arena is full.

        Whole lines are taken, so that what comes next stays aligned: `nbytes` rounded up to LINE.
        """
        start = round_up(self.used, align)
        if start + round_up(nbytes, LINE) > self.capacity:
            raise MemoryError(f"arena of {self.capacity} bytes is full")
        self.used = start + round_up(nbytes, LINE)
        return self._bytes[start : start + nbytes]

    def rows(self, n: int, stride: int, first: int, nbytes: int) -> NDArray[np.uint8]:
        """A view of uint8 [n, nbytes]: from `first` on in each of n rows of `stride` bytes."""
        return self._bytes[: n * stride].reshape(n, stride)[:, first : first + nbytes]

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy bytes within the arena; the two parts do not overlap."""
        self._bytes[target : target + nbytes] = self._bytes[source : source + nbytes]

    def drop(self, start: int, nbytes: int) -> None:
        """Give the pages of a page-aligned part back; they read as zeros again."""
        self._map.madvise(mmap.MADV_DONTNEED, self._skip + start, nbytes)


def address(array: NDArray[np.generic]) -> int:
    """Where an array's data lies; the caller keeps the array alive."""
    return int(array.ctypes.data)
