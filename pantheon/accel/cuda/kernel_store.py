"""Compiled kernels on disk, beside those of the CPU, found by what a kernel is and not by how Numba would pickle it.

Numba's own cache hashes the pickled closure of a body for its key; where that holds device functions, the bytes differ
from process to process, and every start would compile everything again.  Source: `numba.cuda.core.caching._Cache`, the
interface that a dispatcher expects of a cache.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import pickle
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numba import cuda

from pantheon import log
from pantheon.accel.cpu import store

if TYPE_CHECKING:
    from pantheon.accel.cuda.kernel import Kernel

_log = log.logger("cuda")


def launcher(kernel: Kernel) -> Any:
    """The function that launches a kernel on the current device: read from the store, or compiled and kept there.  Not
    for the simulator."""
    # as PTX and not as LTO-IR: what the table of kernels shows is what runs
    made = cuda.jit(kernel.body, lto=False, launch_bounds=kernel.bounds)
    made._cache = _Store(kernel)
    made.compile(kernel.types)
    made._specialized = True
    made.disable_compile()
    return made


@lru_cache(maxsize=1)
def source_hash() -> str:
    """A digest of the sources of this package and of its compiler's version."""
    digest = hashlib.sha256(importlib.metadata.version("numba-cuda").encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def identity(kernel: Kernel) -> str:
    """A digest of all that distinguishes a kernel from others of the same sources, the same in every process."""
    parts = [kernel.name, str(kernel.types), str(kernel.bounds), *_constants(kernel.body)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _constants(function: Any) -> Iterator[str]:
    """What a function and those that it calls have closed over."""
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        inner = getattr(value, "py_func", value)
        if hasattr(inner, "__closure__"):
            yield str(inner.__qualname__)
            yield from _constants(inner)
        else:
            # objects without a text of their own would have their address in it
            yield str(type(value)) if " at 0x" in repr(value) else repr(value)


class _Store:
    """The cache of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._key = "cuda", source_hash(), kernel.name, identity(kernel)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel as it was saved for this kind of device, or None."""
        from numba.cuda.dispatcher import _Kernel

        target_context.refresh()
        data = store.read(self._name())
        return None if data is None else _Kernel._rebuild(**pickle.loads(data))

    def save_overload(self, sig: Any, kernel: Any) -> None:
        """Keep a compiled kernel; one that can not be kept is compiled again at the next start."""
        from numba.cuda.serialize import dumps

        try:
            data = dumps(kernel._reduce_states())
        except (RuntimeError, pickle.PicklingError) as fault:
            _log.warning("kernel not kept %s", log.fields(name=self._key[2], reason=str(fault)))
            return
        store.write(self._name(), data)

    def _name(self) -> str:
        major, minor = cuda.current_context().device.compute_capability
        return store.name_of((*self._key, f"sm_{major}{minor}"))
