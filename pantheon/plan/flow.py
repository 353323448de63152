"""Which buffers an op reads and writes, and which ones a plan carries across a cut.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pantheon.plan.buffers import Buffer
from pantheon.plan.ops import DeltaGates, MatMul, Mix, Op, Rope, Route, Sigmoid, SoftCap

#: fields that are written by ops that work in place
_IN_PLACE: dict[type, tuple[str, ...]] = {
    Rope: ("x",), Sigmoid: ("x",), SoftCap: ("x",), DeltaGates: ("qkv", "beta", "decay"),
    Route: ("chosen", "shares"),
}  # fmt: skip


def writes(op: Op) -> tuple[Buffer, ...]:
    """The buffers that an op changes."""
    names = _IN_PLACE.get(type(op), ("out",))
    return tuple(getattr(op, name) for name in names if hasattr(op, name))


def reads(op: Op) -> tuple[Buffer, ...]:
    """The buffers whose old values an op needs, those that it changes only in part among them."""
    changed = writes(op)
    used = [value for value in vars(op).values() if isinstance(value, Buffer)]
    if isinstance(op, Route):
        return (op.logits,)
    if isinstance(op, Rope | Sigmoid | SoftCap | DeltaGates):
        return tuple(used)
    kept = isinstance(op, Mix) or (isinstance(op, MatMul) and (op.add or op.weight.rows != op.out.width))
    source = [getattr(op, name) for name in ("x", "y", "q", "k", "v", "gate", "up", "qkv") if hasattr(op, name)]
    return tuple(used) if kept else tuple(b for b in used if b not in changed or any(b is s for s in source))


def live_before(ops: Sequence[Op], last: Iterable[Buffer] = ()) -> tuple[Buffer, ...]:
    """The buffers whose values must be there before ops run, when those in `last` are wanted after them; by index."""
    live = set(last)
    for op in reversed(ops):
        live -= set(writes(op))
        live |= set(reads(op))
    return tuple(sorted(live, key=lambda b: b.index))
