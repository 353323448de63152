"""GET /openapi.json: the API as an OpenAPI 3.1 document, made of one table of routes.

The table says what api.py can not: the sentence, the fields, the answers.  A test holds it against the router, both
ways.  A new route is one row here, one line in api.py and one section in docs/reference/http-api.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pantheon import __version__
from pantheon.serve import openapi_answers as answers
from pantheon.serve import openapi_doors as doors
from pantheon.serve import openapi_native as native
from pantheon.serve import openapi_tables as tables
from pantheon.serve.context import App
from pantheon.serve.http_json import dump_json
from pantheon.serve.http_request import Request
from pantheon.serve.openapi_fields import Schema, object_of
from pantheon.serve.routes import Responder

JSON = "application/json"
EVENTS = "text/event-stream"
_LOOK = (401, 403)
_READ = (400, 401, 403, 404, 408, 413, 415, 503)
_RUN = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
_ADMIN = (400, 401, 403, 404, 408, 409, 413, 415, 422, 503, 507)


@dataclass(frozen=True)
class Route:
    """One row.  `path` names its variables in braces; `fields` are the body's, `query` those behind the `?`.

    `answers` maps a status to (media type, example), whose schema is the example's shape; `faults` are the statuses of
    errors; `guard` is what opens it: nothing, an API key, or what admin routes ask; `same_as` is the path that this one
    is another name of.
    """

    method: str
    path: str
    summary: str
    group: str
    fields: tables.Fields = ()
    query: tables.Fields = ()
    answers: Mapping[int, tuple[str, Any]] | None = None
    faults: tuple[int, ...] = _LOOK
    guard: str = "key"
    same_as: str = ""

    @property
    def streams(self) -> bool:
        """Whether `stream: true` asks for events."""
        return any(field.name == "stream" for field in self.fields)


def _get(path: str, summary: str, group: str, example: Any, **more: Any) -> Route:
    return Route("GET", path, summary, group, answers={200: (JSON, example)}, **more)


def _post(path: str, summary: str, group: str, fields: tables.Fields, example: Any, **more: Any) -> Route:
    return Route("POST", path, summary, group, fields, **{"answers": {200: (JSON, example)}, "faults": _RUN, **more})


_ROOT = (JSON, {"service": "pantheon", "status": "ok"})
_PROBE = {200: (JSON, {"status": "ok"}), 503: (JSON, {"status": "loading"})}
_GENERATED = tables.MODEL + tables.STREAM + tables.LENGTH + tables.SAMPLING + tables.SESSION
_CHAT = tables.CHAT + _GENERATED
_ROWS: tuple[Route, ...] = (
    Route("GET", "/", "The process lives; 302 to /ui for a browser", "health", answers={200: _ROOT, 302: _ROOT},
          faults=(), guard="open"),
    *(Route("GET", path, "Whether a chat can be answered now", "health", answers=_PROBE, faults=(403,), guard="open")
      for path in ("/health", "/v1/health", "/ready")),
    Route("GET", "/metrics", "Counters for Prometheus", "health", answers={200: ("text/plain", "")},
          faults=(*_LOOK, 501)),
    _get("/slots", "Who is served now", "health", [answers.SLOT], query=tables.SLOTS, faults=(*_LOOK, 501, 503)),
    Route("GET", "/ui", "A page that shows what the server does", "health", answers={200: ("text/html", "")},
          faults=(403,), guard="open"),
    _get("/openapi.json", "This document", "health", {"openapi": "3.1.0"}, faults=(403,), guard="open"),
    _get("/v1/models", "The models that answer now", "models", {"object": "list", "data": [answers.MODEL]}),
    _get("/v1/models/{id}", "One of them", "models", answers.MODEL, faults=(401, 403, 404)),
    _get("/props", "What llama-server's clients ask", "models", native.PROPS, query=native.PROPS_QUERY,
         faults=(401, 403, 404, 503)),
    _get("/lora-adapters", "LoRA adapters: none", "models", []),
    *(Route("POST", path, "Not supported", "models", faults=(401, 403, 501))
      for path in ("/props", "/lora-adapters", "/rerank")),
    _post("/v1/chat/completions", "Answer a conversation", "chat", _CHAT, answers.CHAT),
    _post("/v1/completions", "Continue a text", "chat", tables.COMPLETION + _GENERATED, answers.COMPLETION,
          faults=(*_RUN, 501)),
    _post("/v1/responses", "Answer a conversation, OpenAI's newer API", "chat", doors.RESPONSES, doors.RESPONSE),
    _post("/v1/messages", "Answer a conversation, Anthropic's API", "chat", doors.MESSAGES, doors.MESSAGE),
    _post("/v1/messages/count_tokens", "How many tokens such a request has", "chat", doors.COUNTED,
          {"input_tokens": 21}),
    _post("/completion", "Continue a text, llama-server's API", "native", native.COMPLETION, native.ANSWER),
    _post("/infill", "Fill a gap in a text", "native", native.INFILL, native.ANSWER, faults=(*_RUN, 501)),
    _post("/tokenize", "Token ids of a text", "native", native.TOKENIZE, {"tokens": [19556]}, faults=_READ),
    _post("/detokenize", "The text of token ids", "native", native.DETOKENIZE, {"content": "Hello"}, faults=_READ),
    _post("/apply-template", "The prompt of a conversation, as text", "native", _CHAT,
          {"prompt": "<|im_start|>user"}, faults=_READ),
    _post("/v1/chat/completions/input_tokens", "How many tokens a conversation is", "native", _CHAT,
          {"object": "response.input_tokens", "input_tokens": 31}, faults=_READ),
    _post("/v1/embeddings", "Texts as vectors", "native", native.EMBEDDINGS, native.VECTORS),
    _post("/embedding", "Texts as vectors, llama-server's API", "native", native.EMBEDDING,
          [{"index": 0, "embedding": [[0.1]]}]),
    _post("/admin/models/load", "Load a model", "admin", tables.LOAD, answers.INSTANCE,
          answers={200: (JSON, answers.INSTANCE), 202: (JSON, answers.UNDER_WAY)},
          faults=_ADMIN, guard="admin"),
    _post("/admin/models/unload", "Unload a model", "admin", tables.UNLOAD, answers.UNLOADED,
          answers={200: (JSON, answers.UNLOADED), 202: (JSON, answers.UNDER_WAY)}, faults=_ADMIN, guard="admin"),
    _get("/admin/models", "Every instance, and the last failures", "admin",
         {"models": [answers.INSTANCE], "failed": {}}, guard="admin"),
    _get("/admin/models/{id}", "State and progress of one name", "admin", answers.STATE, faults=(401, 403, 404),
         guard="admin"),
    _get("/admin/dies", "Dies, their budgets and what is on them", "admin", answers.DIES, guard="admin"),
    _get("/admin/memory", "Memory, its level, and what models give up", "admin", answers.MEMORY, guard="admin"),
    _get("/admin/sched", "Who works and who waits", "admin", answers.SCHED, guard="admin"),
    _get("/admin/plan", "Whether a load would fit now", "admin", answers.PLAN, query=tables.PLAN,
         faults=(400, 401, 403, 404, 409, 422, 503, 507), guard="admin"),
)  # fmt: skip
#: other names of what has a row
SAME = {
    "/models": "/v1/models",
    "/completions": "/completion",
    "/chat/completions": "/v1/chat/completions",
    "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    "/responses": "/v1/responses",
    "/embeddings": "/embedding",
    "/reranking": "/rerank",
    "/v1/rerank": "/rerank",
    "/v1/reranking": "/rerank",
}
ROUTES = (
    *_ROWS,
    *(replace(route, path=name, same_as=path) for name, path in SAME.items() for route in _ROWS if route.path == path),
)


def routes() -> Iterator[Route]:
    """Every row, and those that `/m/{model}` repeats for one model."""
    for route in ROUTES:
        yield route
        if route.path in ONE_MODEL:
            summary = f"{route.summary}; as if this model were the only one"
            yield replace(route, path=_ONE + route.path, summary=summary, same_as=route.path)


_ONE = "/m/{model}"
#: what one_model.py answers
ONE_MODEL = frozenset({
    "/health", "/v1/health", "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses",
    "/v1/messages", "/v1/messages/count_tokens",
})  # fmt: skip


def get_openapi(app: App, request: Request, responder: Responder) -> None:
    """The document."""
    responder.send_bytes(200, JSON, _document_bytes())


@lru_cache(1)
def _document_bytes() -> bytes:
    return dump_json(document())


def document() -> dict[str, Any]:
    """The API as an OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes():
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pantheon", "version": __version__, "license": {"name": "MIT", "identifier": "MIT"}},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": {"Error": answers.shape(answers.ERROR)},
            "responses": {"Error": {"description": "Refused; `param` names the field", "content": _content(
                JSON, {"$ref": "#/components/schemas/Error"})}},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "`--api-key`; also as `X-Api-Key`"},
                "admin": {"type": "http", "scheme": "bearer", "description": "`--admin-key`; without one, this machine "
                          "only, with an API key where there are any"},
            },
        },
    }  # fmt: skip


