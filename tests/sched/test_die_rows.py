"""A runner whose rows stay on the die: generate and the scheduler sample the same answers as from arrays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pantheon.accel.executor import Columns
from pantheon.engine.generate import Token, generate
from pantheon.engine.model import Model
from pantheon.engine.sampler import SamplingParams
from pantheon.sched.scheduler import SchedConfig, Scheduler
from tests.engine.array_row import ArrayRow
from tests.engine.tiny import tiny

PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, repeat_penalty=1.2, presence_penalty=0.3, top_k=0),
    SamplingParams(seed=3, top_k=0, top_p=1.0, min_p=0.0, temperature=2.0, top_logprobs=2),
)


class DieRunner:
    """A runner of the CPU's whose rows are handed out as a die does: not as arrays."""

    def __init__(self, runner: Any, n_vocab: int) -> None:
        self._runner, self.n_tokens = runner, n_vocab

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward_rows(self, state: Any, columns: Columns) -> list[ArrayRow]:
        rows = self._runner.forward(state, columns).copy()
        rows[:, self.n_tokens :] = -np.inf
        return [ArrayRow(row) for row in rows]


def on_die(model: Model) -> Model:
    runner: Any = DieRunner(model.runner, model.n_vocab)
    return Model(
        name="die", path=None, architecture=model.architecture, plan=model.plan, runner=runner,
        tokenizer=model.tokenizer, template=model.template, n_ctx=model.n_ctx,
    )  # fmt: skip


def alone(model: Model, who: int) -> list[Token]:
    prompt = [(7 * who + 3 * i) % 200 for i in range(20)]
    return list(generate(model, model.new_state(), prompt, PARAMS[who], max_tokens=12, ignore_eog=True))


def test_answers_from_rows_on_a_die_are_those_from_arrays() -> None:
    here = tiny("tiny-llama-k.Q4_K_M", "cpu", 512)
    there = on_die(here)
    wanted = [alone(here, who) for who in range(len(PARAMS))]
    for who, tokens in enumerate(wanted):
        mine = alone(there, who)
        assert [t.id for t in mine] == [t.id for t in tokens]
        for a, b in zip(mine, tokens, strict=True):
            assert (a.logprob is None) == (b.logprob is None)
            assert a.logprob is None or a.logprob == pytest.approx(b.logprob, abs=1e-4)
    scheduler = Scheduler(there, there.new_state(4), None, SchedConfig(users=4, chunk=8))

    def turn(who: int) -> list[int]:
        prompt = [(7 * who + 3 * i) % 200 for i in range(20)]
        place, handle = scheduler.submit(prompt, PARAMS[who], max_tokens=12, ignore_eog=True)
        with place:
            return [token.id for token in handle]

    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(turn, range(4))) == [[t.id for t in tokens] for tokens in wanted]
    finally:
        scheduler.close()


def test_ids_that_are_no_tokens_are_told_to_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some files pad the output matrix: such an id has no text."""
    here = tiny("tiny-llama-k.Q4_K_M", "cpu", 512)
    best = alone(here, 0)[0].id
    monkeypatch.setattr(here.tokenizer, "n_vocab", best)
    model = on_die(here)
    assert model.runner.n_tokens == best  # type: ignore[attr-defined]
    assert all(t.id < best for t in alone(model, 1))
