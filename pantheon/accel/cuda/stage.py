"""One part of a plan on its die: the arrays that all states share, and the launches of its body and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cuda import table
from pantheon.accel.cuda.context import Array, Device
from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.lowering import COUNT, MAX_COLUMNS, Launch
from pantheon.accel.cuda.machine import F32, I32, I64
from pantheon.accel.cuda.parts import Part
from pantheon.accel.cuda.place import Place
from pantheon.plan.buffers import Buffer

_SCALARS: dict[Any, Any] = {I32: np.int32, I64: np.int64, F32: np.float32}


class Stage:
    """Arrays and launches of one part.  Used by the holder of the turn."""

    def __init__(self, device: Device, part: Part, place: Place) -> None:
        """Takes the memory.  Raises MemoryError when the die has no room."""
        self.device, self.part, self.place = device, part, place
        sizes = {
            "weights": (place.weights, np.int32), "vectors": (place.vectors, np.float32),
            "tables": (place.tables, np.float32), "scratch": (place.scratch, np.float32),
            "blocks": (place.blocks, np.int32), "columns": (4 * MAX_COLUMNS, np.int32),
        }  # fmt: skip
        self.arrays: dict[str, Array] = {name: device.array(n, dtype) for name, (n, dtype) in sizes.items()}
        self.body = [_Bound(launch) for launch in table.launches(part.plan.body, place.memory)]
        self.head = [_Bound(launch) for launch in table.head(place.memory)]
        #: columns as the host writes them, and what the part before leaves
        self.columns: NDArray[np.int32] = device.pinned(4 * MAX_COLUMNS, np.int32)
        self.inbox: dict[Buffer, NDArray[np.float32]] = {
            b: device.pinned(MAX_COLUMNS * place.memory.buffers[b].stride, np.float32) for b in part.carried
        }

    def run(self, launches: list[_Bound], state: Mapping[str, Array], count: int, reach: int) -> None:
        """Put the launches on the stream, for so many columns that reach so far."""
        arrays = {**self.arrays, **state}
        with self.device.active():
            for bound in launches:
                bound.launch(self.device.stream, arrays, count, reach)

    def compile(self, count: int) -> None:
        """Compile what is launched for so many columns, or for the head of so many."""
        with self.device.active():
            for bound in (*self.body, *self.head):
                bound.pick(count).compiled()

    def send_columns(self) -> None:
        """The host's columns to the die; they stay as they are until the forward has ended."""
        self.device.write(self.arrays["columns"], 0, self.columns)

    def read_buffer(self, b: Buffer, out: NDArray[np.float32]) -> None:
        """The first columns of a buffer, as many as `out` has strides for, into host memory; when the stream gets
        there."""
        self.device.read_into(out, self.arrays["scratch"], self.place.memory.buffers[b].at)

    def take_inbox(self, count: int) -> None:
        """What the part before has left for so many columns, to the die."""
        for b, values in self.inbox.items():
            at, stride = self.place.memory.buffers[b]
            self.device.write(self.arrays["scratch"], at, values[: count * stride])

    def close(self) -> None:
        """Give the memory back."""
        self.arrays.clear()
        self.body, self.head = [], []
        self.device.give_back()


class _Bound:
    """A launch whose arguments have their types."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self.pick = launch, launch.pick
        self._args: dict[Kernel, list[Any]] = {}

    def launch(self, stream: Any, arrays: Mapping[str, Array], count: int, reach: int) -> None:
        kernel = self.pick(count)
        args = self._args.get(kernel)
        if args is None:
            pairs = zip(self._launch.args, kernel.types, strict=True)
            args = self._args[kernel] = [a if isinstance(a, str) else _SCALARS[kind](a) for a, kind in pairs]
        grid = self._launch.grid(count, reach)
        if not all(grid):
            return  # nothing to do for such a forward
        n = np.int32(count)
        values = [arrays[a] if isinstance(a, str) and a != COUNT else n if isinstance(a, str) else a for a in args]
        kernel.launch(grid, stream, *values)