def _operation(route: Route) -> dict[str, Any]:
    out: dict[str, Any] = {
        "operationId": f"{route.method.lower()} {route.path}",
        "summary": route.summary,
        "tags": [route.group],
        # without keys the server asks for none
        "security": [] if route.guard == "open" else [{}, {route.guard: []}],
    }
    if parameters := list(_parameters(route)):
        out["parameters"] = parameters
    if route.fields and route.same_as:
        out["requestBody"] = {"$ref": f"#/paths/{route.same_as.replace('/', '~1')}/post/requestBody"}
    elif route.fields:
        out["requestBody"] = {"required": True, "content": _content(JSON, object_of(route.fields))}
    out["responses"] = {
        **{str(status): _answer(route, status, *what) for status, what in (route.answers or {}).items()},
        **{str(status): {"$ref": "#/components/responses/Error"} for status in route.faults},
    }
    return out


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    for name in ("id", "model"):
        if f"{{{name}}}" in route.path:
            yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for field in route.query:
        yield {
            "name": field.name, "in": "query", "required": field.required, "description": field.meaning,
            "schema": field.schema,
        }  # fmt: skip


def _answer(route: Route, status: int, media: str, example: Any) -> dict[str, Any]:
    schema = answers.shape(example)
    content = _content(media, schema, answers.plain(example))
    if route.streams:
        content |= _content(EVENTS, {"type": "string"})
    return {"description": route.summary, "content": content}


def _content(media: str, schema: Schema, example: Any = None) -> dict[str, Any]:
    return {media: {"schema": schema, **({} if example in (None, "") else {"example": example})}}
