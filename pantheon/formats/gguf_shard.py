"""One GGUF file: preamble, metadata, tensor directory.  A split model is several of these (see gguf.py)."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from pantheon.errors import ModelFileError
from pantheon.formats.file_map import close_map, map_file, release_pages
from pantheon.formats.gguf_cursor import Cursor
from pantheon.formats.gguf_metadata import UINT32, Span, decode, decode_value, walk
from pantheon.formats.gguf_tensors import TensorInfo, check_count, read_tensors

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
ALIGNMENT_KEY = "general.alignment"

#: first bytes of files that people hand us instead of GGUF
_FOREIGN = (
    (b"FUGG", "a big-endian GGUF file; only little-endian files are read"),
    (b"lmgg", "a GGML file from before GGUF; convert it to GGUF"),
    (b"tjgg", "a GGJT file from before GGUF; convert it to GGUF"),
    (b"fmgg", "a GGMF file from before GGUF; convert it to GGUF"),
    (b"algg", "a GGLA adapter file, not a model"),
    (b"PK\x03\x04", "a zip or PyTorch file, not GGUF"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"),
    (b"<!DOCTYPE", "a web page, not GGUF; the download went wrong"),
    (b"<html", "a web page, not GGUF; the download went wrong"),
)


class Shard:
    """The parsed header of one file and its mapping.  `spans` are the metadata places; see `metadata()`."""

    def __init__(self, path: Path) -> None:
        """Open and check `path`.  Raises ModelFileError at the first fault; nothing stays open then."""
        self.path = path
        self.mapping: mmap.mmap = map_file(path)
        try:
            self._cursor = cursor = Cursor(path, self.mapping)
            self.version = _read_preamble(cursor)
            n_tensors = cursor.u64("tensor_count")
            n_keys = cursor.u64("metadata_kv_count")
            check_count(cursor, n_tensors)  # a count that can not be true is the first fault of a file
            self.spans: dict[str, Span] = walk(cursor, n_keys)
            self.alignment = _read_alignment(cursor, self.spans)
            self.tensors: dict[str, TensorInfo] = read_tensors(cursor, n_tensors, self.alignment)
        except BaseException:
            self.close()
            raise

    def metadata(self) -> dict[str, Any]:
        """Decode all metadata; the header's pages are given back afterwards."""
        values = decode(self._cursor, self.spans)
        release_pages(self.mapping, 0, self._cursor.position)
        return values

    def integer(self, key: str, low: int, high: int) -> int | None:
        """The integer at `key`, None when the key is absent.  Raises ModelFileError for other types and values."""
        span = self.spans.get(key)
        if span is None:
            return None
        value = decode_value(self._cursor, key, span)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            text = str(value)[:40] if isinstance(value, (bool, int, float)) else f"of type {span.type}"
            raise self._cursor.fault(f"{key} is {text}; an integer from {low} to {high} is expected", span.offset)
        return value

    def fault(self, key: str, text: str) -> ModelFileError:
        """The error for the value at `key`, with its place when the key is there."""
        span = self.spans.get(key)
        return ModelFileError(self.path, f"{key} {text}", offset=None if span is None else span.offset)

    def close(self) -> None:
        """Unmap the file; it stays mapped while arrays from it live."""
        close_map(self.mapping)


def _read_preamble(cursor: Cursor) -> int:
    """Magic and version.  Returns 2 or 3."""
    start = cursor.buffer[:24]
    if not start.startswith(b"GGUF"):
        for magic, what in _FOREIGN:
            if start.startswith(magic):
                raise cursor.fault(f"is {what}", 0)
        raise cursor.fault(f"is not a GGUF file: magic is {start[:4]!r}, not b'GGUF'", 0)
    cursor.position = 4
    version = cursor.u32("version")
    if version in (2, 3):
        return version
    if version & 0xFFFF == 0 and version:
        raise cursor.fault("version: the file is big-endian; only little-endian GGUF files are read", 4)
    if version == 1:
        raise cursor.fault("version is 1; convert the model anew (versions 2 and 3 are read)", 4)
    raise cursor.fault(f"version is {version}; versions 2 and 3 are read", 4)


def _read_alignment(cursor: Cursor, spans: dict[str, Span]) -> int:
    span = spans.get(ALIGNMENT_KEY)
    if span is None:
        return DEFAULT_ALIGNMENT
    if span.type != UINT32:
        raise cursor.fault(f"{ALIGNMENT_KEY} has type {span.type}; it must be a uint32 (type {UINT32})", span.offset)
    value: int = decode_value(cursor, ALIGNMENT_KEY, span)
    if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        expected = f"a power of two from 1 to {MAX_ALIGNMENT}"
        raise cursor.fault(f"{ALIGNMENT_KEY} is {value}; it must be {expected}", span.offset)
    return value
