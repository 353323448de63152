"""POST /admin/models/load and /unload: what changes which models are here [area K].

A load is confined to the server's model folders and uses the loading code of the start.  State-changing routes take
application/json only, which a foreign web page can not post without asking first; who may ask at all is decided before
anything here runs (http_access.py) [B44, X33].  What only looks is in admin_views.py.
"""

from __future__ import annotations

import re
from glob import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pantheon.engine.scripted import PREFIX as SCRIPT
from pantheon.errors import BadRequest, PantheonError
from pantheon.serve import loading
from pantheon.serve.admin_views import instance_of
from pantheon.serve.context import App
from pantheon.serve.http_request import Request
from pantheon.serve.loading import ModelSpec, default_name, load_reserved
from pantheon.serve.request_fields import Fields
from pantheon.serve.routes import Responder

MR_MAX_NAME = 128
_SPLIT = re.compile(r"(.*)-[0-9]{5}(-of-[0-9]{5}\.gguf)", re.DOTALL)


def post_load(app: App, request: Request, responder: Responder) -> None:
    """{path, name?, ctx?, dies?, quantize?, wait?} -> 200 once the model answers, or 202 at once with `wait: false`.

    Raises PantheonError: 400 field, 403 path outside the folders, 404 no such file, 409 duplicate, 422 bad file, 507
    no place.  A load that nobody waits for reports at GET /admin/models/{name} [X36].
    """
    fields = Fields(_guarded(request))
    spec = load_fields(app, fields)
    wait = fields.flag("wait", True)
    entry = app.registry.reserve(spec.name, spec.path, spec.dies)

    def load() -> None:
        load_reserved(app.registry, entry, spec, app.load_options)

    if wait:
        with app.jobs.noting("load", spec.name):
            load()
        return responder.send_json(200, {"status": "loaded", **instance_of(entry)})
    app.jobs.spawn("load", spec.name, load, lambda: app.registry.withdraw(entry))
    _accept(responder, {"status": "loading", "name": spec.name, "slot": entry.index}, spec.name)


def load_fields(app: App, fields: Fields, confine: bool = True) -> ModelSpec:
    """What is to be loaded.  Raises PantheonError for a field that is wrong; confine False takes the path as it is."""
    if fields.flag("quantize", False):
        raise fields.fault("quantize", "is not supported: load a file that is quantised already")
    path = confined(fields.text("path"), app.model_roots) if confine else str(fields.text("path"))
    name = _name(fields, default_name(path))
    dies = _dies(fields)
    app.registry.dies.check(dies or ())
    return ModelSpec(path, name, dies=dies, ctx=fields.integer("ctx", 2, 1 << 40, None))


def post_unload(app: App, request: Request, responder: Responder) -> None:
    """{name, timeout_s?, force?, slot? or dies? or all?, wait?} -> 200 once nothing uses it and its memory is free.

    Without slot or dies every replica goes; the answer lists which went [X04].  Raises PantheonError: 404 unknown, 409
    loading, unloading already, or busy at the deadline; then it serves on.
    """
    fields = Fields(_guarded(request))
    name = fields.text("name")
    if not name:
        raise fields.fault("name", "must name the model to unload")
    slot = fields.integer("slot", 0, 1 << 16, fields.integer("instance", 0, 1 << 16, None))
    dies = _dies(fields)
    if fields.flag("all", False) and (slot is not None or dies is not None):
        raise fields.fault("all", "stands against slot and dies, which name one replica")
    timeout_s, force = fields.number("timeout_s", 0, 3600, 30), fields.flag("force", False)
    wait = fields.flag("wait", True)

    def unload() -> list[dict[str, Any]]:
        gone = loading.unload(app.registry, name, timeout_s=timeout_s, force=force, slot=slot, dies=dies)
        return [{"slot": entry.index, "dies": list(entry.dies)} for entry in gone]

    if not any(entry.name == name for entry in app.registry.all_entries()):
        unload()  # raises its 404; no attempt, so why a load of that name failed stays known
    if wait:
        with app.jobs.noting("unload", name):
            parts = unload()
        return responder.send_json(200, {"status": "unloaded", "name": name, "instances": parts})
    app.jobs.spawn("unload", name, unload, lambda: None)
    _accept(responder, {"status": "unloading", "name": name}, name)


def _accept(responder: Responder, body: dict[str, Any], name: str) -> None:
    place = f"/admin/models/{quote(name, safe='')}"
    responder.send_json(202, {**body, "location": place}, headers={"Location": place})


# ---- paths ----------------------------------------------------------------------------------------------------------


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
        strays = found is not None and _strays(found, roots)
    except (OSError, RuntimeError, ValueError):
        raise BadRequest("path: can not be resolved", param="path") from None
    if strays:
        raise _refused(403, "path: a part of this model lies outside the folders (--model-root)", "path_not_allowed")
    if found is not None:
        return prefix + str(found)
    if there:
        raise BadRequest("path: is not a regular file", param="path")
    if inside:
        raise _refused(404, "path: there is no such file", "file_not_found")
    raise _refused(403, "path: outside the folders that this server may load from (--model-root)", "path_not_allowed")


def _strays(file: Path, roots: tuple[Path, ...]) -> bool:
    """Whether a further part of a split model is a link to somewhere else."""
    match = _SPLIT.fullmatch(file.name)
    parts = file.parent.glob(f"{escape(match[1])}-?????{match[2]}") if match else ()
    real = [part.resolve() for part in parts]
    return not all(any(part.is_relative_to(root.resolve()) for root in roots) for part in real)


def _refused(status: int, message: str, code: str) -> PantheonError:
    return PantheonError(message, status=status, type="invalid_request_error", code=code, param="path")


# ---- fields ---------------------------------------------------------------------------------------------------------


def _name(fields: Fields, default: str) -> str:
    name = fields.text("name", default) or default
    if len(name) > MR_MAX_NAME or not name.isprintable():
        raise fields.fault("name", f"must be at most {MR_MAX_NAME} printable characters")
    return name


def _dies(fields: Fields) -> tuple[int, ...] | None:
    """Different die numbers; () asks for the CPU, None leaves the choice."""
    if not fields.given("dies"):
        return None
    dies = fields.items("dies")
    if not all(type(die) is int and die >= 0 for die in dies) or len(set(dies)) < len(dies):
        raise fields.fault("dies", "must be an array of different die numbers such as [0, 1]")
    return tuple(dies)


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
