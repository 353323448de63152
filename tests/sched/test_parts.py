"""The parts that decide: slot table, ring, turnstile, compaction, gate [M087-M091, M093-M096, M105, M109, X08, X10]."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pantheon.mem.mem_state import Level
from pantheon.sched.compaction import Decode, Prompt, compose, cut
from pantheon.sched.overflow import LATER, Gate, Overflow, Promises, Verdict, arrive, eta_s, retry_after_s
from pantheon.sched.ring import Ring
from pantheon.sched.slot import MOVES, Actor, IllegalMove, Phase, Slot
from pantheon.sched.turnstile import Turnstile
from tests.fakes import FakeClock


def test_the_life_of_a_slot_M087() -> None:
    slot = Slot(0)
    life = [
        (Phase.PREFILL, Actor.OWNER),
        (Phase.BOUND, Actor.OWNER),
        (Phase.DECODE, Actor.DRIVER),
        (Phase.IDLE, Actor.OWNER),
    ]
    for to, who in life:
        slot.move(to, who)
    assert slot.phase is Phase.IDLE


@pytest.mark.parametrize(("start", "to", "who"), list(itertools.product(Phase, Phase, Actor)))
def test_any_other_move_is_refused_M087(start: Phase, to: Phase, who: Actor) -> None:
    slot = Slot(3, start)
    if who in MOVES.get((start, to), ()):
        slot.move(to, who)
        assert slot.phase is to
    else:
        with pytest.raises(IllegalMove, match=f"slot 3: {who.value} may not"):
            slot.move(to, who)
        assert slot.phase is start


def test_the_driver_never_returns_a_slot_M088() -> None:
    assert all(who == {Actor.OWNER} for (_, to), who in MOVES.items() if to is Phase.IDLE)


def test_a_ring_takes_the_whole_budget_unread_and_no_more_M109() -> None:
    ring: Ring[int] = Ring(3)
    for i in range(3):
        ring.push(i)
    with pytest.raises(RuntimeError, match="budget"):
        ring.push(3)
    assert [ring.pop() for _ in range(4)] == [0, 1, 2, None]
    with pytest.raises(RuntimeError, match="budget"):
        ring.push(4)  # reading does not make the budget larger
    ring.check_integrity()


def test_turns_are_taken_in_the_order_of_asking_M089() -> None:
    """Ten threads, each queued before the next one asks; then a late one, which can not barge."""
    mu = threading.Lock()
    turnstile = Turnstile(mu)
    order: list[int] = []

    def take(i: int) -> None:
        with turnstile.turn():
            assert turnstile.mine
            order.append(i)

    threads = [threading.Thread(target=take, args=(i,)) for i in range(10)]
    with turnstile.turn():
        for i, thread in enumerate(threads):
            thread.start()
            while True:
                with mu:
                    if turnstile.next_ticket == i + 2:
                        break
        with mu:
            assert turnstile.waiting == 10
            turnstile.check_integrity()
    take(99)
    for thread in threads:
        thread.join()
    assert order == [*range(10), 99]


def test_the_holder_of_the_turn_does_not_ask_for_it_again_M091() -> None:
    turnstile = Turnstile(threading.Lock())
    with turnstile.turn(), pytest.raises(AssertionError, match="waits for nothing"), turnstile.turn():
        pass
    with turnstile.turn() as ticket:
        assert ticket == 1


def test_an_interrupted_waiter_does_not_stop_those_behind_it() -> None:
    mu = threading.Lock()
    turnstile = Turnstile(mu)

    class Interrupt(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    def wait_in_vain() -> None:
        with pytest.raises(KeyboardInterrupt), turnstile.turn():
            pass

    plain = turnstile._cv
    with turnstile.turn():
        turnstile._cv = Interrupt(mu)
        waiter = threading.Thread(target=wait_in_vain)
        waiter.start()
        waiter.join()
        turnstile._cv = plain
        with mu:
            assert turnstile.waiting == 0
    with turnstile.turn() as ticket:
        assert ticket == 2


def test_active_slots_are_packed_in_front_M105() -> None:
    """Two of eight slots decode: two columns."""
    step = compose([Decode(6, 11, 40), Decode(2, 12, 7)], [], 128, 256)
    assert step is not None and step.landing == (6, 2)
    assert step.columns.slots.tolist() == [6, 2] and step.columns.tokens.tolist() == [11, 12]
    assert step.columns.positions.tolist() == [40, 7] and step.columns.wanted.tolist() == [0, 1]


def test_nothing_to_do_is_no_step() -> None:
    assert compose([], [], 128, 256) is None
    assert compose([], [Prompt(0, [1, 2], 2)], 128, 256) is None


def test_a_prompt_rides_behind_the_decoders() -> None:
    step = compose([Decode(0, 9, 5)], [Prompt(1, [1, 2, 3, 4, 5], 1), Prompt(2, [6, 7], 0)], 5, 256)
    assert step is not None
    assert step.columns.slots.tolist() == [0, 1, 1, 1, 1, 2] and step.columns.positions.tolist() == [5, 1, 2, 3, 4, 0]
    assert step.columns.tokens.tolist() == [9, 2, 3, 4, 5, 6]
    assert step.landing == (0, 1) and step.columns.wanted.tolist() == [0, 4]
    assert [part.last for part in step.parts] == [True, False]


def test_a_prompt_stops_where_its_state_is_remembered_and_the_next_one_has_the_rest() -> None:
    """X12: of recurrent states."""
    ids = list(range(20))
    parts = [cut([Prompt(0, ids, done, (7, 19)), Prompt(1, ids, 0)], 10) for done in (0, 7, 17, 19)]
    assert [[(part.first, part.end, part.last) for part in both] for both in parts] == [
        [(0, 7, False), (0, 3, False)], [(7, 17, False)],
        [(17, 19, False), (0, 8, False)], [(19, 20, True), (0, 9, False)],
    ]  # fmt: skip


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_token_of_every_prompt_is_read_once_and_in_order_M106_M113(data: st.DataObject) -> None:
    chunk, most = data.draw(st.integers(1, 9)), data.draw(st.integers(8, 16))
    sizes = data.draw(st.lists(st.integers(1, 30), max_size=6))
    decodes = [Decode(10 + i, i, i) for i in range(data.draw(st.integers(0, 7)))]
    prompts = [Prompt(i, list(range(100 * i, 100 * i + n)), 0) for i, n in enumerate(sizes)]
    finished: list[int] = []
    while len(finished) < len(sizes):
        step = compose(decodes, prompts, chunk, most)
        assert step is not None and step.decodes == tuple(d.slot for d in decodes)
        assert len(decodes) < len(step.columns.tokens) <= min(most, len(decodes) + chunk)
        assert len(step.columns.wanted) == len(step.landing)
        for row, slot in zip(step.columns.wanted, step.landing, strict=True):
            assert step.columns.slots[row] == slot
        for part in step.parts:
            prompt = next(p for p in prompts if p.slot == part.slot)
            assert part.first == prompt.done and part.last == (part.end == len(prompt.ids))
            mine = step.columns.slots == part.slot
            assert step.columns.tokens[mine].tolist() == prompt.ids[part.first : part.end]
            assert step.columns.positions[mine].tolist() == list(range(part.first, part.end))
            prompts[prompts.index(prompt)] = prompt._replace(done=part.end)
            finished += [part.slot] * part.last
    assert sorted(finished) == list(range(len(sizes)))


@pytest.mark.parametrize(
    ("gate", "verdict"),
    [
        (Gate(1, 0, 32, Level.OK), Verdict.ENTER),
        (Gate(1, 0, 32, Level.TIGHT), Verdict.ENTER),
        (Gate(1, 0, 32, Level.CRITICAL), Verdict.WAIT),
        (Gate(1, 1, 32, Level.OK), Verdict.WAIT),
        (Gate(0, 31, 32, Level.OK), Verdict.WAIT),
        (Gate(0, 32, 32, Level.OK), Verdict.QUEUE_FULL),
        (Gate(0, 32, 32, Level.TIGHT), Verdict.QUEUE_FULL),
        (Gate(0, 32, 32, Level.CRITICAL), Verdict.MEMORY_CRITICAL),
        (Gate(1, 0, 0, Level.CRITICAL), Verdict.MEMORY_CRITICAL),
        (Gate(0, 0, 0, Level.OK), Verdict.QUEUE_FULL),
        (Gate(-3, 0, 32, Level.OK), Verdict.WAIT),
        (Gate(8, 0, 32, Level.OK, closing=True), Verdict.SHUTTING_DOWN),
    ],
)
def test_the_gate_M093_M096_M102_K01(gate: Gate, verdict: Verdict) -> None:
    """CRITICAL holds and sheds, TIGHT alone never does."""
    assert arrive(gate) is verdict


def test_retry_after_is_position_times_service_time_X08() -> None:
    """Two places, held for 1 and 3 s, of 4 s as a rule: free after 1, 3, 5, 7 s …; one that is overdue is free soon."""
    assert [eta_s(k, [1.0, 3.0], 4.0) for k in range(5)] == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert [eta_s(k, [9.0], 4.0) for k in range(3)] == [1.0, 5.0, 9.0]
    assert [retry_after_s(s) for s in (0.0, 0.2, 3.1, 59.5, 600.0)] == [1, 1, 4, 60, 60]


def test_those_who_are_sent_away_do_not_all_come_back_at_once_X08() -> None:
    promises = Promises()
    each: Any = lambda k: 1.0 + 0.5 * k  # noqa: E731
    assert [promises.next_due_s(100.0, each) / LATER for _ in range(4)] == [1.0, 1.5, 2.0, 2.5]
    assert promises.next_due_s(101.5, each) / LATER == 2.5, "one has come back, three have not"
    assert promises.next_due_s(200.0, each) / LATER == 1.0, "old promises do not count"
    assert max(promises.next_due_s(200.0, lambda k: 10.0 * k) for _ in range(20)) == 60.0


def test_a_storm_of_refusals_costs_no_more_than_a_few_X08() -> None:
    """Each is decided under the mutex that the driver needs: neither the k-th place nor the k-th refusal may take k
    times as long."""
    promises, asked = Promises(), list[int]()

    def eta(k: int) -> float:
        asked.append(k)
        return eta_s(k, [0.0] * 8, 4.0)

    assert promises.next_due_s(0.0, eta) < 60.0
    assert [promises.next_due_s(0.0, eta) for _ in range(2000)][-1] == 60.0
    assert max(asked) < 8 * 60 / 4, "those who were told the most are not counted"


@given(st.integers(0, 40), st.lists(st.floats(0, 20), min_size=1, max_size=9), st.floats(0.01, 10))
def test_the_kth_place_is_that_of_places_given_back_one_after_the_other_X08(
    k: int, ages: list[float], service: float
) -> None:
    free = [max(service - age, service / 4) for age in ages]
    for _ in range(k):
        free[free.index(min(free))] += service
    assert eta_s(k, ages, service) == pytest.approx(min(free))


def test_who_is_let_in_between_two_looks_is_not_told_that_it_waits_X11(fake_clock: FakeClock) -> None:
    gate = Overflow(threading.Lock(), fake_clock, places=1, depth=1, wait_s=30.0, grace_s=2.0)
    inside, waiter = gate.arrive(), gate.arrive()
    told: list[int] = []

    def cancelled() -> bool:
        gate.leave(inside)
        return False

    gate.wait(waiter, cancelled, lambda position, left_s: told.append(position))
    assert waiter.inside and not told
