"""A plan with packed weights on the CPU, and the states that it runs on.  Imports no Numba."""

from __future__ import annotations

import copy
import ctypes
import math
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.checkpoints import MOST, Checkpoints, Conversations
from pantheon.accel.cpu import fields as at
from pantheon.accel.cpu import kernels, kv, sizes
from pantheon.accel.cpu.arena import HUGE, Arena, address
from pantheon.accel.cpu.layouts import MAX_COLUMNS
from pantheon.accel.cpu.pack import Packed
from pantheon.accel.cpu.sizes import MAX_WANTED
from pantheon.accel.cpu.table import Builder, Memory, encode, stride
from pantheon.accel.cpu.team import KEY as TEAM
from pantheon.accel.cpu.team import Team
from pantheon.accel.executor import Columns, Progress, RunnerState
from pantheon.accel.hidden import normed
from pantheon.plan.buffers import Matrix, Vector
from pantheon.plan.builder import Plan
from pantheon.plan.ops import ExpertMatMul, MatMul
from pantheon.plan.state_spec import KVType

#: a slot that used more than this is unmapped when it is reset
_DROP_BYTES = 1 << 20

Tables = list[tuple[NDArray[np.float32], NDArray[np.float32]]]


@dataclass(frozen=True)
class Weights:
    """Packed matrices and float vectors, all in one arena."""

    arena: Arena
    matrices: dict[Matrix, Packed]
    vectors: dict[Vector, int]


