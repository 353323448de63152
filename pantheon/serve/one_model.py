"""`/m/{model}/…`: the API as if that model were the only one, for clients and gateways that expect one behind a URL.

The same handlers answer, with the `model` of the body replaced.  An smg gateway registers each model by this address
(router_links.py).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

from pantheon.errors import NotFound
from pantheon.serve import completions, embeddings, health, messages_api, models_api, openai_chat, responses_api
from pantheon.serve.context import App
from pantheon.serve.http_request import Request
from pantheon.serve.registry import Entry
from pantheon.serve.routes import HttpError, Responder

_POSTS: dict[str, Callable[[App, Request, Responder], None]] = {
    "/v1/chat/completions": openai_chat.post_chat,
    "/v1/completions": completions.post_completion,
    "/v1/embeddings": embeddings.post_openai,
    "/v1/responses": responses_api.post_response,
    "/v1/messages": messages_api.post_message,
    "/v1/messages/count_tokens": messages_api.post_count_tokens,
}
_GETS = ("/v1/models", "/v1/health", "/health")


@dataclass
class _Pinned(Request):
    """A request whose body names this model, whatever it said."""

    model: str = ""

    def json(self) -> dict[str, Any]:
        return {**super().json(), "model": self.model}


def get(app: App, request: Request, responder: Responder) -> None:
    """/m/{model}/health and /m/{model}/v1/models."""
    name, path = _split(request.tail, _GETS, _POSTS)
    entry = _ready(app, name)
    if path == "/v1/models":
        found = [models_api.describe(entry)] if entry is not None else []
        return responder.send_json(200, {"object": "list", "data": found})
    if entry is not None or app.draining.is_set():
        return health.get_health(app, request, responder)
    loading = [item for item in app.registry.loading() if item["name"] == name]
    body: dict[str, Any] = {"status": "loading", "models": loading} if loading else {"status": "no_model"}
    responder.send_json(503, body, headers={"Retry-After": "2"})


def post(app: App, request: Request, responder: Responder) -> None:
    """/m/{model}/v1/chat/completions and the other APIs."""
    name, path = _split(request.tail, tuple(_POSTS), _GETS)
    if _ready(app, name) is None and not any(entry.name == name for entry in app.registry.all_entries()):
        raise NotFound(f"the model {name[:200]!r} does not exist", code="model_not_found", param="model")
    pinned = _Pinned(**{field.name: getattr(request, field.name) for field in fields(Request)}, model=name)
    # no other model answers in its place, even if it is the only one
    strict = copy(app)
    strict.strict_model = True
    _POSTS[path](strict, pinned, responder)


def _split(tail: str, paths: tuple[str, ...], others: Any) -> tuple[str, str]:
    """(model, path): the model's name may hold slashes.  Raises HttpError: 404, 405 for a path of the other method."""
    for path in paths:
        if tail.endswith(path) and len(tail) > len(path):
            return tail[: -len(path)], path
    if any(tail.endswith(path) for path in others):
        raise HttpError(405, f"this method is not allowed on /m/{tail[:200]}", code="method_not_allowed")
    raise HttpError(404, f"no such path: /m/{tail[:200]}", code="not_found")


def _ready(app: App, name: str) -> Entry | None:
    return next((entry for entry in app.registry.snapshot() if entry.name == name), None)
