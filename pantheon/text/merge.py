"""Pair merging, the heart of both tokenizers: the best adjacent pair first, the leftmost of equals.

`find(left, right)` gives the order of a pair (lower is better) or None when it does not merge.
Knows nothing of bytes, scores or ids.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Find = Callable[[str, str], float | None]

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
    """A linked list of symbols and a heap of (order, left, right, total length); stale entries are skipped."""
    n = len(parts)
    after = list(range(1, n + 1))
    before = list(range(-1, n - 1))
    heap: list[tuple[float, int, int, int]] = []
    for i in range(n - 1):
        order = find(parts[i], parts[i + 1])
        if order is not None:
            heap.append((order, i, i + 1, len(parts[i]) + len(parts[i + 1])))
    heapq.heapify(heap)
    while heap:
        _, left, right, total = heapq.heappop(heap)
        if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != total:
            continue
        parts[left] += parts[right]
        parts[right] = ""
        follower = after[left] = after[right]
        if follower < n:
            before[follower] = left
            order = find(parts[left], parts[follower])
            if order is not None:
                heapq.heappush(heap, (order, left, follower, total + len(parts[follower])))
        leader = before[left]
        if leader >= 0:
            order = find(parts[leader], parts[left])
            if order is not None:
                heapq.heappush(heap, (order, leader, left, total + len(parts[leader])))
    return [p for p in parts if p]
