"""Which replica: warmth against waiting, fewest requests, least recent use; what marks tell apart [M064, X01, X03]."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pantheon.serve.placement import HOP_S, Candidate, choose, marks_of_chat, marks_of_text, remaining_s


def test_fewest_requests_then_least_recently_used_M064_X03() -> None:
    assert choose([Candidate(0, 2, 1), Candidate(1, 1, 9), Candidate(2, 1, 5)]) == (2, 0.0)
    assert choose([Candidate(1, 0, 0), Candidate(0, 0, 0)]) == (0, 0.0)


def test_the_warm_one_when_it_is_free_X01() -> None:
    assert choose([Candidate(0, 0, 1), Candidate(1, 0, 9, saved_s=0.1, own=True)]) == (1, 0.0)


def test_a_little_saving_of_somebody_else_s_prefix_binds_nobody_X03() -> None:
    assert choose([Candidate(0, 0, 1), Candidate(1, 0, 9, saved_s=0.1)]) == (0, 0.0)
    assert choose([Candidate(0, 0, 1), Candidate(1, 0, 9, saved_s=3.0)]) == (1, 0.0)


def test_the_busy_warm_one_is_waited_for_as_long_as_reading_anew_takes_X01() -> None:
    cold = Candidate(0, 0, 1)
    assert choose([cold, Candidate(1, 1, 9, wait_s=3, saved_s=4, own=True)]) == (1, 4)
    assert choose([cold, Candidate(1, 1, 9, wait_s=5, saved_s=4, own=True)]) == (0, 0)
    assert choose([cold, Candidate(1, 1, 9, wait_s=HOP_S / 2, saved_s=0.01, own=True)]) == (1, HOP_S)
    # where it would have to wait as well, nothing is won by going there
    busy = Candidate(0, 1, 1, wait_s=3)
    assert choose([busy, Candidate(1, 1, 9, wait_s=5, saved_s=4, own=True)]) == (1, 7)


def test_one_s_own_conversation_before_a_longer_prefix_of_others() -> None:
    assert choose([Candidate(0, 0, 1, saved_s=9), Candidate(1, 0, 9, saved_s=1, own=True)]).place == 1


def test_the_only_one_waits_for_nobody_M049() -> None:
    assert choose([Candidate(3, 2, 1, wait_s=0.1, saved_s=100, own=True)]) == (3, 0.0)


seconds = st.floats(0, 50)
candidates = st.builds(
    Candidate, st.integers(0, 15), st.integers(0, 4), st.integers(0, 99), seconds, seconds, st.booleans()
)


@given(st.lists(candidates, min_size=1, max_size=6, unique_by=lambda c: c.index))
def test_a_choice_is_one_of_them_and_patience_is_never_worth_more_than_it_saves(found: list[Candidate]) -> None:
    choice = choose(found)
    mine = next(c for c in found if c.index == choice.place)
    assert choice.patience_s <= max(c.wait_s for c in found) + max(mine.saved_s, HOP_S)
    if choice.patience_s:
        assert mine.refs and mine.wait_s <= choice.patience_s
    elif not mine.saved_s:
        assert mine.refs == min(c.refs for c in found)


def test_when_an_entry_should_be_free() -> None:
    assert remaining_s(0, 5, 2) == 0
    assert remaining_s(1, 0.5, 2) == 1.5
    assert remaining_s(3, 0.5, 2) == 5.5
    assert remaining_s(1, 8, 2) == 2  # longer than usual: who knows


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


def test_a_conversation_begins_with_its_earlier_request() -> None:
    first = marks_of_chat([USER], ({"name": "tool"},))
    second = marks_of_chat([USER, ANSWER, USER], ({"name": "tool"},))
    assert second[:1] == first and [size for _, size in second] == sorted(size for _, size in second)


@pytest.mark.parametrize(
    "other",
    [
        ([USER], ()),
        ([{"role": "user", "content": "ho"}], ({"name": "tool"},)),
        ([{"role": "system", "content": "hi"}], ({"name": "tool"},)),
        ([ANSWER, USER], ({"name": "tool"},)),
    ],
)
def test_other_messages_or_tools_are_another_conversation(other: Any) -> None:
    messages, tools = other
    assert marks_of_chat(messages, tools)[0][0] != marks_of_chat([USER], ({"name": "tool"},))[0][0]


def test_order_of_keys_and_nulls_change_nothing() -> None:
    turned = {"content": "hi", "role": "user", "name": None}
    assert [mark for mark, _ in marks_of_chat([turned])] == [mark for mark, _ in marks_of_chat([USER])]


def test_texts_and_ids_are_marked_by_blocks() -> None:
    text = "x" * 2000
    assert marks_of_text(text + "yyyy")[:3] == marks_of_text(text)[:3] != marks_of_text("y" + text)[:3]
    assert marks_of_text([1, 2, 3]) == marks_of_text("1 2 3") and marks_of_text("") == ()
    assert len(marks_of_text("z" * 10_000_000)) == 1024
    assert marks_of_chat([{"content": "\ud800", "odd": object}])
