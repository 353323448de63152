"""What a model would take, read from the head of its file: the plan, the context and every part in bytes.

Nothing is loaded.  Placement, admission and the dry run all ask here, so that they can not differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pantheon.accel.executor import Executor
from pantheon.engine.load import pick_ctx, pick_executor, pick_kv_type, plan_of
from pantheon.engine.scripted import PREFIX as SCRIPT
from pantheon.engine.split import Layers, Share, layers_of, split
from pantheon.formats.gguf import open_gguf
from pantheon.plan.builder import Plan
from pantheon.plan.state_spec import KVType


@dataclass(frozen=True)
class Footprint:
    """Bytes by part: weights, scratch, tables, and kv for one full conversation of n_ctx positions.  A script has no
    plan and takes nothing.  `predict`: the parts for another context.  `users`: full conversations that a die must have
    room for; the host has it as they come, since turns are admitted there."""

    n_ctx: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    token_bytes: int = 0
    plan: Plan | None = None
    kv_type: KVType | None = None
    layers: Layers | None = None
    predict: Callable[[int], dict[str, int]] | None = None
    users: int = 1

    def at(self, n_ctx: int) -> Footprint:
        """The same model with another context."""
        return self if self.predict is None else replace(self, n_ctx=n_ctx, parts=self.predict(n_ctx))

    @property
    def total_bytes(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    @property
    def die_bytes(self) -> int:
        """All parts with a full conversation of each user."""
        return self.total_bytes + (self.users - 1) * self.parts.get("kv", 0)

    def shares(self, budgets: Sequence[int]) -> tuple[Share, ...] | None:
        """What each of some dies would hold; None when it does not fit them."""
        if self.layers is None:
            return tuple(Share(0, 0, 0, 0) for _ in budgets)
        shared = self.parts["scratch"] + self.parts["tables"]
        return split(self.layers, shared, self.users * self.parts["kv"], budgets)

    def need(self, budgets: Sequence[int]) -> list[int] | None:
        """Bytes on each of some dies, as the die manager asks for them."""
        shares = self.shares(budgets)
        return None if shares is None else [share.nbytes for share in shares]


def footprint(
    path: str,
    *,
    ctx: int | None = None,
    executor: str = "cpu",
    threads: int | None = None,
    kv_type: str | None = None,
    users: int = 1,
) -> Footprint:
    """Read the head of a model file.  Raises as load_model does: ModelFileError, BadRequest, OSError."""
    if path.startswith(SCRIPT):
        return Footprint()
    runs = pick_executor(executor, threads)
    with open_gguf(path) as file:
        plan = plan_of(file)
        n_ctx = pick_ctx(ctx, plan)
        kv = pick_kv_type(kv_type, executor, file, plan)
        types = {name: info.type.name for name, info in file.tensors.items()}
        sizes = {name: info.nbytes for name, info in file.tensors.items()}

    def predict(ctx: int) -> dict[str, int]:
        return _predict(runs, plan, types, sizes, ctx, kv)

    parts = predict(n_ctx)
    layers = layers_of(plan, sizes, parts["weights"], kv)
    return Footprint(n_ctx, parts, plan.state.bytes_per_token(kv), plan, kv, layers, predict, users)


def _predict(
    runs: Executor, plan: Plan, types: dict[str, str], sizes: dict[str, int], n_ctx: int, kv: KVType
) -> dict[str, int]:
    """The executor's own figures; for one that can not say, those of the file."""
    predict = getattr(runs, "predict", None)
    if predict is None:
        return {"weights": sum(sizes.values()), "scratch": 0, "tables": 0, "kv": plan.state.slot_bytes(kv, n_ctx)}
    try:
        parts: dict[str, int] = predict(plan, types, n_ctx=n_ctx, n_slots=1, kv_type=kv)
    except KeyError:
        # a tensor or a type that is missing: the load says which
        return {"weights": 0, "scratch": 0, "tables": 0, "kv": 0}
    return parts
