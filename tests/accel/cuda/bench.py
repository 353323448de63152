"""A die's arrays for tests of single ops: buffers, vectors and rope tables by value, launches run in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pantheon.accel.cuda.lowering import COUNT, MAX_COLUMNS, At, Launch, Memory, Packed, Room, RopeTable
from pantheon.accel.cuda.machine import SIMULATED
from pantheon.accel.die import cuda_dies
from pantheon.plan.buffers import Buffer, Experts, Matrix, Vector
from pantheon.plan.builder import PlanBuilder
from pantheon.plan.state_spec import RecurrentSpec, StateSpec
from tests.accel.cuda.packer import packed

F32 = NDArray[np.float32]
#: between and behind what is in use, so that a stray read or write shows
GAP, MARK = 5, np.float32(777)


def need_dies(count: int) -> None:
    """Skip the test where there are fewer devices; the simulator has any number."""
    if not SIMULATED and len(cuda_dies()) < count:
        pytest.skip(f"needs {count} CUDA devices")


class Bench:
    """Arrays grow as buffers and vectors are added; `memory` says where they lie, `run` launches."""

    def __init__(self, recurrent: tuple[RecurrentSpec, ...] = (), n_slots: int = 1) -> None:
        self.build = PlanBuilder()
        self.parts: dict[str, list[F32]] = {"scratch": [], "vectors": [], "tables": []}
        self.buffers: dict[Buffer, At] = {}
        self.rows: dict[Buffer, int] = {}
        self.vectors: dict[Vector, int] = {}
        self.matrices: dict[Matrix, Packed] = {}
        self.weights = np.full(GAP, -1, np.int32)
        self.ropes: list[RopeTable] = []
        self.columns = np.zeros(4 * MAX_COLUMNS, np.int32)
        self.spec = StateSpec((), recurrent)
        floats = [spec.floats for spec in recurrent]
        self.recurrent_at = tuple(GAP + sum(floats[:i]) for i in range(len(floats)))
        self.slot_floats = sum(floats) + 2 * GAP
        self.recurrent = np.zeros((n_slots, self.slot_floats), np.float32)

    def _put(self, name: str, values: NDArray[Any]) -> int:
        parts = self.parts[name]
        at = sum(part.size for part in parts)
        parts += [values.astype(np.float32).reshape(-1), np.full(GAP, MARK)]
        return at

    def buffer(self, name: str, values: NDArray[Any]) -> Buffer:
        """A buffer that holds values [n, width]; its columns stand a little apart."""
        buffer = self.build.buffer(name, values.shape[1])
        spaced = np.pad(values.astype(np.float32), ((0, 0), (0, GAP)), constant_values=MARK)
        self.buffers[buffer] = At(self._put("scratch", spaced), spaced.shape[1])
        self.rows[buffer] = len(spaced)
        return buffer

    def empty(self, name: str, n: int, width: int) -> Buffer:
        """A buffer of n columns that nothing was written to."""
        return self.buffer(name, np.full((n, width), MARK))

    def vector(self, name: str, values: NDArray[Any]) -> Vector:
        """A vector of these values."""
        vector = Vector(name, len(values))
        self.vectors[vector] = self._put("vectors", values)
        return vector

    def matrix(self, name: str, type_name: str, raw: NDArray[np.uint8], cols: int) -> Experts:
        """Matrices of rows as a file has them, uint8 [experts, rows, row bytes]."""
        planes = [packed(type_name, rows, cols) for rows in raw]
        quants, scales = (np.concatenate(parts) for parts in zip(*planes, strict=True))
        experts, rows = raw.shape[:2]
        matrix = Experts(name, rows, cols, 0, experts)
        at, each = len(self.weights), (len(quants) // experts, len(scales) // experts)
        self.matrices[matrix] = Packed(type_name, rows, cols, at, at + len(quants), experts, *each)
        self.weights = np.concatenate([self.weights, quants, scales, np.full(GAP, -1, np.int32)])
        return matrix

    def rope(self, cos: F32, sin: F32, pairing: str) -> int:
        """A table of cosines and sines [n_ctx][half]."""
        self.ropes.append(RopeTable(self._put("tables", cos), self._put("tables", sin), cos.shape[1], pairing))
        return len(self.ropes) - 1

    def place(self, row: int, values: Sequence[int]) -> None:
        """Row 0 … 3 of `columns`: tokens, slots, positions, wanted columns."""
        self.columns[row * MAX_COLUMNS : row * MAX_COLUMNS + len(values)] = values

    def memory(self, hidden: Buffer | None = None, head_in: Buffer | None = None) -> Memory:
        """Where all of it lies."""
        some = next(iter(self.buffers))
        blocks = max(self.rows[b] * -(-b.width // 32) for b in self.buffers)
        self.blocks = np.zeros(10 * blocks, np.int32)
        room = Room(0, 8 * blocks, self._put("scratch", np.zeros(blocks)))
        self.build.begin_head(some)
        plan = self.build.finish("test", 1, 1, some, self.spec)
        for name, value in (("logits", None), ("hidden", hidden), ("head_in", head_in)):
            object.__setattr__(plan, name, value)
        return Memory(
            plan, 0, 64, self.matrices, self.vectors, self.buffers, tuple(self.ropes), room, 0, None,
            self.recurrent_at, self.slot_floats,
        )  # fmt: skip

    def run(
        self, launches: list[Launch], n: int, threads: tuple[int, int] | None = None,
        grid: tuple[int, int] | None = (1, 1),
    ) -> None:  # fmt: skip
        """Launch for n columns, on blocks of this shape (None: each kernel's own, one thread in the simulator) and this
        grid (None: each launch's own).  Then `get` reads them."""
        arrays: dict[str, Any] = {name: np.concatenate(parts) for name, parts in self.parts.items() if parts}
        arrays |= {"columns": self.columns, "recurrent": self.recurrent.reshape(-1)}
        arrays |= {"weights": self.weights, "blocks": self.blocks}
        for one in launches:
            kernel = one.pick(n)
            values = [n if arg == COUNT else arrays[arg] if isinstance(arg, str) else arg for arg in one.args]
            typed = [
                value if isinstance(value, np.ndarray) else np.dtype(str(kind)).type(value)
                for kind, value in zip(kernel.types, values, strict=True)
            ]
            kernel.launch(grid or one.grid(n, 1), None, *typed, threads=threads)
        self.scratch = arrays["scratch"]

    def get(self, buffer: Buffer) -> F32:
        """[n, width] of a buffer after `run`; what stands between its columns must be as it was."""
        at, stride = self.buffers[buffer]
        rows = self.scratch[at : at + self.rows[buffer] * stride].reshape(-1, stride)
        assert (rows[:, buffer.width :] == MARK).all()
        return rows[:, : buffer.width]
