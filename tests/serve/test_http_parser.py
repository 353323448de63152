"""Request heads and bodies as pure functions over bytes [M029, M030, B41]."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pantheon.serve.http_body import ChunkedBody, body_reader, content_coding, decode_content
from pantheon.serve.http_errors import HttpError
from pantheon.serve.http_parser import Head, HeadParser, Limits
from pantheon.serve.http_request import Headers

SMALL = Limits(line_bytes=200, head_bytes=600, head_fields=5, body_bytes=1000)


def parse(data: bytes, limits: Limits = SMALL) -> Head:
    head = HeadParser(limits).feed(data)
    assert head is not None, "the head is not complete"
    return head


def head_of(*fields: str, line: str = "POST /v1/x HTTP/1.1") -> bytes:
    return "\r\n".join([line, *fields, "", ""]).encode("latin-1")


def refusal(data: bytes, limits: Limits = SMALL) -> int:
    with pytest.raises(HttpError) as caught:
        parse(data, limits)
    return caught.value.status


def test_a_plain_request() -> None:
    head = parse(b"GET /a%20b/c?x=1&x=2&y HTTP/1.1\r\nHost: LocalHost:80\r\nX-One: 1\r\nx-one:\t2 \r\n\r\nrest")
    assert (head.method, head.path, head.query) == ("GET", "/a b/c", {"x": "2", "y": ""})
    assert (head.host, head.length, head.http_version) == ("localhost", 0, (1, 1))
    assert head.headers.get("X-ONE") == "1, 2" and "x-two" not in head.headers


def test_rest_holds_what_follows_the_head() -> None:
    parser = HeadParser()
    assert parser.feed(b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\nbody") is not None
    assert parser.rest == b"body"


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        ("http://api.example:8201/v1/models?q=1", "api.example", "/v1/models"),
        ("HTTPS://[::1]:1", "[::1]", "/"),
        ("http://a?q", "a", "/"),
        ("/http://b/", "h", "/http://b/"),
    ],
)
def test_absolute_targets_override_host(target: str, host: str, path: str) -> None:
    head = parse(head_of("Host: h", line=f"GET {target} HTTP/1.1"))
    assert (head.host, head.path) == (host, path)


@pytest.mark.parametrize(
    "line",
    [
        "GET /",
        "GET  / HTTP/1.1",
        "GET / HTTP/1.1 ",
        " GET / HTTP/1.1",
        "GET\t/ HTTP/1.1",
        "GET / http/1.1",
        "GET / HTTP/11",
        "GET / HTTP/1.1.1",
        "GET /\x00 HTTP/1.1",
        "GET /\xe9 HTTP/1.1",
        "GET /%zz HTTP/1.1",
        "GET /%00 HTTP/1.1",
        "GET /%ff HTTP/1.1",
        "GET /a#b HTTP/1.1",
        "GET a HTTP/1.1",
        "GET * HTTP/1.1",
        "GET ftp://a/ HTTP/1.1",
        "GET http://a@b/ HTTP/1.1",
        "GET http:/// HTTP/1.1",
        "G(T / HTTP/1.1",
        "",
        "GET / HTTP/1.1\rX",
    ],
)
def test_malformed_request_lines_are_400(line: str) -> None:
    assert refusal(("\r\n" if line == "" else "").encode() + head_of("Host: a", line=line)) == 400


def test_versions_and_methods_of_their_own_status() -> None:
    assert refusal(head_of("Host: a", line="GET / HTTP/2.0")) == 505
    assert refusal(head_of("Host: a", line="CONNECT a:1 HTTP/1.1")) == 501
    assert parse(head_of("Host: a", line="GET / HTTP/1.9")).http_version == (1, 1)
    assert parse(head_of("Host: a", line="OPTIONS * HTTP/1.1")).path == "*"


@pytest.mark.parametrize(
    "field",
    [
        "X : 1",
        " folded",
        "\tfolded",
        "X",
        ": x",
        "X\x00: 1",
        "X: a\x00b",
        "X: a\rb",
        "X: \x7f",
        "X: \x01",
        "(X): 1",
        "X\xe9: 1",
    ],
)
def test_malformed_header_lines_are_400(field: str) -> None:
    assert refusal(head_of("Host: a", field)) == 400


def test_bare_lf_is_400() -> None:
    for data in (b"GET / HTTP/1.1\nHost: a\n\n", b"GET / HTTP/1.1\r\nHost: a\n\r\n", b"\n"):
        assert refusal(data) == 400


def test_a_tls_handshake_on_a_plain_port_is_called_so() -> None:
    with pytest.raises(HttpError, match="TLS handshake.*http://"):
        parse(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")


@pytest.mark.parametrize(
    "fields", [(), ("Host: a", "Host: a"), ("Host: a b",), ("Host: a/b",), ("Host: [::1",), ("Host: a:b",)]
)
def test_host_is_needed_once_and_well_formed(fields: tuple[str, ...]) -> None:
    assert refusal(head_of(*fields)) == 400


def test_http_1_0_needs_no_host() -> None:
    head = parse(head_of(line="GET / HTTP/1.0"))
    assert (head.host, head.http_version) == (None, (1, 0))


@pytest.mark.parametrize("value", ["-1", "+5", "abc", "5, 5", "5,6", "", "1 2", "0x5", "\xb2", "1_000", "5.0"])
def test_malformed_content_length_is_400(value: str) -> None:
    assert refusal(head_of("Host: a", f"Content-Length: {value}")) == 400


def test_two_content_lengths_are_400_even_when_equal() -> None:
    assert refusal(head_of("Host: a", "Content-Length: 5", "Content-Length: 76")) == 400
    assert refusal(head_of("Host: a", "Content-Length: 5", "content-length: 5")) == 400


def test_absurd_content_length_is_413() -> None:
    assert refusal(head_of("Host: a", "Content-Length: " + "9" * 100)) == 413
    assert parse(head_of("Host: a", "Content-Length: 00000000000000000000000005")).length == 5


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (("Content-Length: 5", "Transfer-Encoding: chunked"), 400),
        (("Transfer-Encoding: gzip, chunked",), 501),
        (("Transfer-Encoding: gzip",), 501),
        (("Transfer-Encoding: xchunked",), 501),
        (("Transfer-Encoding: identity",), 501),
        (("Transfer-Encoding: chunked, chunked",), 400),
        (("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), 400),
        (("Transfer-Encoding: chunked, gzip",), 400),
        (("Transfer-Encoding: ",), 400),
        (("Transfer-Encoding: chunked,",), 400),
        (("Transfer-Encoding: \x0bchunked",), 400),
    ],
)
def test_hostile_transfer_codings(fields: tuple[str, ...], status: int) -> None:
    assert refusal(head_of("Host: a", *fields)) == status


def test_chunked_needs_http_1_1() -> None:
    assert parse(head_of("Host: a", "Transfer-Encoding: Chunked")).length is None
    assert refusal(head_of("Transfer-Encoding: chunked", line="POST / HTTP/1.0")) == 400


def test_expect() -> None:
    assert parse(head_of("Host: a", "Expect: 100-Continue", "Content-Length: 1")).expects_continue
    assert not parse(head_of("Expect: 100-continue", line="POST / HTTP/1.0")).expects_continue
    assert refusal(head_of("Host: a", "Expect: 200-ok")) == 417


def test_limits_of_the_head() -> None:
    assert refusal(b"GET /" + b"a" * 300) == 414
    assert refusal(head_of("Host: a", "X: " + "a" * 300)) == 431
    assert refusal(head_of("Host: a")[:-2] + b"X: " + b"a" * 300) == 431
    assert refusal(head_of("Host: a", *(f"X{i}: 1" for i in range(5)))) == 431
    assert refusal(head_of("Host: a", *(f"X{i}: {'a' * 180}" for i in range(4)))) == 431


def unchunk(data: bytes, limits: Limits = SMALL) -> bytes:
    reader = ChunkedBody(limits)
    assert reader.feed(data), "the body is not complete"
    return reader.body()


def test_chunks_with_extensions_and_trailers() -> None:
    data = b'5;a;b=c ; d="q\\"; x"\r\nhello\r\n00a\r\n, stranger\r\n0;last\r\nX-T: 1\r\nX-U: 2\r\n\r\nsurplus'
    assert unchunk(data) == b"hello, stranger"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"zz\r\nhi\r\n0\r\n\r\n", 400),
        (b"\r\n", 400),
        (b"-1\r\n", 400),
        (b"+1\r\na\r\n", 400),
        (b"0x1\r\na\r\n", 400),
        (b"1 \r\na\r\n", 400),
        (b"1;\r\na\r\n", 400),
        (b"1;a=\r\na\r\n", 400),
        (b"1;a\x00\r\na\r\n", 400),
        (b"1\na\r\n", 400),
        (b"1\r\nab\r\n", 400),
        (b"1\r\na\n0\r\n\r\n", 400),
        (b"1\r\na0\r\n\r\n", 400),
        (b"0\r\nbad trailer\r\n\r\n", 400),
        (b"0\r\nX: 1\n\r\n", 400),
        (b"ffffffffffffffffff\r\n", 400),
        (b"ffffffffffffffff\r\n", 413),
        (b"3e9\r\n", 413),
        (b"1;" + b"a" * 5000, 431),
        (b"0\r\nX: " + b"a" * 300, 431),
        (b"0\r\n" + b"X: 1\r\n" * 6, 431),
        ((b"1;" + b"a" * 4000 + b"\r\nx\r\n") * 20, 431),
    ],
)
def test_broken_chunks(data: bytes, status: int) -> None:
    with pytest.raises(HttpError) as caught:
        unchunk(data)
    assert caught.value.status == status


def test_chunk_sizes_add_up_to_the_limit() -> None:
    assert len(unchunk(b"1f4\r\n" + b"a" * 500 + b"\r\n1f4\r\n" + b"b" * 500 + b"\r\n0\r\n\r\n")) == 1000
    with pytest.raises(HttpError) as caught:
        unchunk(b"1f4\r\n" + b"a" * 500 + b"\r\n1f5\r\n")
    assert caught.value.status == 413


def test_a_body_over_the_limit_is_refused_by_its_length() -> None:
    with pytest.raises(HttpError) as caught:
        body_reader(1001, SMALL)
    assert caught.value.status == 413 and caught.value.extra["limit_bytes"] == 1000
    reader = body_reader(3, SMALL)
    assert not reader.feed(b"ab") and reader.feed(b"cdef") and reader.body() == b"abc"


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", gzip.compress(b"hello " * 20)),
        ("x-gzip", gzip.compress(b"hello " * 10) + gzip.compress(b"hello " * 10)),
        ("GZIP", gzip.compress(b"hello " * 20)),
        ("deflate", zlib.compress(b"hello " * 20)),
        ("deflate", zlib.compress(b"hello " * 20)[2:-4]),
        ("identity", b"hello " * 20),
        ("", b"hello " * 20),
    ],
)
def test_content_codings(coding: str, data: bytes) -> None:
    name = content_coding(Headers([("Content-Encoding", coding)]))
    assert decode_content(name, data, 1000) == b"hello " * 20


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "compress", "x" * 500])
def test_unknown_codings_are_415_and_say_what_is_spoken(coding: str) -> None:
    with pytest.raises(HttpError) as caught:
        content_coding(Headers([("Content-Encoding", coding)]))
    assert caught.value.status == 415 and caught.value.headers["Accept-Encoding"] == "gzip, deflate"
    assert len(caught.value.message) < 200


def test_a_bomb_is_413_and_broken_data_400() -> None:
    for data in (zlib.compress(b"0" * 10_000_000), zlib.compress(b"0" * 1001)):
        with pytest.raises(HttpError) as caught:
            decode_content("deflate", data, 1000)
        assert caught.value.status == 413
    whole = gzip.compress(b"hello")
    for data in (b"hello", whole[:-1], whole + b"x", gzip.compress(b"") * 1000):
        with pytest.raises(HttpError) as caught:
            decode_content("gzip", data, 1000)
        assert caught.value.status == 400


# ---- properties: where the bytes are cut does not matter, and nothing but an HttpError comes out

GOOD = (
    b"POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: localhost:8201\r\nTransfer-Encoding: chunked\r\nX: y\r\n\r\n"
    b"5;x=1\r\nhello\r\n6\r\n world\r\n0\r\nT: 1\r\n\r\n"
)
FIXED = b"POST / HTTP/1.0\r\nContent-Length: 11\r\nExpect: 100-continue\r\n\r\nhello worldGET / HTTP/1.1\r\n\r\n"


def outcome(pieces: list[bytes]) -> tuple[object, ...]:
    """The whole parse of a request fed in pieces: its parts, the refusal, or that it is not complete."""
    parser, reader, body_started = HeadParser(SMALL), None, False
    try:
        for piece in pieces:
            if reader is None:
                head = parser.feed(piece)
                if head is None:
                    continue
                reader = body_reader(head.length, SMALL)
                piece, body_started = parser.rest, True
            reader.feed(piece)
    except HttpError as fault:
        return ("refused", fault.status, fault.message)
    if not body_started or reader is None or parser.head is None or not reader.complete:
        return ("incomplete", body_started)
    head = parser.head
    return (head.method, head.path, head.query, head.host, head.length, list(head.headers), reader.body())


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A good request, or one with a few bytes changed, dropped or doubled."""
    data = bytearray(draw(st.sampled_from([GOOD, FIXED])))
    for _ in range(draw(st.integers(0, 4))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.sampled_from(["set", "drop", "insert", "cut", "repeat"]))
        if kind == "set":
            data[at] = draw(st.sampled_from(b'\r\n\0 \t:;,"0aF\xff-') | st.integers(0, 255))
        elif kind == "drop":
            del data[at]
        elif kind == "insert":
            data[at:at] = draw(
                st.sampled_from([b"\r\n", b"\n", b"\r", b" ", b"\0", b"a" * 250, b"Content-Length: 1\r\n"])
            )
        elif kind == "cut":
            del data[at + 1 :]
        else:
            data[at:at] = data[at : at + 20] * draw(st.integers(1, 40))
    return bytes(data)


@settings(deadline=None, max_examples=300)
@given(requests(), st.data())
def test_any_cut_gives_the_same_parse(data: bytes, draws: st.DataObject) -> None:
    cuts = sorted(draws.draw(st.lists(st.integers(0, len(data)), max_size=12)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    whole = outcome([data])
    assert outcome(pieces) == whole
    assert outcome([data[i : i + 1] for i in range(len(data))]) == whole


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_parsed_or_refused(data: bytes) -> None:
    outcome([data])
    outcome([b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + data])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.binary(min_size=1, max_size=60), max_size=10), st.data())
def test_what_is_chunked_comes_back(pieces: list[bytes], draws: st.DataObject) -> None:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
    reader = ChunkedBody(SMALL)
    cut = draws.draw(st.integers(0, len(framed)))
    reader.feed(framed[:cut])
    assert reader.feed(framed[cut:]) and reader.body() == b"".join(pieces)
    assert not ChunkedBody(SMALL).feed(framed[:-1])


def test_good_requests_of_the_properties_are_good() -> None:
    assert outcome([GOOD])[-1] == outcome([FIXED])[-1] == b"hello world"
