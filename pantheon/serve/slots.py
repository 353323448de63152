"""What runs where: GET /slots in llama-server's shape, GET /admin/sched, and the gauges of GET /metrics.

All of it is looked up at the moment of asking, without a ref, a generation lock or a forward, so that it answers while
everything else is busy [M028].
"""

from __future__ import annotations

import time
from typing import Any

import psutil

from pantheon import log
from pantheon.serve.context import App
from pantheon.serve.entry import Entry
from pantheon.serve.flight import Flight, labels_of
from pantheon.serve.http_errors import HttpError
from pantheon.serve.http_request import Request
from pantheon.serve.metrics import CONTENT_TYPE
from pantheon.serve.routes import Responder

_STARTED = int(psutil.Process().create_time())

# ---- GET /slots -----------------------------------------------------------------------------------------------------


def get_slots(app: App, request: Request, responder: Responder) -> None:
    """One row for each user that could be served at a time; `?model=` for one name, `?fail_on_no_slot=1` for a 503.

    Raises HttpError: 501 with --no-slots, 503.
    """
    if not app.slots_view:
        raise _switched_off("slots")
    wanted = request.query.get("model")
    entries = [entry for entry in app.registry.all_entries() if entry.ready and wanted in (None, entry.name)]
    rows = [row for entry in entries for row in slots_of(app, entry)]
    if request.query.get("fail_on_no_slot") not in (None, "", "0") and all(row["is_processing"] for row in rows):
        raise HttpError(503, "no slot is free", code="no_free_slot", type="unavailable_error", retry_after=1)
    responder.send_json(200, rows)


def slots_of(app: App, entry: Entry) -> list[dict[str, Any]]:
    """The slots of one replica: those in use, and as many idle ones as may still be used."""
    model, sched = entry.model, entry.sched
    base = {
        "model": entry.name,
        "replica": entry.index,
        "dies": list(entry.dies),
        "n_ctx": model.n_ctx if model else None,
        "speculative": False,
    }
    if sched is None:
        flight = next((one for one in app.flights.on(entry) if one.busy), None)
        return [base | _row(0, *_of_flight(flight, entry.gen_lock.locked()))]
    slots = sched.view()["slots"]
    busy = [slot for slot in slots if slot["state"] != "idle"]
    idle = [slot for slot in slots if slot["state"] == "idle"][: max(0, sched.config.users - len(busy))]
    shown = sorted([*busy, *idle], key=lambda slot: slot["id"])
    return [base | _row(slot["id"], slot["state"], *_of_slot(slot)) for slot in shown]


def _of_flight(flight: Flight | None, locked: bool) -> tuple[str, int, int, int, int, int]:
    if flight is None or flight.phase not in ("prefill", "decode"):
        return "busy" if locked else "idle", 0, 0, 0, 0, -1
    left = -1 if flight.limit is None else flight.limit - flight.made
    return flight.phase, flight.prompt_tokens, flight.read, flight.cached_tokens, flight.made, left


def _of_slot(slot: dict[str, Any]) -> tuple[int, int, int, int, int]:
    if "prompt_tokens" not in slot:
        return 0, 0, 0, 0, -1
    made = slot["made_tokens"]
    return slot["prompt_tokens"], slot["read_tokens"], slot["cached_tokens"], made, slot["budget_tokens"] - made


def _row(index: int, state: str, prompt: int, read: int, cached: int, made: int, left: int) -> dict[str, Any]:
    busy = state != "idle"
    return {
        "id": index,
        "id_task": -1,
        "is_processing": busy,
        "state": state,
        "n_prompt_tokens": prompt,
        "n_prompt_tokens_processed": read - cached,
        "n_prompt_tokens_cache": cached,
        "next_token": [{"has_next_token": busy, "has_new_line": False, "n_remain": left, "n_decoded": made}],
    }


# ---- GET /admin/sched -----------------------------------------------------------------------------------------------


def get_sched(app: App, request: Request, responder: Responder) -> None:
    """Who works and who waits, for each instance: the scheduler's books, or those of the one who may generate."""
    now = app.clock.monotonic()
    responder.send_json(200, {"entries": [_entry(app, entry, now) for entry in app.registry.all_entries()]})


def _entry(app: App, entry: Entry, now: float) -> dict[str, Any]:
    flights, cache = app.flights.on(entry), entry.prefix_cache
    row: dict[str, Any] = {"name": entry.name, "slot": entry.index, "dies": list(entry.dies), "refs": entry.refs}
    if (sched := entry.sched) is not None:
        load = sched.load()
        row |= {
            "mode": "batch",
            "capacity": sched.config.users,
            "busy": load.active > 0,
            "active": load.active,
            "waiting": load.queued,
            "running_s": None,
            "service_s": round(load.service_s, 3),
            "wait_s": round(load.wait_s, 3),
            "scheduler": sched.view(),
        }
    else:
        busy = entry.gen_lock.locked()
        row |= {
            "mode": "single",
            "capacity": 1,
            "busy": busy,
            "active": int(busy),
            "waiting": max(0, entry.refs - busy),
            "running_s": round(max(0.0, now - entry.began_at), 3) if busy else None,
            "service_s": round(entry.service_s, 3),
            "wait_s": round(entry.wait_s(now), 3),
        }
    done = {
        name: int(app.metrics.value(f"{name}_total", **labels_of(entry)))
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    }
    done["completion_tokens"] += sum(flight.made_total + flight.made_now for flight in flights)
    row["cached_tokens"] = cache.tokens() if cache is not None else 0
    return row | {"totals": done, "requests": [_request(flight) for flight in flights]}


