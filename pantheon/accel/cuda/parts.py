"""A plan cut into parts for several dies.  Pure: plans in, plans out.

A part is a plan of its own: its KV and recurrent layers count from 0, and what it needs of the part before comes in
`carried` buffers.  The last part has the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pantheon.plan.buffers import Buffer
from pantheon.plan.builder import Plan
from pantheon.plan.flow import live_before
from pantheon.plan.ops import Attend, Conv, DeltaRule, Op, StoreKV
from pantheon.plan.state_spec import StateSpec


@dataclass(frozen=True)
class Part:
    """What one die runs.  carried: buffers that the part before leaves for it."""

    plan: Plan
    carried: tuple[Buffer, ...]

    @property
    def is_last(self) -> bool:
        """Whether it ends with the head."""
        return bool(self.plan.head)

    def buffers(self) -> list[Buffer]:
        """The buffers that lie on its die, logits apart."""
        ends = [self.plan.hidden, self.plan.head_in] if self.is_last else []
        used = [value for op in self.plan.ops() for value in vars(op).values() if isinstance(value, Buffer)]
        return [b for b in dict.fromkeys([*self.carried, *used, *ends]) if b is not self.plan.logits]


def cut(plan: Plan, cuts: Sequence[int]) -> list[Part]:
    """Parts that begin at op 0 of the body and at each of `cuts`, ascending.  Raises ValueError for other cuts, and for
    one that parts the op that stores KV rows from the one that reads them."""
    edges = [0, *cuts, len(plan.body)]
    if any(b <= a for a, b in pairwise(edges)):
        raise ValueError(f"cuts {list(cuts)} do not divide {len(plan.body)} ops")
    for at in cuts:
        stored = {op.layer for op in plan.body[:at] if isinstance(op, StoreKV)}
        if any(isinstance(op, Attend) and op.layer in stored for op in plan.body[at:]):
            raise ValueError(f"the cut at op {at} parts KV rows from what reads them")
    parts = []
    for first, last in pairwise(edges):
        carried = live_before(plan.body[first:], (plan.hidden,)) if first else ()
        head = plan.head if last == len(plan.body) else ()
        parts.append(Part(_renumbered(plan, plan.body[first:last], head), carried))
    return parts


def _renumbered(plan: Plan, body: tuple[Op, ...], head: tuple[Op, ...]) -> Plan:
    """A plan of these ops alone, with the layers of its state counted from 0."""
    kv = sorted({op.layer for op in body if isinstance(op, StoreKV | Attend)})
    recurrent = sorted({op.layer for op in body if isinstance(op, Conv | DeltaRule)})
    state = StateSpec(tuple(plan.state.kv[i] for i in kv), tuple(plan.state.recurrent[i] for i in recurrent))

    def moved(op: Op) -> Op:
        if isinstance(op, StoreKV | Attend):
            return replace(op, layer=kv.index(op.layer))
        if isinstance(op, Conv | DeltaRule):
            return replace(op, layer=recurrent.index(op.layer))
        return op

    return replace(plan, body=tuple(map(moved, body)), head=head, state=state)
