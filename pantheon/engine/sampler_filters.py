"""The arithmetic of sampling, as pure functions over one row of logits.  Knows no requests, no random state.

Every filter keeps an upper set of the distribution: highest logit first, lowest id first on ties.  Nothing here
sorts the vocabulary; only candidates are sorted.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.int64]


#: a smaller penalty would make an infinity of a logit, which is what a broken model looks like
LEAST_PENALTY = 1e-30


def penalise_repeats(row: Row, window: Ids, penalty: float) -> None:
    """Divide positive and multiply negative logits of the window's ids by `penalty`, once each, in place.

    Keskar et al. 2019 (CTRL) with llama.cpp's rule for negative logits.  An id that stands twice in the window gets
    the same value written twice, so no unique set is needed.
    """
    values, by = row[window], np.float32(max(penalty, LEAST_PENALTY))
    row[window] = np.where(values > 0, values / by, values * by)


def subtract_counts(row: Row, counts: dict[int, int], presence: float, frequency: float) -> None:
    """row[id] -= presence + frequency * count, in place, for every counted id (the OpenAI formula)."""
    ids = np.fromiter(counts.keys(), np.int64, len(counts))
    n = np.fromiter(counts.values(), np.float32, len(counts))
    row[ids] -= np.float32(presence) + np.float32(frequency) * n


def sort_candidates(row: Row, ids: Ids) -> Ids:
    """`ids` (ascending) ordered by logit, highest first; the lower id first on ties."""
    return ids[(-row[ids]).argsort(kind="stable")]


def top_ids(row: Row, k: int) -> Ids:
    """The ids of the k highest finite logits, ordered; fewer when fewer are finite."""
    ids = _candidates(row, k)
    if len(ids) > 4 * k:
        # many ties or a flat row: cut to the k-th value before sorting, keeping its lowest ids
        values = row[ids]
        kth = np.partition(values, len(ids) - k)[len(ids) - k]
        above = ids[values > kth]
        ids = np.sort(np.concatenate([above, ids[values == kth][: k - len(above)]]))
    return sort_candidates(row, ids)[:k]


def _candidates(row: Row, k: int) -> Ids:
    """Ids, ascending, that hold the k highest finite logits.

    Blocks are interleaved: one is every id of the same remainder.  k blocks whose maximum is >= t hold at least k
    values >= t, so the k-th highest maximum is a lower bound, and what reaches it lies in few blocks.  64 ids a block
    balance the search for that bound against the search behind it; fewer than 8k blocks would leave many candidates.
    """
    blocks = 1 << (max(8 * k, len(row) // 64) - 1).bit_length()
    depth = len(row) // blocks
    if depth < 2:
        return (row > -np.inf).nonzero()[0]
    grid = row[: blocks * depth].reshape(depth, blocks)
    maxima = grid.max(axis=0)
    bound = np.partition(maxima, blocks - k)[blocks - k]
    if bound == -np.inf:
        return (row > -np.inf).nonzero()[0]
    columns = (maxima >= bound).nonzero()[0]
    line, place = np.divmod((grid.take(columns, axis=1) >= bound).ravel().nonzero()[0], len(columns))
    ids = line * blocks + columns[place]
    rest = (row[blocks * depth :] >= bound).nonzero()[0]
    return np.concatenate([ids, rest + blocks * depth]) if len(rest) else ids


def masses(values: Row, best: float, temperature: float) -> NDArray[np.float64]:
    """Weights relative to that of the best logit, float64."""
    scaled = values.astype(np.float64)
    scaled -= best
    if temperature != 1.0:
        # colder than this only ties with the best are left anyway, and the quotient stays finite
        scaled /= max(temperature, 1e-30)
    return np.exp(scaled, out=scaled)


def nucleus_size(reached: NDArray[np.float64], wanted: float) -> int:
    """How many of the descending masses together reach `wanted`, given their running sums; at least 1 (Holtzman et
    al. 2020)."""
    return min(len(reached), int(reached.searchsorted(wanted, side="left")) + 1)


def nucleus_ids(row: Row, best: float, top_p: float, floor: float) -> Ids:
    """The ids, ordered, that top_p keeps of the whole vocabulary, cut at the logit `floor` (-inf: not at all)."""
    weights = np.exp(row - np.float32(best))
    wanted = top_p * float(weights.sum(dtype=np.float64))
    # what lies below the floor counts for the sum only; what is left is mostly few ids
    ids = (row >= floor).nonzero()[0] if floor > -math.inf else top_ids(row, 128)
    if len(ids) <= 1024:
        ids = sort_candidates(row, ids)
        reached = weights[ids].cumsum(dtype=np.float64)
        if floor > -math.inf or reached[-1] >= wanted:
            return ids[: nucleus_size(reached, wanted)]
    kept = _binned_nucleus(row, weights, best, wanted)
    return kept[row[kept] >= floor]


def _binned_nucleus(row: Row, weights: Row, best: float, wanted: float) -> Ids:
    """The nucleus of a flat row, in no stated order: cut by bins of 0.01 logits, and only the bin that the cut goes
    through is sorted."""
    bins = bin_of(row, best)
    reached = np.cumsum(np.bincount(bins, weights, 4096))
    edge = min(4095, int(np.searchsorted(reached, wanted, side="left")))
    border = sort_candidates(row, ((bins == edge) & (row > -np.inf)).nonzero()[0])
    missing = wanted - (float(reached[edge - 1]) if edge else 0.0)
    kept = border[: nucleus_size(weights[border].cumsum(dtype=np.float64), missing)]
    return np.concatenate([(bins < edge).nonzero()[0], kept])


def bin_of(logits: Row | np.float32, best: float) -> NDArray[np.int64]:
    """The bin of each logit: 4096 of 0.01 logits from the best one down, the last without an end."""
    depth = np.minimum((np.float32(best) - logits) * np.float32(100.0), np.float32(4095.0))
    return depth.astype(np.int64)


def min_p_floor(best: float, min_p: float) -> float:
    """The lowest logit that min_p keeps: p >= min_p * p_max is a plain offset below the best logit."""
    return best + math.log(min_p) if min_p > 0 else -math.inf


def log_normaliser(row: Row) -> float:
    """log(sum(exp(row))): logprob = logit - this."""
    best = row.max()
    weights = row - best
    np.exp(weights, out=weights)
    return float(best) + math.log(float(weights.sum(dtype=np.float64)))
