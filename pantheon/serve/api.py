"""The table of routes: every path that Pantheon answers, in one place."""

from __future__ import annotations

from functools import partial

from pantheon.serve import (
    admin,
    admin_views,
    completions,
    dry_run,
    health,
    models_api,
    one_model,
    openai_chat,
    openapi,
    slots,
    ui,
)
from pantheon.serve.context import App
from pantheon.serve.routes import Router


def build_router(app: App) -> Router:
    """All routes of one server; `GET /` is the router's own."""
    router = Router()
    for method, path, handler in (
        ("GET", "/health", health.get_health),
        ("GET", "/v1/health", health.get_health),
        ("GET", "/ready", health.get_health),
        ("GET", "/metrics", slots.get_metrics),
        ("GET", "/slots", slots.get_slots),
        ("GET", "/v1/models", models_api.list_models),
        ("GET", "/v1/models/", models_api.get_model),
        ("POST", "/v1/chat/completions", openai_chat.post_chat),
        ("POST", "/v1/completions", completions.post_completion),
        ("POST", "/admin/models/load", admin.post_load),
        ("POST", "/admin/models/unload", admin.post_unload),
        ("GET", "/admin/models", admin_views.get_models),
        ("GET", "/admin/models/", admin_views.get_model),
        ("GET", "/admin/dies", admin_views.get_dies),
        ("GET", "/admin/memory", admin_views.get_memory),
        ("GET", "/admin/sched", slots.get_sched),
        ("GET", "/admin/plan", dry_run.get_plan),
        ("GET", "/ui", ui.get_ui),
        ("GET", "/openapi.json", openapi.get_openapi),
        ("GET", "/m/", one_model.get),
        ("POST", "/m/", one_model.post),
    ):
        router.add(method, path, partial(handler, app))
    return router
