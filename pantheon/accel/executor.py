"""What every executor offers, and the batch that a forward takes.

An executor turns a plan and its weights into a `Runner`; a runner makes `RunnerState`s and runs forwards over
columns.  A runner's weights are read-only after load; only the state that is passed in changes.  One forward at a
time per runner: callers hold the entry's gen_lock or the scheduler's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pantheon.plan.builder import Plan
from pantheon.plan.state_spec import KVType

#: progress(stage, done, total): bytes for stage "weights", kernels for stage "kernels"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RawTensor:
    """A tensor as it lies in the file: `data` is a read-only uint8 view of its blocks; shape (rows, cols) or (n,)."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class WeightSource(Protocol):
    """Where an executor reads weights from, tensor by tensor."""

    def tensor(self, name: str) -> RawTensor:
        """The raw tensor; raises ModelFileError when the file has no such tensor."""
        ...

    def release(self, name: str) -> None:
        """Its bytes were packed and will not be read again: drop the mapped pages."""
        ...


@dataclass(frozen=True)
class Columns:
    """One forward: token, slot and position of each column, int32 [n] each; `wanted` int32 [m] picks the columns
    whose logits are needed, ascending.

    The columns of one slot stand in ascending position order.  A prefill chunk is many columns of one slot, a
    decode step one column of many slots; both may share a forward.
    """

    tokens: NDArray[np.int32]
    slots: NDArray[np.int32]
    positions: NDArray[np.int32]
    wanted: NDArray[np.int32]

    @staticmethod
    def of_slot(tokens: Sequence[int], first_position: int, *, slot: int = 0, wanted: str = "last") -> Columns:
        """Columns of one slot from first_position on; wanted: "none", "last" or "all"."""
        n = len(tokens)
        picks = {"none": np.arange(0), "last": np.arange(n - 1, n), "all": np.arange(n)}[wanted]
        return Columns(
            np.asarray(tokens, np.int32),
            np.full(n, slot, np.int32),
            np.arange(first_position, first_position + n, dtype=np.int32),
            picks.astype(np.int32),
        )

    def check(self, n_vocab: int, n_slots: int, n_ctx: int) -> None:
        """Raise ValueError unless every index is in range: kernels do not check."""
        n = len(self.tokens)
        if n == len(self.slots) == len(self.positions) == len(self.wanted) == 1 and (
            0 <= self.tokens[0] < n_vocab
            and 0 <= self.slots[0] < n_slots
            and 0 <= self.positions[0] < n_ctx
            and self.wanted[0] == 0
        ):
            return  # most forwards; a comparison costs less than a call of NumPy
        if not (n and len(self.slots) == len(self.positions) == n):
            raise ValueError("a forward needs as many slots and positions as tokens, and at least one")
        for what, values, limit in (
            ("token", self.tokens, n_vocab),
            ("slot", self.slots, n_slots),
            ("position", self.positions, n_ctx),
            ("wanted column", self.wanted, n),
        ):
            if len(values) and not (values.min() >= 0 and values.max() < limit):
                raise ValueError(f"{what} out of range 0..{limit - 1}")


class RunnerState(Protocol):
    """KV rows (and later recurrent state) of n_slots conversations of up to n_ctx positions."""

    n_slots: int
    n_ctx: int

    def reset(self, slot: int) -> None:
        """Forget a conversation: nothing that it left may reach the next one."""
        ...

    def truncate(self, slot: int, n: int) -> None:
        """Keep the first n positions of a conversation (1 <= n); what lies behind them is as good as forgotten."""
        ...

    def nbytes(self) -> int:
        """Bytes reserved for this state."""
        ...


class Changes(NamedTuple):
    """New logits of some ids (int64, ascending): logit + bias, / by where that is positive and * by where not, - minus;
    float32 each."""

    ids: NDArray[np.int64]
    bias: NDArray[np.float32]
    by: NDArray[np.float32]
    minus: NDArray[np.float32]


class Reached(NamedTuple):
    """Where a sum over a row, from its best logit down, gets as far as was wanted: at this logit.

    above_n, above: how many ids lie above it, and the sum of their masses; ties, tie_mass: those of the ids that have
    it.
    """

    logit: float
    above_n: int
    above: float
    ties: int
    tie_mass: float


class Row(Protocol):
    """The logits of one column where they must not be copied to the host.  What a sampler may ask of them.

    A mass is exp((logit - best) / temperature).  Ids that are no tokens, and logits of -inf, are no candidates.  Valid
    until the next forward of the same state; an edited one until the next one is edited.
    """

    n_vocab: int

    @property
    def total(self) -> float:
        """The sum of all masses at temperature 1."""
        ...

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids and logits of the k best candidates, highest first, lowest id first among equals; NaN before all."""
        ...

    def value(self, token: int) -> float:
        """One logit."""
        ...

    def mass(self, low: float, temperature: float) -> tuple[int, float]:
        """How many candidates have a logit from `low` up, and the sum of their masses."""
        ...

    def reach(self, wanted: float, temperature: float, *, beyond: bool = False) -> Reached:
        """How far down the masses must be summed for `wanted` of them, or with `beyond` for more than that."""
        ...

    def reach_count(self, n: int) -> Reached:
        """How far down the n best candidates go; masses are those at temperature 1."""
        ...

    def pick(self, target: float, low: float, high: float, temperature: float) -> int:
        """The first id at which the sum of the masses of those before and with it, in order of id, is above `target`;
        of those only whose logits lie from low to high.  The last of them if none."""
        ...

    def edited(self, changes: Changes | None, allowed: NDArray[np.int32] | None) -> Row:
        """The row with changes, and nothing but the ids whose bits are set in `allowed` (id i is bit i % 32 of word
        i // 32; what has no word is forbidden)."""
        ...


class Runner(Protocol):
    """A plan with its weights on a die.

    One whose logits stay there also has `forward_rows(state, columns) -> Sequence[Row]`, which is `forward` but for
    that, and `n_tokens`, settable: the ids from there on only fill the output matrix up.
    """

    plan: Plan
    kv_type: KVType
    #: the most columns one forward takes; callers cut longer prefills into chunks
    max_columns: int

    def new_state(self, n_slots: int, n_ctx: int) -> RunnerState: ...

    def forward(self, state: RunnerState, columns: Columns) -> NDArray[np.float32]:
        """float32 [len(columns.wanted), n_vocab], valid until the next forward.

        The numbers of a column never depend on its neighbours in the forward, on the chunking of a prefill or on
        the number of threads (batch invariance): chunked prefill equals one-shot bit for bit.
        """
        ...

    def hidden(self, state: RunnerState, columns: Columns) -> NDArray[np.float32]:
        """float32 [len(columns.wanted), width], the caller's own: the wanted columns behind the last norm, before the
        output matrix, which is not read.  What was said of `forward` holds."""
        ...

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile what a forward needs."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes by part: weights, scratch, tables."""
        ...

    def close(self) -> None:
        """Dismiss threads and free memory; idempotent."""
        ...


class Executor(Protocol):
    """One way of running plans: `reference`, `cpu` or `cuda`."""

    name: str

    def load(
        self, plan: Plan, source: WeightSource, *, n_ctx: int, kv_type: KVType, progress: Progress | None = None
    ) -> Runner:
        """Take the weights over (packing them if it must) and return a runner for contexts up to n_ctx."""
        ...
