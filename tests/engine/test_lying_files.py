"""Model files that pass the reader and lie: refused in one clear message that names the file (B38, B40)."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pantheon
from pantheon.engine.load import check_memory
from pantheon.errors import ModelFileError, PantheonError
from pantheon.plan.state_spec import KVType
from tests.engine.tiny import tiny
from tests.golden_data import model_path

STEM = "tiny-llama.F32"
I32, Q8_0 = 26, 8


def patched(tmp_path: Path, at: int, new: bytes) -> Path:
    data = bytearray(model_path(STEM).read_bytes())
    data[at : at + len(new)] = new
    path = tmp_path / "liar.gguf"
    path.write_bytes(data)
    return path


def type_of(tensor: str) -> int:
    """Where the directory says the type of a tensor."""
    data = model_path(STEM).read_bytes()
    name = struct.pack("<Q", len(tensor)) + tensor.encode()
    assert data.count(name) == 1
    at = data.index(name) + len(name)
    n_dims: int = struct.unpack_from("<I", data, at)[0]
    return at + 4 + 8 * n_dims


@pytest.mark.parametrize("executor", ["cpu", "reference"])
@pytest.mark.parametrize(("tensor", "kind"), [("output_norm.weight", Q8_0), ("blk.0.attn_q.weight", I32)])
def test_a_type_that_can_not_be_used_names_file_and_tensor(
    tmp_path: Path, executor: str, tensor: str, kind: int
) -> None:
    path = patched(tmp_path, type_of(tensor), struct.pack("<I", kind))
    try:
        pantheon.load(path, executor=executor).close()
    except ModelFileError as refused:
        assert str(path) in refused.message and tensor in refused.message
    else:
        assert (executor, kind) == ("reference", Q8_0), "only the oracle reads any type it can dequantise"


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_weights_that_are_no_numbers_end_a_generation_cleanly(tmp_path: Path, executor: str) -> None:
    data = model_path(STEM).read_bytes()
    path = patched(tmp_path, len(data) * 3 // 4, struct.pack("<f", float("nan")) * (len(data) // 16))
    with pantheon.load(path, executor=executor) as model, pytest.raises(PantheonError, match="logit of nan"):
        list(model.generate("a", max_tokens=2))


def test_shapes_without_kernels_are_a_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise ValueError("plan: KV layer 0: widths differ")

    die = SimpleNamespace(name="cpu", load=load)
    monkeypatch.setattr("pantheon.engine.load.pick_executor", lambda *_: die)
    with pytest.raises(ModelFileError, match=r"tiny-llama.*cpu executor can not run it.*widths differ"):
        pantheon.load(model_path(STEM))


def test_a_context_that_can_never_fit_is_refused_before_it_is_mapped() -> None:
    with pytest.raises(PantheonError, match=r"context of 16777216 tokens needs .* GiB, but the machine has") as refused:
        check_memory(tiny(STEM, "reference").plan, 1 << 24, KVType.F32, installed=1 << 30)
    assert refused.value.status == 507 and refused.value.param == "ctx"
    check_memory(tiny(STEM, "reference").plan, 2048, KVType.F32, installed=1 << 30)
