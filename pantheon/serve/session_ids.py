"""Whose conversation a request is, by the ids that clients send.

Hints for the prefix cache and the choice of a replica: nothing about them is refused, and nothing is believed of them.
Sources: M039; headers and fields seen from real clients.  Must not know the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: in which clients name a conversation, the most particular first
SESSION_HEADERS = (
    "x-session-affinity",  # opencode
    "x-claude-code-session-id",
    "session-id",  # codex
    "thread-id",
    "x-affinity",  # vibe
    "x-conversation-id",
    "conversation-id",
    "x-thread-id",
    "x-chat-id",
    "x-openwebui-chat-id",
    "x-grok-conv-id",
    "x-litellm-session-id",
    "helicone-session-id",
)
_FIELDS = ("prompt_cache_key", "conversation", "conversation_id", "thread_id", "chat_id")
_INNER = ("session_id", *_FIELDS)
_MAX = 256


def session_id(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The body's `session_id`, else the `X-Session-Id` header [M039], else what coding clients send; at most 256
    characters of it.  `user` names a person with many conversations, and is none of them."""
    return next(_ids(body, {key.lower(): value for key, value in headers.items()}), None)


def _ids(body: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[str]:
    values: list[Any] = [body.get("session_id"), headers.get("x-session-id")]
    values += [headers.get(name) for name in SESSION_HEADERS]
    values += [body.get(name) for name in _FIELDS]
    for outer in (body.get("metadata"), body.get("client_metadata")):
        if isinstance(outer, dict):
            values += [outer.get(name) for name in _INNER]
            user = outer.get("user_id")
            # Claude Code: a person, an account and a session in one
            values.append(user if isinstance(user, str) and "session" in user else None)
    for value in values:
        if isinstance(value, dict):
            value = value.get("id")
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and value.strip():
            # what sets long ids apart is more often at their end
            yield value.strip()[-_MAX:]
