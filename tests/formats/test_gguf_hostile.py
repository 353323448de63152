"""Hostile files of the field [B38, B40] and random damage: an error or success, in bounded time and memory."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from golden_data import DATA
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pantheon.errors import ModelFileError
from pantheon.formats.gguf import GGUFFile, open_gguf
from tools import make_tiny_gguf as tiny
from tools.make_tiny_gguf import ARR, STR, Array, Key, Tensor

#: file -> what its message must hold besides the file's name
HOSTILE = {
    "align_2p31": "general.alignment", "align_3": "general.alignment", "align_string": "general.alignment",
    "align_zero": "general.alignment", "big_endian": "big-endian", "len_array_2p62": "tokenizer.ggml.tokens",
    "len_bad_utf8_key": "key 0 is not UTF-8", "len_empty": "is empty", "len_key_u64max": "length of metadata key 0",
    "len_kvcount_2p63": "metadata_kv_count", "len_magic_only": "version", "len_str_1tib": "general.name",
    "len_tensorcount_2p63": "tensor_count", "len_version1": "version is 1", "m-00001-of-00003": "m-00003-of-00003.gguf",
    "m-00002-of-00003": "m-00003-of-00003.gguf", "trunc_data_short": "token_embd.weight",
    "trunc_mid_header": "general.name", "trunc_offset_2p63": "token_embd.weight",
    "trunc_offset_unaligned": "offset 7", "type_removed_36": "'a.weight': weight type 36",
    "type_unknown_200": "'a.weight': weight type 200",
}  # fmt: skip
GOOD = {"arch_unknown"}  # well-formed; the architecture is refused a floor higher


@contextmanager
def bounded(limit_bytes: int = 8 << 20, limit_s: float = 5.0) -> Iterator[None]:
    """Fail when the block takes more CPU time, traced memory or resident memory than it may."""
    rss = psutil.Process().memory_info().rss
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
    finally:
        spent = time.process_time() - start
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert spent < limit_s and peak < limit_bytes
    assert psutil.Process().memory_info().rss - rss < 64 << 20


def test_the_table_covers_every_file() -> None:
    assert {p.stem for p in (DATA / "hostile").glob("*.gguf")} == HOSTILE.keys() | GOOD


@pytest.mark.parametrize("stem", HOSTILE)
def test_b38_b40_hostile_files_are_refused(stem: str) -> None:
    path = DATA / "hostile" / f"{stem}.gguf"
    with bounded(), pytest.raises(ModelFileError) as caught:
        open_gguf(path)
    assert caught.value.status == 422
    assert f"{stem}.gguf: " in caught.value.message and HOSTILE[stem] in caught.value.message


def test_b40e_an_unknown_architecture_is_a_good_file() -> None:
    with open_gguf(DATA / "hostile" / "arch_unknown.gguf") as model:
        assert model.metadata == {"general.architecture": "nosucharch"}


def test_b38g_a_hundred_thousand_nested_arrays(tmp_path: Path) -> None:
    path = tmp_path / "len_nested_arrays.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + tiny.encode_string("a") + struct.pack("<I", ARR)
    path.write_bytes(head + struct.pack("<IQ", ARR, 1) * 100_000 + struct.pack("<IQ", 0, 0))
    with bounded(1 << 20), pytest.raises(ModelFileError, match="array 'a' is nested more than 4 deep"):
        open_gguf(path)


def sparse(path: Path, head: bytes, size: int) -> Path:
    with open(path, "wb") as out:
        out.write(head)
        out.truncate(size)
    return path


def counts(n_tensors: int, n_keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys)


def huge(*head: int, n_keys: int = 1) -> bytes:
    """A file start with a key `k`, its type and what follows (item type and count, or a length)."""
    return counts(0, n_keys) + tiny.encode_string("k") + struct.pack("<IIQ" if len(head) == 3 else "<IQ", *head)


SPARSE_HEADS = {
    "zero keys": counts(0, 65_536),
    "zero tensors": counts(65_536, 0),
    "zero strings": huge(ARR, STR, 1 << 30),
    "strings, then an empty key": huge(ARR, STR, 1 << 18, n_keys=2),
    "zero bytes": huge(ARR, tiny.U8, 1 << 39),
    "zero arrays": huge(ARR, ARR, 1 << 30),
    "one long string": huge(STR, 1 << 39),
}


@pytest.mark.parametrize("name", SPARSE_HEADS)
def test_b38_a_sparse_file_of_a_tebibyte_gives_no_licence(tmp_path: Path, name: str) -> None:
    """The bytes are there, so length checks pass: the bounds on counts hold instead."""
    path = sparse(tmp_path / "sparse.gguf", SPARSE_HEADS[name], 1 << 40)
    with bounded(), pytest.raises(ModelFileError):
        open_gguf(path)


def test_b38_a_fault_behind_a_large_vocabulary_costs_no_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "late.gguf"
    tokens = Array(STR, [f"token number {i}" for i in range(200_000)])
    path.write_bytes(tiny.encode_gguf([Key("t", ARR, tokens), Key("t", STR, "again")]))
    del tokens
    with bounded(1 << 20), pytest.raises(ModelFileError, match="'t' is there twice"):
        open_gguf(path)


# random damage


def _seeds() -> list[bytes]:
    shape = tiny.LlamaShape(layers=1, width=32, ff=32, kv_heads=2)
    keys = [
        Key("general.alignment", tiny.U32, 64), Key("n", ARR, Array(ARR, [Array(tiny.F64, [1.0]), Array(STR, ["a"])])),
        Key("b", ARR, Array(tiny.BOOL, [0, 1])), Key("split.no", tiny.U16, 0), Key("split.count", tiny.U16, 1),
        Key("long", ARR, Array(tiny.I16, [7] * 1100)), Key("x", tiny.F64, 2.0),
    ]  # fmt: skip
    tensors = [Tensor("t0", (256, 2), 12, bytes(288)), Tensor("t1", (256, 2), 23, bytes(272))]
    return [
        tiny.encode_gguf(keys, tensors, alignment=64),
        tiny.encode_gguf(keys, tensors, version=2),
        tiny.encode_gguf([Key("k", STR, "v")], [Tensor("a", (4,), 0, bytes(16)), Tensor("b", (2, 2), 0, bytes(16))]),
        tiny.encode_gguf(tiny.llama_keys(shape), tiny.llama_tensors(shape))[:12_000],
    ]


SEEDS = _seeds()
#: numbers that lengths, counts, types and offsets go wrong with
POISON = (0, 1, 2, 3, 4, 7, 8, 9, 13, 31, 32, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 32, 2**64 - 1)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good file after up to four accidents: bytes set, a number written over, a cut, a piece removed or put in."""
    raw = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        # mostly behind the magic and in the first kilobyte: that is where the structure is
        at = draw(st.sampled_from((0, 4, *range(8, 24), *range(24, 1024))) | st.integers(0, len(raw)))
        match draw(st.sampled_from(("set", "number", "cut", "remove", "splice"))):
            case "set":
                raw[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "number":
                size, code = draw(st.sampled_from(((4, "<I"), (8, "<Q"))))
                raw[at : at + size] = struct.pack(code, draw(st.sampled_from(POISON)) % (1 << 8 * size))
            case "cut":
                del raw[at:]
            case "remove":
                del raw[at : at + draw(st.integers(1, 64))]
            case "splice":
                other = draw(st.sampled_from(SEEDS))
                start = draw(st.integers(0, len(other)))
                raw[at:at] = other[start : start + draw(st.integers(1, 200))]
    return bytes(raw)


def read_all(model: GGUFFile) -> None:
    """Touch everything that the reader promised is there."""
    for name, info in model.tensors.items():
        assert model.data(name).size == info.nbytes and info.nbytes > 0
        model.data(name).max()
        model.release(name)
    for value in model.metadata.values():
        assert isinstance(value, (str, int, float, bool, list)) or value.ndim == 1


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=damaged())
@example(raw=SEEDS[0])
def test_b38_damaged_files_give_an_error_or_a_model(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(raw)
    with bounded(4 << 20, 2.0):
        try:
            with open_gguf(path) as model:
                read_all(model)
        except ModelFileError as error:
            assert error.message.startswith(f"{path}: ") and len(error.message) < 500
            assert error.offset is None or 0 <= error.offset <= max(len(raw), 24)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=300), version=st.sampled_from((2, 3)))
