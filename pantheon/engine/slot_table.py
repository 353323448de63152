"""Which slot of a state a prompt runs in, what it finds there, and which conversation goes when there is no room.

`SlotTable` decides and touches nothing; `PrefixCache` carries it out.  A conversation is recognised by its tokens;
session ids and marks (hashes of messages) say only whose it is where tokens leave that open, and are never trusted
about what lies in a slot.  Must not know states, requests or models.  Spec: area I, X01, X12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: one (hash, size) for each prefix of a request, in order: enough to recognise a conversation without its tokens
Marks = tuple[tuple[int, int], ...]
#: tokens by which a running conversation is expected to grow, when it is asked whether others still fit beside it
GROWTH = 1024
#: a branch is kept beside its conversation when that costs at most so many copied tokens for each one that is kept
_COPIES = 8
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
    """One conversation.  `high`: positions whose pages are in memory; `asked`: the last prompt; `base`: the table's age
    when it was used last; `pinned`: it is being copied from."""

    ids: NDArray[np.int32] = field(default_factory=lambda: _NONE)
    asked: NDArray[np.int32] = field(default_factory=lambda: _NONE)
    session: str | None = None
    marks: Marks = ()
    high: int = 0
    last_use: int = 0
    base: int = 0
    busy: bool = False
    pinned: bool = False

    @property
    def idle(self) -> bool:
        """Whether it may be given up, and counts among those who share the limit."""
        return not self.busy and not self.pinned and self.high > 0

    @property
    def expected(self) -> int:
        """Positions that it should come to hold."""
        return max(self.high, len(self.asked) + GROWTH) if self.busy else self.high


class SlotTable:
    """Tokens of n_slots conversations.

    max_idle: tokens that idle slots may hold together (None: no limit), and on top of that what running ones leave of
    `spare`.  can_copy: rows can be copied between slots, so that a prefix shared with another conversation can be used
    without taking it away.  points(slot): the only positions, ascending, that a slot can be taken back to (None: all).
    users: busy slots at most.
    """

    def __init__(
        self,
        n_slots: int,
        *,
        max_idle: int | None = None,
        spare: int = 0,
        can_copy: bool = True,
        points: Callable[[int], Iterable[int]] | None = None,
        users: int = 1,
    ) -> None:
        self.max_idle, self.spare = max_idle, spare
        self._can_copy, self._points, self._users = can_copy, points, users
        self._slots = [_Slot() for _ in range(n_slots)]
        self._uses = self._age = 0

    # ---- a turn -----------------------------------------------------------------------------------------------------

    def choose(self, ids: Sequence[int], session: str | None = None, marks: Marks = ()) -> Seat:
        """Take a slot for a prompt.  At least the last token is left to run; raises RuntimeError when all are busy."""
        prompt = np.asarray(ids, np.int32)
        common = [_common(slot.ids, prompt) for slot in self._slots]
        usable = [self._usable(i, n, len(prompt) - 1) for i, n in enumerate(common)]
        target = self._target(prompt, common, session, marks)
        # a busy slot can be copied from as well: it writes behind what is known to lie there
        best = max(range(len(usable)), key=lambda i: (usable[i], self._slots[i].last_use))
        source = best if self._can_copy and usable[best] > usable[target] else None
        reused = usable[target if source is None else source]
        for other in self._slots:
            if session is not None and other.session == session:
                other.session = None  # the id goes with the newest turn
        slot = self._slots[target]
        self._uses += 1
        slot.ids, slot.asked, slot.session, slot.marks = prompt[:reused], prompt, session, marks
        slot.last_use, slot.base, slot.busy = self._uses, self._age, True
        slot.high = max(slot.high, reused) if reused else 0
        dropped = self._make_room(self._allowed())
        self._pin(source, dropped)
        return Seat(target, reused, source, dropped)

    def _pin(self, source: int | None, dropped: tuple[int, ...] = ()) -> None:
        if source is not None and source not in dropped:
            self._slots[source].pinned = True

    def copied(self, source: int) -> None:
        """The copy that a seat asked for is done: until then nobody gives its source up."""
        self._slots[source].pinned = False

    def look_again(self, slot: int) -> Seat | None:
        """For a busy slot whose prompt is being read: whether another one has more of it by now.  What is copied counts
        once `note_progress` says so."""
        at = self._slots[slot]
        if not self._can_copy or not at.busy:
            return None
        usable = [self._usable(i, _common(other.ids, at.asked), len(at.asked) - 1)
                  for i, other in enumerate(self._slots)]  # fmt: skip
        best = max(range(len(usable)), key=usable.__getitem__)
        if usable[best] <= len(at.ids) or best == slot:
            return None
        self._pin(best)
        return Seat(slot, usable[best], best, ())

    def note_progress(self, slot: int, n: int) -> None:
        """A busy slot has read the first n tokens of its prompt: others may copy them."""
        at = self._slots[slot]
        at.ids = at.asked[:n]
        at.high = max(at.high, n)

    def commit(self, slot: int, ids: Sequence[int]) -> None:
        """The answer is over: these tokens, prompt and answer, lie in the slot now."""
        at = self._slots[slot]
        at.ids, at.busy = np.asarray(ids, np.int32), False
        at.high = max(at.high, len(ids))
        if not len(ids):
            self.forget(slot)

    def settle(self) -> tuple[int, ...]:
        """After a commit: idle slots but the newest keep to the limit; the slots that were given up."""
        allowed = self._allowed()
        if allowed is None or self.max_idle is None:
            return ()
        newest = max((s for s in self._slots if s.idle), key=lambda s: s.last_use, default=_Slot())
        return self._make_room(max(allowed, self.max_idle + newest.high))

    def forget(self, slot: int) -> None:
        """Nothing that can be used lies in the slot any more."""
        self._slots[slot] = _Slot(busy=False)

    def trim(self, max_idle: int | None, spare: int = 0) -> tuple[int, ...]:
        """Set how much idle slots may hold, and give up the oldest beyond it; the slots that were given up."""
        self.max_idle, self.spare = max_idle, spare
        return self._make_room(self._allowed())

    def drop_all(self) -> tuple[int, ...]:
        """Give up every idle slot; the slots that were given up.  The limit stays."""
        return self._make_room(0)

    # ---- who goes ---------------------------------------------------------------------------------------------------

    def _usable(self, i: int, common: int, most: int) -> int:
        """How many of `common` tokens a prompt that needs no more than `most` can begin with."""
        most = min(common, most)
        if self._points is None or most <= 0:
            return max(0, most)
        at = self._slots[i]
        end = () if at.busy else (len(at.ids),)  # where it stands: there it need not be taken back to
        return max((n for n in (*self._points(i), *end) if n <= most), default=0)

    def _target(
        self, prompt: NDArray[np.int32], common: Sequence[int], session: str | None, marks: Marks
    ) -> int:
        """The slot of the conversation that this goes on with; else an empty one; else that of the least worth."""
        free = [i for i, slot in enumerate(self._slots) if not slot.busy]
        if not free:
            raise RuntimeError("every slot is busy")
        going_on = [i for i in free if _goes_on(self._slots[i], prompt, common[i], session, marks)]
        if going_on:
            return max(going_on, key=lambda i: (self._mine(i, session), common[i], self._slots[i].last_use))
        empty = [i for i in free if not len(self._slots[i].ids)]
        full = [i for i in free if len(self._slots[i].ids)]
        if empty and (not full or self._fits(len(prompt))):
            return empty[0]
        worth = {i: self._slots[i].base + self._cost(i, common[i]) for i in full}
        target = min(full, key=lambda i: (worth[i], self._slots[i].last_use))
        self._age = max(self._age, worth[target])
        return target

    def _mine(self, i: int, session: str | None) -> bool:
        return session is not None and self._slots[i].session == session

    def _cost(self, i: int, common: int) -> int:
        """Tokens that would have to be read again if slot i were taken for a prompt that has `common` of them."""
        ids = self._slots[i].ids
        elsewhere = (_common(ids, other.ids) for j, other in enumerate(self._slots) if j != i)
        return len(ids) - max(common, *elsewhere, 0)

    def _fits(self, n_prompt: int) -> bool:
        """Whether a conversation can begin in an empty slot and nobody need go for it."""
        if self.max_idle is None:
            return True
        busy = sum(slot.expected for slot in self._slots if slot.busy) + n_prompt + GROWTH
        return self._idle() <= self.max_idle + max(0, self.spare - busy)

    def _idle(self) -> int:
        return sum(slot.high for slot in self._slots if slot.idle)

    def _allowed(self) -> int | None:
        """Tokens that idle slots may hold now."""
        if self.max_idle is None:
            return None
        return self.max_idle + max(0, self.spare - sum(slot.expected for slot in self._slots if slot.busy))

    def _make_room(self, limit: int | None) -> tuple[int, ...]:
        """Forget the idle slots that were used longest ago until the rest holds no more than the limit."""
        idle = [i for i, slot in enumerate(self._slots) if slot.idle]
        idle.sort(key=lambda i: self._slots[i].last_use)
        dropped: list[int] = []
        while limit is not None and idle and sum(self._slots[i].high for i in idle) > limit:
            dropped.append(idle.pop(0))
            self.forget(dropped[-1])
        return tuple(dropped)

    # ---- looking ----------------------------------------------------------------------------------------------------

    def warmth(self, session: str | None, marks: Marks) -> Warmth:
        """What a request with that session id, or those marks, would find here."""
        found = (_warmth(slot, session, marks) for slot in self._slots)
        return max(found, key=lambda w: (w.own, w.tokens), default=Warmth(0, False))

    def tokens(self) -> tuple[int, int]:
        """(tokens that can be reused, positions whose pages are in memory)."""
        return sum(len(slot.ids) for slot in self._slots), sum(slot.high for slot in self._slots)

    def rows(self) -> list[tuple[int, int, bool]]:
        """(tokens that can be reused, positions in memory, busy) of each slot."""
        return [(len(slot.ids), slot.high, slot.busy) for slot in self._slots]

    def check_integrity(self) -> None:
        """Raise AssertionError when the table contradicts itself."""
        assert sum(slot.busy for slot in self._slots) <= self._users, "more generations than users"
        for i, slot in enumerate(self._slots):
            assert slot.high >= len(slot.ids), f"slot {i} holds more than was written: {slot}"
            assert slot.busy or len(slot.ids) or not slot.high, f"slot {i} keeps pages for nothing: {slot}"
        newest = max((slot.high for slot in self._slots if slot.idle), default=0)
        allowed = self._allowed()
        if allowed is not None and self.max_idle is not None:
            allowed = max(allowed, self.max_idle + newest)
            assert self._idle() <= allowed, f"{self._idle()} idle tokens, {allowed} allowed"
        sessions = [slot.session for slot in self._slots if slot.session is not None]
        assert len(sessions) == len(set(sessions)), f"a session in two slots: {sessions}"


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def _goes_on(slot: _Slot, prompt: NDArray[np.int32], common: int, session: str | None, marks: Marks) -> bool:
    """Whether a prompt may take a slot over from its conversation, because nobody will come back for what is lost.

    That is so when nothing is lost; when the whole of the last prompt is in this one, so that only an answer goes that
    was given back in other words (reasoning dropped, a call written anew); and when its messages go on after the last
    ones, whatever the template has made of them.  The same question again, or an edited one, is a branch, unless it is
    the same client's and leaves nearly everything.
    """
    lost = len(slot.ids) - common
    if not common or not lost:
        return bool(common)
    if None not in (session, slot.session) and session != slot.session:
        return False
    if slot.marks and len(marks) > len(slot.marks) == _depth(slot.marks, marks):
        return True
    little = lost * _COPIES < common
    if common < len(slot.asked):
        return little and session is not None and session == slot.session
    return little or len(prompt) > common


def _warmth(slot: _Slot, session: str | None, marks: Marks) -> Warmth:
    n = max(len(slot.ids), len(slot.asked) if slot.busy else 0)
    same = session is not None and slot.session == session
    if not (slot.marks and marks):
        return Warmth(n if same else 0, same)
    depth = _depth(slot.marks, marks)
    whole = depth == len(slot.marks)
    # of a conversation that has branched off, the part in front of the branch
    share = 1.0 if whole else (slot.marks[depth - 1][1] / slot.marks[-1][1] if depth else 0.0)
    stranger = None not in (session, slot.session) and not same
    return Warmth(int(share * n), depth > 0 and (same or (whole and len(marks) > depth and not stranger)))


def _depth(a: Marks, b: Marks) -> int:
    depth = 0
    for one, other in zip(a, b, strict=False):
        if one[0] != other[0]:
            break
        depth += 1
    return depth
