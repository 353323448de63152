"""What an operator can look at: models, dies and memory [area K]; who waits for what is in slots.py.

Nothing here takes a generation lock or a ref, so every route answers while generations and loads run [M028].
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import psutil

from pantheon.errors import NotFound
from pantheon.serve.context import App
from pantheon.serve.http_request import Request
from pantheon.serve.registry import Entry
from pantheon.serve.routes import Responder

_LOOK_S = 0.1


# ---- models ---------------------------------------------------------------------------------------------------------


def get_models(app: App, request: Request, responder: Responder) -> None:
    """Every instance, loading and unloading ones too, and the last failed attempts by name."""
    models = [instance_of(entry) for entry in app.registry.all_entries()]
    responder.send_json(200, {"models": models, "failed": app.jobs.failures()})


def get_model(app: App, request: Request, responder: Responder) -> None:
    """State and progress of one name; as events until it is settled, for `Accept: text/event-stream` [X36].

    Raises NotFound for a name that is not here and was not tried.
    """
    name = request.tail
    body = _model_state(app, name)
    if "text/event-stream" not in (request.headers.get("Accept") or ""):
        return responder.send_json(200, body)
    stream = responder.begin_sse()
    stream.send(body)
    while body["status"] in ("loading", "unloading") and not responder.should_stop():
        app.clock.sleep(_LOOK_S)
        try:
            now = _model_state(app, name)
        except NotFound:
            now = {"name": name, "status": "gone", "instances": []}
        if now != body:
            stream.send(now)
            body = now
    stream.done()


def _model_state(app: App, name: str) -> dict[str, Any]:
    # asked before the table: what ends in between is seen there, or as a failure
    doing, failure = app.jobs.doing(name), app.jobs.failure(name)
    parts = [instance_of(entry) for entry in app.registry.all_entries() if entry.name == name]
    if not parts and doing is None and failure is None and (failure := app.jobs.failure(name)) is None:
        raise NotFound(f"no model named {name[:200]!r} is here", code="model_not_found", param="name")
    states = {part["status"] for part in parts}
    if doing is not None:
        states.add(f"{doing}ing")
    # what changes is what the caller waits for
    status = next((s for s in ("loading", "unloading", "ready") if s in states), "failed")
    slowest = min((part["progress"] for part in parts if part["status"] == "loading"), default=None)
    body = {"name": name, "status": status, "progress": slowest if slowest is not None else float(status == "ready")}
    return {**body, "instances": parts, **({"error": failure} if failure else {})}


def instance_of(entry: Entry) -> dict[str, Any]:
    """One instance, with its memory by part in bytes."""
    model = entry.model
    status = "loading" if model is None else "unloading" if entry.unloading else "ready"
    return {
        "name": entry.name,
        "slot": entry.index,
        "status": status,
        "stage": entry.stage,
        "progress": round(entry.progress, 3),
        "path": entry.path,
        "dies": list(entry.dies),
        "refs": entry.refs,
        "created": entry.created or None,
        "architecture": model.architecture if model else None,
        "n_ctx": model.n_ctx if model else None,
        "memory": model.memory() if model else {},
    }


# ---- dies and memory ------------------------------------------------------------------------------------------------


def get_dies(app: App, request: Request, responder: Responder) -> None:
    """Every die with its budget and what is on it, and what is resident on the CPU [M006, M143]."""
    entries = app.registry.all_entries()
    on_cpu = [instance_of(entry) for entry in entries if entry.model is not None and not entry.dies]
    dies = []
    for die in app.registry.dies.snapshot():
        on_it = [entry for entry in entries if die.index in entry.dies]
        dies.append({**asdict(die), "used_bytes": die.charged_bytes, "slot": on_it[0].index if on_it else None})
    responder.send_json(200, {"dies": dies, "cpu": {"cores": os.cpu_count(), "models": on_cpu}})


def get_memory(app: App, request: Request, responder: Responder) -> None:
    """Host and die memory, the level in force, and what this process and its models hold."""
    process = psutil.Process()
    models = [
        {key: part[key] for key in ("name", "slot", "status", "dies", "memory")}
        for part in map(instance_of, app.registry.all_entries())
    ]
    body = {"process": {"rss_bytes": process.memory_info().rss}, "models": models}
    responder.send_json(200, {**body, **app.memory.view()})
