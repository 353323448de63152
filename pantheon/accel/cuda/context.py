"""One CUDA device of this process: its arrays, its stream, its events.  The only file that calls numba.cuda's host API.

A `Device` is used by one thread at a time (the holder of a model's turn, or a load); several devices, or several models
on one, by as many threads.  In the simulator there is one device, and every call has ended when it returns.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from pantheon import log
from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.machine import SIMULATED

_log = log.logger("cuda")

if not SIMULATED:
    from numba.cuda.core import config

    # Numba frees an array in whatever thread drops it, where no device may be current: the driver refuses, and the
    # memory is lost.  So it frees when it is told (`Device.give_back`), or when an allocation fails.
    config.CUDA_DEALLOCS_COUNT = config.CUDA_DEALLOCS_RATIO = sys.maxsize
    # small grids are no news, and their warnings would fill a server's log
    config.CUDA_LOW_OCCUPANCY_WARNINGS = 0

#: two threads that free what one device has to free would take it from each other; guards nothing else
_one_clears = threading.Lock()

Array = Any  # numba has no types for its device arrays
#: CUDA_ERROR_OUT_OF_MEMORY of the driver API
_OUT_OF_MEMORY = 2


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
        """n zeroed elements, at least one.  Raises MemoryError when the device has no room."""
        shape = max(1, n)
        if SIMULATED:
            return cuda.to_device(np.zeros(shape, dtype))
        from numba.cuda.cudadrv import driver

        with self.active():
            try:
                made = cuda.device_array(shape, dtype, stream=self.stream)
            except driver.CudaAPIError as fault:
                if fault.code != _OUT_OF_MEMORY:
                    raise
                raise MemoryError(f"no room for {shape * np.dtype(dtype).itemsize} bytes") from fault
            driver.device_memset(made, 0, made.nbytes, stream=self.stream)
            return made

    def pinned(self, n: int, dtype: Any) -> NDArray[Any]:
        """n elements of host memory that the device copies from and to while the host goes on."""
        with self.active():
            made: NDArray[Any] = cuda.pinned_array(n, dtype)
            return made

    def write(self, array: Array, at: int, values: NDArray[Any]) -> None:
        """Put values at array[at:] on the stream; their memory must stay as it is until the stream gets there."""
        if len(values):
            with self.active():
                array[at : at + len(values)].copy_to_device(values, stream=self.stream)

    def read_into(self, out: NDArray[Any], array: Array, at: int) -> None:
        """Put the copying of array[at : at + len(out)] to `out` on the stream; wait before you look."""
        with self.active():
            array[at : at + len(out)].copy_to_host(out, stream=self.stream)

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

    def event(self) -> Event:
        """A mark that is not set yet."""
        with self.active():
            return Event(self, cuda.event() if SIMULATED else cuda.event(timing=False))

    def mark(self, event: Event) -> None:
        """Let the event come true when all that is on the stream now has run."""
        with self.active():
            event.raw.record(self.stream)

    def synchronize(self) -> None:
        """Wait for all that is on the stream."""
        with self.active():
            self.stream.synchronize()

    def free_bytes(self) -> int | None:
        """Bytes that the device has free now; None in the simulator."""
        if SIMULATED:
            return None
        with self.active():
            return int(cuda.current_context().get_memory_info().free)

    def give_back(self) -> None:
        """Free what nobody refers to any more.  Raises nothing: a device that is lost has nothing to give."""
        if SIMULATED:
            return
        try:
            with _one_clears, self.active():
                self.stream.synchronize()
                context = cuda.current_context()
                # of arrays and pinned memory, then of streams, events and modules
                for pending in (context.memory_manager.deallocations, context.deallocations):
                    pending.clear()
        except Exception as fault:
            _log.warning("memory not given back %s", log.fields(die=self.index, reason=str(fault)))


class Event:
    """A mark on a stream of a device."""

    def __init__(self, device: Device, raw: Any) -> None:
        self._device, self.raw = device, raw

    @property
    def done(self) -> bool:
        """Whether the stream has got there; asks the driver, waits for nothing."""
        if SIMULATED:
            return True
        with self._device.active():
            return bool(self.raw.query())

    def wait(self) -> None:
        """Return when the stream has got there."""
        with self._device.active():
            self.raw.synchronize()


def _sm(device: Any) -> int:
    major, minor = device.compute_capability
    return 10 * int(major) + int(minor)
