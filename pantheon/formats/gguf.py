"""GGUF model files (versions 2 and 3, little endian, split or whole), read in place over mmap.

`open_gguf` checks the whole header before it returns: what it gives can be read without further checks.  Each fault is
one ModelFileError with file, field and byte offset.  Knows bytes and names, not what they mean to a model.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon.errors import ModelFileError
from pantheon.formats.file_map import release_pages
from pantheon.formats.gguf_cursor import shown
from pantheon.formats.gguf_shard import Shard
from pantheon.formats.gguf_tensors import TensorInfo

__all__ = ["GGUFFile", "TensorInfo", "open_gguf"]

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


class GGUFFile:
    """An open model file: metadata and tensors of all its shards.  Read-only; usable from several threads.

    `metadata`: key -> str, int, float, bool or a list; numeric arrays of more than 1024 items are NumPy arrays.  Of a
    split model it is the metadata of the first shard.  `path` is the first shard, `shards` are all of them in order.
    """

    def __init__(self, shards: list[Shard]) -> None:
        first = shards[0]
        self.path = first.path
        self.version = first.version
        self.alignment = first.alignment
        self.metadata: dict[str, Any] = first.metadata()
        self.tensors: dict[str, TensorInfo] = {}
        for shard in shards:
            for name in self.tensors.keys() & shard.tensors.keys():
                raise ModelFileError(shard.path, f"tensor {shown(name)} is in {self.tensors[name].shard.name} too")
            self.tensors |= shard.tensors
        self._shards = {shard.path: shard for shard in shards}
        self._open = True

    @property
    def shards(self) -> tuple[Path, ...]:
        """The files of the model, in order."""
        return tuple(self._shards)

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of one tensor: a read-only view of the file, uint8 [nbytes].

        Raises KeyError for an unknown name, ModelFileError when the file has become shorter since it was opened.
        """
        info = self.tensors[name]
        if not self._open:
            raise ValueError(f"{self.path} is closed")
        mapping = self._shards[info.shard].mapping
        if mapping.size() < info.offset + info.nbytes:  # to touch it would be a SIGBUS
            raise ModelFileError(info.shard, f"tensor {shown(name)}: the file was cut short after it was opened")
        return np.frombuffer(mapping, np.uint8, info.nbytes, info.offset)

    def release(self, name: str) -> None:
        """Give back the memory of a tensor that has been read; it can be read again."""
        info = self.tensors[name]
        if self._open:
            release_pages(self._shards[info.shard].mapping, info.offset, info.nbytes)

    def close(self) -> None:
        """Unmap the files; arrays that `data` gave out stay valid and keep their file mapped."""
        self._open = False
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file, or a split model by any of its shards.

    Raises ModelFileError: 404 `model_not_found` for a missing file, 422 `invalid_model_file` for every other fault.
    """
    opened = [Shard(Path(path))]
    try:
        shards = _find_siblings(opened)
        return GGUFFile(shards)
    except BaseException:
        for shard in opened:
            shard.close()
        raise


def _find_siblings(opened: list[Shard]) -> list[Shard]:
    """All shards of the model of the one in `opened`, in order; those opened here are added to `opened`."""
    given = opened[0]
    count = given.integer("split.count", 0, 65_535)
    if count is None or count < 2:
        return [given]
    match = _SPLIT_NAME.fullmatch(given.path.name)
    if match is None or int(match["count"]) != count or not 1 <= int(match["number"]) <= count:
        expected = f"…-0000N-of-{count:05d}.gguf"
        raise given.fault("split.count", f"is {count}, so the file must be named {expected} to find the others")
    paths = [given.path.with_name(f"{match['stem']}-{number + 1:05d}-of-{count:05d}.gguf") for number in range(count)]
    missing = [p.name for p in paths if not os.path.exists(p)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise given.fault("split.count", f"is {count}; missing: {', '.join(missing[:3])}{more}")
    shards = []
    for number, path in enumerate(paths):
        shard = given if path == given.path else Shard(path)
        if shard is not given:
            opened.append(shard)
        _check_shard(shard, number, count)
        shards.append(shard)
    _check_total(shards)
    return shards


def _check_shard(shard: Shard, number: int, count: int) -> None:
    no, its_count, _ = (shard.integer(key, 0, (1 << 31) - 1) for key in _SPLIT_KEYS)
    if its_count != count:
        raise shard.fault("split.count", f"is {its_count}; the other shards say {count}")
    if no != number:
        raise shard.fault("split.no", f"is {no}; by the file's name it must be {number} (counted from 0)")


def _check_total(shards: list[Shard]) -> None:
    found = sum(len(shard.tensors) for shard in shards)
    for shard in shards:
        total = shard.integer("split.tensors.count", 0, (1 << 31) - 1)
        if total is not None and total != found:
            raise shard.fault("split.tensors.count", f"is {total}; the shards hold {found} tensors")
