"""Warm conversations: which slot, how much of it, who goes first; and that reuse changes no answer
[M125, M126, M128, M129, M132, M138, X01, X12, X13]."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pantheon.accel.executor import Columns
from pantheon.engine.generate import generate
from pantheon.engine.prefix_cache import PrefixCache, Warm
from pantheon.engine.sampler import SamplingParams
from pantheon.engine.slot_table import Marks, Seat, SlotTable
from tests.engine.tiny import tiny
from tests.sched.echo_model import EchoState, alone, echo_model

A, B = list(range(100, 120)), list(range(200, 230))


def marks(*hashes: int) -> Marks:
    return tuple((value, 10 * (i + 1)) for i, value in enumerate(hashes))


def done(table: SlotTable, ids: list[int], answer: list[int], **who: Any) -> Seat:
    """One turn."""
    seat = table.choose(ids, **who)
    table.commit(seat.slot, [*ids, *answer])
    table.check_integrity()
    return seat


def test_a_conversation_goes_on_where_it_ended_M125() -> None:
    table = SlotTable(4)
    assert done(table, A, [1, 2], session="s") == Seat(0, 0, None, ())
    # all but what is new, the answer of the last turn included
    assert done(table, [*A, 1, 2, 3, 4], [5], session="s") == Seat(0, len(A) + 2, None, ())


def test_the_last_token_is_always_run() -> None:
    table = SlotTable(4)
    done(table, A, [1])
    assert done(table, A, [1]).reused == len(A) - 1
    assert done(table, A[:1], [1]).reused == 0


def test_an_edited_message_reuses_what_stands_before_it_M129() -> None:
    table = SlotTable(4)
    done(table, A, [1], session="s")
    assert done(table, [*A[:5], 9, *A[6:]], [1], session="s") == Seat(1, 5, 0, ())
    # both branches are there when there is room for both
    assert done(table, [*A, 1, 2, 3], [4], session="s") == Seat(0, len(A) + 1, None, ())


def test_two_conversations_keep_a_slot_each_M128() -> None:
    table = SlotTable(4)
    assert done(table, A, [1]).slot != done(table, B, [1]).slot
    for ids in (A, B):
        assert done(table, [*ids, 1, 2, 3], [4]).reused == len(ids) + 1


def test_a_shared_beginning_is_copied_and_stays_with_its_owner_X12() -> None:
    table = SlotTable(4)
    system = list(range(50))
    done(table, [*system, 7, 7], [1], session="a")
    assert done(table, [*system, 8, 8], [1], session="b") == Seat(1, 50, 0, ())
    assert done(table, [*system, 7, 7, 1, 2], [3], session="a") == Seat(0, 53, None, ())


def test_without_copies_a_shared_beginning_is_read_again() -> None:
    table = SlotTable(4, can_copy=False)
    system = list(range(50))
    done(table, [*system, 7, 7], [1], session="a")
    assert done(table, [*system, 8, 8], [1], session="b") == Seat(1, 0, None, ())


def test_a_session_that_begins_anew_takes_the_best_beginning_along() -> None:
    table = SlotTable(4)
    done(table, A, [1], session="a")
    done(table, B, [1], session="b")
    assert done(table, [*A[:15], 5, 6], [1], session="b") == Seat(2, 15, 0, ())
    assert done(table, [*A, 1, 2], [3], session="a").reused == len(A) + 1


def test_the_oldest_conversation_goes_first() -> None:
    table = SlotTable(2)
    done(table, [1, 2, 3], [4], session="a")
    done(table, [5, 6, 7], [8], session="b")
    done(table, [1, 2, 3, 4, 9], [4], session="a")
    assert done(table, [10, 11, 12], [13], session="c").slot == 1
    assert table.warmth("b", ()).tokens == 0 and table.warmth("a", ()).tokens == 6


def test_messages_tell_conversations_apart_that_begin_alike() -> None:
    """Without ids: an answer's slot is not taken by another user whose prompt differs in its last message only."""
    table = SlotTable(4)
    system = list(range(50))
    done(table, [*system, 7], [1], marks=marks(1, 2))
    assert done(table, [*system, 8], [1], marks=marks(1, 3)).slot == 1
    assert done(table, [*system, 7, 1, 9], [1], marks=marks(1, 2, 4, 5)).slot == 0
    # a template that renders an answer differently from how it was given: still the same conversation
    assert done(table, [*system, 8, 5, 9], [1], marks=marks(1, 3, 4, 5)) == Seat(1, 51, None, ())


