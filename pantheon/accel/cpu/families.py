"""Kernel keys -> compiled code.  Importing this file imports Numba: workers do, other processes only in need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core.registry import cpu_target

from pantheon.accel.cpu import attention, cache, embed, matmul, packing, pointwise, reading, walk

_FAMILIES: dict[str, Callable[..., int]] = {
    "matmul": matmul.kernel,
    "embed": embed.kernel,
    "pointwise": pointwise.kernel,
    "attend": lambda half: attention.kernel("attend", half),
    "store": lambda half: attention.kernel("store", half),
    "pack": packing.kernel,
    "team": walk.kernel,
    "read": reading.kernel,
}


def address(key: tuple[Any, ...]) -> int:
    """The address of a kernel, compiled now, in this process."""
    return _FAMILIES[key[0]](*key[1:])


def compiled(key: tuple[Any, ...]) -> bytes:
    """A kernel as an object file."""
    return cache.object_file(address(key))


def tile_widths() -> tuple[int, ...]:
    """Columns of the register tiles on the CPU that is compiled for."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return (1, 2, 4, 8) if "+avx512f" in features else (1, 2, 4)
