"""Decode steps on this machine's GPU: captured ones give the bits of launched ones, and weights stream [M080, M221].

The numbers themselves are those of tests/accel/cuda, which `make test-cuda` runs on the device as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pantheon.accel.executor import Columns
from pantheon.engine.load import load_model
from pantheon.engine.model import Model
from tests.golden_data import model_path
from tools.bench_cuda import SHAPES, write_random

ROOT = Path(__file__).resolve().parents[2]
#: of the copying speed, that decoding reaches at one stream
GOAL = 0.6


def steps(model: Model, graphs: bool) -> np.ndarray:
    """Logits of ten steps of two conversations side by side."""
    state = model.new_state(2)
    for one in state._graphs:  # type: ignore[attr-defined]
        one._off = not graphs
    slots = np.arange(2, dtype=np.int32)
    rows = [
        model.forward(state, Columns(slots + 5 + i, slots, np.full(2, i, np.int32), slots)).copy() for i in range(10)
    ]
    assert any(one._ready for one in state._graphs) == graphs  # type: ignore[attr-defined]
    return np.stack(rows)


@pytest.mark.parametrize("stem", ["tiny-llama.Q4_0", "tiny-qwen35.Q8_0", "tiny-mixtral.Q4_0"])
def test_a_captured_step_gives_the_bits_of_a_launched_one(stem: str) -> None:
    with load_model(model_path(stem), ctx=64, executor="cuda") as model:
        assert np.array_equal(steps(model, graphs=True), steps(model, graphs=False))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_decoding_reaches_its_part_of_the_copying_speed(type_name: str, tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", SHAPES["8B"], type_name)
    words = ["bench", str(path), "--executor", "cuda", "-p", "0", "-n", "64", "-r", "3", "--json"]
    done = subprocess.run([sys.executable, "-m", "pantheon", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert result["roof"]["fraction"] >= GOAL
