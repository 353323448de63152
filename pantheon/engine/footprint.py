"""What a model would take, read from the head of its file: the plan, the context and every part in bytes.

Nothing is loaded.  Placement, admission and the dry run all ask here, so that they can not differ.  Virtual dies share
the host's memory, so that the charges of a model add up to what it takes; CUDA dies have their own, and each part of a
plan that is split over them is charged what its executor will take there, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pantheon.accel.executor import Executor
from pantheon.engine.load import pick_ctx, pick_executor, pick_kv_type, plan_of
from pantheon.engine.scripted import PREFIX as SCRIPT
from pantheon.engine.split import Layers, Share, layers_of, split
from pantheon.formats.gguf import open_gguf
from pantheon.plan.builder import Plan
from pantheon.plan.state_spec import KVType

#: bytes by part
Parts = dict[str, int]
#: how often a split is looked for again when a part turned out larger than its share of the weights
_TRIES = 6


class Predict(Protocol):
    """The parts for a context; on each die when a plan is cut, which is `cuts` None for the whole."""

    def __call__(self, n_ctx: int, cuts: Sequence[int] | None = None, /) -> list[Parts]: ...


@dataclass(frozen=True)
class Footprint:
    """Bytes by part: weights, scratch, tables, and kv for one full conversation of n_ctx positions.  A script has no
    plan and takes nothing.  `predict`: the parts for another context.  `users`: full conversations that a die must have
    room for; the host has it as they come, since turns are admitted there.  `executor`: what would run it."""

    n_ctx: int = 0
    parts: Parts = field(default_factory=dict)
    token_bytes: int = 0
    plan: Plan | None = None
    kv_type: KVType | None = None
    layers: Layers | None = None
    predict: Predict | None = None
    users: int = 1
    executor: str = "cpu"

    def at(self, n_ctx: int) -> Footprint:
        """The same model with another context."""
        return self if self.predict is None else replace(self, n_ctx=n_ctx, parts=self.predict(n_ctx)[0])

    @property
    def on_die(self) -> bool:
        """It runs on accelerators, and takes nothing of the host's memory but what a load does for a while."""
        return self.executor == "cuda"

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
        shared, kv = self.parts["scratch"] + self.parts["tables"], self.users * self.parts["kv"]
        if not self.on_die:
            return split(self.layers, shared / len(budgets), kv, budgets)
        room = list(budgets)
        for _ in range(_TRIES):
            found = split(self.layers, shared, kv, room)
            if found is None:
                return None
            exact = self._exact(found)
            if all(share.nbytes <= budget for share, budget in zip(exact, budgets, strict=True)):
                return exact
            # layers of other types than most pack differently, and a tied table is there twice
            room = [
                max(0, min(had, budget - (share.nbytes - guess.nbytes)))
                for had, budget, share, guess in zip(room, budgets, exact, found, strict=True)
            ]
        return None

    def _exact(self, shares: Sequence[Share]) -> tuple[Share, ...]:
        """The same cuts, with what each part takes on its die."""
        assert self.predict is not None, "whoever has layers was read from a file"
        dies = self.predict(self.n_ctx, self.cuts(shares))
        return tuple(
            replace(share, nbytes=sum(parts.values()) + (self.users - 1) * parts["kv"], slot_bytes=parts["kv"])
            for share, parts in zip(shares, dies, strict=True)
        )

    def cuts(self, shares: Sequence[Share]) -> tuple[int, ...]:
        """The ops of the plan's body that the dies behind the first begin with."""
        return tuple(self.layers.starts[share.first] for share in shares[1:]) if self.layers else ()

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

    def predict(ctx: int, cuts: Sequence[int] | None = None) -> list[Parts]:
        if cuts is None:
            return [_predict(runs, plan, types, sizes, ctx, kv)]
        apart = pick_executor(executor, threads, range(len(cuts) + 1), cuts)
        return apart.predict_dies(plan, types, n_ctx=ctx, kv_type=kv)  # type: ignore[attr-defined]

    with open_gguf(path) as file:
        plan = plan_of(file)
        n_ctx = pick_ctx(ctx, plan)
        kv = pick_kv_type(kv_type, executor, file, plan)
        types = {name: info.type.name for name, info in file.tensors.items()}
        sizes = {name: info.nbytes for name, info in file.tensors.items()}
    (parts,) = predict(n_ctx)
    layers = layers_of(plan, sizes, parts["weights"], kv)
    layers = layers.with_head() if executor == "cuda" else layers
    return Footprint(n_ctx, parts, plan.state.bytes_per_token(kv), plan, kv, layers, predict, users, executor)


def _predict(
    runs: Executor, plan: Plan, types: dict[str, str], sizes: dict[str, int], n_ctx: int, kv: KVType
) -> Parts:
    """The executor's own figures; for one that can not say, those of the file."""
    predict = getattr(runs, "predict", None)
    if predict is None:
        return {"weights": sum(sizes.values()), "scratch": 0, "tables": 0, "kv": plan.state.slot_bytes(kv, n_ctx)}
    try:
        parts: Parts = predict(plan, types, n_ctx=n_ctx, n_slots=1, kv_type=kv)
    except KeyError:
        # a tensor or a type that is missing: the load says which
        return {"weights": 0, "scratch": 0, "tables": 0, "kv": 0}
    return parts
