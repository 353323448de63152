"""One CUDA device of this process: its arrays, its stream, its events.  The only file that calls numba.cuda's host API.

A `Device` is used by one thread at a time (the holder of a model's turn, or a load); several devices, or several models
on one, by as many threads.  In the simulator there is one device, and every call has ended when it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.machine import SIMULATED

Array = Any  # numba has no types for its device arrays


class Device:
    """Device `index` as CUDA counts the visible ones, with a stream of its own."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        with self.active():
            self.stream = cuda.stream()
            self.sm = 0 if SIMULATED else _sm(cuda.current_context().device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make it the calling thread's current device."""
        with cuda.gpus[0 if SIMULATED else self.index]:
            yield

    def array(self, n: int, dtype: Any) -> Array:
        """n zeroed elements, at least one."""
        with self.active():
            return cuda.to_device(np.zeros(max(1, n), dtype), stream=self.stream)

    def write(self, array: Array, at: int, values: NDArray[Any]) -> None:
        """Put values at array[at:] on the stream; their memory must stay as it is until the stream gets there."""
        if len(values):
            with self.active():
                array[at : at + len(values)].copy_to_device(values, stream=self.stream)

    def read(self, array: Array, at: int, n: int) -> NDArray[Any]:
        """array[at : at + n] after all that is on the stream: waits."""
        with self.active():
            found = array[at : at + n].copy_to_host(stream=self.stream)
            self.stream.synchronize()
        return np.asarray(found)

    def copy(self, array: Array, source: int, target: int, n: int) -> None:
        """Copy n elements within an array, on the stream; the parts must not overlap."""
        if n > 0:
            with self.active():
                array[target : target + n].copy_to_device(array[source : source + n], stream=self.stream)

    def launch(self, kernel: Kernel, grid: tuple[int, int], *args: Any) -> None:
        """Put a kernel on the stream."""
        with self.active():
            kernel.launch(grid, self.stream, *args)


def _sm(device: Any) -> int:
    major, minor = device.compute_capability
    return 10 * int(major) + int(minor)
