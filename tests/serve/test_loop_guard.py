"""The loop guard: exact cycles only, and only for answers without a cap."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pantheon.engine.sampler import SamplingParams
from pantheon.engine.scripted import scripted_model
from pantheon.serve.chat_job import Job
from pantheon.serve.generation import Generation, Result
from pantheon.serve.loop_guard import TURNS, is_loop


@pytest.mark.parametrize(
    ("ids", "span", "loops"),
    [
        ([7] * 16, 16, True),
        ([1, 2, 3] * 6, 16, True),
        ([9, 9, 5, *[1, 2] * 8], 16, True),
        ([1, 2, 3] * 5, 16, False),
        ([*[1, 2] * 8, 3], 16, False),
        (list(range(16)), 16, False),
        ([1, 2, 3, 4, 5, 6] * 3, 16, False),
        ([1] * 3, 3, False),
        ([], 0, False),
    ],
)
def test_what_is_a_loop(ids: list[int], span: int, loops: bool) -> None:
    assert is_loop(ids, span) is loops


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 2), max_size=60), st.integers(4, 24))
def test_against_the_definition(ids: list[int], span: int) -> None:
    tail = ids[-span:]
    cycles = [p for p in range(1, span // TURNS + 1) if all(a == b for a, b in zip(tail, tail[p:], strict=False))]
    assert is_loop(ids, span) is (len(ids) >= span and bool(cycles))


def answer(**job: Any) -> tuple[str, Result]:
    model = scripted_model({"pieces": ["once "], "eog": False, "filler": "la "})
    prompt = model.tokenize("hi")
    full = {"prompt_ids": prompt, "params": SamplingParams(temperature=0), "limit": 5000, **job}
    run = Generation(model, model.new_state(), Job(**full), loop_guard=64)
    text = "".join(delta.text for step in run for delta in step.deltas)
    assert run.result is not None
    return text, run.result


def test_a_looping_answer_ends_whole_and_says_length() -> None:
    text, result = answer()
    assert result.finish_reason == "length" and result.looped
    assert text == "once " + "la " * 95 and result.completion_tokens == 96


def test_an_answer_that_ends_before_is_left_alone() -> None:
    text, result = answer(limit=40)
    assert (result.finish_reason, result.looped, result.completion_tokens) == ("length", False, 40)
    assert text == "once " + "la " * 39
