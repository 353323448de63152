"""`accel.executor.Row` over an array: what a row on a die answers, naively, and how often it is asked."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.executor import Changes, Reached


class ArrayRow:
    """One row; `asked` counts the calls that would be trips to a die."""

    def __init__(self, logits: NDArray[np.float32], asked: Counter[str] | None = None) -> None:
        self._x, self.n_vocab = logits, len(logits)
        self.asked = Counter() if asked is None else asked
        self._order = np.argsort(-logits, kind="stable")
        self._best = float(logits.max())

    def _masses(self, temperature: float) -> NDArray[np.float64]:
        with np.errstate(invalid="ignore"):
            scaled = (self._x - np.float32(self._best)) / np.float32(max(temperature, 1e-30))
        return np.exp(scaled).astype(np.float64)

    @property
    def total(self) -> float:
        return float(self._masses(1.0).sum())

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        self.asked["top"] += k > 128
        if math.isnan(self._best):
            return np.zeros(1, np.int64), np.full(1, np.nan, np.float32)
        ids = self._order[:k]
        ids = ids[self._x[ids] > -np.inf]
        return ids, self._x[ids]

    def value(self, token: int) -> float:
        return float(self._x[token])

    def mass(self, low: float, temperature: float) -> tuple[int, float]:
        self.asked["mass"] += 1
        inside = (self._x >= np.float32(low)) & (self._x > -np.inf)
        return int(inside.sum()), float(self._masses(temperature)[inside].sum())

    def reach(self, wanted: float, temperature: float, *, beyond: bool = False) -> Reached:
        return self._reach(self._masses(temperature)[self._order].cumsum(), wanted, temperature, beyond)

    def reach_count(self, n: int) -> Reached:
        finite = self._x[self._order] > -np.inf
        return self._reach(finite.cumsum().astype(np.float64), n, 1.0, False)

    def _reach(self, sums: NDArray[np.float64], wanted: float, temperature: float, beyond: bool) -> Reached:
        self.asked["reach"] += 1
        masses = self._masses(temperature)
        hits = (sums > wanted if beyond else sums >= wanted).nonzero()[0]
        logit = float(self._x[self._order[hits[0]]]) if len(hits) else float(np.finfo(np.float32).min)
        above, same = self._x > np.float32(logit), self._x == np.float32(logit)
        return Reached(logit, int(above.sum()), float(masses[above].sum()), int(same.sum()), float(masses[same].sum()))

    def pick(self, target: float, low: float, high: float, temperature: float) -> int:
        self.asked["pick"] += 1
        ids = ((self._x >= np.float32(low)) & (self._x <= np.float32(high)) & (self._x > -np.inf)).nonzero()[0]
        place = int(self._masses(temperature)[ids].cumsum().searchsorted(target, side="right"))
        return int(ids[min(place, len(ids) - 1)])

    def edited(self, changes: Changes | None, allowed: NDArray[np.int32] | None) -> ArrayRow:
        self.asked["edited"] += 1
        x = self._x.copy()
        if changes is not None:
            ids = changes.ids
            x[ids] += changes.bias
            x[ids] = np.where(x[ids] > 0, x[ids] / changes.by, x[ids] * changes.by)
            x[ids] -= changes.minus
        if allowed is not None:
            bits = np.zeros(-(-len(x) // 32), np.int32)
            bits[: len(allowed)] = allowed[: len(bits)]
            x[np.unpackbits(bits.view(np.uint8), count=len(x), bitorder="little") == 0] = -np.inf
        return ArrayRow(x, self.asked)
