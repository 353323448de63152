"""Blocks of one thread in Numba's simulator, without a thread: five to ten times faster than one that is started for
each block and watched in a loop.  Imported in the simulator only.

What shared memory holds before it is written is nobody's business: floats begin as NaN here, which no test survives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.cuda.simulator.kernelapi import Dim3, FakeCUDAModule, swapped_cuda_module
from numba.np import numpy_support


def run_alone(body: Callable[..., None], grid: tuple[int, int], args: tuple[Any, ...]) -> None:
    """Run every block of a launch, in order, in the calling thread.  Arrays are the simulator's or NumPy's."""
    block = _Alone(grid)
    plain = [getattr(arg, "_ary", arg) for arg in args]
    with swapped_cuda_module(body, block):
        for y in range(grid[1]):
            for x in range(grid[0]):
                block.blockIdx = Dim3(x, y, 0)
                body(*plain)


class _Alone(FakeCUDAModule):
    """What kernels know as `cuda` when a block has one thread."""

    threadIdx, blockIdx, laneid = Dim3(0, 0, 0), Dim3(0, 0, 0), 0

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__((*grid, 1), (1, 1, 1), 0)
        self._shared = self._local = _Memory()

    def syncthreads(self) -> None:
        """There is nobody to wait for."""

    def grid(self, ndim: int) -> Any:
        index = self.blockIdx.x, self.blockIdx.y
        return index[0] if ndim == 1 else index

    def gridsize(self, ndim: int) -> Any:
        size = self.gridDim.x, self.gridDim.y
        return size[0] if ndim == 1 else size


class _Memory:
    """cuda.shared and cuda.local: each line that makes an array is run once a block."""

    def array(self, shape: Any, dtype: Any, alignment: Any = None) -> Any:
        kind = np.dtype(numpy_support.as_dtype(dtype))
        return np.full(shape, np.nan if kind.kind == "f" else np.iinfo(kind).min, kind)
