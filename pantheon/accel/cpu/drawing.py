"""Calling the kernel that draws a token: `draw.choose`.  Imports no Numba."""

from __future__ import annotations

import ctypes
import math

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cpu import kernels

KEY: kernels.Key = ("draw",)
#: the most that top_k may be: candidates are kept in order by insertion
MAX_TOP_K = 128
# keeps the GIL: the call takes some 20 us, and who gives the GIL up may wait 5 ms to get it back
_FUNCTION = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4, *[ctypes.c_double] * 4)


def new_draw(top_k: int, top_p: float, min_p: float, temperature: float) -> Draw | None:
    """A `Draw`, or None for parameters that it does not serve: then the sampler draws by itself."""
    return Draw(top_k, top_p, min_p, temperature) if 0 < top_k <= MAX_TOP_K and temperature > 0 else None


class Draw:
    """Draws tokens with fixed parameters: top_k from 1 to MAX_TOP_K, a temperature above 0; one thread."""

    def __init__(self, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
        if not 0 < top_k <= MAX_TOP_K:
            raise ValueError(f"top_k from 1 to {MAX_TOP_K}")
        self._function = _FUNCTION(kernels.resolve(KEY))
        self._room = np.empty((top_k, 3), np.float64)  # see draw.CANDIDATE
        offset = math.log(min_p) if min_p > 0 else -math.inf
        self._fixed = self._room.ctypes.data, top_k, top_p, offset, temperature
        self._row: NDArray[np.float32] | None = None
        self._row_args = 0, 0

    def __call__(self, row: NDArray[np.float32], point: float) -> int:
        """The id that `point`, uniform in [0, 1), chooses from float32 [n_vocab] logits; -1 when the row holds NaN or
        +inf, or nothing above -inf."""
        if row is not self._row:  # finding an address costs more than the call
            if row.dtype != np.float32 or not row.flags.c_contiguous:
                raise ValueError("a contiguous row of float32")
            self._row, self._row_args = row, (row.ctypes.data, len(row))
        return int(self._function(*self._row_args, *self._fixed, point))
