"""Lines that harnesses put near the front of a system prompt and change from request to request.

Rows behind a changed token can not be used again: attention has mixed it into every one of them.  So such a line must
not reach the model, or all behind it is read anew each time.  Each rule has a name (PN_STABLE_PREFIX); all are pure
functions on system and developer turns only, and a text that no rule knows is returned as it is.  Spec: X12.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

Rule = Callable[[str], str]

# What Claude Code puts before its prompt for the billing of Anthropic's own servers, which take it out again; version
# and hash change with every request.  Only as the first line of a text.
_ATTRIBUTION = re.compile(r"\A(?:\s*x-anthropic-billing-header:[^\n]*(?:\n+|\Z))+")

_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp][Mm])?"
_ZONE = r"(?: ?(?:Z\b|(?:UTC|GMT)?[+-]\d\d:?\d\d|UTC|GMT)(?: ?\([^()\n]{1,60}\))?)?"
_DATE = r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{4}|[A-Z][a-z]{2} [A-Z][a-z]{2} \d{1,2},? \d{4}"
_TIME = re.compile(rf"({_DATE})(?:T|,? (?:at )?){_CLOCK}{_ZONE}")


def _without_attribution(text: str) -> str:
    return _ATTRIBUTION.sub("", text)


def _without_time(text: str) -> str:
    return _TIME.sub(r"\1", text)


#: name -> what it does to one text of a system turn
RULES: dict[str, Rule] = {"attribution": _without_attribution, "time": _without_time}


def stable(messages: Any, names: str) -> Any:
    """The messages without what these rules (`attribution,time`, or `off`) take out; the same object when that is
    nothing.

    A system turn of which nothing is left goes, unless it is the only message.  Whatever is not a message as it should
    be is left to those who refuse it.
    """
    rules = [RULES[name] for name in names.split(",") if name != "off"]
    if not rules or not isinstance(messages, list):
        return messages
    found = [_message(message, rules) for message in messages]
    if all(new is old for new, old in zip(found, messages, strict=True)):
        return messages
    kept = [new for new, old in zip(found, messages, strict=True) if new is old or new["content"] not in ("", [])]
    return kept or messages


def _message(message: Any, rules: Sequence[Rule]) -> Any:
    if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
        return message
    content = message.get("content")
    if isinstance(content, str):
        text = _text(content, rules)
        return message if text == content else {**message, "content": text}
    if not isinstance(content, list):
        return message
    parts = [_part(part, rules) for part in content]
    if all(new is old for new, old in zip(parts, content, strict=True)):
        return message
    return {**message, "content": [part for part in parts if part is not None]}


def _part(part: Any, rules: Sequence[Rule]) -> Any:
    """A part of a content list; None when nothing is left of it."""
    old = part.get("text") if isinstance(part, dict) else part
    if not isinstance(old, str) or (new := _text(old, rules)) == old:
        return part
    if not new:
        return None
    return {**part, "text": new} if isinstance(part, dict) else new


def _text(text: str, rules: Sequence[Rule]) -> str:
    for rule in rules:
        text = rule(text)
    return text
