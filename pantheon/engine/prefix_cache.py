"""Conversations kept warm: which slot of a model's state a prompt starts from, and what it finds there.

A slot holds the KV rows of one conversation; its tokens are remembered after the answer, and the next prompt that
begins with them starts where they end.  `SlotTable` decides and touches nothing; `PrefixCache` carries the decision
out on a state.  As many slots are busy as the entry has users; the others are idle.  Rows of equal prefixes are equal
bit for bit (batch invariance), so that reuse changes no answer.  Must not know requests or models.  Spec: area I, X12,
X13.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.executor import RunnerState

#: conversations that an entry keeps warm at most
SLOTS = 8

#: one (hash, size) for each prefix of a request, in order: enough to recognise a conversation without its tokens
Marks = tuple[tuple[int, int], ...]
_NONE = np.empty(0, np.int32)


class Seat(NamedTuple):
    """Where a prompt runs.  Its first `reused` tokens lie in `slot` once `source`'s rows are copied there (None: they
    do already); the slots in `drop` are given up for it."""

    slot: int
    reused: int
    source: int | None
    drop: tuple[int, ...]


class Warmth(NamedTuple):
    """What a request would find: about so many tokens, and whether they are of its own conversation."""

    tokens: int
    own: bool


@dataclass
class _Slot:
    """One conversation.  `high`: positions whose pages are in memory; `prompt`: where the last prompt ended."""

    ids: NDArray[np.int32] = field(default_factory=lambda: _NONE)
    session: str | None = None
    marks: Marks = ()
    prompt: int = 0
    high: int = 0
    last_use: int = 0
    busy: bool = False


class SlotTable:
    """Tokens of n_slots conversations, least recently used ones first to go.

    max_idle: tokens that idle slots may hold together (None: no limit).  can_copy: rows can be copied between slots, so
    that a prefix shared with another conversation can be used without taking it away.  users: busy slots at most.
    """

    def __init__(self, n_slots: int, *, max_idle: int | None = None, can_copy: bool = True, users: int = 1) -> None:
        self.max_idle, self._can_copy, self._users = max_idle, can_copy, users
        self._slots = [_Slot() for _ in range(n_slots)]
        self._uses = 0

    def choose(self, ids: Sequence[int], session: str | None = None, marks: Marks = ()) -> Seat:
        """Take a slot for a prompt.  At least the last token is left to run; raises RuntimeError when all are busy."""
        prompt = np.asarray(ids, np.int32)
        shared = {i: _common(slot.ids, prompt[:-1]) for i, slot in enumerate(self._slots)}
        found = {i: n for i, n in shared.items() if not self._slots[i].busy}
        if not found:
            raise RuntimeError("every slot is busy")
        # a busy slot can be copied from as well: it writes behind what is known to lie there
        best = max(shared, key=lambda i: (shared[i], self._slots[i].last_use))
        target = self._target(found, session, marks)
        source = None if target == best or shared[best] <= found[target] or not self._can_copy else best
        reused = found[target] if source is None else shared[best]
        for other in self._slots:
            if session is not None and other.session == session:
                other.session = None  # it is busy: two turns of one session at once
        slot = self._slots[target]
        self._uses += 1
        slot.ids, slot.session, slot.marks = prompt[:reused], session, marks
        slot.prompt, slot.last_use, slot.busy = len(prompt), self._uses, True
        slot.high = max(slot.high, reused) if reused else 0
        return Seat(target, reused, source, self._make_room())

    def _target(self, found: dict[int, int], session: str | None, marks: Marks) -> int:
        """The session's own slot; else that of the conversation which this goes on with; else a free or the oldest."""
        if session is not None:
            for i in found:
                if self._slots[i].session == session:
                    return i
        going_on = [i for i in found if found[i] and _goes_on(self._slots[i], marks, found[i])]
        if going_on:
            return max(going_on, key=lambda i: (found[i], self._slots[i].last_use))
        return min(found, key=lambda i: (bool(len(self._slots[i].ids)), self._slots[i].last_use, i))

    def _make_room(self, limit: int | None = None) -> tuple[int, ...]:
        """Forget the oldest idle slots until the rest holds no more than the limit."""
        limit = self.max_idle if limit is None else limit
        idle = [i for i, slot in enumerate(self._slots) if not slot.busy and slot.high]
        idle.sort(key=lambda i: self._slots[i].last_use)
        dropped: list[int] = []
        while limit is not None and idle and sum(self._slots[i].high for i in idle) > limit:
            dropped.append(idle.pop(0))
            self.forget(dropped[-1])
        return tuple(dropped)

    def note_read(self, slot: int, ids: Sequence[int]) -> None:
        """A busy slot has read its prompt: others may copy from it."""
        at = self._slots[slot]
        at.ids = np.asarray(ids, np.int32)
        at.high = max(at.high, len(ids))

    def commit(self, slot: int, ids: Sequence[int]) -> None:
        """The answer is over: these tokens, prompt and answer, lie in the slot now."""
        at = self._slots[slot]
        at.ids, at.busy = np.asarray(ids, np.int32), False
        at.high = max(at.high, len(ids))
        if not len(ids):
            self.forget(slot)

    def settle(self) -> tuple[int, ...]:
        """After a commit: idle slots but the newest keep to the limit; the slots that were given up."""
        idle = [slot for slot in self._slots if not slot.busy and slot.high]
        newest = max(idle, key=lambda slot: slot.last_use, default=None)
        if newest is None or self.max_idle is None:
            return ()
        return self._make_room(self.max_idle + newest.high)

    def forget(self, slot: int) -> None:
        """Nothing that can be used lies in the slot any more."""
        self._slots[slot] = _Slot(busy=False)

    def trim(self, max_idle: int | None) -> tuple[int, ...]:
        """Set how much idle slots may hold, and give up the oldest beyond it; the slots that were given up."""
        self.max_idle = max_idle
        return self._make_room()

    def drop_all(self) -> tuple[int, ...]:
        """Give up every idle slot; the slots that were given up.  The limit stays."""
        return self._make_room(0)

    def warmth(self, session: str | None, marks: Marks) -> Warmth:
        """What a request with that session id, or those marks, would find here."""
        best = Warmth(0, False)
        for slot in self._slots:
            n = max(len(slot.ids), slot.prompt if slot.busy else 0)
            if session is not None and slot.session == session:
                best = max(best, Warmth(n, True), key=lambda w: (w.own, w.tokens))
            elif slot.marks and marks:
                depth = _depth(slot.marks, marks)
                whole = depth == len(slot.marks)
                # of a conversation that has branched off, the part in front of the branch
                share = 1.0 if whole else (slot.marks[depth - 1][1] / slot.marks[-1][1] if depth else 0.0)
                own = session is None and slot.session is None and whole and len(marks) > depth
                best = max(best, Warmth(int(share * n), own), key=lambda w: (w.own, w.tokens))
        return best

    def tokens(self) -> tuple[int, int]:
        """(tokens that can be reused, positions whose pages are in memory)."""
        return sum(len(slot.ids) for slot in self._slots), sum(slot.high for slot in self._slots)

    def check_integrity(self) -> None:
        """Raise AssertionError when the table contradicts itself."""
        assert sum(slot.busy for slot in self._slots) <= self._users, "more generations than users"
        for i, slot in enumerate(self._slots):
            assert slot.high >= len(slot.ids), f"slot {i} holds more than was written: {slot}"
            assert slot.busy or len(slot.ids) or not slot.high, f"slot {i} keeps pages for nothing: {slot}"
        idle = sum(slot.high for slot in self._slots if not slot.busy)
        newest = max((slot.high for slot in self._slots if not slot.busy), default=0)
        assert self.max_idle is None or idle - newest <= self.max_idle, f"{idle} idle tokens, {self.max_idle} allowed"
        sessions = [slot.session for slot in self._slots if slot.session is not None]
        assert len(sessions) == len(set(sessions)), f"a session in two slots: {sessions}"


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def _goes_on(slot: _Slot, marks: Marks, common: int) -> bool:
    """Whether a prompt without a session continues, or repeats, the conversation in a slot: by its messages when they
    are known, else when it has the whole of the last prompt in it."""
    if slot.session is not None:
        return False
    if slot.marks and marks:
        return _depth(slot.marks, marks) == len(slot.marks)
    return common >= min(slot.prompt, len(slot.ids)) - 1


