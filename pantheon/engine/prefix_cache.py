"""Conversations kept warm: a prompt begins where another one that begins alike has been read already.

A slot holds the KV rows of one conversation; its tokens are remembered after the answer, and the next prompt that
begins with them starts where they end.  `engine.slot_table` decides; `PrefixCache` carries the decision out on a state.
As many slots are busy as the entry has users; the others are idle.  Rows of equal prefixes are equal bit for bit (batch
invariance), so that reuse changes no answer.  Must not know requests or models.  Spec: area I, X12, X13.

A state that can not be cut at any token (recurrent layers) has `can_truncate = False`, `checkpoint(slot, n)`, which
remembers how it stands after n positions, and `checkpoints(slot)`, the positions it remembers: only there, and where it
stands, a conversation can be gone on with.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pantheon.accel.executor import RunnerState
from pantheon.engine.slot_table import Marks, Seat, SlotTable, Warmth

__all__ = ["SLOTS", "Marks", "PrefixCache", "Warm", "Warmth"]

#: conversations that an entry keeps warm at most
SLOTS = 8


class Warm:
    """A prompt's place in a state: run it in `slot` from token `reused` on, and tell `held` what got there.  `reused`
    counts all that need not be read, also what `look_again` finds."""

    def __init__(self, cache: PrefixCache | None, slot: int, reused: int, ids: Sequence[int]) -> None:
        self.slot, self.reused = slot, reused
        self.held: list[int] = list(ids[:reused])
        self._cache = cache

    def end(self, *, keep: bool = True) -> None:
        """The generation is over; `keep` False when what it left can not be trusted or is not wanted.  Idempotent."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache._end(self, keep)


class PrefixCache:
    """The slot table of one entry, carried out on its state.  Called by the holder of the entry's gen_lock or of its
    scheduler's turn; `trim`, `warmth` and `used_bytes` by anyone."""

    def __init__(
        self, state: RunnerState, *, max_idle: int | None = None, token_bytes: int = 0, users: int = 1,
        charged: int | None = None,
    ) -> None:  # fmt: skip
        """token_bytes: what one position costs; `max_idle` and `users` as in SlotTable.  Idle conversations may also
        use what a load is charged, `charged` tokens (default: a full conversation of each user), as far as running ones
        leave it."""
        self._state, self._token_bytes = state, token_bytes
        self._copy = getattr(state, "copy_prefix", None)
        #: guards _table and resets of idle slots; taken below the registry's lock; held for no forward and no copy
        #: [M138, X13]
        self.lock = threading.Lock()
        self._max_idle, self._users = max_idle, users
        self._charged = users * state.n_ctx if charged is None else charged
        points = None if getattr(state, "can_truncate", True) else state.checkpoints  # type: ignore[attr-defined]
        self._table = SlotTable(
            state.n_slots, max_idle=max_idle, spare=self._charged, can_copy=self._copy is not None, points=points,
            users=users,
        )  # fmt: skip

    def begin(self, ids: Sequence[int], session: str | None = None, marks: Marks = ()) -> Warm:
        """A slot for a prompt, its warm prefix in place."""
        with self.lock:
            seat = self._table.choose(ids, session, marks)
        try:
            self._copy_in(seat, 0)
            with self.lock:
                for slot in seat.drop:
                    self._state.reset(slot)
        except BaseException:
            Warm(self, seat.slot, 0, ()).end(keep=False)
            raise
        return Warm(self, seat.slot, seat.reused, ids)

    def _copy_in(self, seat: Seat, first: int) -> None:
        """Bring a seat's rows from where they lie.  The lock is free meanwhile: a long conversation takes a while."""
        if seat.source is None or self._copy is None:
            return
        try:
            self._copy(seat.source, seat.slot, seat.reused, first)
        finally:
            with self.lock:
                self._table.copied(seat.source)

    def look_again(self, warm: Warm, ids: Sequence[int]) -> int:
        """Before a chunk of a prompt is read: copy what another one has read of it since; how many tokens."""
        had = len(warm.held)
        with self.lock:
            seat = self._table.look_again(warm.slot)
        if seat is None:
            return 0
        self._copy_in(seat, had)
        with self.lock:
            self._table.note_progress(warm.slot, seat.reused)
        warm.held += ids[had : seat.reused]
        warm.reused += seat.reused - had
        return seat.reused - had

    def note_progress(self, slot: int, n: int) -> None:
        """A running conversation has read the first n tokens of its prompt: others may copy them."""
        with self.lock:
            self._table.note_progress(slot, n)

    def _end(self, warm: Warm, keep: bool) -> None:
        with self.lock:
            self._table.commit(warm.slot, warm.held if keep else [])
            for slot in (*self._table.settle(), *((warm.slot,) if not keep else ())):
                self._state.reset(slot)

    def trim(self, share: float) -> int:
        """Let idle conversations hold that share (0 to 1) of what they may; returns how many were given up.

        At 0 every idle one is given up.  A generation that runs is left alone.
        """
        with self.lock:
            whole = self._max_idle if self._max_idle is not None else self._state.n_slots * self._state.n_ctx
            calm = share >= 1
            dropped = self._table.trim(self._max_idle if calm else int(share * whole), self._charged if calm else 0)
            for slot in dropped:
                self._state.reset(slot)
            return len(dropped)

    def warmth(self, session: str | None, marks: Marks) -> Warmth:
        """See SlotTable.warmth."""
        with self.lock:
            return self._table.warmth(session, marks)

    def used_bytes(self) -> int:
        """Bytes of KV that the slots have in memory."""
        with self.lock:
            return self._token_bytes * self._table.tokens()[1]

    def extra_bytes(self) -> int:
        """Bytes of KV in memory beyond a full conversation of each user, which is what a load is charged."""
        return max(0, self.used_bytes() - self._token_bytes * self._charged)

    def tokens(self) -> int:
        """Tokens that a later prompt could reuse."""
        with self.lock:
            return self._table.tokens()[0]

    def check_integrity(self) -> None:
        """Raise AssertionError when the table contradicts itself."""
        with self.lock:
            self._table.check_integrity()

    def moved_to(self, state: RunnerState, token_bytes: int) -> PrefixCache:
        """An empty cache over another state, with as many bytes for idle conversations as this one had."""
        idle = self._max_idle
        if idle is not None and token_bytes:
            idle = idle * self._token_bytes // token_bytes
        return PrefixCache(state, max_idle=idle, token_bytes=token_bytes, users=self._users)

    def close(self) -> None:
        """Give every idle conversation up."""
        with self.lock:
            for slot in self._table.drop_all():
                self._state.reset(slot)
