"""The head of an HTTP/1.x request, read strictly after RFC 9112, with no socket in sight.

Bytes go in with `feed` in pieces of any size; the outcome does not depend on where they were cut.  Every fault is an
`HttpError`; there is no lenient reading, since each leniency is a way for two parties to frame the same bytes
differently.  Must not know sockets, routes or bodies beyond how they are framed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote_to_bytes

from pantheon.serve.http_errors import HttpError, bad_http
from pantheon.serve.http_request import Headers

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"(" + TOKEN + rb") ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
_FIELD_NAME = re.compile(TOKEN)
_FIELD_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9\-._~%!$&'()*+,;=]*)(?::([0-9]*))?")
_ABSOLUTE = re.compile(r"https?://([^/?#]+)([^#]*)", re.IGNORECASE)
_BAD_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_MAX_QUERY_FIELDS = 100


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes that a request may not exceed."""

    line_bytes: int = 16 << 10
    head_bytes: int = 64 << 10
    head_fields: int = 100
    body_bytes: int = 32 << 20


@dataclass(frozen=True)
class Head:
    """A parsed request head.  `length` is None for a chunked body; `host` is without port and in lower case."""

    method: str
    path: str
    query: dict[str, str]
    http_version: tuple[int, int]
    headers: Headers
    host: str | None
    length: int | None
    expects_continue: bool


