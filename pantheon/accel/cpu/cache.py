"""Compiling kernels: `jit` for helpers, `kernel` and `compiled` for what is called by address.

Kernels are factories' results: a factory compiles when it is called.  What is compiled is kept by `store`, as object
files; nothing here looks there.  Knows nothing about plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cfunc, njit, types

#: no ZeroDivisionError branches and no fast-math: the explicit FMAs are all that is needed
OPTIONS = {"error_model": "numpy"}
_I = types.int64
#: every op of the table: kernel(row, context, thread, a, b, c)
OP_SIGNATURE = types.void(_I, _I, _I, _I, _I, _I)

#: compiled callbacks by address; they live as long as the process: tables hold their addresses
_made: dict[int, Any] = {}


def jit(function: Callable[..., Any]) -> Any:
    """A helper that kernels call; compiled for the types that it is called with."""
    return njit(function, cache=False, **OPTIONS)


def compiled(signature: Any) -> Callable[[Callable[..., Any]], int]:
    """The address of a C function of this signature, compiled at once."""

    def wrap(function: Callable[..., Any]) -> int:
        made = cfunc(signature, **OPTIONS)(function)
        address: int = made.address
        _made[address] = made
        return address

    return wrap


def kernel(function: Callable[..., Any]) -> int:
    """The address of an op kernel with OP_SIGNATURE, compiled at once."""
    return compiled(OP_SIGNATURE)(function)


def object_file(address: int) -> bytes:
    """What was compiled at `address`, as an ELF object with one `cfunc.` symbol."""
    library = _made[address]._library
    if library.has_dynamic_globals:
        raise ValueError("it refers to an address of this process")
    kind, data = library.serialize_using_object_code()[1:]
    if kind != "object":
        raise ValueError(f"Numba gave no object but {kind}")
    return bytes(data[0])
