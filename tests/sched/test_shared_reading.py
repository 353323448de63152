"""Prompts that begin alike and are read at the same time: each chunk is read once [X12]."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pantheon.engine.prefix_cache import PrefixCache
from pantheon.errors import Cancelled
from pantheon.sched.handle import Handle
from pantheon.sched.scheduler import SchedConfig, Scheduler
from tests.engine.tiny import tiny
from tests.sched.echo_model import alone
from tests.sched.test_scheduler import GREEDY, MODES, PATIENCE_S, bench

SYSTEM = [i * 7 % 200 for i in range(120)]


@MODES
def test_equal_prompts_that_start_together_are_read_once_X12(mixed: bool) -> None:
    users, chunk = 5, 8
    prompts = [[*SYSTEM, 200 + user, user] for user in range(users)]
    with bench(users, mixed=mixed, chunk=chunk) as b:
        begun = threading.Barrier(users + 1)
        first = threading.Event()

        def hold(columns: Any) -> None:
            first.wait(PATIENCE_S)

        b.runner.before = hold
        answers: list[list[int]] = [[] for _ in prompts]
        reused = [0] * users

        def user(i: int) -> None:
            with b.scheduler.enter() as place:
                begun.wait(PATIENCE_S)
                handle = place.begin(prompts[i], GREEDY, max_tokens=6, ignore_eog=True)
                answers[i] = [token.id for token in handle]
                reused[i] = handle.reused

        threads = [threading.Thread(target=user, args=(i,)) for i in range(users)]
        for thread in threads:
            thread.start()
        begun.wait(PATIENCE_S)
        # all but the one who is in the forward stand in line for their turn
        b.until(lambda: b.runner.at_once == 1)
        first.set()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert answers == [alone(b.model, ids, n=6) for ids in prompts]
        totals = b.scheduler.view()["totals"]
        everything = sum(map(len, prompts))
        assert totals["prompt_columns"] + totals["cached_tokens"] == everything
        assert totals["cached_tokens"] == sum(reused)
        # the common part once, a chunk of it twice where two ride in one forward, and what is everyone's own
        assert totals["prompt_columns"] <= len(SYSTEM) + users * (2 + chunk)


@MODES
def test_one_who_leaves_in_the_middle_takes_nothing_along(mixed: bool) -> None:
    """Rows that were copied stay when the one who read them is cancelled."""
    with bench(2, mixed=mixed, chunk=8) as b, b.scheduler.enter() as one, b.scheduler.enter() as two:
        handles: list[Handle] = []
        forwards = 0

        def before(columns: Any) -> None:
            nonlocal forwards
            forwards += 1
            if forwards == 6:
                handles[0].cancel()

        b.runner.before = before
        handles.append(one.begin([*SYSTEM, 1], GREEDY, max_tokens=4, ignore_eog=True))
        leaver = threading.Thread(target=_all, args=(handles[0],))
        leaver.start()
        stayer = two.begin([*SYSTEM, 2], GREEDY, max_tokens=4, ignore_eog=True)
        assert [token.id for token in stayer] == alone(b.model, [*SYSTEM, 2], n=4)
        leaver.join(PATIENCE_S)
        assert not leaver.is_alive()


def _all(handle: Handle) -> None:
    with pytest.raises(Cancelled):
        list(handle)


@MODES
def test_rows_that_can_not_be_copied_end_that_prompt_and_nobody_else_X12_B29(mixed: bool) -> None:
    with bench(3, mixed=mixed, chunk=8) as b:
        cache, go = b.scheduler._shared.cache, threading.Event()
        asked = [[*SYSTEM, 1], [*SYSTEM, 2], [5, 4, 3]]
        answers: list[Any] = [None] * 3
        assert cache is not None

        def no(*rows: int) -> None:
            raise OSError("no memory")

        cache._copy = no
        b.runner.before = lambda columns: go.wait(PATIENCE_S)

        def user(i: int) -> None:
            try:
                answers[i] = b.answer(asked[i], 6)
            except OSError as fault:
                answers[i] = fault

        threads = [threading.Thread(target=user, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        b.until(lambda: b.scheduler.load().active == 3 and b.runner.at_once == 1)
        go.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        failed = [i for i, answer in enumerate(answers) if isinstance(answer, OSError)]
        assert len(failed) == 1 and failed[0] < 2, answers
        assert all(answers[i] == alone(b.model, asked[i], n=6) for i in {0, 1, 2} - set(failed))


def test_rows_that_came_in_pieces_from_others_are_the_same_rows_B30() -> None:
    """On a real model: two agents read one system prompt by turns, and answer as they would alone."""
    model = tiny("tiny-llama-k.Q4_K_M", "cpu", 256)
    system = [i * 31 % model.n_vocab for i in range(150)]
    asked = [[*system, 5, 6], [*system, 9], [*system, 5, 6]]
    state = model.new_state(3)
    scheduler = Scheduler(model, state, PrefixCache(state, users=3), SchedConfig(users=3, chunk=16))
    try:
        answers: list[list[int]] = [[] for _ in asked]

        def user(i: int) -> None:
            place, handle = scheduler.submit(asked[i], GREEDY, max_tokens=8, ignore_eog=True)
            with place:
                answers[i] = [token.id for token in handle]

        threads = [threading.Thread(target=user, args=(i,)) for i in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        cached = scheduler.view()["totals"]["cached_tokens"]
    finally:
        scheduler.close()
    assert cached > len(system)
    for ids, answer in zip(asked, answers, strict=True):
        lonely = model.generate(ids, max_tokens=8, ignore_eog=True, temperature=0)
        assert answer == [piece.id for piece in lonely]