def test_b38_random_bytes_after_a_good_start(tmp_path: Path, raw: bytes, version: int) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, len(raw) % 3, len(raw) % 5) + raw)
    with bounded(4 << 20, 2.0):
        try:
            open_gguf(path).close()
        except ModelFileError as error:
            assert error.status == 422


_KINDS = st.sampled_from((tiny.U8, tiny.I8, tiny.U16, tiny.I16, tiny.U32, tiny.I32, tiny.U64, tiny.I64))


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.dictionaries(st.text(min_size=1, max_size=20), st.lists(st.text(max_size=30), max_size=20), max_size=5),
    kind=_KINDS, numbers=st.lists(st.integers(0, 127), max_size=30), alignment=st.sampled_from((1, 32, 256)),
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), max_size=5),
)  # fmt: skip
def test_what_was_written_is_read(
    tmp_path: Path, texts: dict[str, list[str]], kind: int, numbers: list[int], alignment: int,
    sizes: list[tuple[int, int]],
) -> None:  # fmt: skip
    reserved = ("general.alignment", "split.no", "split.count", "numbers")
    texts = {key: value for key, value in texts.items() if key not in reserved}
    keys = [Key(key, ARR, Array(STR, value)) for key, value in texts.items()]
    keys += [Key("general.alignment", tiny.U32, alignment), Key("numbers", ARR, Array(kind, numbers))]
    tensors = [Tensor(f"t{i}", dims, 0, os.urandom(4 * dims[0] * dims[1])) for i, dims in enumerate(sizes)]
    path = tmp_path / "round.gguf"
    path.write_bytes(tiny.encode_gguf(keys, tensors, alignment=alignment))
    with open_gguf(path) as model:
        assert model.metadata == {**texts, "general.alignment": alignment, "numbers": numbers}
        assert {name: model.data(name).tobytes() for name in model.tensors} == {t.name: t.data for t in tensors}
        assert [info.shape for info in model.tensors.values()] == [(b, a) for a, b in sizes]
