"""The scheduler with its driver thread: joiners, stops, cancels, faults, slow readers, the queue, the end.

Every answer is held against the single-user loop's, token for token.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from pantheon import seams
from pantheon.engine.prefix_cache import PrefixCache
from pantheon.engine.sampler import SamplingParams
from pantheon.errors import BadRequest, Busy, Cancelled, PantheonError, Unavailable
from pantheon.mem.mem_state import Level
from pantheon.sched.scheduler import SchedConfig, Scheduler
from tests.fakes import FakeClock
from tests.sched.echo_model import GREEDY, EchoRunner, alone, echo_model

PATIENCE_S = 20.0
MODES = pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "turns"])


class Bench:
    """A scheduler over the echo model, and what its runner saw."""

    def __init__(self, scheduler: Scheduler, model: Any, state: Any) -> None:
        self.scheduler, self.model, self.state = scheduler, model, state
        self.runner: EchoRunner = model.runner

    def answer(self, ids: list[int], n: int = 8, params: SamplingParams = GREEDY, **options: Any) -> list[int]:
        options.setdefault("ignore_eog", True)
        place, handle = self.scheduler.submit(ids, params, max_tokens=n, **options)
        with place:
            return [token.id for token in handle]

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that other threads bring about."""
        ticks = threading.Event()
        for _ in range(int(PATIENCE_S / 0.002)):
            if condition():
                return
            ticks.wait(0.002)
        raise AssertionError(f"not so after {PATIENCE_S:.0f} s: {self.scheduler.view()}")


@contextmanager
def bench(
    users: int = 4, *, slots: int | None = None, clock: Any = seams.SYSTEM_CLOCK, **config: Any
) -> Iterator[Bench]:
    model = echo_model()
    state = model.new_state(slots or users)
    cache = PrefixCache(state, users=users)
    scheduler = Scheduler(model, state, cache, SchedConfig(users=users, **config), clock)
    try:
        yield Bench(scheduler, model, state)
        scheduler.check_integrity()
        assert all(slot["state"] == "idle" for slot in scheduler.view()["slots"]), "a leaked slot"
        assert scheduler.load().active == 0, "a leaked place"
        assert model.runner.most_at_once <= 1, "two forwards at once"
    finally:
        scheduler.close()


def prompts(n: int, seed: int = 1, size: int = 40) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(200) for _ in range(chance.randrange(1, size))] for _ in range(n)]


@MODES
def test_joiners_get_their_solo_answers_M107_M074(mixed: bool) -> None:
    """Eight at once, all new, and sixteen more behind them."""
    with bench(8, mixed=mixed, chunk=6) as b, ThreadPoolExecutor(24) as pool:
        asked = prompts(24)
        for ids, answer in zip(asked, pool.map(lambda ids: b.answer(ids, 1 + len(ids) % 9), asked), strict=True):
            assert answer == alone(b.model, ids, n=1 + len(ids) % 9)
        totals = b.scheduler.view()["totals"]
        assert totals["runs"] == 24 and totals["wasted_tokens"] == 0 and totals["faults"] == 0
        assert totals["tokens"] == sum(1 + len(ids) % 9 for ids in asked)


@MODES
def test_a_seed_gives_the_same_answer_whatever_the_neighbours_M040_M108(mixed: bool) -> None:
    params = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=5, repeat_penalty=1.3, top_logprobs=1)
    with bench(8, mixed=mixed) as b, ThreadPoolExecutor(8) as pool:
        ids = [3, 1, 4, 1, 5]
        expected = alone(b.model, ids, params)
        for _ in range(2):
            mine = [pool.submit(b.answer, ids, 8, params) for _ in range(4)]
            others = [pool.submit(b.answer, other) for other in prompts(4)]
            assert all(job.result() == expected for job in mine)
            assert [job.result() for job in others] == [alone(b.model, other) for other in prompts(4)]


