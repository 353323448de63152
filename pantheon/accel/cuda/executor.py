"""The cuda executor: cuts a plan over dies, uploads its weights and hands out a runner.

Importing this file imports neither numba-cuda nor the driver: what a model would take can be said anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pantheon.accel.cpu import carried
from pantheon.accel.cpu.pack import floats, run_types
from pantheon.accel.cuda.parts import cut
from pantheon.accel.cuda.place import Place, place, tables_used
from pantheon.accel.executor import Progress, WeightSource
from pantheon.plan.buffers import Matrix, Vector
from pantheon.plan.builder import Plan
from pantheon.plan.rope import rope_table
from pantheon.plan.state_spec import KVType

if TYPE_CHECKING:
    from pantheon.accel.cuda.runner import CudaRunner
    from pantheon.accel.cuda.stage import Stage


class CudaExecutor:
    """Runs plans on CUDA devices.

    dies: the devices, as CUDA counts the visible ones.  cuts: ops of the plan's body at which each die behind the first
    begins; one fewer than there are dies.
    """

    name = "cuda"

    def __init__(self, dies: Sequence[int] = (0,), cuts: Sequence[int] = ()) -> None:
        if not dies or len(cuts) != len(dies) - 1:
            raise ValueError(f"{len(dies)} dies and {len(cuts)} cuts")
        self.dies, self.cuts = tuple(dies), tuple(cuts)

    def load(
        self, plan: Plan, source: WeightSource, *, n_ctx: int, kv_type: KVType, progress: Progress | None = None
    ) -> CudaRunner:
        """Take the memory of every die, then upload tensor by tensor; the caller holds upload_lock [M060].

        Raises ModelFileError for tensors that the plan can not use, ValueError for a plan that contradicts itself, and
        MemoryError when a die has no room; then all that was taken is given back.
        """
        from pantheon.accel.cuda.context import Device
        from pantheon.accel.cuda.runner import CudaRunner
        from pantheon.accel.cuda.stage import Stage

        if n_ctx < 1:
            raise ValueError("n_ctx must be at least 1")
        types = run_types(plan, source)
        stages: list[Stage] = []
        devices: list[Device] = []
        try:
            for die, part in zip(self.dies, cut(plan, self.cuts), strict=True):
                devices.append(Device(die))
                stages.append(Stage(devices[-1], part, place(part, types, n_ctx, kv_type, devices[-1].sm)))
            _upload(stages, source, n_ctx, progress)
            return CudaRunner(plan, stages, n_ctx=n_ctx, kv_type=kv_type)
        except BaseException:
            for stage in stages:
                stage.close()
            for device in devices:
                device.give_back()  # of the last one too, whose stage was not made
            raise

    def check(self, plan: Plan, source: WeightSource, *, kv_type: KVType) -> None:
        """Raise what `load` would raise for the types and shapes of its tensors; nothing is uploaded."""
        types = run_types(plan, source)
        for v in plan.vectors():
            floats(source.tensor(v.tensor), v)
        self._places(plan, types, 1, kv_type)

    def predict(
        self, plan: Plan, types: Mapping[str, str], *, n_ctx: int, n_slots: int = 1, kv_type: KVType
    ) -> dict[str, int]:
        """Bytes by part (weights, scratch, tables, kv) that a load would take, over all its dies; nothing is loaded.

        types: tensor name -> weight type.  Raises KeyError for a tensor or type that is not there.
        """
        dies = self.predict_dies(plan, types, n_ctx=n_ctx, n_slots=n_slots, kv_type=kv_type)
        return {name: sum(parts[name] for parts in dies) for name in dies[0]}

    def predict_dies(
        self, plan: Plan, types: Mapping[str, str], *, n_ctx: int, n_slots: int = 1, kv_type: KVType
    ) -> list[dict[str, int]]:
        """As `predict`, for each die in order."""
        found = {m: carried.run_as(types[m.tensor]) for m in plan.matrices()}
        places = self._places(plan, found, n_ctx, kv_type)
        return [place.nbytes | {"kv": place.state_bytes(n_slots)} for place in places]

    def _places(self, plan: Plan, types: Mapping[Matrix, str], n_ctx: int, kv_type: KVType) -> list[Place]:
        return [place(part, types, n_ctx, kv_type) for part in cut(plan, self.cuts)]


def _upload(stages: Sequence[Stage], source: WeightSource, n_ctx: int, progress: Progress | None) -> None:
    """Vectors and tables, then the matrices; a tensor is released when the last matrix of it has gone over."""
    from pantheon.accel.cuda.staging import Uploader

    left: dict[str, int] = {}
    for stage in stages:
        for m in stage.part.plan.matrices():
            left[m.tensor] = left.get(m.tensor, 0) + 1
    goal = sum(source.tensor(name).data.nbytes for name in left)
    done = 0
    for stage in stages:
        _upload_floats(stage, source, n_ctx)
        uploader = Uploader(stage.device, stage.arrays["weights"])
        try:
            for m, packed in stage.place.memory.matrices.items():
                raw = source.tensor(m.tensor)
                uploader.upload(raw, m, packed)
                left[m.tensor] -= 1
                if not left[m.tensor]:
                    done += raw.data.nbytes
                    source.release(m.tensor)
                if progress is not None:
                    progress("weights", done, goal)
        finally:
            uploader.close()


def _upload_floats(stage: Stage, source: WeightSource, n_ctx: int) -> None:
    """Norm weights, biases and taps; cos and sin of every rope of the stage."""
    memory, device, part = stage.place.memory, stage.device, stage.part
    used = tables_used(part.plan)
    for v, at in memory.vectors.items():
        device.write(stage.arrays["vectors"], at, floats(source.tensor(v.tensor), v).copy())
        device.synchronize()
    for i, (spec, rope) in enumerate(zip(part.plan.ropes, memory.ropes, strict=True)):
        if i not in used:
            continue
        name = spec.factors_at(n_ctx)
        factors = None if name is None else floats(source.tensor(name), Vector(name, spec.n_rot // 2))
        cos, sin = rope_table(spec, n_ctx, factors)
        device.write(stage.arrays["tables"], rope.cos_at, cos.reshape(-1))
        device.write(stage.arrays["tables"], rope.sin_at, sin.reshape(-1))
        device.synchronize()

