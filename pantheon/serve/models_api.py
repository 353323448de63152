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
    responder.send_json(200, {"object": "list", "data": [_model(entry) for entry in app.registry.snapshot()]})


def get_model(app: App, request: Request, responder: Responder) -> None:
    """One of them, or 404."""
    for entry in app.registry.snapshot():
        if entry.name == request.tail:
            return responder.send_json(200, _model(entry))
    raise NotFound(f"the model {request.tail[:200]!r} does not exist", code="model_not_found", param="model")


def _model(entry: Entry) -> dict[str, Any]:
    assert entry.model is not None
    n_ctx = entry.model.n_ctx
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "pantheon",
        "max_model_len": n_ctx,
        "context_length": n_ctx,
    }