class CpuState(Conversations):
    """KV rows and recurrent state of n_slots conversations; memory is reserved, and costs pages only as it is written.
    """

    def __init__(
        self, n_slots: int, n_ctx: int, slot_bytes: int, block_bytes: int, kv_type: KVType, recurrent: tuple[int, int]
    ) -> None:
        """slot_bytes: of one conversation; block_bytes: what kv.BLOCK positions of it take; recurrent: where its
        recurrent state begins, and its bytes."""
        if n_slots < 1 or n_ctx < 1:
            raise ValueError("a state needs at least one slot and one position")
        self.n_slots, self.n_ctx, self.kv_type = n_slots, n_ctx, kv_type
        self.slot_bytes, self.block_bytes = slot_bytes, block_bytes
        # long contexts are streamed: on small pages that costs up to a fifth of the bandwidth
        self._arena = Arena(max(4096, n_slots * slot_bytes), huge=slot_bytes >= HUGE)
        self.address = self._arena.address
        self._used = np.zeros(n_slots, np.int64)
        self.recurrent_at, size = recurrent
        self.can_truncate = not size
        self._points = Checkpoints(self._arena.rows(n_slots, slot_bytes, self.recurrent_at, size).view(np.float32))

    def note(self, columns: Columns) -> None:
        """Remember how far each slot was written.  Raises ValueError for columns that do not go on where a recurrent
        state stands."""
        if not self.can_truncate:
            self._points.go_on(columns.slots, columns.positions)
        np.maximum.at(self._used, columns.slots, columns.positions + 1)

    def reset(self, slot: int) -> None:
        """Forget a conversation.  Reads are bounded by position, so old rows can not be seen; large ones are freed."""
        self._check_slot(slot)
        if self._used[slot] * self.block_bytes > _DROP_BYTES * kv.BLOCK:
            self._arena.drop(slot * self.slot_bytes, self.slot_bytes)
        self._used[slot] = 0
        if not self.can_truncate:
            self._points.forget(slot)

    def copy_prefix(self, source: int, target: int, n: int, first: int = 0) -> None:
        """Make target begin with source's first n positions, of which it has the first `first` already; whole blocks,
        since what lies behind n is never read."""
        self._adopt(source, target, n)
        skip = min(first, n) // kv.BLOCK * self.block_bytes
        nbytes = -(-n // kv.BLOCK) * self.block_bytes - skip
        self._arena.copy(source * self.slot_bytes + skip, target * self.slot_bytes + skip, nbytes)
        self._used[target] = max(self._used[target], n)

    def nbytes(self) -> int:
        """Bytes reserved for this state, with all that it may remember."""
        return self.n_slots * self.slot_bytes + MOST * self._points.nbytes


class CpuRunner:
    """Forwards of one plan; one at a time, from any Python thread."""

    def __init__(
        self, plan: Plan, weights: Weights, tables: Tables, *, n_ctx: int, kv_type: KVType, threads: int
    ) -> None:
        self.plan, self.kv_type, self.n_ctx, self.threads = plan, kv_type, n_ctx, threads
        self.max_columns = MAX_COLUMNS
        self._weights, self._tables = weights, tables
        _, self._block_bytes = kv.layers(plan, kv_type)
        types = {m: packed.type_name for m, packed in weights.matrices.items()}
        self._float_experts = sizes.has_float_experts(types)
        self._scratch = Arena(sizes.scratch(plan, n_ctx, threads, self._float_experts))
        self._memory = self._place()
        self._ctx = self._context()
        # every shape is checked here; kernel addresses are filled in by warm_up
        self._phases = Builder(plan, self._memory, kv_type, (1, 2, 4, 8)).phases
        self._team: Team | None = None
        self._variants: dict[KVType, CpuRunner] = {}
        self._closed = False

    # --- memory ---------------------------------------------------------------------------------------------------
    def _place(self) -> Memory:
        take = self._scratch.take
        buffers = [take(rows * stride(b.width)) for b, rows in sizes.buffer_rows(self.plan).items()]
        logits = buffers[self.plan.logits.index].view(np.float32)
        self._logits = logits.reshape(-1, stride(self.plan.logits.width) // 4)[:, : self.plan.n_vocab]
        hidden = buffers[self.plan.hidden.index].view(np.float32)
        self._hidden = hidden.reshape(-1, stride(self.plan.hidden.width) // 4)[:, : self.plan.hidden.width]
        staging = take(sizes.staging(self.plan))
        return Memory(
            self._weights.matrices,
            self._weights.vectors,
            tuple(address(b) for b in buffers),
            tuple(stride(b.width) for b in self.plan.buffers),
            address(staging),
            tuple((address(cos), address(sin)) for cos, sin in self._tables),
            tuple(address(take(n)) if n else 0 for n in sizes.experts(self.plan, self._float_experts)),  # type: ignore[arg-type]
        )

    def _context(self) -> NDArray[np.int64]:
        per_thread = sizes.per_thread(self.plan)
        ctx = self._scratch.take(8 * at.CONTEXT_WORDS).view(np.int64)
        self._columns = [self._scratch.take(4 * MAX_COLUMNS).view(np.int32) for _ in range(4)]
        for offset, array in zip((at.C_TOKENS, at.C_SLOTS, at.C_POSITIONS, at.C_WANTS), self._columns, strict=True):
            ctx[offset // 8] = address(array)
        ctx[at.C_ACT // 8] = address(self._scratch.take(sizes.activations(self.plan)))
        ctx[at.C_SPLIT_COLUMNS // 8], partials = sizes.partials(self.plan, self.n_ctx)
        ctx[at.C_PARTIALS // 8] = address(self._scratch.take(partials))
        ctx[at.C_SCRATCH // 8] = address(self._scratch.take(self.threads * per_thread, 4096))
        ctx[at.C_SCRATCH_BYTES // 8] = per_thread
        ctx[at.C_THREADS // 8] = self.threads
        return ctx

    def memory(self) -> dict[str, int]:
        """Bytes by part; scratch is what is reserved, pages are taken as columns use them."""
        tables = sum(cos.nbytes + sin.nbytes for cos, sin in self._tables)
        return {"weights": self._weights.arena.used, "scratch": self._scratch.capacity, "tables": tables}

    def step_bytes(self) -> int:
        """Bytes of packed weights that a forward with logits reads: all but tables that are only looked up in."""
        found, total = self._weights.matrices, 0
        used = {op.weight for op in self.plan.ops() if isinstance(op, MatMul)}
        for op in self.plan.ops():
            if isinstance(op, ExpertMatMul):  # of these only the ones that a column is routed to
                total += found[op.weight].nbytes * op.chosen.width // op.weight.experts
        return total + sum(found[m].nbytes for m in used)

    # --- running --------------------------------------------------------------------------------------------------
    def new_state(self, n_slots: int, n_ctx: int, kv_type: KVType | None = None) -> CpuState:
        """kv_type: another format than the runner's own.  Raises ValueError when n_ctx is beyond the one loaded for."""
        if n_ctx > self.n_ctx:
            raise ValueError(f"n_ctx {n_ctx} is beyond the {self.n_ctx} positions that the model was loaded for")
        kind = kv_type or self.kv_type
        recurrent = sizes.recurrent_at(self.plan, n_ctx, kind), self.plan.state.recurrent_bytes
        slot_bytes, block_bytes = sizes.slot(self.plan, n_ctx, kind), self.variant(kind)._block_bytes
        return CpuState(n_slots, n_ctx, slot_bytes, block_bytes, kind, recurrent)

    def variant(self, kv_type: KVType) -> CpuRunner:
        """The same weights, tables and scratch, for states of another KV format; forwards find it by themselves."""
        if kv_type is self.kv_type:
            return self
        if kv_type not in self._variants:
            other = copy.copy(self)
            other.kv_type, other._team, other._variants = kv_type, None, {}
            _, other._block_bytes = kv.layers(self.plan, kv_type)
            other._phases = Builder(self.plan, self._memory, kv_type, (1, 2, 4, 8)).phases
            self._variants[kv_type] = other
        return self._variants[kv_type]

    def warm_up(self, progress: Progress | None = None) -> None:
        """Start the threads.  The executor has compiled the kernels before it packed; what is missing is done now."""
        if self._team is not None or self._closed:
            return
        widths = kernels.tile_widths()
        self._ctx[at.C_MAX_TILE // 8] = len(widths) - 1
        for phase in self._phases:
            for row in phase.rows:
                row.keys = row.keys[: len(widths)]
        keys = list(dict.fromkeys(key for p in self._phases for row in p.rows for key in row.keys))
        kernels.prepare([*keys, TEAM], self.threads)
        program, ops = encode(self._phases, kernels.resolve)
        keep = [self._weights, self._tables, self._scratch]
        self._team = Team(program, ops, self._ctx, self.threads, keep)

    def forward(self, state: RunnerState, columns: Columns) -> NDArray[np.float32]:
        """See `accel.executor.Runner`.  Raises ValueError for columns that are out of range."""
        if self._closed:
            raise RuntimeError("the runner is closed")
        if isinstance(state, CpuState) and state.kv_type is not self.kv_type:
            return self.variant(state.kv_type).forward(state, columns)
        if not isinstance(state, CpuState) or state.n_ctx > self.n_ctx or state.block_bytes != self._block_bytes:
            raise ValueError("the state belongs to another runner")
        n, m = len(columns.tokens), len(columns.wanted)
        if n > MAX_COLUMNS or m > MAX_COLUMNS:
            raise ValueError(f"a forward takes at most {MAX_COLUMNS} columns")
        columns.check(self.plan.n_vocab, state.n_slots, state.n_ctx)
        self.warm_up()
        state.note(columns)
        for to, values in zip(self._columns, (columns.tokens, columns.slots, columns.positions), strict=False):
            to[:n] = values
        ctx = self._ctx
        ctx[at.C_KV // 8], ctx[at.C_SLOT_BYTES // 8] = state.address, state.slot_bytes
        ctx[at.C_BLOCK_BYTES // 8], ctx[at.C_RECURRENT // 8] = state.block_bytes, state.recurrent_at
        if m <= MAX_WANTED:
            self._run(n, columns.wanted)
            return self._logits[:m]
        rows = np.empty((m, self.plan.n_vocab), np.float32)
        for first in range(0, m, MAX_WANTED):  # the body runs once: it has no work for 0 columns
            part = columns.wanted[first : first + MAX_WANTED]
            self._run(0 if first else n, part)
            rows[first : first + len(part)] = self._logits[: len(part)]
        return rows

    def hidden(self, state: RunnerState, columns: Columns) -> NDArray[np.float32]:
        """See `accel.executor.Runner`: the body alone, whose last rows stay where it left them."""
        self.forward(state, replace(columns, wanted=columns.wanted[:0]))
        norm = self.plan.last_norm
        weight = None
        if norm is not None:
            floats = (ctypes.c_float * norm.weight.size).from_address(self._weights.vectors[norm.weight])
            weight = np.ctypeslib.as_array(floats)
        return normed(self._hidden[columns.wanted], norm, weight)

    def _run(self, n: int, wanted: NDArray[np.int32]) -> None:
        """One job of the team: the body on n columns, the head on the wanted ones."""
        self._ctx[at.C_COLUMNS // 8], self._ctx[at.C_WANTED // 8] = n, len(wanted)
        self._columns[3][: len(wanted)] = wanted
        self._team.run()  # type: ignore[union-attr]

    def profile(self, state: RunnerState, columns: Columns, repeats: int = 5) -> list[tuple[str, float]]:
        """(what, seconds) of every phase of this forward, best of `repeats`; for runners of one thread.

        Each phase runs alone, so its weights may come from a cache that they would not be in within a whole forward.
        """
        if self.threads != 1:
            raise ValueError("profiles are taken on one thread")
        self.forward(state, columns)
        times = []
        for i, phase in enumerate(self._phases):
            best = math.inf
            for _ in range(repeats):
                start = time.perf_counter()
                self._team.run_phase(i)  # type: ignore[union-attr]
                best = min(best, time.perf_counter() - start)
            times.append((phase.describe(), best))
        return times

    def close(self) -> None:
        """Dismiss the threads and let go of the memory; idempotent.  A forward that still runs keeps its memory."""
        self._closed = True
        for other in self._variants.values():
            other.close()
        team, self._team = self._team, None
        if team is not None:
            team.close()
