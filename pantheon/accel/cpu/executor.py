"""The cpu executor: packs a plan's weights and hands out a runner.  Importing this file does not import Numba."""

from __future__ import annotations

from collections.abc import Mapping

from pantheon.accel.cpu import carried, drawing, kernels, sizes
from pantheon.accel.cpu.arena import Arena, address
from pantheon.accel.cpu.cores import usable_cores
from pantheon.accel.cpu.pack import Packed, Packer, floats, row_bytes, run_types
from pantheon.accel.cpu.runner import CpuRunner, Weights
from pantheon.accel.cpu.table import Builder, Memory, Phase, stride
from pantheon.accel.cpu.team import KEY as TEAM
from pantheon.accel.executor import Progress, WeightSource
from pantheon.plan.buffers import Matrix, Vector
from pantheon.plan.builder import Plan
from pantheon.plan.rope import rope_table
from pantheon.plan.state_spec import KVType

#: tile widths for a table that is only looked at
_ANY_WIDTHS = (1,)


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
        types = run_types(plan, source)
        # all at once, so that workers start once and the slowest kernel first
        kernels.prepare(_keys(plan, types, kv_type), self.threads, progress)
        weights = _load_weights(plan, source, types, self.threads, progress)
        tables = _load_tables(plan, source, n_ctx)
        return CpuRunner(plan, weights, tables, n_ctx=n_ctx, kv_type=kv_type, threads=self.threads)

    def check(self, plan: Plan, source: WeightSource, *, kv_type: KVType) -> None:
        """Raise what `load` would raise for the types and shapes of its tensors; nothing is packed or compiled."""
        types = run_types(plan, source)
        for v in plan.vectors():
            floats(source.tensor(v.tensor), v)
        _phases(plan, types, kv_type, _ANY_WIDTHS)

    def predict(
        self, plan: Plan, types: Mapping[str, str], *, n_ctx: int, n_slots: int = 1, kv_type: KVType
    ) -> dict[str, int]:
        """Bytes by part (weights, scratch, tables, kv) that a load would take; nothing is loaded.

        types: tensor name -> weight type.  Raises KeyError for a tensor or type that is not there.
        """
        found = {m: carried.run_as(types[m.tensor]) for m in plan.matrices()}
        return sizes.predict(plan, found, n_ctx=n_ctx, n_slots=n_slots, kv_type=kv_type, threads=self.threads)


def _keys(plan: Plan, types: Mapping[Matrix, str], kv_type: KVType) -> list[kernels.Key]:
    """Every kernel that packs or runs the plan."""
    rows = [row for p in _phases(plan, types, kv_type, kernels.tile_widths()) for row in p.rows]
    packing: list[kernels.Key] = [("pack", name) for name in dict.fromkeys(types.values())]
    return [*packing, *(key for row in rows for key in row.keys), TEAM, drawing.KEY]


def _phases(plan: Plan, types: Mapping[Matrix, str], kv_type: KVType, widths: tuple[int, ...]) -> list[Phase]:
    """The plan's table with nothing behind the addresses.  Raises ValueError for shapes that no kernel takes."""
    packed = {m: Packed(name, m.rows, m.cols, 0, 0, 0, sizes.experts_of(m)) for m, name in types.items()}
    strides = tuple(stride(b.width) for b in plan.buffers)
    vectors, ropes = dict.fromkeys(plan.vectors(), 0), ((0, 0),) * len(plan.ropes)
    memory = Memory(packed, vectors, (0,) * len(strides), strides, 0, ropes, (0, 0, 0))
    return Builder(plan, memory, kv_type, widths).phases


def _load_weights(
    plan: Plan, source: WeightSource, types: Mapping[Matrix, str], threads: int, progress: Progress | None
) -> Weights:
    """Sizes first, so that one arena on huge pages holds everything."""
    matrices, vectors = plan.matrices(), plan.vectors()
    arena = Arena(sizes.weights(plan, types), huge=True)
    placed: dict[Vector, int] = {}
    for v in vectors:
        room = arena.take(sizes.vector(v))
        room.view("f4")[: v.size] = floats(source.tensor(v.tensor), v)
        placed[v] = address(room)
    packed: dict[Matrix, Packed] = {}
    file_bytes = {m: sizes.experts_of(m) * m.rows * row_bytes(source.tensor(m.tensor)) for m in matrices}
    done, goal = 0, sum(file_bytes.values())
    left = {m.tensor: [x for x in matrices if x.tensor == m.tensor] for m in matrices}
    packer = Packer(threads)
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
        name = spec.factors_at(n_ctx)
        factors = None if name is None else floats(source.tensor(name), Vector(name, spec.n_rot // 2))
        tables.append(rope_table(spec, n_ctx, factors))
    return tables
