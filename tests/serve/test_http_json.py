"""JSON from strangers and JSON that can not break a stream [M032, B13]."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pantheon.errors import BadRequest
from pantheon.serve.http_json import dump_json, load_json, load_object, nesting


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" \r\n",
        b"{:",
        b'{"model":',
        b"[1,2]",
        b'"text"',
        b"null",
        b"17",
        b"{} {}",
        b"{'a':1}",
        b'{"a":1,}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e400}',
        b'{"a":-1e999}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":' + b"9" * 33 + b"}",
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        '{"a":1}'.encode("utf-16"),
        b'{"a":"\x01"}',
        b'{"a":"line\nbreak"}',
        b'{"a":"' + b"x" * 100,
        b'{"a":"\\',
        b'{"a":"\\x"}',
        b'{"a":' + nested(3000) + b"}",
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b'{"a":01}',
        b'{"a":+1}',
        b"\xef\xbb\xbf",
        b"\0",
    ],
)
def test_bad_bodies_are_400(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        load_object(body)
    assert caught.value.status == 400 and caught.value.type == "invalid_request_error"
    assert len(caught.value.message) < 300


def test_depth_is_bounded_at_100_levels() -> None:
    """B13a, B13b: what Python's parser would recurse into is refused before it gets there."""
    assert load_json(nested(100))
    for body in (nested(101), b"[" * 100_000, nested(100_000), b"[{" * 60 + b'"a":1'):
        with pytest.raises(BadRequest):
            load_json(body)


def test_brackets_in_strings_do_not_count() -> None:
    text = '["' + "[" * 500 + '\\"' + "{" * 500 + '\\\\"]'
    assert load_json(text.encode())[0].startswith("[[[")


@pytest.mark.parametrize(
    "body",
    [
        b'"' + b'\\"' * 2_000_000,
        b'"\\' * 2_000_000,
        b"[" * 4_000_000,
        b"[],[" * 1_000_000,
        b'"[' * 2_000_000,
    ],
)
def test_hostile_bodies_take_linear_time(body: bytes) -> None:
    started = time.thread_time()  # not the clock: other processes must not fail this
    with pytest.raises(BadRequest):
        load_json(body)
    assert time.thread_time() - started < 1.0


def test_lone_surrogates_become_replacement_characters_and_pairs_stay() -> None:
    body = b'{"a":"x\\ud83dy","b":["\\ud83d\\ude00"],"\\udc00":1}'
    assert load_json(body) == {"a": "x\ufffdy", "b": ["\U0001f600"], "\ufffd": 1}


def test_a_byte_order_mark_is_forgiven() -> None:
    assert load_object(b'\xef\xbb\xbf{"a":1}') == {"a": 1}


def test_dumped_json_is_always_valid() -> None:
    assert dump_json({"a": "é\u2028", "b": 1.5}) == '{"a":"é\u2028","b":1.5}'.encode()
    assert dump_json({"a": "\ud83d", "b": "\ud83d\ude00"}) == '{"a":"\ufffd","b":"\U0001f600"}'.encode()
    assert dump_json([float("-inf"), {"x": (float("nan"), 1)}]) == b'[null,{"x":[null,1]}]'


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    # lone halves of a surrogate pair come back as U+FFFD, so they are left out here
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=150)
@given(VALUES)
def test_what_is_dumped_loads_again(value: object) -> None:
    assert load_json(dump_json(value)) == value


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=80) | st.text('[]{}",:\\u0d8 \n1e-', max_size=80).map(str.encode))
def test_arbitrary_bytes_load_as_python_does_or_are_refused(body: bytes) -> None:
    assert nesting(body) >= 0
    try:
        value = load_json(body)
    except BadRequest:
        return
    assert value is None or json.loads(dump_json(value)) == value


@settings(deadline=None, max_examples=30)
@given(st.integers(101, 400), st.integers(0, 60))
def test_nesting_is_exact_beyond_the_limit(depth: int, siblings: int) -> None:
    assert nesting(b"[" + nested(10) * siblings + nested(depth - 1) + b"]") == depth


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["[", "]", "{", "}", '"', "\\", "\\\\", '\\"', "a"]), max_size=60).map("".join))
def test_nesting_follows_strings_and_escapes(text: str) -> None:
    """Against the plain reading, one character at a time, up to the first backslash outside a string."""
    depth = deepest = 0
    inside = escaped = False
    taken = "[" * 101
    for c in text:
        if c == "\\" and not inside:
            break
        taken += c
        if inside and not escaped and c == "\\":
            escaped = True
            continue
        if c == '"' and not escaped:
            inside = not inside
        elif not inside:
            depth += (c in "[{") - (c in "]}")
            deepest = max(deepest, depth)
        escaped = False
    assert nesting(taken.encode()) == 101 + deepest