def test_the_end_token_and_the_constraint_end_an_answer_like_the_loop_does() -> None:
    with bench() as b:
        eog = min(b.model.tokenizer.eog_ids)
        forced = SamplingParams(temperature=0, logit_bias=((eog, 100.0),))
        place, handle = b.scheduler.submit([1, 2], forced, max_tokens=9)
        with place:
            tokens = list(handle)
        assert [(t.id, t.is_eog, t.is_last) for t in tokens] == [(eog, True, True)]


@MODES
def test_decoders_go_on_while_a_long_prompt_is_read_M113(mixed: bool) -> None:
    """At most one chunk lies between two columns of a decoder."""
    with bench(2, mixed=mixed, chunk=8) as b, ThreadPoolExecutor(1) as pool:
        bound = False

        def hold(columns: Any) -> None:
            """A forward takes longer than the other side needs to ask for its next turn, once there is another side."""
            nonlocal bound
            bound = bound or b.scheduler.view()["slots"][1]["state"] in ("bound", "decode")
            joins = (columns.slots == 1).any()
            if not bound and (not mixed if joins else len(b.runner.seen) > 2):
                b.until(lambda: b.scheduler.view()["turnstile"]["waiting"] > 0)

        b.runner.before = hold
        place, handle = b.scheduler.submit([1, 2], GREEDY, max_tokens=150, ignore_eog=True)
        with place:
            tokens = iter(handle)
            next(tokens)
            joiner = pool.submit(b.answer, list(range(100)), 3)
            assert len(list(tokens)) == 149
            assert joiner.result() == alone(b.model, list(range(100)), n=3)
        chunks = [i for i, c in enumerate(b.runner.seen) if (c.slots == 1).sum() > 1]
        assert len(chunks) == 13
        waits, gap = [], 0
        for columns in b.runner.seen[chunks[0] : chunks[-1] + 1]:
            gap = 0 if (columns.slots == 0).any() else gap + 1
            waits.append(gap)
        assert max(waits) <= (0 if mixed else 1)


def test_a_short_prompt_is_not_held_up_by_a_long_one_M113() -> None:
    with bench(2, chunk=4) as b, ThreadPoolExecutor(2) as pool:
        began, go = threading.Event(), threading.Event()

        def hold(columns: Any) -> None:
            began.set()
            assert go.wait(PATIENCE_S)

        b.runner.before = hold
        long = pool.submit(b.answer, [7] * 120, 1)
        assert began.wait(PATIENCE_S)
        short = pool.submit(b.answer, [8] * 3, 1)
        b.until(lambda: b.scheduler.view()["turnstile"]["waiting"] == 1)
        go.set()
        assert (len(long.result()), len(short.result())) == (1, 1)
        first = next(i for i, c in enumerate(b.runner.seen) if (c.tokens == 8).any())
        assert first <= 2, "the short prompt waits for one chunk of the long one"


def test_a_stalled_reader_stops_nobody_M109() -> None:
    with bench(2) as b:
        stalled, handle = b.scheduler.submit([1, 2, 3], GREEDY, max_tokens=50, ignore_eog=True)
        with stalled:
            assert b.answer([4, 5, 6], 60) == alone(b.model, [4, 5, 6], n=60)
            b.until(lambda: any(slot.get("made_tokens") == 50 for slot in b.scheduler.view()["slots"]))
            assert b.answer([7, 8], 5) == alone(b.model, [7, 8], n=5)
            assert [t.id for t in handle] == alone(b.model, [1, 2, 3], n=50), "all of it was kept for the reader"


@pytest.mark.parametrize("stop_at", [1, 4, 10])
def test_an_answer_that_its_owner_ends_wastes_two_tokens_at_most_X06(stop_at: int) -> None:
    """The owner sees the stop string with token `stop_at`, however slowly it reads."""
    with bench(2) as b:
        place, handle = b.scheduler.submit([1, 2, 3], GREEDY, max_tokens=150, ignore_eog=True, lookahead=2)
        with place:
            for token in handle:
                assert b.answer([9], 30) == alone(b.model, [9], n=30)  # the driver had time for much more
                if token.n == stop_at:
                    break
            place.end()
            totals = b.scheduler.view()["totals"]
            assert totals["wasted_tokens"] <= 2
        columns = sum(int((c.slots == 0).sum()) for c in b.runner.seen)
        assert columns <= 3 + stop_at + 2


