"""GET /props: what a client of llama-server asks a server about itself; and doors that only say no.

One model is described: the one that `?model=` names, else the one that a request without a name would reach.
"""

from __future__ import annotations

from typing import Any

from pantheon import __version__
from pantheon.serve.chat_request import sampling_params
from pantheon.serve.context import App
from pantheon.serve.http_errors import HttpError
from pantheon.serve.http_request import Request
from pantheon.serve.native_completion import DEFAULTS
from pantheon.serve.native_settings import settings_of
from pantheon.serve.registry import Entry
from pantheon.serve.request_fields import Fields
from pantheon.serve.routes import Responder


def get_props(app: App, request: Request, responder: Responder) -> None:
    """The model's path, context, template and special tokens, and the settings of a request that names none."""
    with app.registry.lease(request.query.get("model"), strict=app.strict_model) as entry:
        body = _props(app, entry)
    responder.send_json(200, body)


def _props(app: App, entry: Entry) -> dict[str, Any]:
    model = entry.model
    assert model is not None
    tokenizer = model.tokenizer

    def text(token: int | None) -> str:
        return "" if token is None else tokenizer.token_text(token)

    fields = Fields({**DEFAULTS, **app.defaults.fill({})})
    params = settings_of(sampling_params(fields, None), fields.integer("max_tokens", -1, 1 << 62, None), stream=True)
    return {
        "default_generation_settings": {"params": params, "n_ctx": model.n_ctx},
        "total_slots": entry.users,
        "model_alias": entry.name,
        "model_path": str(model.path) if model.path is not None else entry.path,
        "modalities": {"vision": False, "audio": False, "video": False},
        "chat_template": model.template.source,
        "bos_token": text(tokenizer.bos_id),
        "eos_token": text(tokenizer.eos_id),
        "build_info": f"pantheon-{__version__}",
        "endpoint_props": False,
        "is_sleeping": False,
    }


def post_props(app: App, request: Request, responder: Responder) -> None:
    """Raises HttpError 501: settings are made with flags."""
    raise not_supported("this server does not change its settings while it runs; give them as flags")


def get_adapters(app: App, request: Request, responder: Responder) -> None:
    """LoRA adapters: none."""
    responder.send_json(200, [])


def post_adapters(app: App, request: Request, responder: Responder) -> None:
    """An empty list is what there is; anything else can not be.  Raises BadRequest, HttpError 501."""
    raise not_supported("this server has no LoRA adapters")


def post_rerank(app: App, request: Request, responder: Responder) -> None:
    """Raises HttpError 501: none of the supported architectures is a reranker."""
    raise not_supported("reranking needs a reranker model; the models of this server generate text")


def not_supported(message: str) -> HttpError:
    """501, in the words of llama-server's clients."""
    return HttpError(501, message, code="not_supported", type="not_supported_error")
