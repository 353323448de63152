"""`make bench-cuda`: its random models load and run, and its table says what was measured."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pantheon.engine.load import load_model
from tools import bench_cuda
from tools.bench_cuda import SCALES, SHAPES, Line

RESULT = {"test": "tg128", "runs": [90.0, 100.0, 110.0], "roof": {"bytes_per_token": 7_500_000_000, "fraction": 0.625}}
PROMPT = {"test": "pp512", "runs": [4000.0], "roof": None}


def arguments(*words: str) -> argparse.Namespace:
    return bench_cuda.parser().parse_args(words)


@pytest.mark.parametrize("type_name", SCALES)
def test_a_random_model_computes_numbers(type_name: str, tmp_path: Path) -> None:
    """Of a shape of a real one but for its size; logits are finite and differ."""
    shape = replace(SHAPES["1B"], layers=1, width=256, heads=8, kv_heads=2, ff=512)
    path = bench_cuda.write_random(tmp_path / "m.gguf", shape, type_name)
    with load_model(path, ctx=64, executor="reference") as model:
        logits = model.logits([5, 6, 7])
    assert np.isfinite(logits).all() and 0.01 < logits.std() < 100


def test_a_line_has_what_was_measured_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def told(*words: str) -> Any:
        asked.append(words)
        return {"model": "m", "results": [PROMPT, RESULT]}

    monkeypatch.setattr(bench_cuda, "told", told)
    monkeypatch.setattr(bench_cuda, "has_llama_cpp", lambda: False)
    lines = bench_cuda.measure([Path("m.gguf")], arguments("m.gguf", "--streams", "1,8", "-r", "3"))
    assert asked == [("bench", "m.gguf", "--executor", "cuda", *"-p 512 -n 128 --batch 1,8 -r 3 --json".split())]
    assert [line.cells() for line in lines] == [
        ("m", "pp512, tokens/s", "4000 (4000–4000)", "", "", "", ""),
        ("m", "tg128, tokens/s", "100 (90–110)", "7500", "62 %", "", ""),
    ]
    assert "no llama.cpp built for CUDA" in bench_cuda.table(lines, ["NVIDIA A100"])

    monkeypatch.setattr(bench_cuda, "has_llama_cpp", lambda: True)
    monkeypatch.setattr(bench_cuda, "theirs", lambda path, tests, reps: {tests[1].name: (50.0,)})
    beside = bench_cuda.measure([Path("m.gguf")], arguments("m.gguf"))
    assert [line.cells()[-2:] for line in beside] == [("", ""), ("50 (50–50)", "2.00")]
    assert "no llama.cpp" not in bench_cuda.table(beside, ["NVIDIA A100"])


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_cuda, "discover", lambda: [])
    monkeypatch.setattr("sys.argv", ["bench_cuda"])
    assert bench_cuda.main() == 1
    assert capsys.readouterr().err == "bench-cuda: there is no CUDA device here\n"


@pytest.mark.parametrize("text", ["9B:Q4_K", "1B:IQ1_S", "1B"])
def test_random_models_that_it_can_not_make_are_usage_errors(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments("--random", text)
    assert "1B, 8B" in capsys.readouterr().err


def test_the_performance_page_has_its_place(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "performance.md").read_text()
    lines = [Line("m", "tg128", (1.0,))]
    assert "| m     | tg128, tokens/s |" in bench_cuda.put_blocks(page, {"cuda": bench_cuda.table(lines, ["a card"])})
