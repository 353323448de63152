"""Little plans for kernel tests: inputs go in as F32 embedding tables, any buffer can be read afterwards."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cpu.executor import CpuExecutor
from pantheon.accel.cpu.runner import CpuRunner, CpuState
from pantheon.accel.executor import Columns, RawTensor
from pantheon.plan.buffers import Buffer, Matrix, Vector
from pantheon.plan.builder import Plan, PlanBuilder
from pantheon.plan.ops import Embed, Op
from pantheon.plan.state_spec import KVSpec, KVType, StateSpec

F32 = NDArray[np.float32]
N_VOCAB = 64


class Source:
    """Tensors by name; remembers what was released."""

    def __init__(self) -> None:
        self.tensors: dict[str, RawTensor] = {}
        self.released: list[str] = []

    def add(self, name: str, type_name: str, shape: tuple[int, ...], data: NDArray[np.generic]) -> str:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.tensors[name] = RawTensor(name, type_name, shape, flat)
        return name

    def floats(self, name: str, values: NDArray[np.generic]) -> str:
        return self.add(name, "F32", values.shape, values.astype(np.float32))

    def tensor(self, name: str) -> RawTensor:
        return self.tensors[name]

    def release(self, name: str) -> None:
        self.released.append(name)


class Bench:
    """Collects buffers, inputs and ops; `run` executes them on a fresh runner."""

    def __init__(self, kv: tuple[KVSpec, ...] = ()) -> None:
        self.source, self.build = Source(), PlanBuilder()
        self.kv = kv
        self.inputs: list[Op] = []
        self.ops: list[Op] = []

    def input(self, name: str, values: NDArray[np.generic]) -> Buffer:
        """A buffer that holds row `token` of values; values [n, width], n <= N_VOCAB."""
        table = np.zeros((N_VOCAB, values.shape[1]), np.float32)
        table[: len(values)] = values
        self.source.floats(name, table)
        buffer = self.build.buffer(name, values.shape[1])
        self.inputs.append(Embed(Matrix(name, *table.shape), buffer))
        return buffer

    def vector(self, name: str, values: NDArray[np.generic]) -> Vector:
        return Vector(self.source.floats(name, values), len(values))

    def matrix(self, name: str, type_name: str, shape: tuple[int, int], raw: NDArray[np.generic]) -> Matrix:
        return Matrix(self.source.add(name, type_name, shape, raw), *shape)

    def plan(self) -> Plan:
        self.build.add(*self.inputs, *self.ops)
        hidden = self.build.buffer("dummy", N_VOCAB)
        head_in = self.build.begin_head(hidden)
        return self.build.finish("test", N_VOCAB, 512, head_in, StateSpec(self.kv))

    @contextmanager
    def runner(self, threads: int = 1, kv_type: KVType = KVType.F32, n_ctx: int = 512) -> Iterator[CpuRunner]:
        made = CpuExecutor(threads).load(self.plan(), self.source, n_ctx=n_ctx, kv_type=kv_type)
        try:
            yield made
        finally:
            made.close()


def peek(runner: CpuRunner, buffer: Buffer, n: int) -> F32:
    """float32 [n, width]: a copy of the first n rows of a buffer."""
    address, step = runner._memory.buffers[buffer.index], runner._memory.strides[buffer.index]
    raw = np.frombuffer(ctypes.string_at(address, n * step), np.float32)
    return raw.reshape(n, -1)[:, : buffer.width].copy()


def columns(
    tokens: NDArray[np.integer] | list[int],
    positions: NDArray[np.integer] | list[int] | None = None,
    slots: NDArray[np.integer] | list[int] | None = None,
) -> Columns:
    n = len(tokens)
    return Columns(
        np.asarray(tokens, np.int32),
        np.zeros(n, np.int32) if slots is None else np.asarray(slots, np.int32),
        np.arange(n, dtype=np.int32) if positions is None else np.asarray(positions, np.int32),
        np.zeros(0, np.int32),
    )


def evaluate(bench: Bench, out: Buffer, n: int, threads: int = 1, positions: list[int] | None = None) -> F32:
    """Rows 0 … n-1 of `out` after one forward of tokens 0 … n-1."""
    with bench.runner(threads) as runner:
        runner.forward(runner.new_state(1, 512), columns(np.arange(n), positions))
        return peek(runner, out, n)


def fresh(runner: CpuRunner, n_slots: int = 1, n_ctx: int = 512) -> CpuState:
    return runner.new_state(n_slots, n_ctx)


Maker = Callable[[np.random.Generator, int], NDArray[np.uint8]]
