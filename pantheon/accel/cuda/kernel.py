"""`Kernel`: a kernel's body with all that is needed to compile it, for a device, for a table or for the simulator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numba import cuda

from pantheon.accel.cuda import kernel_store
from pantheon.accel.cuda.machine import SIMULATED

if SIMULATED:
    from pantheon.accel.cuda.simulator import run_alone

#: the simulator runs one launch of this process at a time; guards nothing else
_one_launch = threading.Lock()


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel for one choice of its constants.

    name: what the table in docs/architecture/cuda.md calls it.  types: Numba types of its arguments; a body takes
    typed arrays, offsets in elements (int64) and counts (int32).  threads: the shape of a block on a device, which the
    body's constants agree with.  least_sm: the oldest compute capability that has its instructions, times ten.
    tight: it may not spill registers.  resident: blocks that a multiprocessor shall have registers for at a time.
    """

    name: str
    body: Callable[..., None]
    types: tuple[Any, ...]
    threads: tuple[int, int] = (256, 1)
    least_sm: int = 70
    tight: bool = False
    resident: int = 1
    _compiled: dict[str, Any] = field(default_factory=dict, repr=False)

    def launch(self, grid: tuple[int, int], stream: Any, *args: Any, threads: tuple[int, int] | None = None) -> None:
        """Put a launch on a stream of the current device; compiles on the first call.  Scalars must be NumPy scalars
        of the declared types.  threads: another block shape, for tests in the simulator."""
        if SIMULATED:
            with _one_launch:
                if (threads or self.threads) == (1, 1):
                    run_alone(self.body, grid, args)
                else:
                    self.compiled()[grid, threads or self.threads](*args)
        else:
            self.compiled()[grid, threads or self.threads, stream](*args)

    def compiled(self) -> Any:
        """The function that launches it; compiled for the current device at its first call."""
        if not self._compiled:
            self._compiled["jit"] = cuda.jit(self.body) if SIMULATED else kernel_store.launcher(self)
        return self._compiled["jit"]

    def ptx(self, sm: int) -> str:
        """PTX for a compute capability (80 for sm_80); needs NVVM, no device."""
        text, _ = cuda.compile_ptx(self.body, self.types, cc=divmod(sm, 10), launch_bounds=self.bounds)
        return str(text)

    @property
    def bounds(self) -> tuple[int, int]:
        """Threads of a block and blocks abreast, by which the compiler gives registers out."""
        return self.threads[0] * self.threads[1], self.resident
