"""GET /v1/models and /v1/models/{id}: what answers, and the window in force [M023, M068, B47]."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pantheon.errors import NotFound
from pantheon.serve.context import App
from pantheon.serve.http_request import Request
from pantheon.serve.registry import Entry
from pantheon.serve.routes import Responder


def list_models(app: App, request: Request, responder: Responder) -> None:
    """Every ready name once; loading and unloading models are not listed."""
    data = [_described(request, entry) for entry in app.registry.snapshot()]
    responder.send_json(200, {"object": "list", "data": data, **_page(request, data)})


def get_model(app: App, request: Request, responder: Responder) -> None:
    """One of them, or 404."""
    for entry in app.registry.snapshot():
        if entry.name == request.tail:
            return responder.send_json(200, _described(request, entry))
    raise NotFound(f"the model {request.tail[:200]!r} does not exist", code="model_not_found", param="model")


def _described(request: Request, entry: Entry) -> dict[str, Any]:
    """A model as the asking API's clients want it: Anthropic's say who they are."""
    found = describe(entry)
    if "anthropic-version" in request.headers:
        made = datetime.fromtimestamp(entry.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        found |= {"type": "model", "display_name": entry.name, "created_at": made}
    return found


def _page(request: Request, data: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if "anthropic-version" not in request.headers:
        return {}
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"has_more": False, "first_id": first, "last_id": last}


def describe(entry: Entry) -> dict[str, Any]:
    """One model as OpenAI's clients want it, with the window in force."""
    # one that was ready a moment ago may have been freed since
    model = entry.model
    n_ctx = model.n_ctx if model is not None else None
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "pantheon",
        "max_model_len": n_ctx,
        "context_length": n_ctx,
    }
