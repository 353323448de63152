"""From messages to token ids: guard user text, render the template, tokenise its markup and only its markup.

The messages are normalised before (text.messages); this module never changes what they say.  It must not know a
request or a model.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from pantheon import seams, settings
from pantheon.errors import BadRequest
from pantheon.text.chat_template import TOOLS_HEAD, TOOLS_TAIL
from pantheon.text.messages import Renders, fit, render
from pantheon.text.prompt_guard import Guard, strings
from pantheon.text.tokenizer import Tokenizer

THINK, THINK_END = "<think>", "</think>"
_CHATML_OPENING = "<|im_start|>assistant\n"
_TOOLS = re.compile(r"\btools\b")


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
    refuse_from: int | None = None,
    prefill: str = "",
    **kwargs: Any,
) -> Prompt:
    """Render and tokenise.  `refuse_from`: a text that can not have fewer tokens than these is refused unread
    (BadRequest, context_length_exceeded).  `prefill`: how the answer begins; it stands behind an open thought's end.

    Control markers in any string of messages, tools and kwargs stay text [B31]; the prompt begins with one BOS when
    the model wants one, whether or not the template prints it [B32].  Tools that the template has no words for are
    listed in the system turn.  Raises BadRequest with the template's own words when it refuses.
    """
    seams.hit("render")
    if tools and not _TOOLS.search(template.source):
        messages = fit(_with_tools(messages, tools), template, None, **kwargs)
    guard = Guard(tokenizer.control_texts, [template.source, *strings([messages, tools, kwargs, prefill])])
    guarded = [_guard_message(guard, message) for message in messages]
    offered = guard.value(tools) if tools else None
    text = render(template, guarded, offered, add_generation_prompt, **guard.value(kwargs))
    text = guard.unescape(text)
    if _prefills_thought(text, kwargs) and add_generation_prompt:
        text += f"{THINK}\n"
    if prefill:
        text += (f"{THINK_END}\n\n" if text.rstrip().endswith(THINK) else "") + guard.value(prefill)
    if refuse_from is not None:
        check_least(tokenizer, text, refuse_from, "messages")
    ids = tokenizer.encode(text, add_special=False, parse_special=True, guard=guard.table)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    text = guard.restore(text)
    return Prompt(ids, text, opens_reasoning=text.rstrip().endswith(THINK))


def check_least(tokenizer: Tokenizer, text: str, n_ctx: int, param: str) -> None:
    """Refuse a text that is too long whatever its tokens are, so that nobody waits for them."""
    least = tokenizer.least(text)
    if least >= n_ctx:
        raise BadRequest(
            f"This model's maximum context length is {n_ctx} tokens. However, your {param} of {len(text)} characters "
            f"can not be fewer than {least} tokens. Please reduce the length of the {param}.",
            code="context_length_exceeded",
            param=param,
            n_prompt_tokens=least,
            n_ctx=n_ctx,
        )


def _guard_message(guard: Guard, message: dict[str, Any]) -> dict[str, Any]:
    """Everything but the role, which templates compare with; think tags stay for templates that cut them out."""
    spare = message.get("role") == "assistant"
    return {k: v if k == "role" else guard.value(v, spare_think=spare) for k, v in message.items()}


def _with_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tools listed at the end of the system turn, as CHATML lists them."""
    listed = TOOLS_HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + TOOLS_TAIL
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": listed}, *messages]
    text = "\n\n".join(part for part in (first["content"], listed) if part)
    return [{**first, "content": text}, *messages[1:]]


def _prefills_thought(text: str, kwargs: dict[str, Any]) -> bool:
    """M119: a ChatML answer that the flag opens with a thought."""
    wanted = kwargs.get("enable_thinking") is not False and settings.get("PN_CHAT_CHATML_THINK")
    return bool(wanted) and text.endswith(_CHATML_OPENING)
