"""`Plan`, and the builder that architecture files write plans with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pantheon.plan.buffers import Buffer, Matrix, Vector
from pantheon.plan.ops import Op, RmsNorm
from pantheon.plan.rope import RopeSpec
from pantheon.plan.state_spec import StateSpec


@dataclass(frozen=True)
class Plan:
    """A model's forward, for any number of columns.

    `body` runs on every column; then the rows of `hidden` that want logits are gathered, in order, to the front of
    `head_in`, and `head` runs on those rows only, leaving float32 [n_wanted, n_vocab] in `logits`.
    """

    name: str
    n_vocab: int
    n_ctx_train: int
    buffers: tuple[Buffer, ...]
    body: tuple[Op, ...]
    hidden: Buffer
    head_in: Buffer
    head: tuple[Op, ...]
    logits: Buffer
    ropes: tuple[RopeSpec, ...]
    state: StateSpec

    def ops(self) -> Iterator[Op]:
        """Every op in order, body first."""
        yield from self.body
        yield from self.head

    @property
    def last_norm(self) -> RmsNorm | None:
        """The norm between the last layer and the output matrix; its output is what a model knows of a column."""
        return next((op for op in self.head if isinstance(op, RmsNorm) and op.x is self.head_in), None)

    def matrices(self) -> list[Matrix]:
        """Every weight matrix once, in the order of first use."""
        found = [value for op in self.ops() for value in vars(op).values() if isinstance(value, Matrix)]
        return list(dict.fromkeys(found))

    def vectors(self) -> list[Vector]:
        """Every norm weight and bias once, in the order of first use."""
        values = [value for op in self.ops() for value in vars(op).values()]
        flat = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
        return list(dict.fromkeys(one for one in flat if isinstance(one, Vector)))

    def column_bytes(self) -> int:
        """Activation bytes of one column (the logits row is counted apart: only wanted columns have one)."""
        return sum(4 * b.width for b in self.buffers if b is not self.logits)


class PlanBuilder:
    """Collects buffers, ops and rope tables; `add` appends to the body until `begin_head`."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._ropes: list[RopeSpec] = []
        self._body: list[Op] = []
        self._head: list[Op] | None = None
        self._handover: tuple[Buffer, Buffer] | None = None

    def buffer(self, name: str, width: int) -> Buffer:
        """A new buffer of `width` floats a column."""
        made = Buffer(len(self._buffers), name, width)
        self._buffers.append(made)
        return made

    def rope(self, spec: RopeSpec) -> int:
        """The index of a rope table; equal specs share one."""
        if spec not in self._ropes:
            self._ropes.append(spec)
        return self._ropes.index(spec)

    def add(self, *ops: Op) -> None:
        """Append ops to the part that is being written."""
        (self._body if self._head is None else self._head).extend(ops)

    def begin_head(self, hidden: Buffer) -> Buffer:
        """End the body; returns the buffer that holds the gathered rows of `hidden`."""
        head_in = self.buffer("head_in", hidden.width)
        self._handover = hidden, head_in
        self._head = []
        return head_in

    def finish(self, name: str, n_vocab: int, n_ctx_train: int, logits: Buffer, state: StateSpec) -> Plan:
        """The finished plan."""
        if self._head is None or self._handover is None:
            raise ValueError("a plan needs a head")
        hidden, head_in = self._handover
        return Plan(
            name, n_vocab, n_ctx_train, tuple(self._buffers), tuple(self._body), hidden, head_in,
            tuple(self._head), logits, tuple(self._ropes), state,
        )  # fmt: skip
