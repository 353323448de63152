"""Lines that change with every request do not reach the prompt; everything else does, byte for byte [X12]."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pantheon import settings
from pantheon.text.stable_prefix import RULES, stable

BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch={};"
PROMPT = "You are an agent.\nToday is Mon Nov 30 2026.\n\n# Tools\n"
USER = {"role": "user", "content": "hi"}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def test_the_settings_know_every_rule() -> None:
    assert tuple(RULES) == settings.STABLE_RULES
    assert settings.get("PN_STABLE_PREFIX") == "attribution"
    assert settings.rules("time, attribution,time") == "time,attribution" and settings.rules("off") == "off"
    with pytest.raises(ValueError, match="attribution,time"):
        settings.rules("attribution,off")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_an_attribution_line_goes_whatever_its_hash_X12(role: str) -> None:
    found = [
        stable([{"role": role, "content": BILLING.format(cch) + "\n" + PROMPT}, USER], "attribution")
        for cch in ("36ee5", "0aaa9")
    ]
    assert found[0] == found[1] == [{"role": role, "content": PROMPT}, USER]


def test_an_attribution_block_goes_as_a_part_and_as_a_message() -> None:
    def text(value: str) -> dict[str, str]:
        return {"type": "text", "text": value}

    line = BILLING.format("fa690")
    parts = stable([system([text(line), text(PROMPT)]), USER], "attribution")
    assert parts == [system([text(PROMPT)]), USER]
    assert stable([system(line), system(PROMPT), USER], "attribution") == [system(PROMPT), USER]
    assert stable([system([line, PROMPT])], "attribution") == [system([PROMPT])]
    # somebody has to say something
    assert stable([system(line)], "attribution") == [system(line)]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": BILLING}],
        [system("Explain this header:\n" + BILLING), USER],
        [system("x-anthropic-billing-headers: no"), USER],
        [system(None), {"role": "assistant", "content": BILLING}],
        [{"role": "tool", "content": BILLING}, 5, "text", system({"text": BILLING})],
        "no list",
        None,
    ],
)
def test_the_same_words_elsewhere_stay(messages: Any) -> None:
    assert stable(messages, "attribution") is messages


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("Current time: 2026-11-30 00:11", "Current time: 2026-11-30"),
        ("now 2026-11-30T00:11:07.123Z.", "now 2026-11-30."),
        ("now 2026-11-30T00:11:07+01:00, go", "now 2026-11-30, go"),
        ("# Time\n11/30/2026, 12:11:07 AM (UTC, UTC+0:00)", "# Time\n11/30/2026 (UTC, UTC+0:00)"),
        ("Mon Nov 30 2026 00:11:07 GMT+0000 (Coordinated Universal Time)", "Mon Nov 30 2026"),
        ("at 12:30 we eat; Today's date: 2026-11-30", "at 12:30 we eat; Today's date: 2026-11-30"),
    ],
)
def test_the_time_of_day_goes_when_asked_for_and_the_date_stays(line: str, left: str) -> None:
    assert stable([system(line), USER], "time") == [system(left), USER]
    assert stable([{"role": "user", "content": line}], "time") == [{"role": "user", "content": line}]
    assert stable(both := [system(line), USER], "attribution") is both


text = st.text("ax-:;\n 0", max_size=30) | st.just(BILLING) | st.just("2026-11-30 10:00")


@hypothesis_settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": text | st.lists(text)}),
        max_size=4,
    )
)
def test_once_is_enough_and_users_are_never_touched(messages: list[dict[str, Any]]) -> None:
    before = repr(messages)
    once = stable(messages, ",".join(RULES))
    assert repr(messages) == before
    assert [m for m in once if m["role"] == "user"] == [m for m in messages if m["role"] == "user"]
    assert stable(once, ",".join(RULES)) == once and stable(messages, "off") is messages
