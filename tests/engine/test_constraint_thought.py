"""A thought that has had its tokens is closed, whatever the model would rather write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pantheon.engine.constraint_thought import ThoughtBudget

TAGS = (b"<think>", b"</think>")
N = 256


def budget(tokens: int, opens: bool = True, inner: Any = None) -> ThoughtBudget:
    return ThoughtBudget(
        tokens, b"</think>", lambda token: bytes([token]), thought=TAGS, opens_reasoning=opens, inner=inner
    )


def next_of(constraint: ThoughtBudget) -> int | None:
    """The one token that is left; None when all are."""
    logits = np.zeros(N, np.float32)
    constraint.mask(logits)
    left = np.flatnonzero(logits == 0)
    assert len(left) in (1, N)
    return int(left[0]) if len(left) == 1 else None


def say(constraint: ThoughtBudget, text: bytes) -> None:
    for token in text:
        assert next_of(constraint) is None
        constraint.accept(token)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_the_closing_tag_is_forced_when_the_tokens_are_spent(tokens: int) -> None:
    constraint = budget(tokens)
    say(constraint, b"hmmmmmm"[:tokens])
    for token in b"</think>":
        assert next_of(constraint) == token
        constraint.accept(token)
    say(constraint, b"the answer, and <think> is text now" * 3)


def test_a_thought_that_ends_by_itself_is_left_alone() -> None:
    constraint = budget(20)
    say(constraint, b"short</think>" + b"x" * 50)


def test_a_model_that_opens_its_thought_itself() -> None:
    constraint = budget(10, opens=False)
    say(constraint, b"\n<think>ab")
    assert next_of(constraint) == ord("<")
    plain = budget(3, opens=False)
    say(plain, b"no thought at all <think>")


def test_what_stands_inside_moves_on_too() -> None:
    class Inner:
        done = False
        seen = b""

        def mask(self, logits: Any) -> None:
            logits[ord("x")] = -np.inf

        def accept(self, token: int) -> None:
            self.seen += bytes([token])

    inner = Inner()
    constraint = budget(1, inner=inner)
    logits = np.zeros(N, np.float32)
    constraint.mask(logits)
    assert logits[ord("x")] == -np.inf and not constraint.done
    for token in b"a</think>{":
        constraint.accept(token)
    assert inner.seen == b"a</think>{"
    inner.done = True
    assert constraint.done
