"""From messages to token ids: guard user text, render the template, tokenise its markup and only its markup.

The messages are normalised before (text.messages); this module never changes what they say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from pantheon.errors import BadRequest
from pantheon.text.prompt_guard import Guard, strings
from pantheon.text.tokenizer import Tokenizer

THINK = "<think>"


class Renders(Protocol):
    """A chat template."""

    @property
    def source(self) -> str: ...

    def render(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any) -> str: ...


@dataclass(frozen=True)
class Prompt:
    """What the model reads.  `text` is the rendered prompt; `opens_reasoning`: it ends inside `<think>` [B21]."""

    ids: list[int]
    text: str
    opens_reasoning: bool


def build_prompt(
    tokenizer: Tokenizer,
    template: Renders,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> Prompt:
    """Render and tokenise.  Control markers in any string of messages and tools stay text [B31]; the prompt begins
    with one BOS when the model wants one, whether or not the template prints it [B32].

    Raises BadRequest with the template's own words when it refuses.
    """
    inputs = [template.source, *strings(messages), *strings(tools), *strings(kwargs)]
    guard = Guard(tokenizer.control_texts, inputs)
    guarded = [_guard_message(guard, message) for message in messages]
    guarded_tools = None if tools is None else guard.value(tools)
    try:
        text = template.render(guarded, guarded_tools, add_generation_prompt, **kwargs)
    except BadRequest:
        if tools is not None:
            raise
        # Hermes' tool templates walk `tools` even when there are none (ARCH.md §9)
        text = template.render(guarded, [], add_generation_prompt, **kwargs)
    text = guard.unescape(text)
    ids = tokenizer.encode(text, add_special=False, parse_special=True, guard=guard.table)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    text = guard.restore(text)
    return Prompt(ids, text, opens_reasoning=text.rstrip().endswith(THINK))


def _guard_message(guard: Guard, message: dict[str, Any]) -> dict[str, Any]:
    """Everything but the role, which templates compare with; think tags stay for templates that cut them out."""
    spare = message.get("role") == "assistant"
    return {k: v if k == "role" else guard.value(v, spare_think=spare) for k, v in message.items()}
