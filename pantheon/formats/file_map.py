"""A model file as read-only memory: opening it, the errors of opening, and giving its pages back.

Knows files, not formats.  A mapping is shared with the page cache: pages become resident when they are touched.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path

from pantheon.errors import ModelFileError

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def missing_file(path: Path) -> ModelFileError:
    """The error for a path where nothing is: 404 `model_not_found`."""
    return ModelFileError(path, "no such file", status=404, code="model_not_found")


def _check_regular(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise ModelFileError(path, "is a directory; give the path of the model file in it")
    kind = next((name for test, name in _KINDS if test(mode)), "no regular file")
    raise ModelFileError(path, f"is {kind}, not a regular file")


def map_file(path: Path) -> mmap.mmap:
    """Map a regular, non-empty file for reading.  Never blocks (a pipe is refused unopened).

    Raises ModelFileError: 404 `model_not_found` for a missing file, 422 for what is no readable regular file.
    """
    try:
        _check_regular(path, os.stat(path).st_mode)
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise missing_file(path) from None
    except OSError as fault:
        raise ModelFileError(path, f"can not be opened: {fault.strerror}") from None
    except ValueError:
        raise ModelFileError(repr(str(path)), "is not a valid path") from None
    try:
        status = os.fstat(handle)
        _check_regular(path, status.st_mode)
        if status.st_size == 0:
            raise ModelFileError(path, "is empty", offset=0)
        return mmap.mmap(handle, status.st_size, access=mmap.ACCESS_READ)
    except (OSError, OverflowError) as fault:
        raise ModelFileError(path, f"can not be mapped: {fault}") from None
    finally:
        os.close(handle)


def release_pages(mapping: mmap.mmap, offset: int, size: int) -> None:
    """Drop the pages of a byte range from this process; they are read again from the file when touched."""
    start = offset - offset % mmap.PAGESIZE
    end = min(offset + size, len(mapping))
    if end > start:
        mapping.madvise(mmap.MADV_DONTNEED, start, end - start)


def close_map(mapping: mmap.mmap) -> None:
    """Close a mapping; when arrays still look into it, it goes with the last of them instead."""
    with contextlib.suppress(BufferError):
        mapping.close()
