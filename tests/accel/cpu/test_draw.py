"""The kernel that draws a token against its NumPy twin: the sampler without it.  [M040]"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pantheon.accel.cpu import drawing, kernels
from pantheon.engine.sampler import Sampler, SamplingParams
from pantheon.errors import PantheonError


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    kernels.prepare([drawing.KEY])


def both(params: SamplingParams, rows: list[NDArray[np.float32]]) -> tuple[list[int], list[int]]:
    """The tokens of the kernel and of the twin."""
    made = [Sampler(params, len(rows[0]), None, new_draw) for new_draw in (drawing.new_draw, None)]
    kernel, twin = ([s.sample(row).token for row in rows for _ in range(4)] for s in made)
    return kernel, twin


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_kernel_chooses_as_the_sampler_does(data: st.DataObject) -> None:
    """Any size (also not a multiple of 64), ties, forbidden ids and parameters: the same ids from the same seed."""
    n = data.draw(st.sampled_from([1, 15, 63, 64, 65, 200, 1000, 4099]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    distinct = data.draw(st.sampled_from([1, 2, 20, 10**6]))
    rows = []
    for _ in range(3):
        row = (rng.integers(0, distinct, n) / distinct * 12).astype(np.float32)
        row[rng.random(n) < data.draw(st.sampled_from([0.0, 0.5, 0.98]))] = -np.inf
        row[rng.integers(n)] = 1.0
        rows.append(row)
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([1e-320, 0.01, 0.7, 1.0, 1.3, 1e30])),
        top_k=data.draw(st.sampled_from([1, 2, 40, 128])),
        top_p=data.draw(st.sampled_from([0.0, 0.3, 0.95, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        seed=data.draw(st.integers(0, 2**32)),
    )
    kernel, twin = both(params, rows)
    assert kernel == twin


def test_of_ties_the_lower_ids_are_kept() -> None:
    rows = [np.zeros(1000, np.float32)]
    kernel, twin = both(SamplingParams(top_k=3, top_p=1.0, min_p=0.0, seed=1), rows * 50)
    assert kernel == twin and set(kernel) == {0, 1, 2}


def test_the_best_ids_are_found_in_any_order() -> None:
    """A row that rises is the most work, one that falls the least."""
    for row in (np.arange(5000), -np.arange(5000), np.arange(5000) % 777):
        kernel, twin = both(SamplingParams(top_k=128, top_p=1.0, min_p=0.0, temperature=1e6, seed=2), [row.astype("f4")] * 40)  # noqa: E501
        assert kernel == twin and len(set(kernel)) > 50


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 517, 999])
def test_a_broken_row_is_refused(value: float, place: int) -> None:
    row = np.zeros(1000, np.float32)
    row[place] = value
    draw = drawing.new_draw(40, 0.95, 0.1, 1.0)
    assert draw is not None and draw(row, 0.5) == -1
    with pytest.raises(PantheonError) as caught:
        Sampler(SamplingParams(), 1000, None, drawing.new_draw).sample(row)
    assert caught.value.code == "bad_logits"


def test_a_row_with_nothing_to_choose_from_is_refused() -> None:
    draw = drawing.new_draw(40, 0.95, 0.1, 1.0)
    assert draw is not None and draw(np.full(100, -np.inf, np.float32), 0.5) == -1


def test_what_the_kernel_can_not_do_is_left_to_the_sampler() -> None:
    assert drawing.new_draw(0, 0.9, 0.0, 1.0) is None, "top_k off"
    assert drawing.new_draw(drawing.MAX_TOP_K + 1, 0.9, 0.0, 1.0) is None
    assert drawing.new_draw(40, 0.9, 0.0, 0.0) is None, "greedy"
    draw = drawing.new_draw(40, 0.9, 0.0, 1.0)
    assert draw is not None
    with pytest.raises(ValueError, match="contiguous"):
        draw(np.zeros(100, np.float32)[::2], 0.5)
