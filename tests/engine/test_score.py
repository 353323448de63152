"""Log-probabilities of a text, against the goldens' own numbers."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.engine.score import score
from pantheon.errors import BadRequest, Cancelled
from tests.engine.tiny import tiny

STEM = "tiny-llama.F32"
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35] * 5


def test_each_token_after_those_before_it() -> None:
    model = tiny(STEM)
    logits = model.logits(IDS).astype(np.float64)
    norm = np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)) + logits.max(axis=1)
    found = list(score(model, model.new_state(), IDS, 2))
    assert len(found) == len(IDS) - 1
    for at, (value, top) in enumerate(found):
        assert value == pytest.approx(logits[at, IDS[at + 1]] - norm[at], abs=1e-4)
        best = int(logits[at].argmax())
        assert top[0][0] == best and top[0][1] == pytest.approx(logits[at, best] - norm[at], abs=1e-4)


def test_one_token_says_nothing_and_too_many_are_refused() -> None:
    model = tiny(STEM)
    assert list(score(model, model.new_state(), [3])) == []
    with pytest.raises(BadRequest):
        list(score(model, model.runner.new_state(1, 8), IDS))
    with pytest.raises(Cancelled):
        list(score(model, model.new_state(), IDS, cancelled=lambda: True))
