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


def penalise_repeats(row: Row, window: Ids, penalty: float) -> None:
    """Divide positive and multiply negative logits of the window's ids by `penalty`, once each, in place.

    Keskar et al. 2019 (CTRL) with llama.cpp's rule for negative logits.  An id that stands twice in the window gets
    the same value written twice, so no unique set is needed.
    """
    values = row[window]
    row[window] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))


def subtract_counts(row: Row, counts: dict[int, int], presence: float, frequency: float) -> None:
    """row[id] -= presence + frequency * count, in place, for every counted id (the OpenAI formula)."""
    ids = np.fromiter(counts.keys(), np.int64, len(counts))
    n = np.fromiter(counts.values(), np.float32, len(counts))
    row[ids] -= np.float32(presence) + np.float32(frequency) * n


def sort_candidates(row: Row, ids: Ids) -> Ids:
    """`ids` (ascending) ordered by logit, highest first; the lower id first on ties."""
    return ids[np.argsort(-row[ids], kind="stable")]


def top_ids(row: Row, k: int) -> Ids:
    """The ids of the k highest finite logits, ordered; fewer when fewer are finite.

    A lower bound for the k-th highest logit comes from block maxima: k blocks whose maximum is >= t hold at least k
    values >= t.  With 8k blocks or more few candidates are left above it, whatever the row looks like.
    """
    blocks = 8 * k
    depth = len(row) // blocks
    if depth < 2:
        ids = np.flatnonzero(row > -np.inf)
    else:
        maxima = row[: blocks * depth].reshape(depth, blocks).max(axis=0)
        bound = np.partition(maxima, blocks - k)[blocks - k]
        ids = np.flatnonzero(row >= bound) if bound > -np.inf else np.flatnonzero(row > -np.inf)
    if len(ids) > 4 * k:
        # many ties or a flat row: cut to the k-th value before sorting, keeping its lowest ids
        values = row[ids]
        kth = np.partition(values, len(ids) - k)[len(ids) - k]
        above = ids[values > kth]
        ids = np.sort(np.concatenate([above, ids[values == kth][: k - len(above)]]))
    return sort_candidates(row, ids)[:k]


def nucleus_size(masses: NDArray[np.float64], wanted: float) -> int:
    """How many of the descending masses together reach `wanted`; at least 1 (Holtzman et al. 2020)."""
    return min(len(masses), int(np.searchsorted(np.cumsum(masses), wanted, side="left")) + 1)


def nucleus_ids(row: Row, top_p: float) -> Ids:
    """The ids that top_p keeps of the whole vocabulary, in no stated order.

    A peaked row has its nucleus among its best 128 ids; a flat one is cut by bins of 0.01 logits, and only the bin
    that the cut goes through is sorted.
    """
    best = row.max()
    weights = np.exp(row - best)
    wanted = top_p * float(weights.sum(dtype=np.float64))
    ids = top_ids(row, 128)
    masses = weights[ids].astype(np.float64)
    if masses.sum() >= wanted:
        return ids[: nucleus_size(masses, wanted)]
    bins = np.minimum((best - row) * np.float32(100.0), np.float32(4095.0)).astype(np.int64)
    reached = np.cumsum(np.bincount(bins, weights, 4096))
    edge = min(4095, int(np.searchsorted(reached, wanted, side="left")))
    border = sort_candidates(row, np.flatnonzero((bins == edge) & (row > -np.inf)))
    missing = wanted - (float(reached[edge - 1]) if edge else 0.0)
    kept = border[: nucleus_size(weights[border].astype(np.float64), missing)]
    return np.concatenate([np.flatnonzero(bins < edge), kept])


def softmax(values: Row, temperature: float) -> NDArray[np.float64]:
    """float64 probabilities of finite or -inf logits at a temperature above 0."""
    with np.errstate(over="ignore"):
        scaled = (values.astype(np.float64) - float(values.max())) / temperature
    weights: NDArray[np.float64] = np.exp(scaled)
    weights /= weights.sum()
    return weights


def min_p_floor(best: float, min_p: float) -> float:
    """The lowest logit that min_p keeps: p >= min_p * p_max is a plain offset below the best logit."""
    return best + math.log(min_p) if min_p > 0 else -math.inf


def log_normaliser(row: Row) -> float:
    """log(sum(exp(row))): logprob = logit - this."""
    best = float(row.max())
    return best + math.log(float(np.exp(row - np.float32(best)).sum(dtype=np.float64)))