def test_lockstep_gives_the_same_answers_M112() -> None:
    with bench(3, lockstep=True) as b, ThreadPoolExecutor(3) as pool:
        asked = prompts(3)
        assert list(pool.map(b.answer, asked)) == [alone(b.model, ids) for ids in asked]


@MODES
def test_what_a_slot_holds_is_reused_and_counted_M128_M130(mixed: bool) -> None:
    with bench(2, slots=4, mixed=mixed) as b:
        ids = list(range(30))
        answer = b.answer(ids, 5, session="s")
        b.answer([99] * 20, 5)
        more = [*ids, *answer, 1, 2]
        with b.scheduler.enter() as place:
            handle = place.begin(more, GREEDY, max_tokens=5, ignore_eog=True, session="s")
            # the last token was never run: it has no row
            assert handle.reused == len(ids) + 4
            assert [t.id for t in handle] == alone(b.model, more, n=5)
        assert b.scheduler.view()["totals"]["cached_tokens"] == len(ids) + 4


def test_a_running_neighbours_prompt_is_copied_X12() -> None:
    """Two agents with one system prompt: the second reads its own words only."""
    system = list(range(60))
    with bench(2) as b:
        first, handle = b.scheduler.submit([*system, 100], GREEDY, max_tokens=40, ignore_eog=True)
        with first, b.scheduler.enter() as second:
            tokens = iter(handle)
            made = [next(tokens).id]
            other = second.begin([*system, 101], GREEDY, max_tokens=9, ignore_eog=True)
            assert other.reused == len(system)
            assert [t.id for t in other] == alone(b.model, [*system, 101], n=9)
            made += [t.id for t in tokens]
            assert made == alone(b.model, [*system, 100], n=40)


def test_two_turns_of_one_session_at_once() -> None:
    with bench(2) as b:
        first, handle = b.scheduler.submit([1, 2, 3], GREEDY, max_tokens=30, ignore_eog=True, session="s")
        with first:
            assert b.answer([1, 2, 3, 4], 5, session="s") == alone(b.model, [1, 2, 3, 4], n=5)
            b.scheduler.check_integrity()
            assert [t.id for t in handle] == alone(b.model, [1, 2, 3], n=30)


# ---- cancels ---------------------------------------------------------------------------------------------------------


@MODES
def test_cancel_while_the_prompt_is_read_M253_X23(mixed: bool) -> None:
    done: list[int] = []
    with bench(2, mixed=mixed, chunk=4) as b:

        def hold(columns: Any) -> None:
            if columns.positions[0] == 12:
                b.until(lambda: b.scheduler.view()["totals"]["cancelled"] == 1)

        b.runner.before = hold
        with pytest.raises(Cancelled, match="reading the prompt"):
            b.answer([7] * 100, cancelled=lambda: bool(done) and done[-1] >= 8, on_prefill=lambda n, _: done.append(n))
        assert done[0] == 0 and done[-1] in (8, 12)
        b.runner.before = lambda columns: None
        assert b.answer([7] * 50) == alone(b.model, [7] * 50)
        assert b.scheduler.view()["totals"]["cancelled"] == 1


@MODES
def test_cancel_while_decoding_leaves_no_trace_M076_M252(mixed: bool) -> None:
    with bench(1, mixed=mixed) as b:
        seen: list[int] = []
        place, handle = b.scheduler.submit(
            [1, 2], GREEDY, max_tokens=190, ignore_eog=True, lookahead=1, cancelled=lambda: len(seen) >= 5
        )
        with place, pytest.raises(Cancelled, match="decoding"):
            for token in handle:
                seen.append(token.id)
        assert len(seen) == 5
        assert b.answer([3, 4]) == alone(b.model, [3, 4])


