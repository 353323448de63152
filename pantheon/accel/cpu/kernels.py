"""Kernel keys of the op table -> addresses.  Imports no Numba: what was compiled before is loaded without it.

What is missing is compiled by worker processes (`workers`), so that neither LLVM's memory nor its start ever burdens
this one.  Only where that fails, or an object can not be loaded, does this process import Numba itself.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from pantheon.accel.cpu import objects, store, workers
from pantheon.accel.executor import Progress

#: a kernel by name: ("matmul", type, width), ("embed", type), ("attend" | "store", half), ("pointwise", name), …
Key = tuple[str | int | bool, ...]

log = logging.getLogger("pantheon.cpu")
# guards _addresses and every compilation: two models that load at once wait for each other
_lock = threading.RLock()
_addresses: dict[Key, int] = {}


def prepare(keys: Iterable[Key], processes: int = 1, progress: Progress | None = None) -> None:
    """Have these kernels ready, compiling what is missing; progress("kernels", done, total)."""
    with _lock:
        wanted = list(dict.fromkeys(keys))
        for _ in range(2):  # a worker may die of something that has nothing to do with the kernel
            missing = [key for key in wanted if not _known(key)]
            if missing:
                workers.build(missing, processes, progress)
        if progress is not None:
            progress("kernels", len(wanted), len(wanted))


def resolve(key: Key) -> int:
    """The address of a kernel; compiled in this process when it is nowhere yet."""
    with _lock:
        if not _known(key):
            log.info("compiling in the server's process kernel=%s", store.name_of(key))
            _addresses[key] = importlib.import_module("pantheon.accel.cpu.families").address(key)
        return _addresses[key]


def _known(key: Key) -> bool:
    """Loaded, or loaded now."""
    if key not in _addresses:
        data = store.read(store.name_of(key))
        if data is None:
            return False
        try:
            _addresses[key] = objects.load(data)
        except objects.Rejected as fault:
            log.info("kernel object refused kernel=%s fault=%s", store.name_of(key), fault)
            return False
    return True


def function(key: Key, *arguments: Any, result: Any = None, keep_gil: bool = False) -> Callable[..., Any]:
    """A kernel as a Python function of ctypes arguments; it runs without the GIL unless it shall keep it."""
    kind = ctypes.PYFUNCTYPE if keep_gil else ctypes.CFUNCTYPE
    return kind(result, *arguments)(resolve(key))


def tile_widths() -> tuple[int, ...]:
    """Columns of the register tiles on the CPU that is compiled for."""
    with _lock:
        for _ in range(2):
            data = store.read(workers.WIDTHS)
            if data is not None:
                return tuple(json.loads(data))
            workers.build([], 1, None)
        made: tuple[int, ...] = importlib.import_module("pantheon.accel.cpu.families").tile_widths()
        return made
