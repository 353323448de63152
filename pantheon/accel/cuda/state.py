"""Conversations on the dies of a runner: KV rows, recurrent state and a row of logits for each slot.

All memory is taken when it is made, and given back when it is closed or nobody refers to it any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.checkpoints import MOST, Checkpoints, Conversations
from pantheon.accel.cuda.context import Array
from pantheon.accel.cuda.faults import named
from pantheon.accel.cuda.graphs import Graphs
from pantheon.accel.cuda.kv import blocks
from pantheon.accel.cuda.place import logit_rows
from pantheon.accel.cuda.rows import Rows
from pantheon.accel.cuda.stage import Stage
from pantheon.accel.executor import Columns


class CudaState(Conversations):
    """n_slots conversations of up to n_ctx positions; used by the holder of the turn."""

    def __init__(self, stages: Sequence[Stage], n_slots: int, n_ctx: int) -> None:
        """Raises MemoryError when a die has no room, ValueError without slots or positions."""
        if n_slots < 1 or n_ctx < 1:
            raise ValueError("a state needs at least one slot and one position")
        self.n_slots, self.n_ctx, self.n_rows = n_slots, n_ctx, logit_rows(n_slots)
        self._stages = tuple(stages)
        self.arrays: list[dict[str, Array]] = []
        self._graphs = [Graphs(stage.device) for stage in stages]
        last = stages[-1]
        try:
            self.arrays += [_arrays(stage, n_slots, n_ctx) for stage in stages]
            self.rows = Rows(last.device, self.arrays[-1]["logits"], n_slots, last.part.plan.n_vocab)
        except BaseException:
            self.close()
            raise
        recurrent = _Recurrent(stages, self.arrays, n_slots)
        self.can_truncate = not recurrent.floats
        self._points = Checkpoints(recurrent)

    def belongs_to(self, stages: Sequence[Stage]) -> bool:
        """Whether it was made by the runner of these stages."""
        return len(stages) == len(self._stages) and all(a is b for a, b in zip(stages, self._stages, strict=True))

    # ---- for the runner -------------------------------------------------------------------------------------------

    def launch(self, i: int, key: Hashable, launch: Callable[[], None]) -> None:
        """Put a step on stage i's stream."""
        self._graphs[i].run(key, launch)

    def note(self, columns: Columns) -> None:
        """Raises ValueError for columns that do not go on where a recurrent state stands."""
        if not self.can_truncate:
            self._points.go_on(columns.slots, columns.positions)

    def read_logits(self, out: NDArray[np.float32]) -> None:
        """The first rows of logits, float32 [m, n_vocab], to the host: waits."""
        flat = self._stages[-1].device.read(self.arrays[-1]["logits"], 0, out.size)
        np.copyto(out, flat.reshape(out.shape))

    # ---- conversations --------------------------------------------------------------------------------------------

    def reset(self, slot: int) -> None:
        """Forget a conversation.  Reads are bounded by position, so old KV rows can not be seen."""
        self._check_slot(slot)
        if not self.can_truncate:
            self._points.forget(slot)

    def copy_prefix(self, source: int, target: int, n: int, first: int = 0) -> None:
        """Make target begin with source's first n positions, of which it has the first `first` already; whole blocks,
        since what lies behind n is never read."""
        self._adopt(source, target, n)
        for stage, arrays in zip(self._stages, self.arrays, strict=True):
            with named((stage.device.index,)):
                for name, begin, end, count in stage.place.memory.kv.copy_ranges(source, target, n, first):
                    stage.device.copy(arrays[name], begin, end, count)

    def nbytes(self) -> int:
        """Bytes on all dies, and on the host for what is remembered."""
        return sum(stage.place.state_bytes(self.n_slots) for stage in self._stages) + MOST * self._points.nbytes

    def close(self) -> None:
        """Give the memory back, whoever still holds the state; idempotent."""
        for graphs in self._graphs:
            graphs.close()
        for arrays in self.arrays:
            arrays.clear()
        with contextlib.suppress(AttributeError):
            del self.rows
        for stage in self._stages:
            stage.device.give_back()


def _arrays(stage: Stage, n_slots: int, n_ctx: int) -> dict[str, Array]:
    """The last slot has no more positions than the state: that of a text which is read once is as long as the text."""
    memory, layout, device = stage.place.memory, stage.place.memory.kv, stage.device
    n_vocab = memory.plan.n_vocab if stage.part.is_last else 0
    whole, last = n_slots - 1, blocks(n_ctx)
    return {
        "kv": device.array(whole * layout.slot_words + last * layout.block_words, np.int32),
        "kv_scales": device.array(whole * layout.slot_scales + last * layout.block_scales, np.uint16),
        "recurrent": device.array(n_slots * memory.slot_floats, np.float32),
        "logits": device.array(logit_rows(n_slots) * n_vocab, np.float32),
    }


class _Recurrent:
    """The recurrent state of every slot as rows on the host, float32 [floats]: read from the dies and written to them.
    """

    def __init__(self, stages: Sequence[Stage], arrays: Sequence[dict[str, Array]], n_slots: int) -> None:
        self._stages, self._arrays, self._n_slots = stages, arrays, n_slots
        self._floats = [stage.place.memory.slot_floats for stage in stages]
        self._dies = [stage.device.index for stage in stages]
        self.floats = sum(self._floats)
        self.nbytes = 4 * self.floats * n_slots

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._n_slots))

    def __getitem__(self, slot: int) -> NDArray[np.float32]:
        with named(self._dies):
            parts = [
                stage.device.read(arrays["recurrent"], slot * n, n)
                for stage, arrays, n in zip(self._stages, self._arrays, self._floats, strict=True)
            ]
        return np.concatenate(parts)

    def __setitem__(self, slot: int, row: NDArray[np.float32] | int) -> None:
        whole, at = np.broadcast_to(np.asarray(row, np.float32), self.floats).copy(), 0
        with named(self._dies):
            for stage, arrays, n in zip(self._stages, self._arrays, self._floats, strict=True):
                stage.device.write(arrays["recurrent"], slot * n, whole[at : at + n])
                stage.device.synchronize()
                at += n
