"""Embeddings: the hidden states of a text, pooled into one vector.

Reads a text in chunks into a slot that the caller owns; the numbers do not depend on the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.executor import Columns, RunnerState
from pantheon.engine.generate import PREFILL_CHUNK, never
from pantheon.errors import BadRequest, Cancelled

if TYPE_CHECKING:
    from pantheon.engine.model import Model

Pooling = Literal["mean", "last", "none"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last", "none")


def embed(
    model: Model,
    state: RunnerState,
    ids: Sequence[int],
    pooling: Pooling = "mean",
    *,
    slot: int = 0,
    cancelled: Callable[[], bool] = never,
    turn: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> NDArray[np.float32]:
    """float32 [width]: mean of the hidden states of all tokens, or the last one's; float32 [len(ids), width] for none.

    `turn` is held for each forward.  `cancelled` is asked before each: then Cancelled is raised.  Raises BadRequest for
    no tokens and for more than the context has room for.
    """
    if not ids:
        raise BadRequest("the input is empty: this model adds no begin token", param="input")
    if len(ids) > state.n_ctx:
        raise BadRequest(f"{len(ids)} tokens do not fit a context of {state.n_ctx}", param="input")
    state.reset(slot)
    step = max(1, min(PREFILL_CHUNK, model.runner.max_columns))
    total: NDArray[np.float64] | None = None
    kept: list[NDArray[np.float32]] = []
    for first in range(0, len(ids), step):
        if cancelled():
            raise Cancelled("cancelled while reading the input")
        part = ids[first : first + step]
        end = first + len(part) == len(ids)
        wanted = "all" if pooling != "last" else "last" if end else "none"
        with turn():
            rows = model.hidden(state, Columns.of_slot(part, first, slot=slot, wanted=wanted))
        if pooling == "mean":
            # one row after the other, so that the sum does not depend on the chunks
            summed = np.add.accumulate(rows if total is None else np.vstack([total, rows]), axis=0, dtype=np.float64)
            total = summed[-1]
        else:
            kept.append(rows)
    if total is not None:
        return (total / len(ids)).astype(np.float32)
    return kept[-1][-1] if pooling == "last" else np.concatenate(kept)


def normalised(vector: NDArray[np.float32], norm: int = 2) -> NDArray[np.float32]:
    """The vector over its size: -1 as it is, 0 by the largest value (to 32760), 1 by the sum of sizes, 2 by Euclid's
    length, p > 2 by the p-norm.  A vector of zeros stays."""
    if norm < 0:
        return vector
    wide = np.abs(vector.astype(np.float64))
    size = wide.max() / 32760 if norm == 0 else np.sum(wide**norm) ** (1 / norm)
    return (vector / size).astype(np.float32) if size > 0 else vector
