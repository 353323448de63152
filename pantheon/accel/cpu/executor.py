"""The cpu executor: packs a plan's weights and hands out a runner.  Importing this file does not import Numba."""

from __future__ import annotations

from pantheon.accel.cpu.arena import Arena, address, round_up
from pantheon.accel.cpu.cores import usable_cores
from pantheon.accel.cpu.pack import Packed, check, floats, pack, packed_bytes, row_bytes
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
        weights = _load_weights(plan, source, progress)
        tables = _load_tables(plan, source, n_ctx)
        return CpuRunner(plan, weights, tables, n_ctx=n_ctx, kv_type=kv_type, threads=self.threads)


def _load_weights(plan: Plan, source: WeightSource, progress: Progress | None) -> Weights:
    """Sizes first, so that one arena on huge pages holds everything."""
    matrices, vectors = plan.matrices(), plan.vectors()
    total, file_bytes = 0, {}
    for m in matrices:
        raw = source.tensor(m.tensor)
        check(raw, m)
        total += packed_bytes(raw.type_name, m.rows, m.cols)
        file_bytes[m] = m.rows * row_bytes(raw)
    total += sum(round_up(4 * v.size, 64) + 128 for v in vectors)
    arena = Arena(total + 4096, huge=True)
    placed: dict[Vector, int] = {}
    for v in vectors:
        # a product's bias is read 16 rows at a time
        room = arena.take(4 * round_up(v.size, 16))
        room.view("f4")[: v.size] = floats(source.tensor(v.tensor), v)
        placed[v] = address(room)
    packed: dict[Matrix, Packed] = {}
    done, goal = 0, sum(file_bytes.values())
    left = {m.tensor: [x for x in matrices if x.tensor == m.tensor] for m in matrices}
    for m in matrices:
        packed[m] = pack(source.tensor(m.tensor), m, arena)
        left[m.tensor].remove(m)
        if not left[m.tensor]:
            source.release(m.tensor)
        done += file_bytes[m]
        if progress is not None:
            progress("weights", done, goal)
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