def _depth(a: Marks, b: Marks) -> int:
    depth = 0
    for one, other in zip(a, b, strict=False):
        if one[0] != other[0]:
            break
        depth += 1
    return depth


class Warm:
    """A prompt's place in a state: run it in `slot` from token `reused` on, and tell `held` what got there."""

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
        self, state: RunnerState, *, max_idle: int | None = None, token_bytes: int = 0, users: int = 1
    ) -> None:
        """token_bytes: what one position costs; `max_idle` and `users` as in SlotTable."""
        self._state, self._token_bytes = state, token_bytes
        self._copy = getattr(state, "copy_prefix", None)
        #: guards _table and resets of idle slots; taken below the registry's lock, held for no forward [M138, X13]
        self.lock = threading.Lock()
        self._table = SlotTable(state.n_slots, max_idle=max_idle, can_copy=self._copy is not None, users=users)
        self._max_idle, self._users = max_idle, users

    def begin(self, ids: Sequence[int], session: str | None = None, marks: Marks = ()) -> Warm:
        """A slot for a prompt, its warm prefix in place."""
        with self.lock:
            seat = self._table.choose(ids, session, marks)
            if seat.source is not None and self._copy is not None:
                self._copy(seat.source, seat.slot, seat.reused)
            for slot in seat.drop:
                self._state.reset(slot)
        return Warm(self, seat.slot, seat.reused, ids)

    def note_read(self, slot: int, ids: Sequence[int]) -> None:
        """See SlotTable.note_read."""
        with self.lock:
            self._table.note_read(slot, ids)

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
            dropped = self._table.trim(self._max_idle if share >= 1 else int(share * whole))
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
        """Bytes of KV in memory beyond one full conversation, which is what a load is charged."""
        return max(0, self.used_bytes() - self._token_bytes * self._state.n_ctx)

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
