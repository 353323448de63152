"""A plan over several dies: which layers go where, and what each die is charged.  Pure arithmetic on a plan.

Layers stay in order, so that a column crosses from one die to the next once; the cut that fills the fullest die least
is taken.  Must not know dies or files.  Spec: M197, M226.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pantheon.plan.buffers import Matrix, Vector
from pantheon.plan.builder import Plan
from pantheon.plan.ops import StoreKV
from pantheon.plan.state_spec import KVType

_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Layers:
    """Bytes of every stage of a plan, in order: embedding, layers, head.  `kv_token`: what one position costs there;
    `starts`: the op of the plan's body that each stage begins with, the head's being the first behind it."""

    weights: tuple[int, ...]
    kv_token: tuple[int, ...]
    starts: tuple[int, ...] = ()

    def with_head(self) -> Layers:
        """The same with the head as a part of the last layer: no die has the head alone."""
        weights, kv = self.weights, self.kv_token
        return Layers(
            (*weights[:-2], sum(weights[-2:])), (*kv[:-2], sum(kv[-2:])), self.starts[: max(1, len(weights) - 1)]
        )


@dataclass(frozen=True)
class Share:
    """One die's part: stages first … last (exclusive), and its bytes.  `token_bytes`: what one more position of any
    conversation costs on it; `slot_bytes`: a further conversation, where that is known."""

    first: int
    last: int
    nbytes: int
    token_bytes: int
    slot_bytes: int = 0


def layers_of(plan: Plan, sizes: Mapping[str, int], total_bytes: int, kv_type: KVType) -> Layers:
    """The stages of a plan.  sizes: file bytes of each tensor, by which total_bytes of weights are shared out."""
    weights, kv, starts = [0.0], [0], [0]
    seen: set[str] = set()
    block: str | None = None
    for i, op in enumerate(plan.ops()):
        used = [value for value in vars(op).values() if isinstance(value, Matrix | Vector)]
        found = next((match[1] for value in used if (match := _BLOCK.match(value.tensor))), None)
        ends = found is None and bool(used) and block is not None
        if (found is not None and found != block) or ends:
            weights.append(0.0)
            kv.append(0)
            starts.append(i)
        if found is not None or ends:
            block = found
        # a tensor counts where it is first used, once: it may be cut into several matrices
        names = dict.fromkeys(value.tensor for value in used)
        weights[-1] += sum(sizes.get(name, 0) for name in names if name not in seen)
        seen.update(names)
        if isinstance(op, StoreKV):
            kv[-1] += plan.state.kv[op.layer].bytes_per_token(kv_type)
    scale = total_bytes / sum(weights) if sum(weights) else 0.0
    edges = [round(scale * edge) for edge in (0.0, *accumulate(weights))]
    return Layers(tuple(b - a for a, b in pairwise(edges)), tuple(kv), tuple(starts))


def split(layers: Layers, each: float, kv_bytes: int, budgets: Sequence[int]) -> tuple[Share, ...] | None:
    """The stages on as many dies as there are budgets, in order; None when they do not fit.

    each: scratch and tables of every die; kv_bytes: all full conversations.
    """
    n = len(budgets)
    kv_token = sum(layers.kv_token)
    costs = [
        w + (kv_bytes * k / kv_token if kv_token else 0.0) for w, k in zip(layers.weights, layers.kv_token, strict=True)
    ]
    room = [budget - each for budget in budgets]
    if len(costs) < n or min(room) <= 0:
        return None
    low, high = 0.0, 1.0
    if _cut(costs, room, high) is None:
        return None
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if _cut(costs, room, middle) is not None else (middle, high)
    cuts = _cut(costs, room, high)
    assert cuts is not None, "the last cut that fitted"
    return tuple(
        Share(a, b, -int(-(sum(costs[a:b]) + each) // 1), sum(layers.kv_token[a:b])) for a, b in pairwise(cuts)
    )


def _cut(costs: Sequence[float], room: Sequence[float], fill: float) -> list[int] | None:
    """Where each die begins when none is filled beyond that share of its room; None when something is left over.

    Every die takes what it can, but leaves a stage for each one behind it.
    """
    cuts, at = [0], 0
    for die, space in enumerate(room):
        left, taken = len(costs) - (len(room) - die - 1), 0.0
        while at < left and taken + costs[at] <= fill * space:
            taken += costs[at]
            at += 1
        if at == cuts[-1]:
            return None
        cuts.append(at)
    return cuts if at == len(costs) else None