def _request(flight: Flight) -> dict[str, Any]:
    return {
        "id": flight.request_id,
        "session": flight.session,
        "phase": flight.phase,
        "age_s": round(time.perf_counter() - flight.arrived, 3),
        "prompt_tokens": flight.prompt_tokens,
        "cached_tokens": flight.cached_tokens,
        "read_tokens": flight.read,
        "made_tokens": flight.made_now,
        "answers": flight.answers,
    }


# ---- GET /metrics ---------------------------------------------------------------------------------------------------


def get_metrics(app: App, request: Request, responder: Responder) -> None:
    """The figures for Prometheus.  Raises HttpError: 501 with --no-metrics."""
    if not app.metrics_view:
        raise _switched_off("metrics")
    refresh(app)
    headers = {"Process-Start-Time-Unix": str(_STARTED)}
    responder.send_bytes(200, CONTENT_TYPE, app.metrics.render().encode(), headers)


def refresh(app: App) -> None:
    """Set every gauge to what it is now."""
    metrics = app.metrics
    metrics.set("models_loaded", app.registry.count())
    metrics.set("models_loading", len(app.registry.loading()))
    metrics.set("process_start_time_seconds", _STARTED)
    metrics.set("process_resident_memory_bytes", psutil.Process().memory_info().rss)
    metrics.raise_to("log_lines_dropped_total", log.dropped())
    app.memory.count(metrics)
    entries = [entry for entry in app.registry.all_entries() if entry.ready]
    _replicas(app, entries)
    _dies(app)
    forwards = metrics.value("forwards_total")
    busy = forwards + metrics.value("batched_answers_total")
    for name, amount, per in (
        ("prompt_tokens_seconds", "prompt_tokens_total", "prompt_seconds_total"),
        ("predicted_tokens_seconds", "tokens_predicted_total", "tokens_predicted_seconds_total"),
    ):
        seconds = metrics.value(f"llamacpp:{per}")
        metrics.set(f"llamacpp:{name}", metrics.value(f"llamacpp:{amount}") / seconds if seconds else 0.0)
    metrics.raise_to("llamacpp:n_decode_total", forwards)
    metrics.set("llamacpp:n_busy_slots_per_decode", busy / forwards if forwards else 0.0)


def _replicas(app: App, entries: list[Entry]) -> None:
    metrics, rows = app.metrics, list[tuple[dict[str, str], dict[str, float]]]()
    for entry in entries:
        labels, found = labels_of(entry), _of_entry(app, entry)
        rows.append((labels, found))
        if (sched := entry.sched) is not None:
            view = sched.view()
            totals = view["totals"]
            metrics.advance("forwards_total", entry, totals["steps"], **labels)
            metrics.advance("batched_answers_total", entry, max(0, totals["busy_slots"] - totals["steps"]), **labels)
            metrics.advance("sched_wasted_tokens_total", entry, totals["wasted_tokens"], **labels)
            for reason, count in view["queue"]["refused"].items():
                metrics.advance("queue_refused_total", entry, count, reason=reason, **labels)
    for name in (
        "slots", "slots_ceiling", "slots_busy", "queue_depth", "kv_used_bytes", "cached_tokens", "service_seconds",
    ):  # fmt: skip
        metrics.replace(name, [(labels, found[name]) for labels, found in rows])
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        metrics.replace(
            f"vllm:{name}", [({**labels, "model_name": labels["model"]}, found[name]) for labels, found in rows]
        )
    metrics.set("llamacpp:requests_processing", sum(found["num_requests_running"] for _, found in rows))
    metrics.set("llamacpp:requests_deferred", sum(found["num_requests_waiting"] for _, found in rows))


def _of_entry(app: App, entry: Entry) -> dict[str, float]:
    cache, model, sched = entry.prefix_cache, entry.model, entry.sched
    flights = [flight for flight in app.flights.on(entry) if flight.busy]
    found: dict[str, float] = {
        "cached_tokens": cache.tokens() if cache is not None else 0,
        "kv_used_bytes": cache.used_bytes() if cache is not None else 0,
    }
    if sched is None:
        busy = entry.gen_lock.locked()
        found |= {
            "slots": 1, "slots_ceiling": 1, "slots_busy": busy, "queue_depth": 0, "service_seconds": entry.service_s,
            "num_requests_running": busy, "num_requests_waiting": max(0, entry.refs - busy),
        }  # fmt: skip
    else:
        load = sched.load()
        found |= {
            "slots": sched.config.users, "slots_ceiling": load.slots, "queue_depth": sched.config.queue_depth,
            "slots_busy": sum(flight.phase in ("prefill", "decode") for flight in flights),
            "service_seconds": load.service_s, "num_requests_running": load.active, "num_requests_waiting": load.queued,
        }  # fmt: skip
    room = (model.n_ctx if model else 0) * found["slots"]
    held = sum(flight.read + flight.made for flight in flights if flight.phase in ("prefill", "decode"))
    found["kv_cache_usage_perc"] = min(1.0, held / room) if room else 0.0
    return found


def _dies(app: App) -> None:
    dies = [({"die": str(die.index)}, die) for die in app.dies.snapshot()]
    app.metrics.replace("die_used_bytes", [(labels, die.charged_bytes) for labels, die in dies])
    app.metrics.replace("die_budget_bytes", [(labels, die.budget_bytes) for labels, die in dies])


def _switched_off(name: str) -> HttpError:
    return HttpError(
        501, f"this server was started with --no-{name}", code="not_supported", type="not_supported_error"
    )  # fmt: skip
