"""Tells an answer that goes round in circles from one that goes on.  Pure.

Small models fall into loops that nothing but the end of the context ends; a request without a token cap would then
hold its model for minutes.  A loop here is exact: the same cycle of tokens, over and over, to the end of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: The cycle must come round so often within the span.
TURNS = 4
#: How many tokens pass between two looks; a look costs some tenths of a millisecond.
EVERY = 32


def is_loop(ids: Sequence[int], span: int) -> bool:
    """Whether the last `span` ids repeat one cycle of at most span / TURNS ids."""
    if span < TURNS or len(ids) < span:
        return False
    tail = np.asarray(ids[-span:])
    # only distances at which the last id came before can be a cycle
    back = span - 1 - np.flatnonzero(tail[:-1] == tail[-1])
    return any(np.array_equal(tail[p:], tail[:-p]) for p in back[::-1] if p <= span // TURNS)
