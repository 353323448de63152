"""Pair merging, the heart of both tokenizers: the best adjacent pair first, the leftmost of equals.

`find(left, right)` gives the order of a pair (a whole number >= 0, lower is better) or None when it does not merge.
Knows nothing of bytes, scores or ids.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Find = Callable[[str, str], int | None]

_SHORT = 48  # symbols; below this the plain search beats the heap


def merge(symbols: list[str], find: Find) -> list[str]:
    """Merge pairs until none is left.  O(n log n) for long input; `symbols` may be changed."""
    if len(symbols) <= _SHORT:
        return _merge_short(symbols, find)
    return _merge_long(symbols, find)


def _merge_short(parts: list[str], find: Find) -> list[str]:
    orders = [find(parts[i], parts[i + 1]) for i in range(len(parts) - 1)]
    while orders:
        best, at = None, -1
        for i, order in enumerate(orders):
            if order is not None and (best is None or order < best):
                best, at = order, i
        if best is None:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del orders[at]
        if at > 0:
            orders[at - 1] = find(parts[at - 1], parts[at])
        if at < len(orders):
            orders[at] = find(parts[at], parts[at + 1])
    return parts


def _merge_long(parts: list[str], find: Find) -> list[str]:
    """A linked list of symbols and a heap of candidate pairs.

    A heap entry packs (order, left symbol, length of both) into one integer: quick to compare, invisible to the garbage
    collector.  An entry is stale when the two symbols have another length by now.
    """
    n = len(parts)
    sizes = [len(p) for p in parts]
    span = sum(sizes) + 1
    after, before = list(range(1, n + 1)), list(range(-1, n - 1))
    heap: list[int] = []

    def offer(left: int, right: int) -> None:
        order = find(parts[left], parts[right])
        if order is not None:
            heapq.heappush(heap, (order * n + left) * span + sizes[left] + sizes[right])

    for i in range(n - 1):  # pushed one by one: one heapify of a long list would hold the GIL
        offer(i, i + 1)
    while heap:
        entry, size = divmod(heapq.heappop(heap), span)
        left = entry % n
        right = after[left]
        if not sizes[left] or right == n or sizes[left] + sizes[right] != size:
            continue
        parts[left] += parts[right]
        sizes[left], sizes[right], parts[right] = size, 0, ""
        follower = after[left] = after[right]
        if follower < n:
            before[follower] = left
            offer(left, follower)
        if before[left] >= 0:
            offer(before[left], left)
    return [p for p in parts if p]