def test_idle_conversations_hold_no_more_than_they_may() -> None:
    table = SlotTable(8, max_idle=60)
    for i in range(5):
        seat = done(table, list(range(100 * i, 100 * i + 20)), [], session=str(i))
        assert seat == (i % 4, 0, None, ())
    assert table.trim(25) == (1, 2, 3)
    assert table.trim(None) == () and table.drop_all() == (0,)
    assert table.tokens() == (0, 0)


def test_a_running_conversation_is_not_trimmed() -> None:
    table = SlotTable(2)
    seat = table.choose(A)
    assert table.drop_all() == ()
    table.commit(seat.slot, A)
    assert table.tokens() == (len(A), len(A))


def test_what_is_forgotten_is_not_found() -> None:
    table = SlotTable(2)
    seat = table.choose(A)
    table.commit(seat.slot, [])
    assert done(table, A, []).reused == 0


def test_warmth_is_what_a_request_would_find_X01() -> None:
    table = SlotTable(4)
    done(table, A, [1], session="s", marks=marks(1, 2))
    done(table, B, [1], marks=marks(5, 6, 7))
    assert table.warmth("s", ()) == (21, True)
    assert table.warmth("other", ()) == (0, False)
    assert table.warmth(None, marks(5, 6, 7, 8, 9)) == (31, True)
    # the same question again is no conversation of one's own, and half a prefix is worth its share
    assert table.warmth(None, marks(5, 6, 7)) == (31, False)
    assert table.warmth(None, marks(5, 8)) == (10, False)
    assert table.warmth(None, marks(8)) == (0, False)
    # a title request under the conversation's id is not bound to where that is warm; an edited message is
    assert table.warmth("s", marks(8)) == (0, False)
    assert table.warmth("s", marks(1, 9)) == (10, True) and table.warmth("s", marks(1, 2, 3)) == (21, True)
    assert table.warmth("t", marks(1, 2, 3)) == (21, False)


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=24)
SESSION = st.none() | st.sampled_from("abcd")


