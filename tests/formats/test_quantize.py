"""The quantisers of the test writer against gguf-py, and the tiny models that they make."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from pantheon.errors import PantheonError
from pantheon.formats import quant
from pantheon.formats.gguf import open_gguf
from pantheon.formats.quantize import QUANTIZABLE, quantize
from tools import make_tiny_gguf as tiny

TOOL = Path(tiny.__file__)
#: of blocks of 32 at most: what gguf-py quantises too, and what the rows of the tiny models are made of
SIMPLE = [name for name in QUANTIZABLE if not name.endswith("_K")]


@pytest.mark.parametrize("name", SIMPLE)
def test_same_bytes_as_gguf_py(name: str) -> None:
    rows = np.random.default_rng(5).standard_normal((64, 96), dtype=np.float32)
    rows[3] = 0
    rows[4, :32] = np.linspace(-1, 1, 32)
    theirs = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name])
    assert quantize(name, rows).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name,bits", [("F32", 30), ("F16", 10), ("BF16", 7), ("Q8_0", 6), ("Q4_0", 2)])
def test_round_trip_is_as_close_as_the_type_allows(name: str, bits: int) -> None:
    rows = np.random.default_rng(6).uniform(-1, 1, (8, 64)).astype(np.float32)
    back = quant.dequantize(name, quantize(name, rows), rows.size).reshape(rows.shape)
    assert np.abs(back - rows).max() <= 2.0**-bits


def test_refusals() -> None:
    with pytest.raises(PantheonError, match="Q5_K can not be written"):
        quantize("Q5_K", np.zeros((1, 256), np.float32))
    with pytest.raises(ValueError, match="a row of 48 values"):
        quantize("Q8_0", np.zeros((2, 48), np.float32))


@pytest.mark.parametrize("type_name", SIMPLE)
def test_tiny_llama_is_a_good_file_for_gguf_py_too(tmp_path: Path, type_name: str) -> None:
    shape = tiny.LlamaShape(type_name=type_name, tied=False, biases=True)
    path = tiny.write_tiny_llama(tmp_path / "t.gguf", shape)
    theirs = gguf.GGUFReader(path)
    with open_gguf(path) as model:
        assert [t.name for t in theirs.tensors] == list(model.tensors)
        assert {t.type.name for t in model.tensors.values()} == {"F32", type_name}
        assert model.tensors["blk.1.attn_k.weight"].shape == (32, 64)


def test_command_line(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    command = [sys.executable, str(TOOL), str(out), "--type", "Q8_0", "--shards", "2", "--layers", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env={"PYTHONPATH": str(TOOL.parents[1])}
    )
    assert done.returncode == 0, done.stderr
    with open_gguf(done.stdout.split()[1]) as model:
        assert len(model.shards) == 2 and model.metadata["llama.block_count"] == 1
