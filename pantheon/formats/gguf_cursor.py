"""Reading numbers and strings of a GGUF header with every length checked against the bytes that are left.

Knows the encoding of single fields, not their order.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from pantheon.errors import ModelFileError

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
U64_AT = _U64.unpack_from

MAX_NAME_BYTES = 65_535


def shown(text: str) -> str:
    """A name from a file as it may stand in a message: quoted, without control characters, at most 80 characters."""
    short = text if len(text) <= 80 else f"{text[:77]}..."
    return repr(short)


class Cursor:
    """A place in the header of one file; every read names the field for which it is."""

    __slots__ = ("buffer", "end", "path", "position")

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.position = 0
        self.end = len(buffer)

    def fault(self, text: str, at: int | None = None) -> ModelFileError:
        """The error for a field that starts at byte `at`, or at the present position."""
        return ModelFileError(self.path, text, offset=self.position if at is None else at)

    def need(self, size: int, field: str, at: int | None = None) -> None:
        """Raise unless `size` more bytes are in the file."""
        left = self.end - self.position
        if size > left:
            raise self.fault(f"{field}: needs {size} bytes, but {left} bytes are left in the file", at)

    def u32(self, field: str) -> int:
        """The next u32."""
        self.need(4, field)
        value: int = _U32.unpack_from(self.buffer, self.position)[0]
        self.position += 4
        return value

    def u64(self, field: str) -> int:
        """The next u64."""
        self.need(8, field)
        value: int = U64_AT(self.buffer, self.position)[0]
        self.position += 8
        return value

    def name(self, field: str) -> str:
        """The next string as a key or tensor name: not empty, UTF-8, at most 65535 bytes."""
        start = self.position
        size = self.u64(f"length of {field}")
        self.need(size, f"length of {field}", start)
        if not 0 < size <= MAX_NAME_BYTES:
            raise self.fault(f"{field} has {size} bytes; 1 to {MAX_NAME_BYTES} are allowed", start)
        try:
            text = self.buffer[self.position : self.position + size].decode()
        except UnicodeDecodeError as bad:
            raise self.fault(f"{field} is not UTF-8", self.position + bad.start) from None
        self.position += size
        return text
