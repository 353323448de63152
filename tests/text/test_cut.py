"""Conversations cut at whole steps [X21]."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pantheon.text.cut import cut, steps


def talk(roles: str) -> list[dict[str, Any]]:
    """`s`ystem, `d`eveloper, `u`ser, `a`ssistant, `t`ool."""
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]


def left(roles: str, n: int) -> str:
    return "".join(message["role"][0] + message["content"] for message in cut(talk(roles), n))


def test_x21_the_oldest_turns_go_and_the_system_prompt_and_the_last_turn_stay() -> None:
    assert steps(talk("suauau")) == [[1, 2], [3, 4]]
    assert [left("suauau", n) for n in range(3)] == ["s0u1a2u3a4u5", "s0u3a4u5", "s0u5"]
    assert left("suauau", 99) == "s0u5"


def test_a_system_message_in_the_middle_stays() -> None:
    assert left("dusauu", 2) == "d0s2u5"


def test_within_a_long_turn_calls_go_with_their_results() -> None:
    assert steps(talk("suatatt")) == [[2, 3]]
    assert left("suatatt", 1) == "s0u1a4t5t6"
    assert left("uauatat", 1) == "u2a3t4a5t6"
    assert left("uauatat", 2) == "u2a5t6"


def test_a_conversation_of_one_turn_has_nothing_to_give() -> None:
    for roles in ("u", "su", "sua", "suat", "s", "", "a", "sa"):
        assert steps(talk(roles)) == [], roles


def test_what_is_no_message_is_left_to_the_check() -> None:
    assert cut(["x", {"content": "no role"}, {"role": "user", "content": "a"}], 1)[-1]["content"] == "a"


@given(st.text("sduat", max_size=30), st.integers(0, 40))
def test_steps_are_apart_in_order_and_never_touch_what_must_stay(roles: str, n: int) -> None:
    messages = talk(roles)
    found = [i for step in steps(messages) for i in step]
    assert found == sorted(set(found)) and all(steps(messages))
    assert not [i for i in found if roles[i] in "sd"]
    if roles:
        assert len(cut(messages, 99)) > 0
    if "u" in roles:
        assert roles.rindex("u") not in found
    kept = cut(messages, n)
    assert [m for m in messages if m in kept] == kept
    # a tool result goes with the call in front of it
    for step in steps(messages):
        after = step[-1] + 1
        assert after >= len(roles) or roles[after] != "t" or after - 1 == roles.rfind("u")
