"""POST /admin/models/load and /unload, GET /admin/dies [area K].

A load is confined to the server's model folders and uses the loading code of the start.  State-changing routes take
application/json only, which a foreign web page can not post without asking first (http_access.py refuses it) [B44].
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pantheon import log
from pantheon.engine.scripted import PREFIX as SCRIPT
from pantheon.errors import BadRequest, PantheonError
from pantheon.serve.context import App
from pantheon.serve.http_request import Request
from pantheon.serve.loading import ModelSpec, default_name, load_spec
from pantheon.serve.registry import Entry
from pantheon.serve.request_fields import Fields
from pantheon.serve.routes import Responder

MR_MAX_NAME = 128
_log = log.logger("admin")


def post_load(app: App, request: Request, responder: Responder) -> None:
    """{path, name?, ctx?, dies?, quantize?} -> 200 once the model answers.

    Raises PantheonError: 400 field, 403 path outside the folders, 404 no such file, 409 duplicate, 422 bad file, 507
    no place.
    """
    fields = Fields(_guarded(request))
    if fields.flag("quantize", False):
        raise fields.fault("quantize", "is not supported")
    if fields.items("dies"):
        raise fields.fault("dies", "there are no dies on this machine; leave it out to load on the CPU")
    path = confined(fields.text("path"), app.model_roots)
    spec = ModelSpec(path, _name(fields, default_name(path)), ctx=fields.integer("ctx", 1, 1 << 40, None))
    entry = load_spec(app.registry, spec, app.load_options)
    responder.send_json(200, {"status": "loaded", **_instance(entry)})


def post_unload(app: App, request: Request, responder: Responder) -> None:
    """{name, timeout_s?, force?} -> 200 once nothing uses it and its memory is free.

    Raises PantheonError: 404 unknown, 409 loading, unloading already, or busy at the deadline.
    """
    fields = Fields(_guarded(request))
    name = fields.text("name")
    if not name:
        raise fields.fault("name", "must name the model to unload")
    timeout_s = fields.number("timeout_s", 0, 3600, 30)
    gone = app.registry.unload(name, timeout_s=timeout_s, force=fields.flag("force", False))
    for entry in gone:
        if entry.model is not None:
            entry.state = None
            entry.model.close()
            entry.model = None
    _log.info("unloaded %s", log.fields(model=name, instances=len(gone)))
    responder.send_json(200, {"status": "unloaded", "name": name, "instances": len(gone)})


def get_dies(app: App, request: Request, responder: Responder) -> None:
    """The accelerators, and what is resident on the CPU [M006, M143]."""
    resident = [_instance(entry) for entry in app.registry.all_entries() if entry.model is not None]
    responder.send_json(200, {"dies": [], "cpu": {"cores": os.cpu_count(), "models": resident}})


def _instance(entry: Entry) -> dict[str, Any]:
    model = entry.model
    return {
        "name": entry.name,
        "slot": entry.index,
        "dies": list(entry.dies),
        "refs": entry.refs,
        "n_ctx": model.n_ctx if model else None,
        "memory": model.memory() if model else {},
    }


def confined(path: str | None, roots: tuple[Path, ...]) -> str:
    """The resolved path of a model file inside one of `roots`; a relative path is looked up in each.

    Links are followed before the check, and nothing outside is touched beyond that.  Raises PantheonError: 400, 403
    outside, 404 missing.
    """
    if not path or "\0" in path:
        raise BadRequest("path: must be the path of a model file", param="path")
    prefix, name = (SCRIPT, path[len(SCRIPT) :]) if path.startswith(SCRIPT) else ("", path)
    try:
        inside = [real for root in roots if (real := (root / name).resolve()).is_relative_to(root.resolve())]
        found = next((real for real in inside if real.is_file()), None)
        there = any(real.exists() for real in inside)
    except (OSError, RuntimeError):
        raise BadRequest("path: can not be resolved", param="path") from None
    if found is not None:
        return prefix + str(found)
    if there:
        raise BadRequest("path: is not a regular file", param="path")
    if inside:
        raise _refused(404, "path: there is no such file", "file_not_found")
    raise _refused(403, "path: outside the folders that this server may load from (--model-root)", "path_not_allowed")


def _refused(status: int, message: str, code: str) -> PantheonError:
    return PantheonError(message, status=status, type="invalid_request_error", code=code, param="path")


def _name(fields: Fields, default: str) -> str:
    name = fields.text("name", default) or default
    if len(name) > MR_MAX_NAME or not name.isprintable():
        raise fields.fault("name", f"must be at most {MR_MAX_NAME} printable characters")
    return name


def _guarded(request: Request) -> dict[str, Any]:
    media = (request.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise PantheonError(
            "the Content-Type must be application/json",
            status=415,
            type="invalid_request_error",
            code="unsupported_media_type",
        )
    return request.json()
