"""A plan with its weights on one or more dies: forwards that are begun, looked at and ended, one at a time.

`forward_begin` puts a forward on the first die's stream and returns; `forward_poll` says whether it has run, and takes
it on to the next die when it has left one; `forward_end` hands the rows over.  No lock is held: the caller has the
entry's gen_lock or the scheduler's turn from begin to end [M217, M222], and a second begin is refused [M219].
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cuda.bandwidth import copy_rates
from pantheon.accel.cuda.faults import named
from pantheon.accel.cuda.lowering import MAX_COLUMNS
from pantheon.accel.cuda.machine import SIMULATED
from pantheon.accel.cuda.rows import DeviceRow
from pantheon.accel.cuda.stage import Stage
from pantheon.accel.cuda.state import CudaState
from pantheon.accel.cuda.waiting import wait
from pantheon.accel.executor import Columns, Progress, RunnerState
from pantheon.accel.hidden import normed
from pantheon.plan.builder import Plan
from pantheon.plan.state_spec import KVType

#: widths of the forwards that compile everything; nothing is compiled in the simulator
_WARM_UP = (1,) if SIMULATED else (1, 2, 4, 8, 16, 64)


@dataclass
class _Flight:
    """A forward on its way: which stage it is on, and what was asked.  sampled: answers are drawn from its rows."""

    state: CudaState
    columns: Columns
    reach: int
    sampled: bool = True
    stage: int = 0


class CudaRunner:
    """Forwards of one plan.  See `accel.executor.Runner` for the contract."""

    max_columns = MAX_COLUMNS

    def __init__(self, plan: Plan, stages: Sequence[Stage], *, n_ctx: int, kv_type: KVType) -> None:
        self.plan, self.n_ctx, self.kv_type = plan, n_ctx, kv_type
        #: ids from here up fill the output matrix and are no tokens
        self.n_tokens = plan.n_vocab
        self._stages = list(stages)
        self._marks = [stage.device.event() for stage in stages]
        self._flight: _Flight | None = None
        self._dies = [stage.device.index for stage in stages]

    # ---- the asynchronous seam ------------------------------------------------------------------------------------

    def forward_begin(self, state: RunnerState, columns: Columns) -> None:
        """Start a forward.  At most `state.n_slots` columns may be wanted.

        Raises ValueError for columns out of range or another runner's state, RuntimeError while a forward is on its way
        and after `close`.
        """
        mine = self._check(state, columns)
        if len(columns.wanted) > mine.n_slots:
            raise ValueError(f"{len(columns.wanted)} wanted columns, and the state has room for {mine.n_slots} rows")
        self._begin(_Flight(mine, columns, reach(columns)))

    def _begin(self, flight: _Flight) -> None:
        columns = flight.columns
        flight.state.note(columns)
        n, m = len(columns.tokens), len(columns.wanted)
        for stage in self._stages:
            for i, values in enumerate((columns.tokens, columns.slots, columns.positions)):
                stage.columns[i * MAX_COLUMNS : i * MAX_COLUMNS + n] = values
            stage.columns[3 * MAX_COLUMNS : 3 * MAX_COLUMNS + m] = columns.wanted
        self._flight = flight
        self._start(flight)

    def forward_poll(self) -> bool:
        """Whether the forward has run; takes it on to the next die when it has left one.  Waits for nothing."""
        flight = self._in_flight()
        while self._marks[flight.stage].done:
            if flight.stage == len(self._stages) - 1:
                return True
            flight.stage += 1
            self._start(flight)
        return False

    def forward_end(self) -> list[DeviceRow]:
        """The wanted rows, on their die, valid until the next forward of the same state."""
        flight = self._in_flight()
        self._flight = None
        return flight.state.rows.take(len(flight.columns.wanted))

    def _in_flight(self) -> _Flight:
        if self._flight is None:
            raise RuntimeError("no forward is on its way")
        return self._flight

    def _start(self, flight: _Flight) -> None:
        """Everything of one stage on its stream: columns, what the stage before left, body, head, what the next takes.
        """
        i, n, m = flight.stage, len(flight.columns.tokens), len(flight.columns.wanted)
        stage, arrays = self._stages[i], flight.state.arrays[i]
        try:
            stage.send_columns()
            stage.take_inbox(n)

            def launch() -> None:
                stage.run(stage.body, arrays, n, flight.reach)
                if m:
                    stage.run(stage.head, arrays, m, flight.reach)

            flight.state.launch(i, (n, m, flight.reach), launch)
            if i + 1 < len(self._stages):
                for b, values in self._stages[i + 1].inbox.items():
                    stage.read_buffer(b, values[: n * stage.place.memory.buffers[b].stride])
            elif m and flight.sampled:
                flight.state.rows.prefetch(m, self.n_tokens)
            stage.device.mark(self._marks[i])
        except BaseException:
            self._abandon()
            raise

    # ---- whole forwards -------------------------------------------------------------------------------------------

    def forward_rows(self, state: RunnerState, columns: Columns) -> list[DeviceRow]:
        """The wanted rows, which stay on the die."""
        with named(self._dies):
            self.forward_begin(state, columns)
            self._wait()
            return self.forward_end()

    def _wait(self) -> None:
        try:
            wait(self.forward_poll)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Wait for what runs, since it reads the host's columns, and forget it."""
        self._flight = None
        for stage in self._stages:
            with contextlib.suppress(Exception):  # the device may be lost: the first fault is the one to tell
                stage.device.synchronize()

    def forward(self, state: RunnerState, columns: Columns) -> NDArray[np.float32]:
        """float32 [n_wanted, n_vocab] on the host: for scores and tests, answers are drawn from rows on the die."""
        mine = self._check(state, columns)
        m = len(columns.wanted)
        out = np.empty((m, self.plan.n_vocab), np.float32)
        for first in range(0, max(1, m), mine.n_rows):
            part = replace(columns, wanted=columns.wanted[first : first + mine.n_rows])
            with named(self._dies):
                if first:
                    self._head_again(mine, part.wanted)
                else:
                    self._begin(_Flight(mine, part, reach(part), sampled=False))
                    self._wait()
                    self._flight = None
                mine.read_logits(out[first : first + mine.n_rows])
        return out

    def _head_again(self, state: CudaState, wanted: NDArray[np.int32]) -> None:
        """The head for other columns of the forward that ran last, whose last rows stay where they are."""
        stage = self._stages[-1]
        stage.columns[3 * MAX_COLUMNS : 3 * MAX_COLUMNS + len(wanted)] = wanted
        stage.send_columns()
        stage.run(stage.head, state.arrays[-1], len(wanted), 1)

    def hidden(self, state: RunnerState, columns: Columns) -> NDArray[np.float32]:
        """See `accel.executor.Runner`: the body alone."""
        self.forward_rows(state, replace(columns, wanted=columns.wanted[:0]))
        stage, norm = self._stages[-1], self.plan.last_norm
        memory, n = stage.place.memory, len(columns.tokens)
        at, stride = memory.buffers[self.plan.hidden]
        weight = None
        with named(self._dies):
            flat = stage.device.read(stage.arrays["scratch"], at, n * stride)
            if norm is not None:
                weight = stage.device.read(stage.arrays["vectors"], memory.vectors[norm.weight], norm.weight.size)
        rows = flat.reshape(n, stride)[:, : self.plan.hidden.width]
        return normed(rows[columns.wanted], norm, weight)

    # ---- the rest -------------------------------------------------------------------------------------------------

    def new_state(self, n_slots: int, n_ctx: int, kv_type: KVType | None = None) -> CudaState:
        """Takes the memory of every slot at once: nothing that a forward may read is ever resized [M216, M218].

        Raises MemoryError when a die has no room, ValueError for an n_ctx beyond the one loaded for, or another format
        of the cache than the runner's.
        """
        if n_ctx > self.n_ctx:
            raise ValueError(f"n_ctx {n_ctx} is beyond the {self.n_ctx} positions that the model was loaded for")
        if kv_type not in (None, self.kv_type):
            raise ValueError(f"the cache of this model is {self.kv_type.value}")
        return CudaState(self._stages, n_slots, n_ctx)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile and run every kernel before anybody waits for it, on a state of its own [X07]."""
        with contextlib.closing(self.new_state(1, min(self.n_ctx, max(_WARM_UP)))) as state:
            widths = [n for n in _WARM_UP if n <= state.n_ctx]
            state.rows.compile()
            for i, n in enumerate(widths):
                if progress is not None:
                    progress("kernels", i, len(widths))
                for stage in self._stages:
                    stage.compile(n)  # of the head, too, which this state of one row launches for one column only
                state.reset(0)
                self.forward_rows(state, Columns.of_slot([0] * n, 0))
            if progress is not None:
                progress("kernels", len(widths), len(widths))

    def memory(self) -> dict[str, int]:
        """Bytes by part, over all dies."""
        parts = [stage.place.nbytes for stage in self._stages]
        return {name: sum(part[name] for part in parts) for name in ("weights", "scratch", "tables")}

    def step_bytes(self) -> int:
        """Bytes of packed weights that a forward of one column reads, logits included."""
        return sum(stage.place.step_bytes for stage in self._stages)

    def copy_rates(self, nbytes: int) -> list[float]:
        """Bytes per second at which the first die copies within its memory, read and written both counted."""
        return copy_rates(self._stages[0].device, nbytes)

    def close(self) -> None:
        """Give the memory of every die back; idempotent.  States go with their owners."""
        stages, self._stages = self._stages, []
        for stage in stages:
            stage.close()

    def _check(self, state: RunnerState, columns: Columns) -> CudaState:
        if not self._stages:
            raise RuntimeError("the runner is closed")
        if self._flight is not None:
            raise RuntimeError("a forward of this model is on its way already")
        if not isinstance(state, CudaState) or not state.belongs_to(self._stages):
            raise ValueError("the state belongs to another runner")
        if len(columns.tokens) > MAX_COLUMNS:
            raise ValueError(f"a forward takes at most {MAX_COLUMNS} columns")
        columns.check(self.plan.n_vocab, state.n_slots, state.n_ctx)
        return state


def reach(columns: Columns) -> int:
    """One more than the highest position, rounded up to a power of two of at least 256: what grids depend on."""
    return 1 << max(8, int(columns.positions.max()).bit_length())
