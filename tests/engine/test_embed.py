"""Hidden states and embeddings on the tiny golden models: the same on every executor, whatever is computed beside."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.accel.executor import Columns
from pantheon.engine.embed import embed, normalised
from pantheon.engine.scripted import scripted_model
from pantheon.errors import BadRequest, Cancelled
from pantheon.plan.buffers import Matrix
from tests.engine.tiny import tiny

STEM = "tiny-llama.F32"
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9]


@pytest.mark.parametrize("executor", ["reference", "cpu"])
def test_the_output_matrix_times_the_hidden_state_is_the_logits(executor: str) -> None:
    model = tiny(STEM, executor)
    oracle = tiny(STEM, "reference").runner
    matrix = next(value for value in vars(oracle.plan.head[-1]).values() if isinstance(value, Matrix))
    weight = oracle._matrix(matrix)  # type: ignore[attr-defined]
    columns = Columns.of_slot(IDS, 0, wanted="all")
    hidden = model.hidden(model.new_state(), columns)
    assert hidden.shape == (len(IDS), weight.shape[1])
    logits = model.forward(model.new_state(), columns)
    assert np.abs(hidden @ weight.T - logits).max() < 2e-3


def test_both_executors_see_the_same() -> None:
    columns = Columns.of_slot(IDS, 0, wanted="all")
    ours, oracle = (tiny(STEM, name).hidden(tiny(STEM, name).new_state(), columns) for name in ("cpu", "reference"))
    assert np.abs(ours - oracle).max() < 2e-3


@pytest.mark.parametrize("stem", [STEM, "tiny-llama.Q4_0"])
def test_a_hidden_state_does_not_depend_on_its_neighbours(stem: str) -> None:
    model = tiny(stem)
    alone = model.hidden(model.new_state(), Columns.of_slot(IDS, 0, wanted="all"))
    state, parts = model.new_state(), []
    for at in range(len(IDS)):
        parts.append(model.hidden(state, Columns.of_slot(IDS[at : at + 1], at, wanted="all")))
    assert np.array_equal(np.concatenate(parts), alone)
    both = model.new_state(2)
    n = len(IDS)
    columns = Columns(
        np.asarray(IDS[::-1] + IDS, np.int32), np.repeat(np.asarray([0, 1], np.int32), n),
        np.tile(np.arange(n, dtype=np.int32), 2), np.arange(n, 2 * n, dtype=np.int32),
    )  # fmt: skip
    assert np.array_equal(model.hidden(both, columns), alone)
    # and a forward for logits goes on undisturbed where one for hidden states ended
    more = Columns.of_slot([7], n)
    whole = model.new_state()
    expected = model.forward(whole, Columns.of_slot([*IDS, 7], 0))
    assert np.array_equal(model.forward(state, more), expected)


def test_pooling() -> None:
    model = tiny(STEM)
    rows = embed(model, model.new_state(), IDS, "none")
    assert rows.shape[0] == len(IDS)
    assert np.array_equal(embed(model, model.new_state(), IDS, "last"), rows[-1])
    assert np.allclose(embed(model, model.new_state(), IDS), rows.mean(axis=0), atol=1e-6)


def test_the_mean_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(STEM)
    whole = embed(model, model.new_state(), IDS * 3)
    monkeypatch.setattr("pantheon.engine.embed.PREFILL_CHUNK", 5)
    assert np.array_equal(embed(model, model.new_state(), IDS * 3), whole)


def test_a_slot_that_was_used_is_begun_anew() -> None:
    model = tiny(STEM)
    state = model.new_state()
    model.forward(state, Columns.of_slot([9] * 20, 0))
    assert np.array_equal(embed(model, state, IDS), embed(model, model.new_state(), IDS))


def test_what_can_not_be_embedded() -> None:
    model = scripted_model({"pieces": ["x"], "n_ctx": 4})
    state = model.new_state()
    with pytest.raises(BadRequest, match="empty"):
        embed(model, state, [])
    with pytest.raises(BadRequest, match="5 tokens do not fit"):
        embed(model, state, [1] * 5)
    with pytest.raises(Cancelled):
        embed(model, state, [1], cancelled=lambda: True)


def test_norms() -> None:
    vector = np.asarray([3, -4], np.float32)
    assert np.allclose(normalised(vector), [0.6, -0.8])
    assert np.allclose(normalised(vector, -1), vector)
    assert np.allclose(normalised(vector, 1), [3 / 7, -4 / 7])
    assert np.allclose(normalised(vector, 0), [3 * 8190, -32760])
    assert np.allclose(np.sum(np.abs(normalised(vector, 3)) ** 3), 1)
    assert np.array_equal(normalised(np.zeros(2, np.float32)), [0, 0])
