"""Models for engine tests: the tiny goldens, loaded once per process."""

from __future__ import annotations

from functools import lru_cache

from pantheon.engine.load import load_model
from pantheon.engine.model import Model
from tests.golden_data import SMOLLM2_STEM, model_path, smollm2_path


@lru_cache(maxsize=8)
def tiny(stem: str, executor: str = "cpu", ctx: int = 1024) -> Model:
    """A golden model.  Shared: do not close it."""
    path = smollm2_path() if stem == SMOLLM2_STEM else model_path(stem)
    assert path is not None
    return load_model(path, ctx=ctx, executor=executor)
