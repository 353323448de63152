"""Streams whose events have names, as the Responses and Messages APIs send them."""

from __future__ import annotations

import json
from typing import Any

from tests.serve.http_client import Answer

Event = dict[str, Any]


def events_of(answer: Answer) -> list[Event]:
    """The data of every event, whose `event:` line must say its type; comments are left out."""
    assert answer.headers["content-type"] == "text/event-stream", answer.body
    blocks = answer.body.decode("utf-8").split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def types(events: list[Event]) -> list[str]:
    """Their types; a run of one type counts once."""
    names = [event["type"] for event in events]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