def test_a_cancel_from_another_thread_ends_a_wait_for_tokens_X23() -> None:
    with bench(1) as b, ThreadPoolExecutor(1) as pool:
        began, go = threading.Event(), threading.Event()

        def hold(columns: Any) -> None:
            began.set()
            assert go.wait(PATIENCE_S)

        b.runner.before = hold
        place, handle = b.scheduler.submit([1, 2], GREEDY, max_tokens=9, ignore_eog=True)
        with place:
            reader = pool.submit(list, handle)
            assert began.wait(PATIENCE_S)
            handle.cancel()
            go.set()
            with pytest.raises(Cancelled):
                reader.result()
        assert len(b.runner.seen) == 1, "it is in no step that begins after the cancel"


def test_cancel_in_the_queue_M253_X23() -> None:
    with bench(1) as b, b.scheduler.enter(), pytest.raises(Cancelled, match="waiting"):
        waited: list[int] = []
        try:
            b.answer([1], cancelled=lambda: len(waited) >= 2, on_wait=lambda position, eta: waited.append(position))
        finally:
            assert waited == [1, 1] and b.scheduler.load().queued == 0


# ---- faults ----------------------------------------------------------------------------------------------------------


@MODES
def test_a_forward_that_fails_ends_those_in_it_and_nobody_else(mixed: bool) -> None:
    with bench(2, mixed=mixed) as b:
        b.runner.fail = RuntimeError("a kernel")
        with pytest.raises(RuntimeError, match="a kernel"):
            b.answer([1, 2, 3])
        assert b.answer([1, 2, 3]) == alone(b.model, [1, 2, 3])
        assert b.scheduler.view()["totals"]["faults"] == 1


def test_a_sampler_that_fails_ends_its_own_answer_only() -> None:
    class Bad:
        done = False

        def mask(self, logits: Any) -> None:
            raise PantheonError("no token", code="no_token_left")

        def accept(self, token: int) -> None: ...

    with bench(2) as b:
        other, handle = b.scheduler.submit([1, 2], GREEDY, max_tokens=40, ignore_eog=True)
        with other:
            with pytest.raises(PantheonError, match="no token"):
                b.answer([3], constraint=Bad())
            assert [t.id for t in handle] == alone(b.model, [1, 2], n=40)


def test_a_bind_that_fails_gives_the_slot_back_X17() -> None:
    with bench(1) as b:
        seams.arm("bind")
        with pytest.raises(seams.InjectedFailure):
            b.answer([1, 2])
        seams.arm("")
        assert b.answer([1, 2]) == alone(b.model, [1, 2])


def test_a_turn_that_memory_refuses_runs_no_forward_M201() -> None:
    def refuse(reused: int) -> None:
        raise Unavailable(f"no memory, {reused} reused")

    with bench(1) as b:
        b.answer([1, 2, 3], 1)
        forwards = len(b.runner.seen)
        with b.scheduler.enter() as place:
            with pytest.raises(Unavailable, match="2 reused"):
                place.begin([1, 2, 3], GREEDY, max_tokens=3, admit=refuse)
            assert len(b.runner.seen) == forwards
            handle = place.begin([1, 2, 3], GREEDY, max_tokens=3, ignore_eog=True, admit=lambda reused: None)
            assert handle.reused == 2 and len(list(handle)) == 3


@pytest.mark.parametrize(("ids", "n"), [([], 5), ([1] * 200, 5), ([1], 0)])
def test_what_can_be_refused_is_refused_before_a_slot_is_taken_M051(ids: list[int], n: int) -> None:
    with bench(1) as b, b.scheduler.enter() as place:
        with pytest.raises(BadRequest):
            place.begin(ids, GREEDY, max_tokens=n)
        assert b.scheduler.view()["slots"] == [{"id": 0, "state": "idle"}]


def test_users_need_slots() -> None:
    model = echo_model()
    with pytest.raises(ValueError, match="3 users"):
        Scheduler(model, model.new_state(2), None, SchedConfig(users=3))


