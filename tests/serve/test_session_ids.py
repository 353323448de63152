"""Ids of conversations, as real clients send them: found, never refused [M039, X01]."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pantheon.serve.session_ids import SESSION_HEADERS, session_id

CLAUDE = "user_0a1b_account_2c3d_session_4e5f"


@pytest.mark.parametrize(
    ("body", "headers", "wanted"),
    [
        ({}, {}, None),
        ({"session_id": "a"}, {"X-Session-Id": "b"}, "a"),
        ({}, {"X-Session-Id": "b", "x-session-affinity": "c"}, "b"),
        ({"prompt_cache_key": "k"}, {"session-id": "d", "thread-id": "e"}, "d"),
        ({"prompt_cache_key": "k", "user": "u1", "metadata": {"k": "v"}, "safety_identifier": "s"}, {}, "k"),
        ({"user": "u1", "safety_identifier": "s", "metadata": {"user_id": "u1"}}, {"x-client-request-id": "r"}, None),
        ({"conversation": {"id": "c"}}, {}, "c"),
        ({"conversation": "c"}, {}, "c"),
        ({"chat_id": 17}, {}, "17"),
        ({"metadata": {"user_id": CLAUDE}}, {}, CLAUDE),
        ({"client_metadata": {"thread_id": "t", "session_id": "s"}}, {}, "s"),
        ({"session_id": "", "metadata": {"session_id": "m"}}, {"session-id": " "}, "m"),
    ],
)
def test_an_id_is_found_where_clients_put_it_M039(body: Any, headers: dict[str, str], wanted: str | None) -> None:
    assert session_id(body, headers) == wanted


@pytest.mark.parametrize("name", SESSION_HEADERS)
def test_header_names_in_any_case(name: str) -> None:
    assert session_id({}, {name.upper(): "x"}) == session_id({}, {name: "x"}) == "x"


json = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300)
values = json | st.lists(json, max_size=2) | st.dictionaries(st.sampled_from(["id", "user_id", "session_id"]), json)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["session_id", "metadata", "conversation", "prompt_cache_key"]), values))
def test_whatever_is_sent_is_an_id_or_none_and_no_fault(body: dict[str, Any]) -> None:
    found = session_id(body, {})
    assert found is None or 0 < len(found) <= 256


def test_long_ids_keep_what_sets_them_apart() -> None:
    assert session_id({"session_id": "x" * 300 + "1"}, {}) != session_id({"session_id": "x" * 300 + "2"}, {})
