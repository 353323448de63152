"""States of another KV format than the model was loaded with: rung 4a of the ladder [M207, X14, X15]."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.accel.executor import Columns
from pantheon.engine.footprint import footprint
from pantheon.engine.load import load_model
from pantheon.engine.model import Model
from pantheon.plan.state_spec import KVType
from tests.engine.tiny import tiny
from tests.golden_data import model_path

STEM = "tiny-llama.Q8_0"
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def last_row(model: Model, kv_type: KVType | None) -> np.ndarray:
    state = model.new_state(2, kv_type)
    model.forward(state, Columns.of_slot(IDS[:9], 0, slot=1, wanted="none"))
    return model.forward(state, Columns.of_slot(IDS[9:], 9, slot=1))[0]


def test_x15_a_state_of_the_smaller_format_computes_what_a_model_loaded_with_it_does() -> None:
    model = tiny(STEM)
    assert model.kv_types == (KVType.F16, KVType.F32, KVType.Q8_0, KVType.Q4_0)
    with load_model(model_path(STEM), ctx=1024, kv_type="q8_0") as loaded:
        assert np.array_equal(last_row(model, KVType.Q8_0), last_row(loaded, None))
    assert not np.array_equal(last_row(model, KVType.Q8_0), last_row(model, None))
    assert np.array_equal(last_row(model, None), last_row(model, KVType.F16))


def test_x14_the_smaller_format_is_smaller() -> None:
    model = tiny(STEM)
    sizes = [model.new_state(1, kind).nbytes() for kind in (KVType.F32, KVType.F16, KVType.Q8_0, KVType.Q4_0)]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3]


def test_states_of_both_formats_may_alternate() -> None:
    """The one that was there before the pressure goes on as it began."""
    model = tiny(STEM)
    states = {kind: model.new_state(1, kind) for kind in (KVType.F16, KVType.Q8_0)}
    rows: dict[KVType, list[np.ndarray]] = {kind: [] for kind in states}
    for at, token in enumerate(IDS):
        for kind, state in states.items():
            rows[kind].append(model.forward(state, Columns.of_slot([token], at))[0])
    for kind, found in rows.items():
        alone = model.new_state(1, kind)
        for at, token in enumerate(IDS):
            assert np.array_equal(model.forward(alone, Columns.of_slot([token], at))[0], found[at])


def test_a_closed_model_has_no_variant_either() -> None:
    model = load_model(model_path(STEM), ctx=64)
    state = model.new_state(1, KVType.Q8_0)
    model.forward(state, Columns.of_slot([1], 0))
    runner = model.runner
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.forward(state, Columns.of_slot([1], 1))


def test_a_model_without_variants_offers_its_own_format_only() -> None:
    assert tiny(STEM, "reference").kv_types == (KVType.F32,)


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_both_executors_round_alike(kv_type: str) -> None:
    """Up to the weights' int8 activations: with float32 weights only the order of additions differs."""
    stem = "tiny-llama.F32"
    rows = [tiny(stem, executor).logits(IDS) for executor in ("cpu", "reference")]
    found = []
    for executor in ("cpu", "reference"):
        with load_model(model_path(stem), ctx=64, kv_type=kv_type, executor=executor) as model:
            found.append(model.logits(IDS))
    assert np.abs(rows[0] - rows[1]).max() < 1e-3
    # a value on the edge between two codes may fall to either side
    assert np.abs(found[0] - found[1]).mean() < 0.1 * np.abs(found[1] - rows[1]).mean()
    assert np.abs(found[1] - rows[1]).max() > 1e-3


def test_k21_one_flag_is_what_loads_and_plans_count_with(monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_path(STEM)
    plain = footprint(str(path), ctx=256).parts["kv"]
    monkeypatch.setenv("QWEN35_KV_Q4", "1")
    with load_model(path, ctx=256) as model:
        assert model.runner.kv_type is KVType.Q4_0
        assert footprint(str(path), ctx=256).parts["kv"] == model.new_state(1).nbytes() <= plain / 3
    with load_model(path, ctx=256, kv_type="f16") as model:
        assert model.runner.kv_type is KVType.F16
