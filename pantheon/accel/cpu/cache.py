"""Compiling and caching kernels: `jit` for helpers, `kernel` for what the op table calls by address.

Numba's own cache stamps only the file of the cached function, so the folder's name carries a hash of every source
of this package: editing an intrinsic or a callee in another file never leaves stale machine code in use.
Knows nothing about plans.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import cfunc, njit, types

from pantheon import settings

#: no ZeroDivisionError branches and no fast-math: the explicit FMAs are all that is needed
OPTIONS = {"error_model": "numpy"}
_I = types.int64
#: every op of the table: kernel(row, context, thread, a, b, c)
OP_SIGNATURE = types.void(_I, _I, _I, _I, _I, _I)

# guards numba.config.CACHE_DIR, which is read while a function is decorated
_lock = threading.RLock()


def source_hash() -> str:
    """A digest of every kernel source and of the compiler's versions."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {sys.version}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@lru_cache(maxsize=1)
def folder() -> Path:
    """Where this process keeps compiled kernels; a temporary folder when the chosen one can not be written."""
    chosen = settings.get("PN_KERNEL_CACHE")
    base = Path(chosen) if chosen else Path(os.path.expanduser("~/.cache/pantheon"))
    wanted = base / "kernels" / source_hash()
    if _writable(wanted):
        return wanted
    spare = Path(tempfile.mkdtemp(prefix="pantheon-kernels-"))
    logging.getLogger("pantheon.cpu").warning("kernel cache not writable path=%s using=%s", wanted, spare)
    return spare


@contextmanager
def _cache_folder() -> Iterator[None]:
    with _lock:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(folder())
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before


def jit(function: Callable[..., Any]) -> Any:
    """A helper that kernels call; compiled for the types that it is called with."""
    return njit(function, cache=False, **OPTIONS)


def entry(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function that Python calls without the GIL, compiled (or taken from the cache) at once."""

    def wrap(function: Callable[..., Any]) -> Any:
        with _cache_folder():
            return njit(signature, cache=True, nogil=True, **OPTIONS)(function)

    return wrap


def kernel(function: Callable[..., Any]) -> int:
    """The address of an op kernel with OP_SIGNATURE, compiled (or taken from the cache) at once."""
    with _cache_folder():
        made = cfunc(OP_SIGNATURE, cache=True, **OPTIONS)(function)
    _keep.append(made)
    address: int = made.address
    return address


#: compiled callbacks live as long as the process: tables hold their addresses
_keep: list[Any] = []
