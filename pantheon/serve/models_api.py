"""GET /v1/models and /v1/models/{id}: what answers, and the window in force [M023, M068, B47]."""

from __future__ import annotations

from typing import Any

from pantheon.errors import NotFound
from pantheon.serve.context import App
from pantheon.serve.http_request import Request
from pantheon.serve.registry import Entry
from pantheon.serve.routes import Responder


def list_models(app: App, request: Request, responder: Responder) -> None:
    """Every ready name once; loading and unloading models are not listed."""
    responder.send_json(200, {"object": "list", "data": [describe(entry) for entry in app.registry.snapshot()]})


def get_model(app: App, request: Request, responder: Responder) -> None:
    """One of them, or 404."""
    for entry in app.registry.snapshot():
        if entry.name == request.tail:
            return responder.send_json(200, describe(entry))
    raise NotFound(f"the model {request.tail[:200]!r} does not exist", code="model_not_found", param="model")


def describe(entry: Entry) -> dict[str, Any]:
    """One model as OpenAI's clients want it, with the window in force."""
    # one that was ready a moment ago may have been freed since
    n_ctx = entry.model.n_ctx if entry.model is not None else None
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "pantheon",
        "max_model_len": n_ctx,
        "context_length": n_ctx,
    }
