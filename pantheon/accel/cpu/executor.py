"""The cpu executor: packs a plan's weights and hands out a runner.  Importing this file does not import Numba."""

from __future__ import annotations

from collections.abc import Mapping

from pantheon.accel.cpu import sizes
from pantheon.accel.cpu.arena import Arena, address
from pantheon.accel.cpu.cores import usable_cores
from pantheon.accel.cpu.pack import Packed, Packer, check, floats, row_bytes
from pantheon.accel.cpu.runner import CpuRunner, Weights
from pantheon.accel.executor import Progress, WeightSource
from pantheon.plan.buffers import Matrix, Vector
from pantheon.plan.builder import Plan
from pantheon.plan.rope import rope_table
from pantheon.plan.state_spec import KVType


class CpuExecutor:
    """Runs plans on `threads` threads, the caller's included (default: the physical cores of this process)."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError("threads must be at least 1")
        self.threads = threads or usable_cores()

    def load(
        self, plan: Plan, source: WeightSource, *, n_ctx: int, kv_type: KVType, progress: Progress | None = None
    ) -> CpuRunner:
        """Pack every weight, tensor by tensor.  Raises ModelFileError for tensors that the plan can not use and
        ValueError for a plan that contradicts itself."""
        if n_ctx < 1:
            raise ValueError("n_ctx must be at least 1")
        weights = _load_weights(plan, source, self.threads, progress)
        tables = _load_tables(plan, source, n_ctx)
        return CpuRunner(plan, weights, tables, n_ctx=n_ctx, kv_type=kv_type, threads=self.threads)

    def predict(
        self, plan: Plan, types: Mapping[str, str], *, n_ctx: int, n_slots: int = 1, kv_type: KVType
    ) -> dict[str, int]:
        """Bytes by part (weights, scratch, tables, kv) that a load would take; nothing is loaded.

        types: tensor name -> weight type.  Raises KeyError for a tensor or type that is not there.
        """
        found = {m: types[m.tensor] for m in plan.matrices()}
        return sizes.predict(plan, found, n_ctx=n_ctx, n_slots=n_slots, kv_type=kv_type, threads=self.threads)


def _load_weights(plan: Plan, source: WeightSource, threads: int, progress: Progress | None) -> Weights:
    """Sizes first, so that one arena on huge pages holds everything."""
    matrices, vectors = plan.matrices(), plan.vectors()
    types: dict[Matrix, str] = {}
    file_bytes: dict[Matrix, int] = {}
    for m in matrices:
        raw = source.tensor(m.tensor)
        check(raw, m)
        types[m], file_bytes[m] = raw.type_name, m.rows * row_bytes(raw)
    arena = Arena(sizes.weights(plan, types), huge=True)
    placed: dict[Vector, int] = {}
    for v in vectors:
        room = arena.take(sizes.vector(v))
        room.view("f4")[: v.size] = floats(source.tensor(v.tensor), v)
        placed[v] = address(room)
    packed: dict[Matrix, Packed] = {}
    done, goal = 0, sum(file_bytes.values())
    left = {m.tensor: [x for x in matrices if x.tensor == m.tensor] for m in matrices}
    packer = Packer(dict.fromkeys(types.values()), threads)
    try:
        for m in matrices:
            packed[m] = packer.pack(source.tensor(m.tensor), m, arena)
            left[m.tensor].remove(m)
            if not left[m.tensor]:
                source.release(m.tensor)
            done += file_bytes[m]
            if progress is not None:
                progress("weights", done, goal)
    finally:
        packer.close()
    return Weights(arena, packed, placed)


def _load_tables(plan: Plan, source: WeightSource, n_ctx: int) -> list:  # type: ignore[type-arg]
    """(cos, sin) float32 [n_ctx, n_rot/2] of every rope."""
    tables = []
    for spec in plan.ropes:
        factors = None
        if spec.factors is not None:
            factors = floats(source.tensor(spec.factors), Vector(spec.factors, spec.n_rot // 2))
        tables.append(rope_table(spec, n_ctx, factors))
    return tables
