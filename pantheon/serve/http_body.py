"""Request bodies: unframed by length or chunks (RFC 9112 6-7), then decompressed, always within a bound.

Must not know sockets, routes or JSON.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from typing import Protocol

from pantheon.serve.http_errors import HttpError, bad_http
from pantheon.serve.http_parser import TOKEN, Limits, parse_field, take_line
from pantheon.serve.http_request import Headers

_QUOTED = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"'
_EXTENSION = rb"[ \t]*;[ \t]*" + TOKEN + rb"(?:[ \t]*=[ \t]*(?:" + TOKEN + rb"|" + _QUOTED + rb"))?"
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:" + _EXTENSION + rb")*")
_CHUNK_LINE_BYTES = 4 << 10
_EXTENSION_BYTES = 64 << 10
_MAX_MEMBERS = 64
_WBITS = {"gzip": (31,), "x-gzip": (31,), "deflate": (15, -15)}  # deflate: zlib as specified, raw as some send it


class BodyReader(Protocol):
    """Takes framed bytes, holds the body.  Bytes behind the body are left alone."""

    complete: bool

    def feed(self, data: bytes) -> bool:
        """Take more bytes; returns `complete`.  Raises HttpError (400, 413, 431)."""

    def body(self) -> bytes:
        """What has been unframed so far."""


def too_large(limit: int) -> HttpError:
    """413 with the limit in it."""
    return HttpError(413, f"the request body is larger than {limit} bytes", code="body_too_large", limit_bytes=limit)


def body_reader(length: int | None, limits: Limits) -> BodyReader:
    """The reader for a body of `length` bytes, None for chunked.  Raises HttpError (413) before any byte is read."""
    if length is None:
        return ChunkedBody(limits)
    if length > limits.body_bytes:
        raise too_large(limits.body_bytes)
    return FixedBody(length)


class FixedBody:
    """A body of known length."""

    def __init__(self, length: int) -> None:
        self._left = length
        self._data = bytearray()
        self.complete = length == 0

    def feed(self, data: bytes) -> bool:
        taken = data[: self._left]
        self._data += taken
        self._left -= len(taken)
        self.complete = self._left == 0
        return self.complete

    def body(self) -> bytes:
        return bytes(self._data)


@dataclass
class ChunkedBody:
    """A chunked body; extensions and trailer fields are checked, bounded and dropped."""

    limits: Limits
    complete: bool = False
    _data: bytearray = field(default_factory=bytearray)
    _buffer: bytearray = field(default_factory=bytearray)
    _left: int = 0
    _state: str = "size"  # size -> data -> end -> size … size -> trailer -> complete
    _extension_bytes: int = 0
    _trailer_bytes: int = 0
    _trailer_fields: int = 0

    def feed(self, data: bytes) -> bool:
        """Take more bytes; returns `complete`.  Raises HttpError: 400 framing, 413 body, 431 extensions, trailers."""
        self._buffer += data
        while not self.complete and self._advance():
            pass
        return self.complete

    def body(self) -> bytes:
        return bytes(self._data)

    def _advance(self) -> bool:
        if self._state == "data":
            return self._take_data()
        limit = {"size": _CHUNK_LINE_BYTES, "end": 2, "trailer": self.limits.line_bytes}[self._state]
        end = self._buffer.find(b"\n", 0, limit)
        if end < 0:
            if len(self._buffer) >= limit:
                self._refuse_line()
            return False
        line = take_line(self._buffer, end)
        if self._state == "size":
            self._open_chunk(line)
        elif self._state == "end":
            if line:
                raise bad_http("a chunk is longer than its size says")
            self._state = "size"
        else:
            self._trailer(line)
        return True

    def _refuse_line(self) -> None:
        if self._state == "end":
            raise bad_http("a chunk is longer than its size says")
        raise HttpError(431, "a line of the chunked body is too long", code="header_too_large")

    def _open_chunk(self, line: bytes) -> None:
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise bad_http("malformed chunk size")
        self._extension_bytes += len(line) - len(match[1])
        if self._extension_bytes > _EXTENSION_BYTES:
            raise HttpError(431, "the chunk extensions are too large", code="header_too_large")
        self._left = int(match[1], 16)
        if len(self._data) + self._left > self.limits.body_bytes:
            raise too_large(self.limits.body_bytes)
        self._state = "data" if self._left else "trailer"

    def _take_data(self) -> bool:
        taken = self._buffer[: self._left]
        del self._buffer[: self._left]
        self._data += taken
        self._left -= len(taken)
        if self._left == 0:
            self._state = "end"
        return self._left == 0

    def _trailer(self, line: bytes) -> None:
        if line == b"":
            self.complete = True
            return
        parse_field(line)
        self._trailer_bytes += len(line)
        self._trailer_fields += 1
        if self._trailer_bytes > self.limits.head_bytes or self._trailer_fields > self.limits.head_fields:
            raise HttpError(431, "the trailer of the chunked body is too large", code="header_too_large")


def content_coding(headers: Headers) -> str | None:
    """The one Content-Encoding of the request, None for plain.  Raises HttpError (415) for one that is not spoken."""
    names = [name.strip(" \t").lower() for name in (headers.get("content-encoding") or "").split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _WBITS:
        message = f"Content-Encoding {', '.join(names)[:80]!r} is not supported; send gzip, deflate or plain"
        raise HttpError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "gzip, deflate"})
    return names[0]


def decode_content(coding: str | None, data: bytes, limit: int) -> bytes:
    """Undo the content coding, never inflating beyond `limit` bytes.  Raises HttpError 400, 413."""
    if coding is None:
        return data
    for wbits in _WBITS[coding]:
        try:
            return _inflate(data, wbits, limit)
        except zlib.error:
            continue
    raise HttpError(400, f"the request body is not valid {coding}", code="bad_encoding")


def _inflate(data: bytes, wbits: int, limit: int) -> bytes:
    out = bytearray()
    for _ in range(_MAX_MEMBERS):  # gzip may come in several members; each costs a copy of what is left
        if not data:
            return bytes(out)
        stream = zlib.decompressobj(wbits)
        out += stream.decompress(data, limit + 1 - len(out))
        if len(out) > limit:
            raise too_large(limit)
        if not stream.eof:
            raise zlib.error("the stream is cut short")
        data = stream.unused_data
    raise zlib.error("too many members")
