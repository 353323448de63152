"""A conversation that ends with the beginning of an answer: what the model is to go on from.

The turns before it are rendered as ever, with the opening of an answer behind them; then its words follow.
"""

from __future__ import annotations

from typing import Any

from pantheon.errors import BadRequest
from pantheon.text.messages import check

#: between the parts of a beginning, as llama-server joins them
_BETWEEN = "\n\n"


def split_prefill(messages: Any) -> tuple[Any, str]:
    """(messages before it, the beginning); (messages, "") when the last one is none, or makes calls."""
    if not isinstance(messages, list) or len(messages) < 2 or not isinstance(messages[-1], dict):
        return messages, ""
    last = messages[-1]
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return messages, ""
    content = last.get("content")
    parts = content if isinstance(content, list) else [content]
    try:
        texts = [str(check([{"role": "user", "content": _one(part)}])[0]["content"]) for part in parts]
    except BadRequest:
        return messages, ""  # whoever normalises the list names what is wrong
    return messages[:-1], _BETWEEN.join(texts)


def _one(part: Any) -> Any:
    return [part] if isinstance(part, dict) else part