@dataclass
class HeadParser:
    """Collects lines up to the empty one.  `head` is set once it is whole; `rest` then holds the bytes behind it."""

    limits: Limits = field(default_factory=Limits)
    head: Head | None = None
    _buffer: bytearray = field(default_factory=bytearray)
    _taken: int = 0
    _line: tuple[str, str, tuple[int, int]] | None = None
    _fields: list[tuple[str, str]] = field(default_factory=list)
    _blank_seen: bool = False

    @property
    def started(self) -> bool:
        """Whether any byte has arrived."""
        return bool(self._taken or self._buffer)

    @property
    def rest(self) -> bytes:
        """What was fed behind the head."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> Head | None:
        """Take more bytes; returns the head once complete.  Raises HttpError (400, 414, 431, 501, 505)."""
        self._buffer += data
        if self._line is None and self._buffer.startswith(b"\x16\x03"):
            raise bad_http("a TLS handshake, but this port speaks plain HTTP: use http://, or serve with --ssl-cert")
        while self.head is None:
            end = self._buffer.find(b"\n")
            size = end + 1 if end >= 0 else len(self._buffer)
            self._check_size(size)
            if end < 0:
                break
            line = take_line(self._buffer, end)
            self._taken += size
            self._accept(line)
        return self.head

    def _check_size(self, size: int) -> None:
        if size > self.limits.line_bytes or self._taken + size > self.limits.head_bytes:
            if self._line is None:
                raise HttpError(414, "the request line is too long", code="uri_too_long")
            raise HttpError(431, "the request header is too large", code="header_too_large")

    def _accept(self, line: bytes) -> None:
        if self._line is None:
            if line == b"" and not self._blank_seen:  # RFC 9112 2.2: one empty line before the request is forgiven
                self._blank_seen = True
                return
            self._line = parse_request_line(line)
        elif line == b"":
            self.head = build_head(*self._line, Headers(self._fields))
        elif len(self._fields) == self.limits.head_fields:
            raise HttpError(431, f"more than {self.limits.head_fields} header fields", code="header_too_large")
        else:
            self._fields.append(parse_field(line))


def take_line(buffer: bytearray, end: int) -> bytes:
    """Remove the line whose LF stands at `end`; returns it without CRLF.  Raises HttpError (400) for a bare LF."""
    if end == 0 or buffer[end - 1] != 0x0D:
        raise bad_http("a line ends in LF without CR")
    line = bytes(buffer[: end - 1])
    del buffer[: end + 1]
    return line


def parse_request_line(line: bytes) -> tuple[str, str, tuple[int, int]]:
    """(method, target, version).  Raises HttpError 400, or 505 for a major version other than 1."""
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise bad_http("malformed request line")
    method, target, major, minor = match.groups()
    if major != b"1":
        raise HttpError(505, "only HTTP/1.0 and HTTP/1.1 are spoken here", code="http_version_not_supported")
    return method.decode("ascii"), target.decode("ascii"), (1, min(int(minor), 1))


def parse_field(line: bytes) -> tuple[str, str]:
    """(name, value) of one header line.  Raises HttpError (400): fold, blank before the colon, control bytes."""
    if line[:1] in (b" ", b"\t"):
        raise bad_http("a header line is folded")
    name, colon, value = line.partition(b":")
    if not colon or _FIELD_NAME.fullmatch(name) is None or _FIELD_VALUE.fullmatch(value) is None:
        raise bad_http("malformed header line")
    return name.decode("ascii"), value.strip(b" \t").decode("latin-1")


def build_head(method: str, target: str, version: tuple[int, int], headers: Headers) -> Head:
    """Check the fields against each other and resolve the target.  Raises HttpError 400, 413, 417, 501."""
    authority, path, query = parse_target(method, target)
    host = parse_host(headers, version)
    if authority is not None:  # RFC 9112 3.2.2: an absolute target overrides Host
        host = _host_name(authority)
    length = body_length(headers, version)
    return Head(method, path, query, version, headers, host, length, expects_continue(headers, version))


def parse_target(method: str, target: str) -> tuple[str | None, str, dict[str, str]]:
    """(authority or None, decoded path, query) of origin, absolute and asterisk form.  Raises HttpError 400, 501."""
    authority: str | None = None
    if method == "CONNECT":
        raise HttpError(501, "CONNECT is not supported", code="not_implemented")
    if target == "*" and method == "OPTIONS":
        return None, "*", {}
    if not target.startswith("/"):
        match = _ABSOLUTE.fullmatch(target)
        if match is None:
            raise bad_http("malformed request target")
        authority, target = match[1], match[2]
        target = target if target.startswith("/") else "/" + target
    raw_path, _, raw_query = target.partition("?")
    if "#" in target or _BAD_PERCENT.search(raw_path):
        raise bad_http("malformed request target")
    try:
        path = unquote_to_bytes(raw_path).decode("utf-8")
        fields = parse_qsl(raw_query, keep_blank_values=True, errors="replace", max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError:
        raise bad_http("malformed request target") from None
    if "\0" in path:
        raise bad_http("malformed request target")
    return authority, path, dict(fields)


def parse_host(headers: Headers, version: tuple[int, int]) -> str | None:
    """The host of the one Host field, None when HTTP/1.0 sent none.  Raises HttpError (400)."""
    values = headers.get_all("host")
    if len(values) > 1 or (not values and version == (1, 1)):
        raise bad_http("a request needs exactly one Host header")
    return _host_name(values[0]) if values else None


def _host_name(authority: str) -> str:
    match = _HOST.fullmatch(authority)
    if match is None:
        raise bad_http("malformed host")
    return match[1].lower()


def body_length(headers: Headers, version: tuple[int, int]) -> int | None:
    """Body bytes that follow, None for chunked (RFC 9112 6).  Raises HttpError 400, 413 (absurd), 501."""
    lengths, codings = headers.get_all("content-length"), headers.get_all("transfer-encoding")
    if codings:
        if lengths:
            raise bad_http("both Content-Length and Transfer-Encoding")
        _check_chunked(",".join(codings), version)
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or not (lengths[0].isascii() and lengths[0].isdigit()):
        raise bad_http("malformed Content-Length")
    if len(lengths[0].lstrip("0")) > 18:
        raise HttpError(413, "the request body is too large", code="body_too_large")
    return int(lengths[0])


def _check_chunked(codings: str, version: tuple[int, int]) -> None:
    names = [name.strip(" \t").lower() for name in codings.split(",")]
    if version == (1, 0):
        raise bad_http("Transfer-Encoding in an HTTP/1.0 request")
    if names[-1] != "chunked" and "chunked" in names:
        raise bad_http("chunked is not the last transfer coding")
    if names.count("chunked") > 1 or not all(names):
        raise bad_http("malformed Transfer-Encoding")
    if names != ["chunked"]:
        raise HttpError(501, "the only transfer coding supported is chunked", code="not_implemented")


def expects_continue(headers: Headers, version: tuple[int, int]) -> bool:
    """Whether the client waits for `100 Continue`.  Raises HttpError (417) for another expectation."""
    value = headers.get("expect")
    if value is None or version == (1, 0):  # RFC 9110 10.1.1: ignored from HTTP/1.0
        return False
    if value.lower() != "100-continue":
        raise HttpError(417, "the only expectation supported is 100-continue", code="expectation_failed")
    return True