def test_without_a_cache_everything_is_read_M132() -> None:
    model = echo_model()
    scheduler = Scheduler(model, model.new_state(2), None, SchedConfig(users=2))
    try:
        b = Bench(scheduler, model, None)
        for _ in range(2):
            assert b.answer([1, 2, 3]) == alone(model, [1, 2, 3])
        assert scheduler.view()["totals"]["cached_tokens"] == 0
    finally:
        scheduler.close()


def test_another_state_is_taken_when_nobody_sits_in_the_old_one_M216() -> None:
    with bench(2) as b:
        state = b.model.new_state(2)
        cache = PrefixCache(state, users=2)
        place, handle = b.scheduler.submit([1, 2], GREEDY, max_tokens=5, ignore_eog=True)
        with place:
            assert not b.scheduler.rehouse(state, cache)
            list(handle)
        assert b.scheduler.rehouse(state, cache)
        assert b.answer([1, 2]) == alone(b.model, [1, 2])
        assert cache.tokens() == 9


# ---- the queue -------------------------------------------------------------------------------------------------------


def codes(fault: pytest.ExceptionInfo[Any]) -> tuple[int, str | None]:
    assert 1 <= fault.value.retry_after <= 60 and "queue_depth" in fault.value.extra
    return fault.value.status, fault.value.code


def test_ninth_waits_forty_first_is_refused_M085_M099() -> None:
    with bench(8) as b:
        places = [b.scheduler.enter() for _ in range(40)]
        assert [place.inside for place in places] == [True] * 8 + [False] * 32
        assert places[8].outlook()[0] == 1 and places[39].outlook()[0] == 32
        with pytest.raises(Busy) as refused:
            b.scheduler.enter()
        assert codes(refused) == (429, "queue_full")
        for place in places:
            place.leave()


def test_a_hundred_waiters_enter_in_the_order_of_arrival_X29() -> None:
    with bench(1, queue_depth=100) as b:
        places = [b.scheduler.enter() for _ in range(101)]
        for i, place in enumerate(places):
            b.scheduler.check_integrity()
            assert place.inside and not any(later.inside for later in places[i + 1 :])
            place.leave()


def test_a_newcomer_does_not_barge_X29() -> None:
    with bench(1) as b:
        first, second = b.scheduler.enter(), b.scheduler.enter()
        first.leave()
        third = b.scheduler.enter()
        assert second.inside and not third.inside
        for place in (second, third):
            place.leave()


def test_a_waiter_gets_in_when_a_slot_is_free_M092_M101() -> None:
    with bench(1) as b, ThreadPoolExecutor(1) as pool:
        first = b.scheduler.enter()
        job = pool.submit(b.answer, [1, 2, 3])
        b.until(lambda: b.scheduler.load().queued == 1)
        first.leave()
        assert job.result() == alone(b.model, [1, 2, 3])


def test_a_wait_that_is_too_long_ends_with_429_M097_X10(fake_clock: FakeClock) -> None:
    with bench(1, clock=fake_clock, wait_s=30.0) as b, ThreadPoolExecutor(1) as pool:
        first = b.scheduler.enter()
        job = pool.submit(b.answer, [1])
        b.until(lambda: b.scheduler.load().queued == 1)
        fake_clock.advance(29.9)
        assert b.scheduler.load().queued == 1
        fake_clock.advance(0.2)
        with pytest.raises(Busy) as refused:
            job.result()
        assert codes(refused) == (429, "queue_timeout") and b.scheduler.load().queued == 0
        first.leave()


def test_critical_holds_then_sheds_M102_K03(fake_clock: FakeClock) -> None:
    """A free slot does not help at CRITICAL: waiters stay for the grace, then hear 503; a lower level lets them in."""
    with bench(2, clock=fake_clock, grace_s=2.0) as b:
        place = b.scheduler.enter(Level.CRITICAL)
        assert not place.inside
        fake_clock.advance(1.9)
        assert not place.inside
        b.scheduler.notify_pressure(Level.TIGHT)
        assert place.inside
        b.scheduler.notify_pressure(Level.CRITICAL)
        late = b.scheduler.enter()
        assert place.inside, "who is inside stays"
        fake_clock.advance(2.0)
        with pytest.raises(Unavailable) as refused:
            _ = late.inside
        assert codes(refused) == (503, "memory_critical")
        place.leave()


