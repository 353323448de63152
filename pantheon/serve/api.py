"""The table of routes: every path that Pantheon answers, in one place."""

from __future__ import annotations

from functools import partial

from pantheon.serve import (
    admin,
    admin_views,
    completions,
    dry_run,
    embeddings,
    health,
    messages_api,
    models_api,
    native_completion,
    native_text,
    one_model,
    openai_chat,
    openapi,
    props,
    responses_api,
    slots,
    ui,
)
from pantheon.serve.context import App
from pantheon.serve.messages_reply import VOICE
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
        ("POST", "/v1/responses", responses_api.post_response),
        ("POST", "/responses", responses_api.post_response),
        ("POST", "/v1/messages", messages_api.post_message),
        ("POST", "/v1/messages/count_tokens", messages_api.post_count_tokens),
        ("POST", "/completion", native_completion.post_completion),
        ("POST", "/completions", native_completion.post_completion),
        ("POST", "/infill", native_completion.post_infill),
        ("POST", "/tokenize", native_text.post_tokenize),
        ("POST", "/detokenize", native_text.post_detokenize),
        ("POST", "/apply-template", native_text.post_apply_template),
        ("POST", "/chat/completions", openai_chat.post_chat),
        ("POST", "/chat/completions/input_tokens", native_text.post_input_tokens),
        ("POST", "/v1/chat/completions/input_tokens", native_text.post_input_tokens),
        ("GET", "/models", models_api.list_models),
        ("GET", "/props", props.get_props),
        ("POST", "/props", props.post_props),
        ("GET", "/lora-adapters", props.get_adapters),
        ("POST", "/lora-adapters", props.post_adapters),
        ("POST", "/v1/embeddings", embeddings.post_openai),
        ("POST", "/embeddings", embeddings.post_native),
        ("POST", "/embedding", embeddings.post_native),
        ("POST", "/rerank", props.post_rerank),
        ("POST", "/reranking", props.post_rerank),
        ("POST", "/v1/rerank", props.post_rerank),
        ("POST", "/v1/reranking", props.post_rerank),
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
    router.speak("/v1/messages", VOICE)
    return router
