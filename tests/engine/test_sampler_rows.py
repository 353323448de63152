"""Rows that stay on a die are sampled as arrays are: the same tokens, for the same points, over every filter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pantheon import seams
from pantheon.engine.constraint import make_constraint
from pantheon.engine.constraint_thought import ThoughtBudget
from pantheon.engine.sampler import Sampler, SamplingParams
from pantheon.errors import PantheonError
from tests.engine.array_row import ArrayRow
from tests.engine.constrained import TOKENIZER, N

ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Only:
    """A constraint that allows some ids."""

    done = False

    def __init__(self, ids: list[int]) -> None:
        self.ids = sorted(set(ids))

    def mask(self, logits: NDArray[np.float32]) -> None:
        kept = logits[self.ids].copy()
        logits[:] = -np.inf
        logits[self.ids] = kept

    def allowed(self) -> NDArray[np.int32]:
        words = np.zeros(self.ids[-1] // 32 + 1, np.uint32)
        for token in self.ids:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32)

    def accept(self, token: int) -> None:
        """Nothing follows from it."""


def both(params: SamplingParams, n: int, ids: list[int] | None = None) -> tuple[Sampler, Sampler]:
    """Two samplers that should agree, and never share a constraint."""
    one, two = (Sampler(params, n, Only(ids) if ids else None) for _ in range(2))
    return one, two


def agree(params: SamplingParams, rows: NDArray[np.float32], ids: list[int] | None = None) -> list[int]:
    """The tokens of both for the rows, one after the other; asserts that they are the same, probabilities too."""
    here, there = both(params, rows.shape[1], ids)
    out = []
    for sampler in (here, there):
        sampler.prime([1, 2, 3, 2])
    for logits in rows:
        a, b = here.sample(logits), there.sample(ArrayRow(logits))
        assert a.token == b.token, params
        if a.logprob is not None and b.logprob is not None:
            assert b.logprob == pytest.approx(a.logprob, abs=1e-4)
            if not params.post_sampling:  # whose equals stand in the order of their rounding
                assert [t for t, _ in b.top] == [t for t, _ in a.top]
            assert [p for _, p in b.top] == pytest.approx([p for _, p in a.top], abs=1e-4)
        here.accept(a.token)
        there.accept(b.token)
        out.append(a.token)
    return out


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_same_tokens_as_over_arrays_M040(data: st.DataObject) -> None:
    """Any parameters, sharp and flat rows, ties, penalties and masks: token for token."""
    n = data.draw(st.sampled_from([7, 40, 300, 3000]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scale = data.draw(st.sampled_from([0.0, 0.01, 0.5, 3.0, 12.0]))
    rows = (rng.standard_normal((6, n)) * scale).astype(np.float32)
    if data.draw(st.booleans()):
        rows = np.round(rows * 4) / np.float32(4)
    rows[:, rng.random(n) < data.draw(st.sampled_from([0.0, 0.6]))] = -np.inf
    rows[:, 0] = 0.3
    ids = data.draw(st.none() | st.lists(st.integers(0, n - 1), min_size=1, max_size=n))
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 1e-30, 0.7, 1.0, 2.5])),
        top_k=data.draw(st.sampled_from([0, 1, 40, 200, 1200, 10_000])),
        top_p=data.draw(st.sampled_from([0.0, 0.437, 0.95, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.001, 0.1, 1.0])),
        repeat_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.87])),
        repeat_last_n=data.draw(st.sampled_from([-1, 3, 64])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.2])),
        logit_bias=data.draw(st.sampled_from([(), ((2, 1.5), (5, -100.0), (2, 1.0))])),
        seed=data.draw(st.integers(0, 2**32)),
        top_logprobs=data.draw(st.sampled_from([None, 0, 5])),
    )
    agree(params, rows, None if ids is None else [0, *ids])


@pytest.mark.parametrize("scale", [0.05, 1.0, 8.0])
@pytest.mark.parametrize(
    "options",
    [
        ALL,
        ALL | {"temperature": 0.6},
        ALL | {"min_p": 0.02},
        ALL | {"top_p": 0.9},
        ALL | {"top_p": 0.5, "min_p": 0.5},
        ALL | {"top_k": 2000},
        ALL | {"top_k": 2000, "top_p": 0.8},
        ALL | {"top_k": 2000, "min_p": 0.3, "temperature": 3.0},
    ],
)
def test_choices_too_wide_to_list(options: dict[str, Any], scale: float) -> None:
    """Thousands of candidates: they are summed where they lie, and the same one is found."""
    rows = (np.random.default_rng(3).standard_normal((40, 6000)) * scale).astype(np.float32)
    rows[20:] = np.round(rows[20:] * 8) / np.float32(8)
    agree(SamplingParams(seed=5, top_logprobs=3, post_sampling=True, **options), rows)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 128, "top_logprobs": 20}, {"top_k": 0}])
def test_the_usual_choice_asks_nothing_of_the_die(options: dict[str, Any]) -> None:
    """The best 128 and the sum of all are there with the row: no trip for each token."""
    logits = (np.random.default_rng(1).standard_normal(50_000) * 3).astype(np.float32)
    row = ArrayRow(logits)
    sampler = Sampler(SamplingParams(seed=1, **options), len(logits))
    for _ in range(20):
        sampler.sample(row)
    assert not +row.asked


def test_a_constraint_that_leaves_one_token_asks_nothing_of_the_die() -> None:
    """The closing tag of a thought, most of a call: and the points after it are those of the other path."""
    row = ArrayRow(np.arange(100, dtype=np.float32))
    here, there = both(SamplingParams(seed=1, top_logprobs=2, post_sampling=True), 100, [63])
    assert here.sample(np.arange(100, dtype=np.float32)) == there.sample(row) == (63, 0.0, ((63, 0.0),))
    assert not +row.asked
    here.constraint = there.constraint = None
    flat = np.zeros(100, np.float32)
    assert here.choose(flat) == there.choose(ArrayRow(flat))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"repeat_penalty": 1.2}, ALL])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_row_is_one_clear_error(options: dict[str, Any], value: float) -> None:
    logits = np.zeros(500, np.float32)
    logits[17] = value
    for ids in (None, [3, 4]):
        with pytest.raises(PantheonError, match=r"logit of (nan|inf)") as caught:
            Sampler(SamplingParams(**options), 500, Only(ids) if ids else None).choose(ArrayRow(logits))
        assert caught.value.code == "bad_logits"


def test_a_row_that_leaves_nothing_is_one_clear_error() -> None:
    with pytest.raises(PantheonError, match="no token is left"):
        Sampler(SamplingParams(), 9).choose(ArrayRow(np.full(9, -np.inf, np.float32)))
    with pytest.raises(ValueError, match="expected 8"):
        Sampler(SamplingParams(), 8).choose(ArrayRow(np.zeros(9, np.float32)))


def test_sampling_is_a_failure_point() -> None:
    seams.arm("sample@1")
    try:
        with pytest.raises(seams.InjectedFailure):
            Sampler(SamplingParams(), 3).choose(ArrayRow(np.zeros(3, np.float32)))
    finally:
        seams.arm("")


def test_what_a_wide_choice_was_drawn_with_adds_up() -> None:
    """Probabilities that are told of thousands of candidates: of the same scale as the draws."""
    logits = (np.random.default_rng(2).standard_normal(4000) * 0.01).astype(np.float32)
    sampler = Sampler(SamplingParams(seed=0, top_logprobs=4000, post_sampling=True, **ALL), 4000)
    token, own, top = sampler.sample(ArrayRow(logits))
    assert sum(math.exp(p) for _, p in top) == pytest.approx(1, rel=1e-5)
    assert own == pytest.approx(dict(top)[token])


@pytest.mark.parametrize("budget", [None, 0, 9])
@pytest.mark.parametrize("kind", ["json", "lazy"])
def test_grammars_allow_the_same_in_bits(kind: str, budget: int | None) -> None:
    """What `mask` forbids in an array `allowed` forbids on a die: answers are the same, token for token."""
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}]
    openings = {"type": "openings", "tools": tools, "syntax": "hermes"}
    spec: dict[str, Any] = {"type": "json_object"} if kind == "json" else openings
    samplers = []
    for _ in range(2):
        constraint = make_constraint(TOKENIZER, spec, opens_reasoning=budget is not None)
        if budget is not None:
            constraint = ThoughtBudget(
                budget, list(b"</think>"), lambda token: TOKENIZER.token_bytes(token, special=True),
                thought=(b"<think>", b"</think>"), opens_reasoning=True, inner=constraint,
            )  # fmt: skip
        samplers.append(Sampler(SamplingParams(seed=3, temperature=1.2), N, constraint))
        if kind == "lazy" and budget is None:
            for token in TOKENIZER.encode("x <tool_call>"):
                samplers[-1].accept(token)
    rng = np.random.default_rng(8)
    forbidden = 0
    for _ in range(60):
        logits = rng.standard_normal(N).astype(np.float32)
        a, b = samplers[0].choose(logits), samplers[1].choose(ArrayRow(logits))
        assert a == b
        forbidden += a != Sampler(SamplingParams(temperature=0), N).choose(logits)
        for sampler in samplers:
            sampler.accept(a)
        if samplers[0].constraint.done:  # type: ignore[union-attr]
            break
    assert forbidden > 2
