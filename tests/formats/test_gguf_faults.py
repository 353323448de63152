"""Every fault of a file is one ModelFileError that names file, field and offset [B38, B40, M223]."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from pantheon.errors import ModelFileError
from pantheon.formats.gguf import open_gguf
from tools import make_tiny_gguf as tiny
from tools.make_tiny_gguf import ARR, STR, Array, Key, Tensor, encode_gguf, encode_string

ALIGN = "general.alignment"
T32 = bytes(32)


def one(
    name: str | bytes = "a.weight", dims: tuple[int, ...] = (8,), kind: int = 0, data: bytes = T32,
    offset: int | None = None,
) -> Tensor:  # fmt: skip
    return Tensor(name, dims, kind, data, offset)


def raw_key(key: str, kind: int, value: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + encode_string(key) + struct.pack("<I", kind) + value


def array_head(item_type: int, count: int) -> bytes:
    return struct.pack("<IQ", item_type, count)


def nested(depth: int) -> Array:
    value = Array(tiny.U8, [1])
    for _ in range(depth - 1):
        value = Array(ARR, [value])
    return value


#: name -> (bytes, what the message holds, offset or None when it does not matter)
FAULTS: dict[str, tuple[bytes, str, int | None]] = {
    # preamble
    "empty": (b"", "is empty", 0),
    "short magic": (b"GG", r"magic is b'GG'", 0),
    "magic only": (b"GGUF", "version", 4),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "tensor_count", 8),
    "no key count": (b"GGUF" + struct.pack("<IQ", 3, 0), "metadata_kv_count", 16),
    "other magic": (b"NOPE" + bytes(40), r"not a GGUF file: magic is b'NOPE'", 0),
    "pytorch": (b"PK\x03\x04" + bytes(40), "zip or PyTorch", 0),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer", 0),
    "web page": (b"<!DOCTYPE html><html>", "web page", 0),
    "ggjt": (b"tjgg" + bytes(20), "GGJT", 0),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian", 4),
    "big endian v2": (b"GGUF" + struct.pack(">IQQ", 2, 0, 0), "big-endian", 4),
    "big endian magic": (b"FUGG" + struct.pack(">IQQ", 3, 0, 0), "big-endian", 0),
    "version 0": (encode_gguf([], version=0), "version is 0", 4),
    "version 1": (encode_gguf([], version=1), "version is 1", 4),
    "version 4": (encode_gguf([], version=4), "version is 4", 4),
    # counts
    "keys beyond the file": (encode_gguf([], n_keys=1), "metadata_kv_count is 1: needs 14 bytes", 16),
    "2^63 keys": (encode_gguf([], n_keys=1 << 63), "metadata_kv_count is 9223372036854775808", 16),
    "too many keys": (encode_gguf([], n_keys=65_537) + bytes(1 << 20), "at most 65536 keys", 16),
    "tensors beyond the file": (encode_gguf([], n_tensors=1), "tensor_count is 1: needs 33 bytes", 8),
    "2^64-1 tensors": (encode_gguf([], n_tensors=(1 << 64) - 1), "tensor_count is 18446744073709551615", 8),
    "too many tensors": (encode_gguf([], n_tensors=65_537) + bytes(3 << 20), "at most 65536 tensors", 8),
    # keys
    "key length 2^64-1": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, (1 << 64) - 1) + bytes(64), "length of metadata key 0: needs 18", 24),
    "empty key": (encode_gguf([Key("", STR, "aaaa")]), "metadata key 0 has 0 bytes", 24),
    "long key": (encode_gguf([Key("k" * 65_536, STR, "")]), "metadata key 0 has 65536 bytes", 24),
    "key not UTF-8": (encode_gguf([Key(b"ab\xff", STR, "aaaa")]), "metadata key 0 is not UTF-8", 34),
    "key twice": (encode_gguf([Key("k.k", STR, ""), Key("k.k", STR, "")]), r"metadata key 'k\.k' is there twice", 47),
    "type of value cut": (encode_gguf([Key("k" * 9, STR, "")])[:44], "type of 'kkkkkkkkk': needs 4 bytes, but 3", 41),
    "type 13": (raw_key("k", 13, bytes(64)), "type of 'k' is 13", 33),
    "type 2^32-1": (raw_key("k", 0xFFFFFFFF, bytes(64)), "type of 'k' is 4294967295", 33),
    # values
    "u64 cut": (raw_key("k", tiny.U64, bytes(4)), "'k': needs 8 bytes, but 4", 37),
    "bool 2": (raw_key("k", tiny.BOOL, b"\x02" + bytes(9)), "'k': a bool is 0 or 1, not 2", 37),
    "string of 1 TiB": (raw_key("k", STR, struct.pack("<Q", 1 << 40)), "length of 'k': needs 1099511627776 bytes", 37),
    "string of 2^64-1": (raw_key("k", STR, struct.pack("<Q", (1 << 64) - 1)), "length of 'k'", 37),
    "string not UTF-8": (encode_gguf([Key("k", STR, b"abc\xc3(")]), "'k' is not UTF-8", 48),
    "string cut in a character": (encode_gguf([Key("k", STR, "é".encode()[:1])]), "'k' is not UTF-8", 45),
    # arrays
    "array head cut": (raw_key("k", ARR, bytes(6)), "count of array 'k'", 41),
    "array of type 13": (raw_key("k", ARR, array_head(13, 0)), "item type of array 'k' is 13", 37),
    "array of 2^62 strings": (raw_key("k", ARR, array_head(STR, 1 << 62)), "'k' of 4611686018427387904 items", 41),
    "array of 2^64-1 bytes": (raw_key("k", ARR, array_head(tiny.U8, (1 << 64) - 1)), "array 'k' of", 41),
    "array of 2^61 u64": (raw_key("k", ARR, array_head(tiny.U64, 1 << 61)), "array 'k' of", 41),
    "array one item short": (raw_key("k", ARR, array_head(tiny.U32, 5) + bytes(16)), "'k' of 5 items: needs 20", 41),
    "first string of array too long": (
        raw_key("k", ARR, array_head(STR, 2) + struct.pack("<Q", 99) + bytes(16)), "array 'k', item 0", 49),
    "last string of array too long": (
        raw_key("k", ARR, array_head(STR, 2) + encode_string("ab") + struct.pack("<Q", 9) + bytes(8)),
        "array 'k', item 1", 59),
    "string of array 2^64-1": (
        raw_key("k", ARR, array_head(STR, 2) + struct.pack("<Q", (1 << 64) - 1) + bytes(16)), "array 'k', item 0", 49),
    "no room for a string's length": (
        raw_key("k", ARR, array_head(STR, 2) + encode_string("12345") + bytes(3)), "array 'k', item 1", 62),
    "array item not UTF-8": (
        encode_gguf([Key("k", ARR, Array(STR, ["ok", b"\xff"]))]), "array 'k', item 1 is not UTF-8", 67),
    "array bool 7": (raw_key("k", ARR, array_head(tiny.BOOL, 3) + b"\x01\x00\x07"), "array 'k', item 2: a bool", 51),
    "nested 5 deep": (encode_gguf([Key("k", ARR, nested(5))]), "array 'k' is nested more than 4 deep", None),
    "nested count": (raw_key("k", ARR, array_head(ARR, 1 << 60)), "array 'k' of", 41),
    "too many nested": (raw_key("k", ARR, array_head(ARR, 65_537) + bytes(12 * 65_537)), "65536 nested arrays", 41),
    "too many items": (
        raw_key("k", ARR, array_head(tiny.U8, (1 << 22) + 1) + bytes((1 << 22) + 1)), "4194304 array items", 41),
    # alignment
    "alignment 0": (encode_gguf([Key(ALIGN, tiny.U32, 0)]), "general.alignment is 0", 53),
    "alignment 3": (encode_gguf([Key(ALIGN, tiny.U32, 3)]), "general.alignment is 3", 53),
    "alignment 2^31": (encode_gguf([Key(ALIGN, tiny.U32, 1 << 31)]), "general.alignment is 2147483648", 53),
    "alignment 2 MiB": (encode_gguf([Key(ALIGN, tiny.U32, 2 << 20)]), "general.alignment is 2097152", 53),
    "alignment u64": (encode_gguf([Key(ALIGN, tiny.U64, 32)]), "general.alignment has type 10", 53),
    "alignment i32": (encode_gguf([Key(ALIGN, tiny.I32, 32)]), "general.alignment has type 5", 53),
    "alignment string": (encode_gguf([Key(ALIGN, STR, "32")]), "general.alignment has type 8", 53),
    # tensors
    "tensor name empty": (encode_gguf([], [one("")]), "name of tensor 0 has 0 bytes", 24),
    "tensor name not UTF-8": (encode_gguf([], [one(b"\xfe\xff")]), "name of tensor 0 is not UTF-8", 32),
    "tensor name length": (
        encode_gguf([], [one()])[:24] + struct.pack("<Q", 1 << 50) + bytes(99), "length of name of tensor 0", 24),
    "tensor twice": (encode_gguf([], [one(), one()]), "tensor 'a.weight' is there twice", 64),
    "0 dims": (encode_gguf([], [one(dims=())]), "tensor 'a.weight': n_dims is 0", 40),
    "5 dims": (encode_gguf([], [one(dims=(1, 1, 1, 1, 8))]), "tensor 'a.weight': n_dims is 5", 40),
    "2^32-1 dims": (encode_gguf([], [one()])[:40] + b"\xff" * 4 + bytes(99), "n_dims is 4294967295", 40),
    "dim 0": (encode_gguf([], [one(dims=(8, 0))]), "tensor 'a.weight': dim 1 is 0", 52),
    "dim 2^63": (encode_gguf([], [one(dims=(1 << 63,))]), "tensor 'a.weight': dim 0 is", 44),
    "product overflows": (encode_gguf([], [one(dims=(1 << 32, 1 << 32, 1 << 32))]), "multiply to more than", None),
    "product wraps to 8": (encode_gguf([], [one(dims=((1 << 61) + 1, 8))]), "multiply to more than", None),
    "bytes overflow": (encode_gguf([], [one(dims=(1 << 31, 1 << 31))]), "too large", 24),
    "type 4": (encode_gguf([], [one(kind=4)]), r"tensor 'a\.weight': weight type 4 \(Q4_2\) was removed", 52),
    "type 36": (encode_gguf([], [one(kind=36)]), r"weight type 36 \(IQ4_NL_4_4\) was removed", 52),
    "type 200": (encode_gguf([], [one(kind=200)]), r"tensor 'a\.weight': weight type 200 is not known", 52),
    "tensor type 2^32-1": (encode_gguf([], [one(kind=0xFFFFFFFF)]), "weight type 4294967295 is not known", 52),
    "row of half a block": (encode_gguf([], [one(dims=(48, 2), kind=2)]), r"row of 48 values.*Q4_0", 24),
    "row of 32 for a K-quant": (encode_gguf([], [one(dims=(32, 8), kind=12)]), r"row of 32 values.*Q4_K", 24),
    "offset unaligned": (encode_gguf([], [one(offset=8)]), "offset 8 is not a multiple of the alignment 32", 56),
    "offset beyond": (encode_gguf([], [one(offset=32)]), "would end at byte 128, but the file ends at 96", 24),
    "offset 2^63": (encode_gguf([], [one(offset=1 << 63)]), "tensor 'a.weight'.*would end", 24),
    "offset near 2^64": (encode_gguf([], [one(offset=(1 << 64) - 32)]), "tensor 'a.weight'.*would end", 24),
    "one byte short": (encode_gguf([], [one()])[:-1], "but the file ends at 95", 24),
    "header ends the file": (encode_gguf([], [one(data=b"")])[:90], "cut short", 24),
    "overlap": (
        encode_gguf([], [one("a", (16,), data=bytes(64)), one("b", offset=32)]), "'b': overlaps tensor 'a'", 57),
    "same place": (encode_gguf([], [one("a"), one("b", offset=0)]), "overlaps", None),
    "control characters": (
        encode_gguf([], [one("a\n\x1b[31m" + "x" * 200, kind=99)]), r"'a\\n\\x1b\[31mxxx.*\.\.\.'", None),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_b38_b40_fault_names_file_field_and_offset(tmp_path: Path, name: str) -> None:
    raw, message, offset = FAULTS[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelFileError, match=message) as caught:
        open_gguf(path)
    error = caught.value
    assert error.message.startswith(f"{path}: ") and "\n" not in error.message and len(error.message) < 500
    assert error.status == 422 and error.code == "invalid_model_file"
    assert error.offset is not None and 0 <= error.offset <= max(len(raw), 24)
    if offset is not None:
        assert error.offset == offset
        assert error.message.endswith(f"(at byte {offset})")


def test_every_truncation_of_a_model_is_one_error(tmp_path: Path) -> None:
    shape = tiny.LlamaShape(layers=1, width=32, ff=32)
    raw = encode_gguf(tiny.llama_keys(shape), tiny.llama_tensors(shape))
    path = tmp_path / "cut.gguf"
    path.write_bytes(raw)
    with open_gguf(path) as model:
        end = max(t.offset + t.nbytes for t in model.tensors.values())
    for size in [*range(0, 400), *range(400, end, 997), end - 1]:
        path.write_bytes(raw[:size])
        with pytest.raises(ModelFileError):
            open_gguf(path)
    path.write_bytes(raw[:end])
    open_gguf(path).close()


# paths


def test_x34_missing_file_is_404(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path / "none" / "none.gguf"):
        with pytest.raises(ModelFileError, match=r"none\.gguf: no such file") as caught:
            open_gguf(path)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    file = tmp_path / "file"
    file.write_bytes(b"x")
    with pytest.raises(ModelFileError, match="no such file"):
        open_gguf(file / "below.gguf")
    dangling = tmp_path / "link.gguf"
    dangling.symlink_to(tmp_path / "gone")
    with pytest.raises(ModelFileError, match="no such file"):
        open_gguf(dangling)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    pipe, loop, sock = tmp_path / "pipe", tmp_path / "loop", tmp_path / "s"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(sock))
    cases = {
        tmp_path: "is a directory", pipe: "is a named pipe", Path("/dev/null"): "is a character device",
        sock: "is a socket", loop: "can not be opened: .*symbolic links", tmp_path / ("n" * 300): "can not be opened",
    }  # fmt: skip
    try:
        for path, message in cases.items():
            with pytest.raises(ModelFileError, match=message) as caught:
                open_gguf(path)
            assert caught.value.status == 422
    finally:
        listener.close()


@pytest.mark.parametrize("path", ["a\0b.gguf", "a\udcff\ud800.gguf"])
def test_paths_that_no_file_can_have(path: str) -> None:
    with pytest.raises(ModelFileError, match="valid path") as caught:
        open_gguf(path)
    assert caught.value.message.encode()


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(encode_gguf([]))

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ModelFileError, match=r"secret\.gguf: can not be opened: Permission denied"):
        open_gguf(path)


# split files


def split_keys(no: object, count: object, total: object = 2) -> list[Key]:
    kinds = {int: tiny.I32, str: STR, float: tiny.F32, bool: tiny.BOOL}
    pairs = (("split.no", no), ("split.count", count), ("split.tensors.count", total))
    return [Key(key, kinds[type(value)], value) for key, value in pairs if value is not None]


def write_pair(folder: Path, first: list[Key], second: list[Key], names: tuple[str, str] = ("a", "b")) -> list[Path]:
    paths = [folder / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for path, keys, name in zip(paths, (first, second), names, strict=True):
        path.write_bytes(encode_gguf(keys, [one(name)]))
    return paths


SPLIT_FAULTS = {
    "no of the first": (split_keys(1, 2), split_keys(1, 2), r"m-00001.*split\.no is 1; by the file's name .* 0 "),
    "no counted from 1": (split_keys(1, 2), split_keys(2, 2), r"m-00001.*split\.no is 1"),
    "no missing": (split_keys(0, 2), split_keys(None, 2), r"m-00002.*split\.no is None"),
    "no is text": (split_keys(0, 2), split_keys("1", 2), r"m-00002.*split\.no is of type 8"),
    "no negative": (split_keys(0, 2), split_keys(-1, 2), r"m-00002.*split\.no is -1"),
    "count differs": (split_keys(0, 2), split_keys(1, 3), r"split\.count is 3"),
    "count missing": (split_keys(0, 2), split_keys(1, None), r"m-00002.*split\.count is None"),
    "count bool": (split_keys(0, True), split_keys(1, 2), r"m-00001.*split\.count is True"),
    "count negative": (split_keys(0, -2), split_keys(1, 2), r"m-00001.*split\.count is -2"),
    "count float": (split_keys(0, 2.0), split_keys(1, 2), r"m-00001.*split\.count is 2\.0"),
    "total": (split_keys(0, 2, 3), split_keys(1, 2, 3), r"split\.tensors\.count is 3; the shards hold 2"),
    "total of the second": (split_keys(0, 2), split_keys(1, 2, 9), r"m-00002.*split\.tensors\.count is 9"),
}


@pytest.mark.parametrize("name", SPLIT_FAULTS)
def test_split_faults_are_named(tmp_path: Path, name: str) -> None:
    first, second, message = SPLIT_FAULTS[name]
    paths = write_pair(tmp_path, first, second)
    with pytest.raises(ModelFileError, match=message):
        open_gguf(paths[0])


def test_split_name_that_does_not_tell_the_others(tmp_path: Path) -> None:
    for name in ("model", "m-00001-of-00003", "m-1-of-2", "m-00003-of-00002", "m-00000-of-00002"):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(encode_gguf(split_keys(0, 2), [one()]))
        with pytest.raises(ModelFileError, match=r"split\.count is 2, so the file must be named …-0000N-of-00002"):
            open_gguf(path)


def test_same_tensor_in_two_shards(tmp_path: Path) -> None:
    paths = write_pair(tmp_path, split_keys(0, 2), split_keys(1, 2), ("a", "a"))
    with pytest.raises(ModelFileError, match=r"m-00002.*tensor 'a' is in m-00001-of-00002\.gguf too"):
        open_gguf(paths[1])


def test_b40m_missing_shards_are_named(tmp_path: Path) -> None:
    shape = tiny.LlamaShape(layers=1, width=32, ff=32)
    paths = tiny.write_split(tmp_path, "m", tiny.llama_keys(shape), tiny.llama_tensors(shape), 6)
    paths[2].unlink()
    with pytest.raises(ModelFileError, match=r"missing: m-00003-of-00006\.gguf \(at") as caught:
        open_gguf(paths[1])
    assert caught.value.status == 422
    for number in (0, 3, 4):
        paths[number].unlink()
    with pytest.raises(ModelFileError, match=r"missing: m-00001-of-00006\.gguf, m-00003.*, m-00004.* and 1 more \(at"):
        open_gguf(paths[1])
    with pytest.raises(ModelFileError, match="no such file") as caught:
        open_gguf(paths[2])
    assert caught.value.status == 404


def test_fault_of_a_sibling_names_the_sibling(tmp_path: Path) -> None:
    paths = write_pair(tmp_path, split_keys(0, 2), split_keys(1, 2))
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=r"m-00002-of-00002\.gguf: tensor 'b'.*cut short"):
        open_gguf(paths[0])
