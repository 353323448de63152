"""The sampler's order of filters over a row that stays on a die: `sampler_filters` asks the whole row, this asks for
the best candidates and for sums.  The choices are the same but for the rounding of those sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.executor import Changes, Reached, Row
from pantheon.engine import sampler_filters as filters

if TYPE_CHECKING:
    from pantheon.engine.sampler import SamplingParams

#: as many candidates may be looked at one by one; more are only summed on the die
MOST_LISTED = 1024
#: how many best ids are at hand without another trip to the die, and how many `filters.nucleus_ids` tries first
AT_HAND = 128


class Few(NamedTuple):
    """Candidates by name, in the order in which they are drawn, and the sums of their masses up to each."""

    ids: NDArray[np.int64]
    reached: NDArray[np.float64]

    def draw(self, point: float) -> int:
        """The id that a point in [0, 1) chooses."""
        # scaled by the last sum, so that the index stays inside but for rounding
        place = int(self.reached.searchsorted(point * self.reached[-1], side="right"))
        return int(self.ids[min(place, len(self.ids) - 1)])

    def told(self, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
        """The probability of a token, and those of the n likeliest."""
        masses = np.diff(self.reached, prepend=0.0) / self.reached[-1]
        order = np.argsort(-masses, kind="stable")[:n]
        return float(masses[self.ids == token].sum()), [(int(self.ids[i]), float(masses[i])) for i in order]


@dataclass(frozen=True)
class Many:
    """Candidates by their logits: all above `lowest`, and the first `ties` ids of those that have it (None: all).

    Those from `by_id` up are drawn in order of id, before the rest in order of logit.
    """

    row: Row
    best: float
    temperature: float
    lowest: float
    ties: int | None
    by_id: float

    def draw(self, point: float) -> int:
        """The id that a point in [0, 1) chooses."""
        row, t = self.row, self.temperature
        target, begin = point * self._total(), max(self.by_id, self.lowest)
        if begin < math.inf and (begin == self.lowest or target < row.mass(begin, t)[1]):
            return row.pick(target, begin, math.inf, t)
        found = row.reach(target, t, beyond=True)
        if not found.ties or found.logit < self.lowest:  # rounding went beyond the last one
            return row.pick(math.inf, self.lowest, math.inf, t)
        each, ties = found.tie_mass / found.ties, found.ties
        if self.ties is not None and found.logit == self.lowest:
            ties = self.ties
        place = min(int((target - found.above) / each), ties - 1)
        return row.pick((place + 0.5) * each, found.logit, found.logit, t)

    def told(self, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
        """The probability of a token, and those of the n likeliest."""
        total = self._total()
        ids, values = self.row.top(n)
        size = int((values > self.lowest).sum()) + (n if self.ties is None else self.ties)
        kept = values[:size][values[:size] >= self.lowest]
        parts = filters.masses(kept, self.best, self.temperature) / total
        own = filters.masses(np.asarray([self.row.value(token)], np.float32), self.best, self.temperature)
        return float(own[0]) / total, [(int(i), float(p)) for i, p in zip(ids, parts, strict=False)]

    def _total(self) -> float:
        if self.ties is None:
            return self.row.mass(self.lowest, self.temperature)[1]
        each = filters.masses(np.asarray([self.lowest], np.float32), self.best, self.temperature)
        above = float(np.nextafter(np.float32(self.lowest), np.float32(np.inf)))
        return self.row.mass(above, self.temperature)[1] + self.ties * float(each[0])


def support(row: Row, p: SamplingParams, n_vocab: int) -> Few | Many:
    """What top_k, top_p and min_p leave of a row, whose best logit is finite, for a temperature above 0."""
    best = float(row.top(1)[1][0])
    floor = float(np.float32(filters.min_p_floor(best, p.min_p)))
    # a top_k beyond the vocabulary is off, unless there is so little to sort that one order serves all
    if 0 < p.top_k < max(n_vocab, 1024):
        return _of_best(row, p, best, floor)
    if p.top_p < 1:
        return _nucleus(row, p, best, floor)
    return Many(row, best, p.temperature, floor, None, floor)


def _few(ids: NDArray[np.int64], values: NDArray[np.float32], best: float, temperature: float) -> Few:
    return Few(ids, filters.masses(values, best, temperature).cumsum())


def _of_best(row: Row, p: SamplingParams, best: float, floor: float) -> Few | Many:
    """With top_k: top_p is measured on what that leaves."""
    if p.top_k <= MOST_LISTED:
        ids, values = row.top(p.top_k)
        reached = filters.masses(values, best, 1.0).cumsum()
        size = filters.nucleus_size(reached, p.top_p * reached[-1]) if p.top_p < 1 else len(ids)
        size = min(size, int(np.count_nonzero(values >= floor)))
        return _few(ids[:size], values[:size], best, p.temperature)
    found = row.reach_count(p.top_k)
    ties = min(found.ties, p.top_k - found.above_n)
    if p.top_p < 1:
        wanted = p.top_p * (found.above + ties * found.tie_mass / max(1, found.ties))
        closer = row.reach(wanted, 1.0)
        if closer.logit > found.logit:
            found, ties = closer, closer.ties
        ties = min(ties, _ties_for(wanted, found))
    if floor > found.logit or not found.ties:
        return Many(row, best, p.temperature, max(floor, found.logit), None, math.inf)
    return Many(row, best, p.temperature, found.logit, ties, math.inf)


def _ties_for(wanted: float, found: Reached) -> int:
    """How many of the ids at the edge belong to what reaches `wanted`: at least one."""
    if not found.ties or not found.tie_mass:
        return max(1, found.ties)
    return max(1, min(found.ties, math.ceil((wanted - found.above) / (found.tie_mass / found.ties))))


def _nucleus(row: Row, p: SamplingParams, best: float, floor: float) -> Few | Many:
    """top_p of the whole vocabulary: `filters.nucleus_ids`."""
    ids, values = row.top(AT_HAND)
    wanted = p.top_p * row.total
    few = True
    if floor > -math.inf:
        if len(ids) == AT_HAND and values[-1] >= floor:
            n, _ = row.mass(floor, 1.0)
            few = n <= MOST_LISTED
            ids, values = row.top(n) if few else (ids, values)
        size = int(np.count_nonzero(values >= floor))
        ids, values = ids[:size], values[:size]
    reached = np.exp(values - np.float32(best)).cumsum(dtype=np.float64)
    if few and (floor > -math.inf or reached[-1] >= wanted):
        size = filters.nucleus_size(reached, wanted)
        return _few(ids[:size], values[:size], best, p.temperature)
    found = row.reach(wanted, 1.0)
    by_id = _behind_edge(best, found.logit)
    if floor > found.logit or not found.ties:
        return Many(row, best, p.temperature, max(floor, found.logit), None, max(by_id, floor))
    return Many(row, best, p.temperature, found.logit, _ties_for(wanted, found), by_id)


def _behind_edge(best: float, edge: float) -> float:
    """The lowest logit in a bin above that of `edge`, of the bins that `filters` cuts a flat row by; inf without one.
    """
    low, high = np.float32(edge), np.float32(best)
    own = filters.bin_of(low, best)
    if filters.bin_of(high, best) >= own:
        return math.inf
    while (middle := np.float32((float(low) + float(high)) / 2)) not in (low, high):
        low, high = (low, middle) if filters.bin_of(middle, best) < own else (middle, high)
    return float(high)


def changes(
    bias: tuple[NDArray[np.int64], NDArray[np.float32]],
    window: NDArray[np.int64],
    penalty: float,
    counts: dict[int, int],
    presence: float,
    frequency: float,
) -> Changes | None:
    """What bias and penalties do to a row: the arithmetic of `filters`, for a die to carry out."""
    counted = np.fromiter(counts.keys(), np.int64, len(counts))
    ids = np.unique(np.concatenate([bias[0], window, counted]))
    if not len(ids):
        return None
    made = Changes(ids, np.zeros(len(ids), np.float32), np.ones(len(ids), np.float32), np.zeros(len(ids), np.float32))
    made.bias[ids.searchsorted(bias[0])] = bias[1]
    made.by[ids.searchsorted(window)] = max(penalty, filters.LEAST_PENALTY)
    n = np.fromiter(counts.values(), np.float32, len(counts))
    made.minus[ids.searchsorted(counted)] = np.float32(presence) + np.float32(frequency) * n
    return made
