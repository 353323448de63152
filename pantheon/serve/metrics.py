"""Counters of the server in Prometheus' text format 0.0.4 [B47].

Written by handler threads, read by GET /metrics; neither waits on a generation.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

_HELP = {
    "requests_total": "Chat and completion requests by outcome",
    "prompt_tokens_total": "Prompt tokens read",
    "cached_tokens_total": "Prompt tokens that were warm and not read again",
    "completion_tokens_total": "Tokens delivered to clients",
    "cancelled_total": "Generations ended early because the client was gone or the server stopped",
    "generation_seconds_total": "Seconds spent in generations",
    "requests_in_flight": "Requests that generate now",
    "models_loaded": "Model names that answer requests",
    "models_loading": "Models that are being loaded",
    "turns_refused_total": "Turns refused for want of memory",
    "turns_capped_total": "Turns whose prompt was cut to fit",
    "memory_level": "Pressure on the host: 0 OK, 1 WATCH, 2 TIGHT, 3 CRITICAL",
    "memory_available_bytes": "Memory of the host, or of our cgroup, that can still be taken",
    "memory_reserve_bytes": "What of it no model may have",
    "memory_watcher_alive": "Whether a watcher keeps these numbers fresh",
    "memory_watcher_restarts_total": "Watchers that died and were replaced",
    "ladder_level": "The highest level that a model acts on",
    "ladder_degraded_models": "Models that run with less than configured",
}
_GAUGES = (
    "requests_in_flight", "models_loaded", "models_loading", "memory_level", "memory_available_bytes",
    "memory_reserve_bytes", "memory_watcher_alive", "ladder_level", "ladder_degraded_models",
)  # fmt: skip
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters that never fall and gauges, with labels."""

    def __init__(self) -> None:
        #: guards _values
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = {(name, ""): 0 for name in _HELP if name != "requests_total"}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Raise a counter, or move a gauge."""
        key = (name, _labels(labels))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[(name, "")] = value

    def value(self, name: str, **labels: str) -> float:
        """What a counter or gauge stands at."""
        with self._lock:
            return self._values.get((name, _labels(labels)), 0)

    def render(self) -> str:
        """The text that Prometheus scrapes."""
        with self._lock:
            values = dict(self._values)
        lines = []
        for name, text in _HELP.items():
            lines.append(f"# HELP pantheon_{name} {text}")
            lines.append(f"# TYPE pantheon_{name} {'gauge' if name in _GAUGES else 'counter'}")
            lines += [
                f"pantheon_{name}{labels} {_number(value)}" for (key, labels), value in values.items() if key == name
            ]
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Bytes to the last digit, seconds to ten."""
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{key}="{_escape(value)}"' for key, value in sorted(labels.items()))
    return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
