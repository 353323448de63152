"""A conversation made shorter, for callers who ask for that instead of a refusal [X21].

System and developer messages stay, and so do the last turns; what goes is the oldest, in whole steps, so that no tool
result stands without its call.  Pure: must not know tokens; the caller counts and asks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_KEPT = ("system", "developer")


def steps(messages: Sequence[Any]) -> list[list[int]]:
    """What may be dropped, oldest first: the indices of each step.

    A step is a user's message with all that answers it; within the last turn, where an agent may have worked for long,
    an assistant's message with the tool results behind it.  The last user's message and the last step always stay.
    """
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    users = [i for i, role in enumerate(roles) if role == "user"]
    last_user = users[-1] if users else -1
    groups: list[list[int]] = []
    for i, role in enumerate(roles):
        if role in _KEPT or i == last_user:
            continue
        begins = role == "user" if i < last_user else role == "assistant"
        crosses = bool(groups) and groups[-1][-1] < last_user < i
        if begins or crosses or not groups:
            groups.append([])
        groups[-1].append(i)
    # what stands behind the last user's message ends with what the model is to go on from
    return groups[:-1] if groups and groups[-1][-1] > last_user else groups


def cut(messages: Sequence[Any], n: int) -> list[Any]:
    """The messages without their oldest n steps."""
    gone = {i for step in steps(messages)[:n] for i in step}
    return [message for i, message in enumerate(messages) if i not in gone]
