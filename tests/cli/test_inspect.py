"""`pantheon inspect`: metadata, tensors, plan, memory, tokenizer, template; and what will not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pantheon.cli import main
from pantheon.commands.inspect import summarise
from pantheon.engine.footprint import footprint
from pantheon.engine.load import load_model
from tests.cli.terminal import write_script
from tests.golden_data import DATA, model_path


def inspect(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    code = main(["inspect", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_the_report_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    path = model_path("tiny-llama.Q4_0")
    code, report, err = inspect(capsys, str(path), "--ctx", "100", "--tensors")
    assert code == 0 and err == "" and report["faults"] == []
    assert report["metadata"]["general.architecture"] == "llama"
    assert report["tensors"]["Q4_0"]["count"] >= 1
    assert sum(t["bytes"] for t in report["tensors"].values()) == sum(t[3] for t in report["tensor_list"])
    assert sum(t["bytes"] for t in report["tensors"].values()) < path.stat().st_size
    memory = report["memory"]
    assert memory["n_ctx"] == 100 and memory["kv_type"] == "f16"
    assert memory["kv_bytes"] >= 100 * memory["kv_per_token_bytes"]
    parts = ("weights", "scratch", "tables", "kv")
    assert memory["total_bytes"] == sum(memory[f"{part}_bytes"] for part in parts)
    with load_model(path, ctx=100) as model:
        taken = {**model.memory(), "kv": model.new_state().nbytes()}
    assert {part: memory[f"{part}_bytes"] for part in parts} == {part: taken[part] for part in parts}
    assert report["tokenizer"]["n_vocab"] == report["plan"]["n_vocab"]
    assert report["plan"]["ops"]["Attend"] == report["metadata"]["llama.block_count"]
    assert "op_list" not in report["plan"]


def test_the_kv_type_doubles_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(model_path("tiny-llama.F32"))
    sizes = [inspect(capsys, path, "--kv-type", kv)[1]["memory"]["kv_per_token_bytes"] for kv in ("f16", "f32")]
    assert sizes[1] == 2 * sizes[0] > 0
    assert inspect(capsys, path)[1]["memory"]["kv_type"] == "f32"


def test_the_text_report_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model_path("tiny-llama.Q8_0")), "--plan"]) == 0
    out = capsys.readouterr().out
    for heading in ("\nmetadata\n", "\ntensors\n", "\nplan\n", "\nmemory\n", "\ntokenizer\n", "\ntemplate\n"):
        assert heading in out
    assert "Attend " in out and "MatMul weight=blk.0." in out
    assert max(map(len, out.splitlines())) < 400, "long arrays and texts are summarised"


def test_a_scripted_model_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report, _ = inspect(capsys, write_script(tmp_path, "x"))
    assert code == 0 and report["tokenizer"]["eos"][1] == "<|im_end|>"


def test_an_unknown_architecture_says_why_and_still_prints_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = model_path("tiny-llama.Q4_0").read_bytes()
    key = b"general.architecture"
    at = data.index(key) + len(key) + 4
    assert data[at + 8 : at + 13] == b"llama"
    file = tmp_path / "odd.gguf"
    file.write_bytes(data[: at + 8] + b"lemma" + data[at + 13 :])
    code, report, err = inspect(capsys, str(file))
    assert code == 1 and "lemma" in err and err.startswith("pantheon: error: will not run: ")
    assert report["metadata"]["general.architecture"] == "lemma" and report["tensors"]
    assert report["tokenizer"]["n_vocab"] > 0 and "plan" not in report


@pytest.mark.parametrize("file", sorted((DATA / "hostile").glob("*")), ids=lambda p: p.name)
def test_hostile_files_are_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Never a traceback, always the file's name."""
    assert main(["inspect", str(file)]) in (0, 1)
    err = capsys.readouterr().err
    assert "internal error" not in err and "Traceback" not in err
    assert not err or file.name in err


def test_long_values_are_summarised() -> None:
    assert summarise(np.arange(1000, dtype=np.int32)) == {"length": 1000, "of": "int32", "first": list(range(8))}
    assert summarise(["a"] * 9)["of"] == "str"
    assert summarise([1, 2]) == [1, 2] and summarise([]) == [] and summarise(np.float32(0.5)) == 0.5
    assert summarise("x" * 201).endswith("(201 characters)")


# ---- what will not run ----------------------------------------------------------------------------------------------

FAMILIES = (
    "tiny-llama.Q8_0", "tiny-mixtral.Q4_0", "tiny-qwen2.Q5_1", "tiny-qwen3.Q4_1", "tiny-qwen3moe.Q8_0", "tiny-p3.Q8_0",
    "tiny-gemma3.Q4_0", "tiny-qwen35.Q8_0", "tiny-qwen35moe.Q4_0", "tiny-llama-k.IQ1_S",
)  # fmt: skip


def patched(stem: str, tmp_path: Path, *changes: tuple[bytes, bytes]) -> str:
    """A copy of a tiny model in which some bytes, which stand in it once or more, are others of the same length."""
    data = model_path(stem).read_bytes()
    for old, new in changes:
        assert len(old) == len(new) and old in data
        data = data.replace(old, new)
    file = tmp_path / "odd.gguf"
    file.write_bytes(data)
    return str(file)


@pytest.mark.parametrize("stem", FAMILIES)
def test_each_family_runs_or_says_what_is_missing(
    stem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tensor that is gone, one of a type that nothing runs, a context that no machine holds: named, and exit 1."""
    path = str(model_path(stem))
    code, report, err = inspect(capsys, path)
    assert (code, report["runs"], err) == (0, True, "")
    assert main(["inspect", path]) == 0 and "\nwill run   yes\n" in capsys.readouterr().out
    gone = patched(stem, tmp_path, (b"blk.0.attn_norm.weight", b"blk.0.attn_morn.weight"))
    code, report, err = inspect(capsys, gone)
    assert (code, report["runs"]) == (1, False) and "blk.0.attn_norm.weight is missing" in err and "odd.gguf" in err
    code, report, err = inspect(capsys, path, "--ctx", str(1 << 39))
    assert code == 1 and "context of 549755813888 tokens needs" in err and not report["runs"]


@pytest.mark.parametrize("tensor", [b"blk.0.attn_norm.weight", b"blk.0.ssm_a"])
def test_a_type_that_nothing_runs_is_named(tensor: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = model_path("tiny-qwen35.Q8_0").read_bytes()
    at = data.index(tensor) + len(tensor)
    at += 4 + 8 * int.from_bytes(data[at : at + 4], "little")
    file = tmp_path / "odd.gguf"
    file.write_bytes(data[:at] + (26).to_bytes(4, "little") + data[at + 4 :])  # I32
    code, report, err = inspect(capsys, str(file))
    assert code == 1 and report["faults"] and tensor.decode() in err, err


def test_the_figures_of_a_cuda_die_need_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(model_path("tiny-llama-k.Q4_K_M"))
    code, report, err = inspect(capsys, path, "--executor", "cuda", "--ctx", "64")
    parts = footprint(path, ctx=64, executor="cuda").parts
    assert code == 0 and err == "" and report["faults"] == []
    assert {part: report["memory"][f"{part}_bytes"] for part in parts} == parts
