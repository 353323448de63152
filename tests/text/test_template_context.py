"""Variables that templates take for granted."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from pantheon.engine.scripted import scripted_model
from pantheon.text.template_context import template_context

NOON = datetime(2026, 11, 30, 12)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{% if not enable_thinking %}x{% endif %}", {"enable_thinking": True}),
        ("{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}", {}),
        ("{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}", {}),
        ("{%- set enable_thinking = enable_thinking | default(false) -%}", {}),
        ("plain words: enable_thinking, datetime", {}),
        ("{% if not date_string is defined %}{% set date_string = '1' %}{% endif %}", {"date_string": "30 Nov 2026"}),
        ("{% if date_string is defined %}{{ strftime_now('%d') }}{% endif %}", {}),
        ("{{ 'Today is ' + datetime }}", {"datetime": "Nov 30 2026 12:00:00 GMT"}),
        ("{{ functions }}", {"functions": "[]"}),
        ("{{ functions }}{% if tools %}{% endif %}", {}),
        ("{{ message.functions }}{{ 'datetime' }}", {}),
    ],
)
def test_what_a_template_is_given(source: str, found: dict[str, Any]) -> None:
    assert template_context(source, None, NOON) == found


def test_tools_as_json_and_the_callers_own_value_wins() -> None:
    assert '"name": "f"' in template_context("{{ functions }}", [{"name": "f"}])["functions"]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not enable_thinking %}!{% endif %}"
    model = scripted_model({"pieces": ["x"], "template": template})
    hi = [{"role": "user", "content": "hi"}]
    assert model.prompt(hi).text == "hi" and model.prompt(hi, enable_thinking=False).text == "hi!"
