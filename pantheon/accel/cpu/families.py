"""Kernel keys -> compiled code.  Importing this file imports Numba: workers do, other processes only in need."""

from __future__ import annotations

import importlib
from typing import Any

from numba.core.registry import cpu_target

from pantheon.accel.cpu import cache

#: the first word of a key -> the module whose `kernel` makes it, and what that is called with before the other words
MAKERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "matmul": ("matmul", ()),
    "embed": ("embed", ()),
    "pointwise": ("pointwise", ()),
    "attend": ("attention", ("attend",)),
    "combine": ("attention", ("combine",)),
    "store": ("kv_store", ()),
    "team": ("walk", ()),
    "pack": ("packing", ()),
    "experts": ("experts", ()),
    "recurrent": ("recurrent", ()),
    "read": ("reading", ()),
    "draw": ("draw", ()),
}


def address(key: tuple[Any, ...]) -> int:
    """The address of a kernel, compiled now, in this process."""
    module, first = MAKERS[key[0]]
    made: int = importlib.import_module(f"pantheon.accel.cpu.{module}").kernel(*first, *key[1:])
    return made


def compiled(key: tuple[Any, ...]) -> bytes:
    """A kernel as an object file."""
    return cache.object_file(address(key))


def tile_widths() -> tuple[int, ...]:
    """Columns of the register tiles on the CPU that is compiled for."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return (1, 2, 4, 8) if "+avx512f" in features else (1, 2, 4)
