"""What the tests of the server share."""

from __future__ import annotations

import pytest

from pantheon.engine.load import load_model
from tests.golden_data import model_path


@pytest.fixture(scope="session")
def kernels() -> None:
    """Compile what a load of a tiny model needs, for which no client would wait on a cold machine."""
    load_model(model_path("tiny-llama.Q4_0"), ctx=32, threads=1).close()
