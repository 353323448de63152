"""GET /health, /v1/health and /ready: can a chat be answered now?  Never waits on an engine [B47, X22]."""

from __future__ import annotations

from typing import Any

from pantheon.serve.context import App
from pantheon.serve.http_request import Request
from pantheon.serve.routes import Responder


def get_health(app: App, request: Request, responder: Responder) -> None:
    """200 ok once a model answers; 503 while the first one loads and while there is none."""
    body: dict[str, Any]
    if app.draining.is_set():
        status, body = 503, {"status": "stopping"}
    elif app.registry.count():
        status, body = 200, {"status": "ok"}
        if app.memory.admission == "stale":
            # it still answers, but memory is not seen any more [X20]
            body["degraded"] = ["memory_watcher"]
    elif loading := app.registry.loading():
        status, body = 503, {"status": "loading", "models": loading}
    else:
        status, body = 503, {"status": "no_model"}
    responder.send_json(status, body, headers={} if status == 200 else {"Retry-After": "2"})
