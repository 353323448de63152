"""Templates by name."""

from __future__ import annotations

import pytest

from pantheon.text.chat_template import ChatTemplate
from pantheon.text.template_names import NAMED

TALK = [{"role": "system", "content": " You are a test. "}, {"role": "user", "content": "Hi"}]
SHOWN = {
    "chatml": "<|im_start|>system\nYou are a test.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "command-r": "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>You are a test.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
    "<|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nYou are a test.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "phi3": "<|system|>\nYou are a test.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n",
    "zephyr": "<|system|>\nYou are a test.<|endoftext|>\n<|user|>\nHi<|endoftext|>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", NAMED)
def test_each_renders_its_turns(name: str) -> None:
    template = ChatTemplate(NAMED[name])
    talk = TALK if name != "chatml" else [{**TALK[0], "content": "You are a test."}, TALK[1]]
    assert template.render(talk) == SHOWN[name]
    closed = template.render(talk, add_generation_prompt=False)
    assert SHOWN[name].startswith(closed) and "Hi" in closed
