"""A plan over several dies: every layer once and in order, no die over its budget, nothing lost [M197, M226]."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pantheon.engine.footprint import Footprint, footprint
from pantheon.engine.load import load_model
from pantheon.engine.split import Layers, split
from tests.golden_data import model_path

LAYERS = Layers((30, 10, 10, 10, 10, 20), (0, 1, 1, 1, 1, 0))


def test_one_die_holds_everything() -> None:
    (share,) = split(LAYERS, 8, 40, [1000]) or ()
    assert (share.first, share.last, share.nbytes, share.token_bytes) == (0, 6, 90 + 8 + 40, 4)


def test_the_fullest_die_is_filled_least() -> None:
    shares = split(LAYERS, 4, 40, [100, 100])
    assert shares is not None
    # 30 + 2 layers of 20 | 2 layers of 20 + 20, and what every die needs
    assert [(s.first, s.last, s.nbytes) for s in shares] == [(0, 3, 74), (3, 6, 64)]
    uneven = split(LAYERS, 0, 40, [60, 200])
    assert uneven is not None and uneven[0].nbytes <= 60


def test_what_does_not_fit_is_said() -> None:
    assert split(LAYERS, 8, 40, [100]) is None
    assert split(LAYERS, 4, 40, [60, 60]) is None
    assert split(LAYERS, 0, 0, [1000] * 7) is None  # more dies than stages
    assert split(LAYERS, 50, 0, [1000, 10]) is None


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=24),
    st.integers(0, 40), st.integers(0, 300), st.lists(st.integers(1, 600), min_size=1, max_size=5),
)  # fmt: skip
def test_every_stage_once_and_no_die_over_its_budget(
    stages: list[tuple[int, int]], shared: int, kv: int, budgets: list[int]
) -> None:
    layers = Layers(tuple(w for w, _ in stages), tuple(k for _, k in stages))
    shares = split(layers, shared / len(budgets), kv, budgets)
    if shares is None:
        return
    assert [s.first for s in shares] == [0, *(s.last for s in shares[:-1])] and shares[-1].last == len(stages)
    assert all(share.nbytes <= budget for share, budget in zip(shares, budgets, strict=True))
    whole = sum(layers.weights) + shared + (kv if sum(layers.kv_token) else 0)
    assert whole - 1e-6 <= sum(s.nbytes for s in shares) <= whole + len(shares)


def test_a_file_s_head_says_what_the_loaded_model_takes_X16() -> None:
    path = model_path("tiny-llama-k.Q4_K_M")
    found = footprint(str(path), ctx=256, threads=1)
    with load_model(path, ctx=256, threads=1) as model:
        taken, state = model.memory(), model.new_state(1)
    assert found.parts == {"weights": taken["weights"], "scratch": taken["scratch"], "tables": taken["tables"],
                           "kv": state.nbytes()}  # fmt: skip
    assert found.layers is not None and sum(found.layers.weights) == found.parts["weights"]
    assert len(found.layers.weights) == len(model.plan.state.kv) + 2
    assert sum(found.layers.kv_token) == found.token_bytes


def test_a_script_takes_nothing() -> None:
    found = footprint("script:anything.json")
    assert found == Footprint() and found.total_bytes == 0 and found.need([10, 10]) == [0, 0]


def test_the_reference_executor_is_sized_by_the_file() -> None:
    found = footprint(str(model_path("tiny-llama.F32")), ctx=64, executor="reference")
    assert found.parts["weights"] > 0 and found.parts["kv"] == 64 * found.token_bytes


@pytest.mark.parametrize("count", [1, 2, 3])
def test_charges_add_up_however_many_dies(count: int) -> None:
    found = footprint(str(model_path("tiny-llama-k.Q4_K_M")), ctx=256, threads=1)
    need = found.need([1 << 30] * count)
    assert need is not None and found.total_bytes <= sum(need) <= found.total_bytes + count
