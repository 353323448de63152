"""Packing: a matrix of the model file into the arena, in the layout that the kernels read, on several threads."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cpu import carried, kernels
from pantheon.accel.cpu.arena import Arena, address
from pantheon.accel.cpu.file_blocks import FILE_BLOCK
from pantheon.accel.cpu.layouts import FLOATS, KINDS, ROWS
from pantheon.accel.executor import RawTensor, WeightSource
from pantheon.errors import ModelFileError
from pantheon.plan.buffers import Experts, Matrix, Vector
from pantheon.plan.builder import Plan

U8 = NDArray[np.uint8]
#: bytes of the file that a thread packs at once: enough to forget the call, few enough to share
_PIECE_BYTES = 1 << 20
_ARGUMENTS = [ctypes.c_int64] * 8


@dataclass(frozen=True)
class Packed:
    """A packed matrix: addresses of its quants (or floats) and scales."""

    type_name: str
    rows: int
    cols: int
    quants: int
    scales: int
    nbytes: int
    #: of how many matrices these are the first one's; the others follow, each with both its planes' bytes
    experts: int = 1
    quant_bytes: int = 0
    scale_bytes: int = 0

    @property
    def groups(self) -> int:
        """Groups of 16 rows; the last may be padded."""
        return -(-self.rows // ROWS)

    @property
    def quantised(self) -> bool:
        """Takes int8 activations."""
        return self.type_name in KINDS


def packed_bytes(type_name: str, rows: int, cols: int) -> tuple[int, int]:
    """Arena bytes of the quants (or floats) and of the scales of a matrix."""
    if type_name in FLOATS:
        return -(-rows // ROWS) * ROWS * cols * FLOATS[type_name], 0
    return KINDS[type_name].packed_bytes(rows, cols)


def row_bytes(raw: RawTensor) -> int:
    """Bytes of one row in the file.  Raises ModelFileError for a type or shape that can not be packed."""
    values, nbytes = carried.block(raw.type_name)
    if not values:
        raise ModelFileError(f"tensor {raw.name}", f"type {raw.type_name} is not supported by the cpu executor")
    cols = raw.shape[-1]
    if cols % values:
        raise ModelFileError(f"tensor {raw.name}", f"rows of {cols} values are no whole {raw.type_name} blocks")
    return cols // values * nbytes


def check(raw: RawTensor, m: Matrix) -> None:
    """Raise ModelFileError unless the plan's matrix lies inside the tensor."""
    head = (m.experts,) if isinstance(m, Experts) else ()
    # dims of 1 in front are dropped by some writers
    shape = (1,) * (len(head) + 2 - len(raw.shape)) + tuple(raw.shape)
    if len(shape) != len(head) + 2 or shape[:-2] != head or shape[-1] != m.cols or not (
        0 <= m.first_row and 0 < m.rows and m.first_row + m.rows <= shape[-2]
    ):  # fmt: skip
        wanted = f"rows {m.first_row}..{m.first_row + m.rows - 1} of {m.cols} values"
        wanted += f" of {head[0]} experts" if head else ""
        raise ModelFileError(f"tensor {raw.name}", f"shape {tuple(raw.shape)}, but the model needs {wanted}")
    if raw.data.size != math.prod(shape[:-1]) * row_bytes(raw):
        raise ModelFileError(f"tensor {raw.name}", f"{raw.data.size} bytes for shape {tuple(raw.shape)}")


def run_types(plan: Plan, source: WeightSource) -> dict[Matrix, str]:
    """The types that the plan's matrices are run as.  Raises ModelFileError unless each lies inside its tensor."""
    types: dict[Matrix, str] = {}
    for m in plan.matrices():
        raw = source.tensor(m.tensor)
        check(raw, m)
        types[m] = carried.run_as(raw.type_name)
    return types


class Packer:
    """Packs matrices on `threads` threads; `close` ends them."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "pantheon-pack")

    def pack(self, raw: RawTensor, m: Matrix, arena: Arena) -> Packed:
        """Pack the rows that `m` names.  Raises ModelFileError unless they lie inside the tensor."""
        check(raw, m)
        n, type_name = row_bytes(raw), carried.run_as(raw.type_name)
        experts = m.experts if isinstance(m, Experts) else 1
        one = packed_bytes(type_name, m.rows, m.cols)
        quants, scales = (arena.take(experts * size) for size in one)
        whole = Packed(
            type_name, m.rows, m.cols, address(quants), address(scales), experts * sum(one), experts, *one
        )  # fmt: skip
        tensor = raw.data.reshape(experts, -1)
        for e in range(experts):
            rows = tensor[e, m.first_row * n : (m.first_row + m.rows) * n]
            this = replace(whole, quants=whole.quants + e * one[0], scales=whole.scales + e * one[1])
            if type_name != raw.type_name:
                for first, part in carried.parts(rows.reshape(m.rows, n), raw.type_name, m.cols):
                    self._run(this, part, first)
            else:
                self._run(this, rows, 0)
        return whole

    def _run(self, packed: Packed, rows: U8, first: int) -> None:
        """Pack blocks of whole rows, from row `first` (a multiple of 16) on."""
        n = packed.cols // FILE_BLOCK[packed.type_name][0] * FILE_BLOCK[packed.type_name][1]
        count, group = rows.size // n, first // ROWS
        function, groups = _kernel(packed.type_name), -(-count // ROWS)
        # the kernel counts groups from the first row of the matrix
        fixed = address(rows) - first * n, packed.quants, packed.scales, packed.cols, first + count, n
        pieces = max(1, min(groups, rows.size // _PIECE_BYTES))
        cuts = [group + groups * i // pieces for i in range(pieces + 1)]
        if pieces == 1 or self._threads == 1:
            function(*fixed, group, group + groups)
        else:
            # all of them, so that nothing is unmapped under a thread
            list(self._pool.map(lambda i: function(*fixed, cuts[i], cuts[i + 1]), range(pieces)))

    def close(self) -> None:
        """Wait for the threads to end."""
        self._pool.shutdown()


@lru_cache(maxsize=len(FILE_BLOCK))
def _kernel(type_name: str) -> Callable[..., Any]:
    return kernels.function(("pack", type_name), *_ARGUMENTS)


def floats(raw: RawTensor, v: Vector) -> NDArray[np.float32]:
    """A norm weight or bias as float32.  Raises ModelFileError for another type or a vector that is too short."""
    flat = raw.data.reshape(-1)
    n = int(np.prod(raw.shape))
    size = FLOATS.get(raw.type_name, 0)
    if not size or flat.size != n * size:
        raise ModelFileError(f"tensor {raw.name}", f"type {raw.type_name} can not be a norm weight or bias")
    last = v.first + (v.size - 1) * v.step
    if not (0 <= v.first and v.step > 0 and last < n):
        raise ModelFileError(f"tensor {raw.name}", f"{n} values, but the model needs {v.first}..{last}")
    part = flat.reshape(n, size)[v.first : last + 1 : v.step].reshape(-1)
    if raw.type_name == "F16":
        return part.view(np.float16).astype(np.float32)
    if raw.type_name == "BF16":
        return (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return part.view(np.float32)
