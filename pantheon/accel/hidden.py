"""The last norm in NumPy: what a model knows of a column, without the product with the output matrix.

Shared by the executors, so that hidden states mean the same on all of them.  Each row is computed on its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pantheon.plan.ops import RmsNorm

Array = NDArray[np.float32]


def normed(rows: Array, op: RmsNorm | None, weight: Array | None) -> Array:
    """float32 [n, width] after `op`, with its weight [width / groups]; a copy of the rows for a plan without one."""
    if op is None or weight is None:
        return rows.copy()
    x = rows.reshape(-1, op.groups, op.weight.size)
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    scale = (1.0 / np.sqrt(mean + op.eps)).astype(np.float32)
    out: Array = (x * scale * weight).reshape(rows.shape)
    return out