class Slots(RuleBasedStateMachine):
    """Turns of many conversations by two users at a time, which grow, branch, fail and are trimmed, against a model of
    what each slot holds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(4, max_idle=40, users=2)
        self.rows: dict[int, list[int]] = {i: [] for i in range(4)}
        self.running: dict[int, list[int]] = {}

    def drop(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            assert slot not in self.running, "a running conversation was given up"
            self.rows[slot] = []

    @precondition(lambda self: len(self.running) < 2)
    @rule(ids=IDS, session=SESSION, marks=st.lists(st.integers(0, 1), max_size=4),
          trimmed=st.booleans())  # fmt: skip
    def begin(self, ids: list[int], session: str | None, marks: list[int], trimmed: bool) -> None:
        hashes = [hash(tuple(marks[: i + 1])) for i in range(len(marks))]
        seat = self.table.choose(ids, session, tuple((value, i + 1) for i, value in enumerate(hashes)))
        assert seat.slot not in self.running
        if seat.source is not None:
            assert seat.source != seat.slot
            self.rows[seat.slot] = self.rows[seat.source][: seat.reused]
            if trimmed and seat.source not in seat.drop:
                assert seat.source not in self.table.drop_all(), "given up while it is copied"
                self.rows |= {i: [] for i, (held, _, _) in enumerate(self.table.rows()) if not held}
                self.rows[seat.slot] = ids[: seat.reused]
            self.table.copied(seat.source)
        assert seat.slot not in seat.drop
        self.drop(seat.drop)
        # what is promised to lie there does
        assert seat.reused < len(ids) and self.rows[seat.slot][: seat.reused] == ids[: seat.reused]
        self.rows[seat.slot] = ids[: seat.reused]
        self.running[seat.slot] = ids

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1), n=st.integers(1, 8))
    def read(self, which: int, n: int) -> None:
        slot = list(self.running)[which % len(self.running)]
        ids, had = self.running[slot], len(self.rows[slot])
        seat = self.table.look_again(slot)
        if seat is not None:
            assert seat.slot == slot and seat.source is not None and had < seat.reused < len(ids)
            self.rows[slot] = self.rows[seat.source][: seat.reused]
            self.table.copied(seat.source)
            assert self.rows[slot] == ids[: seat.reused]
        self.rows[slot] = ids[: max(had, min(len(ids), len(self.rows[slot]) + n))]
        self.table.note_progress(slot, len(self.rows[slot]))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1), answer=st.lists(st.integers(0, 2), max_size=6), keep=st.booleans())
    def end(self, which: int, answer: list[int], keep: bool) -> None:
        slot = list(self.running)[which % len(self.running)]
        ids = self.running.pop(slot)
        held = [*ids, *answer] if len(self.rows[slot]) == len(ids) else self.rows[slot]
        self.rows[slot] = held if keep else []
        self.table.commit(slot, self.rows[slot])
        self.drop(self.table.settle())

    @rule(limit=st.integers(0, 60), spare=st.sampled_from([0, 2000]))
    def trim(self, limit: int, spare: int) -> None:
        self.drop(self.table.trim(limit, spare))
        idle = sum(high for _, high, busy in self.table.rows() if not busy)
        assert spare or idle <= limit

    @invariant()
    def sound(self) -> None:
        self.table.check_integrity()
        for slot, (held, _, busy) in enumerate(self.table.rows()):
            assert busy == (slot in self.running)
            assert held <= len(self.rows[slot]) if busy else held == len(self.rows[slot])


Slots.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestSlots = Slots.TestCase


# ---- on a real state ------------------------------------------------------------------------------------------------


class FakeState:
    n_slots, n_ctx = 2, 100

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.fail = False

    def reset(self, slot: int) -> None:
        self.done.append(("reset", slot))

    def copy_prefix(self, source: int, target: int, n: int, first: int = 0) -> None:
        if self.fail:
            raise MemoryError
        self.done.append(("copy", source, target, n))


def test_decisions_are_carried_out_on_the_state() -> None:
    state: Any = FakeState()
    cache = PrefixCache(state, max_idle=25, token_bytes=10)
    first = cache.begin(A, "a")
    first.held[:] = A
    first.end()
    second = cache.begin([*A[:10], 1, 2], "b")
    assert (second.slot, second.reused, second.held) == (1, 10, A[:10]) and state.done == [("copy", 0, 1, 10)]
    second.held += [1, 2]
    second.end()
    second.end(keep=False)  # over is over
    assert cache.tokens() == 32 and cache.used_bytes() == 320 and cache.extra_bytes() == 0
    assert cache.trim(0.5) == 1 and state.done[-1] == ("reset", 0)
    assert cache.trim(0.0) == 1 and cache.used_bytes() == 0
    cache.begin(A).end(keep=False)
    assert state.done[-1] == ("reset", 0)
    cache.check_integrity()
    cache.close()


def test_a_copy_that_fails_gives_its_slot_back_and_its_source_stays() -> None:
    state: Any = FakeState()
    cache = PrefixCache(state)
    first = cache.begin(A)
    first.held[:] = A
    first.end()
    state.fail = True
    with pytest.raises(MemoryError):
        cache.begin([*A[:10], 1, 2])
    state.fail = False
    cache.check_integrity()
    again = cache.begin([*A[:10], 1, 2])
    assert (again.slot, again.reused) == (1, 10)
    # while it is copied from, and not longer, nobody gives it up
    assert cache.trim(0.0) == 1
    again.end()


def test_without_a_cache_everything_is_read_M132() -> None:
    warm = Warm(None, 0, 0, A)
    warm.end()
    assert (warm.slot, warm.reused, warm.held) == (0, 0, [])


GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_reuse_changes_no_answer_B30(executor: str) -> None:
    """Turns of three conversations in two slots, each equal to its answer from an empty state, token for token."""
    model = tiny("tiny-llama-k.Q4_K_M", executor, 256)
    cache = PrefixCache(state := model.new_state(2))
    chance = random.Random(7)
    logs: dict[str, list[int]] = {name: [chance.randrange(model.n_vocab) for _ in range(6)] for name in "abc"}
    reused = 0
    for turn in range(9):
        name = "abc"[turn * turn % 3]
        ids = [*logs[name], *(chance.randrange(model.n_vocab) for _ in range(4))]
        warm = cache.begin(ids, name)
        tokens = [
            t.id for t in generate(model, state, ids, GREEDY, max_tokens=5, slot=warm.slot, reused=warm.reused,
                                   held=warm.held, ignore_eog=True)
        ]  # fmt: skip
        assert warm.held == [*ids, *tokens[:-1]]
        warm.end()
        cache.check_integrity()
        reused += warm.reused
        alone = model.new_state(1)
        assert tokens == [t.id for t in generate(model, alone, ids, GREEDY, max_tokens=5, ignore_eog=True)]
        logs[name] = [*ids, *tokens]
    assert reused > 60


def test_rows_of_a_reused_prefix_are_equal_bit_for_bit_M125() -> None:
    model = tiny("tiny-llama-k.Q4_K_M", "cpu", 256)
    ids = [random.Random(1).randrange(model.n_vocab) for _ in range(150)]
    state, fresh = model.new_state(1), model.new_state(1)
    model.forward(state, Columns.of_slot(ids[:100], 0, wanted="none"))
    model.forward(state, Columns.of_slot([1, 2, 3], 100, wanted="none"))
    state.truncate(0, 100)
    warm = model.forward(state, Columns.of_slot(ids[100:], 100))
    assert np.array_equal(warm, model.forward(fresh, Columns.of_slot(ids, 0)))


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_copied_rows_are_equal_bit_for_bit(executor: str) -> None:
    model = tiny("tiny-llama-k.Q4_K_M", executor, 256)
    state: Any = model.new_state(3)
    ids = [random.Random(2).randrange(model.n_vocab) for _ in range(170)]
    model.forward(state, Columns.of_slot([5] * 160, 0, slot=2, wanted="none"))
    model.forward(state, Columns.of_slot(ids[:140], 0, slot=0, wanted="none"))
    state.copy_prefix(0, 2, 140)
    copied = model.forward(state, Columns.of_slot(ids[140:], 140, slot=2))
    # the reference's sums depend on the chunking, so that both run in the same chunks
    fresh = model.new_state(1)
    model.forward(fresh, Columns.of_slot(ids[:140], 0, wanted="none"))
    assert np.array_equal(copied, model.forward(fresh, Columns.of_slot(ids[140:], 140)))


class RecurrentState(EchoState):
    """One that can be taken back to its checkpoints only."""

    can_truncate = False

    def __init__(self, n_slots: int, n_ctx: int) -> None:
        super().__init__(n_slots, n_ctx)
        self.saved: list[set[int]] = [set() for _ in range(n_slots)]

    def _stands_at(self, slot: int) -> int:
        return int((self.rows[slot] >= 0).sum())

    def reset(self, slot: int) -> None:
        super().reset(slot)
        self.saved[slot].clear()

    def checkpoint(self, slot: int, n: int) -> None:
        assert n == self._stands_at(slot)
        self.saved[slot].add(n)

    def checkpoints(self, slot: int) -> list[int]:
        return sorted(self.saved[slot])

    def truncate(self, slot: int, n: int) -> None:
        assert n in self.saved[slot] or n == self._stands_at(slot), "taken back to where nothing was remembered"
        super().truncate(slot, n)
        self.saved[slot] = {point for point in self.saved[slot] if point <= n}

    def copy_prefix(self, source: int, target: int, n: int, first: int = 0) -> None:
        assert n in self.saved[source] or n == self._stands_at(source)
        self.rows[target] = -1
        super().copy_prefix(source, target, n)
        self.saved[target] = {point for point in self.saved[source] if point <= n}


@pytest.mark.parametrize("seed", range(6))
def test_a_recurrent_state_is_reused_at_checkpoints_only_X12(seed: int) -> None:
    """Conversations that go on, branch, are asked again and lose the end of an answer; each answer is the solo one."""
    model = echo_model()
    state: Any = RecurrentState(3, model.n_ctx)
    cache = PrefixCache(state)
    chance = random.Random(seed)
    eog = min(model.tokenizer.eog_ids)
    system = [chance.randrange(200) for _ in range(20)] + [eog]
    logs = [list(system) for _ in range(4)]
    reused = 0
    for _ in range(40):
        log = chance.choice(logs)
        ids = [*log[: chance.choice([len(log), len(log), len(log) // 2])], chance.randrange(200), eog, 7, 8]
        warm = cache.begin(ids)
        tokens = [
            t.id for t in generate(model, state, ids, GREEDY, max_tokens=4, slot=warm.slot, reused=warm.reused,
                                   held=warm.held, ignore_eog=True, chunk=chance.choice([3, 16]))
        ]  # fmt: skip
        assert tokens == alone(model, ids, n=4)
        reused += warm.reused
        warm.end(keep=chance.random() < 0.9)
        cache.check_integrity()
        # the client gives less or all of the answer back
        log[:] = [*ids, *tokens[: chance.choice([0, 2, 3, 4])]]
        if len(log) > 120:
            log[:] = system
    assert reused > 200
