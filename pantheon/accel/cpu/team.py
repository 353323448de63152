"""The thread team: members enter one function without the GIL and stay; a job walks the op table together.

What they run is in `walk`.  Knows no ops.  Imports no Numba.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cpu import kernels
from pantheon.accel.cpu.arena import Arena, address
from pantheon.accel.cpu.control import CONTROL_BYTES, STOP, SYS_FUTEX, TIMEOUT, WAKE_PRIVATE
from pantheon.accel.cpu.fields import PHASE_BYTES, PROGRAM_BYTES

#: the kernel that members run
KEY = ("team",)
_N_ARGS = 7
_SLEEP_NS = 50_000_000


def _shut(control: NDArray[np.uint8], threads: list[threading.Thread], keep: list[Any]) -> None:
    control[STOP : STOP + 8].view(np.int64)[0] = 1
    ctypes.CDLL(None).syscall(SYS_FUTEX, ctypes.c_void_p(address(control)), WAKE_PRIVATE, 0x7FFFFFFF, None, None, 0)
    for t in threads:
        t.join(timeout=5.0)
    if any(t.is_alive() for t in threads):  # never unmap what a thread may still read: leak it
        _leaked.append((control, keep))


_leaked: list[Any] = []


class Team:
    """`threads` members, the caller being one; one caller at a time.

    rows: int64 [n_phases, PROGRAM], ops: int64 [n_ops, OP], ctx: the context block (see `fields`); all kept alive
    here, with `keep`, until the last member has left.
    """

    def __init__(
        self, rows: NDArray[np.int64], ops: NDArray[np.int64], ctx: NDArray[np.int64], threads: int, keep: list[Any]
    ) -> None:
        n = len(rows)
        self._arena = Arena(CONTROL_BYTES + PHASE_BYTES * max(1, n) + 4096)
        control = self._arena.take(CONTROL_BYTES)
        control[TIMEOUT : TIMEOUT + 16].view(np.int64)[:] = 0, _SLEEP_NS
        phases = self._arena.take(PHASE_BYTES * max(1, n))
        self._args = (address(control), address(rows), n, address(phases), address(ops), address(ctx))
        self._take_part = take_part = kernels.function(KEY, *[ctypes.c_int64] * _N_ARGS)
        self._threads = [
            threading.Thread(target=take_part, args=(*self._args, i), name=f"pantheon-cpu-{i}", daemon=True)
            for i in range(1, threads)
        ]
        # a running job's frame reaches the memory through the team: closing never unmaps it under the kernels
        held = self._held = [*keep, rows, ops, ctx, self._arena]
        # also runs at interpreter exit, so that no member outlives the memory that it reads
        self._close = weakref.finalize(self, _shut, control, self._threads, held)
        for t in self._threads:
            t.start()

    def run(self) -> None:
        """Run the job that the context block describes."""
        self._take_part(*self._args, 0)

    def run_phase(self, index: int) -> None:
        """Run one phase of the last job again, alone: for profiles."""
        control, rows, _, phases, ops, ctx = self._args
        self._take_part(control, rows + PROGRAM_BYTES * index, 1, phases, ops, ctx, 0)

    def close(self) -> None:
        """Dismiss the members; idempotent."""
        self._close()
