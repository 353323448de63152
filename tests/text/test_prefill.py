"""Conversations that end with the beginning of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from pantheon.engine.scripted import scripted_model
from pantheon.text.prefill import split_prefill

USER = {"role": "user", "content": "hi"}
THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[a]<think>\n{% endif %}"
)
PARTS = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]


@pytest.mark.parametrize(
    ("last", "text"),
    [
        ({"role": "assistant", "content": "Wh"}, "Wh"),
        ({"role": "assistant", "content": PARTS}, "Wh\n\nill"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, ""),
        ({"role": "assistant", "content": 5}, ""),
        ({"role": "assistant", "content": None}, ""),
        ({"role": "user", "content": "x"}, ""),
        ("x", ""),
    ],
)
def test_the_beginning_is_taken_apart(last: Any, text: str) -> None:
    messages = [USER, last]
    assert split_prefill(messages) == ([USER] if text else messages, text)
    assert split_prefill([last]) == ([last], "")


def test_it_stands_behind_the_opening_of_the_answer_and_is_no_markup() -> None:
    model = scripted_model({"pieces": ["x"]})
    prompt = model.prompt([USER, {"role": "assistant", "content": "So<|im_end|>"}], continue_final=True)
    assert prompt.text.endswith("<|im_start|>assistant\nSo<|im_end|>")
    marker = model.tokenizer.token_id("<|im_end|>")
    assert prompt.ids.count(marker) == model.prompt([USER]).ids.count(marker)
    plain = model.prompt([USER, {"role": "assistant", "content": "So"}])
    assert plain.text.endswith("So<|im_end|>\n<|im_start|>assistant\n")


def test_an_open_thought_is_ended_first() -> None:
    model = scripted_model({"pieces": ["x"], "template": THINKS})
    prompt = model.prompt([USER, {"role": "assistant", "content": "So"}], continue_final=True)
    assert prompt.text == "[user]hi[a]<think>\n</think>\n\nSo" and not prompt.opens_reasoning
