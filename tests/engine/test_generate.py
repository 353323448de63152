"""The generate loop: stop conditions, cancellation, determinism, a clean slot for the next request."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from pantheon import seams
from pantheon.engine.generate import Token, generate
from pantheon.engine.sampler import SamplingParams
from pantheon.errors import BadRequest, Cancelled
from tests.engine.tiny import tiny

GREEDY = SamplingParams(temperature=0)
IDS = [5, 17, 40, 8, 99, 3]


def model() -> Any:
    return tiny("tiny-llama.F32", "reference")


def run(prompt: list[int] = IDS, params: SamplingParams = GREEDY, state: Any = None, **options: Any) -> list[Token]:
    options.setdefault("ignore_eog", True)
    n = options.pop("n", 8)
    return list(generate(model(), state or model().new_state(), prompt, params, max_tokens=n, **options))


def after(calls: int) -> Callable[[], bool]:
    """False `calls` times, then True."""
    counter = itertools.count()
    return lambda: next(counter) >= calls


def test_greedy_follows_the_logits() -> None:
    ids = list(IDS)
    for token in run(n=5):
        assert token.id == int(model().logits(ids)[-1].argmax())
        ids.append(token.id)


def test_budget_and_counting() -> None:
    tokens = run(n=4)
    assert [t.n for t in tokens] == [1, 2, 3, 4]
    assert [t.is_last for t in tokens] == [False, False, False, True]


def test_end_of_generation_token_is_yielded_and_last() -> None:
    eog = min(model().tokenizer.eog_ids)
    forced = SamplingParams(temperature=0, logit_bias=((eog, 100.0),))
    tokens = run(params=forced, ignore_eog=False)
    assert [(t.id, t.is_eog, t.is_last) for t in tokens] == [(eog, True, True)]
    assert len(run(params=forced, ignore_eog=True)) == 8


def test_generation_ends_when_the_context_is_full() -> None:
    """B26c: n_ctx - 1 prompt tokens leave room for one."""
    state = model().runner.new_state(1, 10)
    assert len(run(state=state, n=100)) == 4
    assert len(run([1] * 9, state=state, n=100)) == 1


@pytest.mark.parametrize("n", [10, 11, 500])
def test_a_prompt_without_room_is_refused_with_both_numbers(n: int) -> None:
    """B26a, B26b, M051."""
    with pytest.raises(BadRequest) as refused:
        run([1] * n, state=model().runner.new_state(1, 10))
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.extra == {"n_prompt_tokens": n, "n_ctx": 10}
    assert "10 tokens" in refused.value.message and f"{n} tokens" in refused.value.message


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BadRequest, match="empty"):
        run([])


@pytest.mark.parametrize("chunk", [1, 2, 5, 6, 100])
def test_chunking_does_not_change_the_answer(chunk: int) -> None:
    """M113, M114."""
    assert [t.id for t in run(chunk=chunk)] == [t.id for t in run()]


def test_prefill_progress_counts_up_to_the_prompt() -> None:
    seen: list[tuple[int, int]] = []
    run(chunk=4, on_prefill=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 6), (4, 6), (6, 6)]


def test_cancel_in_prefill_stops_before_the_next_chunk() -> None:
    """M253, B24c."""
    seen: list[int] = []
    with pytest.raises(Cancelled, match="reading the prompt"):
        run(chunk=2, cancelled=after(2), on_prefill=lambda done, total: seen.append(done))
    assert seen == [0, 2, 4]


def test_cancel_in_decode_stops_within_one_step() -> None:
    """M252, B24a: one prefill check, then one per step."""
    made: list[Token] = []
    with pytest.raises(Cancelled, match="decoding"):
        for token in generate(
            model(), model().new_state(), IDS, GREEDY, max_tokens=50, cancelled=after(4), ignore_eog=True
        ):  # fmt: skip
            made.append(token)
    assert len(made) == 4


def test_a_cancelled_request_leaves_no_trace_in_the_next() -> None:
    """M076."""
    state = model().new_state()
    with pytest.raises(Cancelled):
        run([7] * 30, state=state, n=50, cancelled=after(6))
    assert [t.id for t in run(state=state)] == [t.id for t in run()]


def test_a_seed_fixes_the_answer_and_no_seed_does_not() -> None:
    """B11f."""
    hot = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    seeded = [[t.id for t in run(params=SamplingParams(seed=3, **hot), n=12)] for _ in range(2)]
    free = [[t.id for t in run(params=SamplingParams(**hot), n=12)] for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert free[0] != free[1]


def test_rows_beyond_the_vocabulary_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some files pad the output matrix: such an id has no text."""
    best = run(n=1)[0].id
    monkeypatch.setattr(model().tokenizer, "n_vocab", best)
    assert all(t.id < best for t in run(n=8, params=SamplingParams(temperature=1.5, seed=1)))


def test_injected_failure_ends_the_loop_and_spares_the_next() -> None:
    """B23: raise at the fifth forward; the same prompt again is right."""
    expected = [t.id for t in run()]
    state = model().new_state()
    seams.arm("forward@5")
    try:
        with pytest.raises(seams.InjectedFailure):
            run(state=state)
    finally:
        seams.arm("")
    assert [t.id for t in run(state=state)] == expected