def test_a_full_queue_at_critical_is_503_M096() -> None:
    with bench(1, queue_depth=0) as b:
        with pytest.raises(Unavailable) as refused:
            b.scheduler.enter(Level.CRITICAL)
        assert codes(refused) == (503, "memory_critical")
        b.scheduler.enter(Level.OK).leave()


def test_fewer_places_under_pressure_and_all_again_after_it_X17_M220() -> None:
    with bench(4) as b:
        inside = [b.scheduler.enter() for _ in range(4)]
        b.scheduler.set_ceiling(2)
        waiting = [b.scheduler.enter() for _ in range(3)]
        for place in inside[:2]:
            place.leave()
        assert not waiting[0].inside, "two are still inside"
        inside[2].leave()
        assert waiting[0].inside and not waiting[1].inside
        b.scheduler.set_ceiling(8)
        assert all(place.inside for place in waiting) and b.scheduler.load().slots == 4
        for place in [*inside, *waiting]:
            place.leave()


def test_the_end_M098() -> None:
    """Waiters and newcomers hear 503 at once, an owner that waits for tokens too."""
    model = echo_model()
    scheduler = Scheduler(model, model.new_state(1), None, SchedConfig(users=1))
    b = Bench(scheduler, model, None)
    with ThreadPoolExecutor(2) as pool:
        place = scheduler.enter()
        handle = place.begin([1, 2], GREEDY, max_tokens=150, ignore_eog=True, lookahead=1)
        waiter = pool.submit(b.answer, [3])
        b.until(lambda: scheduler.load().queued == 1)
        scheduler.close()
        scheduler.close()
        for refused in (waiter.result, scheduler.enter, lambda: list(handle)):
            with pytest.raises(Unavailable) as fault:
                refused()  # type: ignore[operator]
            assert fault.value.code == "shutting_down"
        with pytest.raises(Unavailable):
            place.begin([1], GREEDY, max_tokens=1)
        place.leave()
        scheduler.check_integrity()


@pytest.mark.parametrize("seed", range(6))
def test_clients_that_obey_retry_after_get_in_X08(seed: int) -> None:
    """40 clients, 8 slots, a queue of 8: of those who are refused at first, 80 % succeed with their first retry."""
    clock = FakeClock()
    model = echo_model()
    scheduler = Scheduler(
        model, model.new_state(8), None, SchedConfig(users=8, queue_depth=8), clock, start=False
    )  # fmt: skip
    chance = random.Random(seed)
    for _ in range(16):  # what is known from before
        with scheduler.enter():
            clock.advance(chance.uniform(2, 6))
    due: list[tuple[float, int]] = [(clock.monotonic() + i * 0.01, 0) for i in range(40)]
    waiting: list[tuple[Any, int]] = []
    running: list[tuple[float, Any]] = []
    by_tries: dict[int, int] = {}
    while due or waiting or running:
        now = clock.monotonic()
        for end, place in [r for r in running if r[0] <= now]:
            running.remove((end, place))
            place.leave()
        for at, tries in sorted(d for d in due if d[0] <= now):
            due.remove((at, tries))
            try:
                waiting.append((scheduler.enter(), tries))
            except Busy as busy:
                assert busy.retry_after is not None
                due.append((now + busy.retry_after, tries + 1))
        for place, tries in [w for w in waiting if w[0].inside]:
            waiting.remove((place, tries))
            by_tries[tries] = by_tries.get(tries, 0) + 1
            running.append((now + chance.uniform(2, 6), place))
        clock.advance(0.05)
    refused = 40 - by_tries.get(0, 0)
    assert refused >= 20 and by_tries[1] >= 0.8 * refused, by_tries
    scheduler.close()
