"""Counters, gauges and histograms in Prometheus' text format 0.0.4 [B47].

Written by handler threads, read by GET /metrics; neither waits on a generation.  Where llama-server or vLLM have a
name for a figure, it is theirs, with their meaning; the rest is `pantheon_…`.  Knows names and numbers, no models.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OURS = "pantheon_"

#: vLLM's boundaries, so that its dashboards' `le` exist; finer below, since a small model's gaps are
GAP_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
FIRST_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
WHOLE_S = (
    0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Family(NamedTuple):
    """One metric: its full name, counter, gauge or histogram, its help line, a histogram's upper bounds.

    `plain`: there from the start as one series without labels, at 0.
    """

    name: str
    kind: str
    help: str
    bounds: Sequence[float] = ()
    plain: bool = False


def _ours(kind: str, plain: bool, **helps: str) -> list[Family]:
    return [Family(OURS + name, kind, text, (), plain) for name, text in helps.items()]


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        # ---- of the whole server
        *_ours(
            "counter", True,
            cancelled_total="Generations ended early because the client was gone or the server stopped",
            turns_refused_total="Turns refused for want of memory",
            turns_capped_total="Turns whose prompt was cut to fit",
            memory_watcher_restarts_total="Watchers that died and were replaced",
            log_lines_dropped_total="Log lines that nobody read",
        ),
        *_ours(
            "gauge", True,
            requests_in_flight="Requests that generate now",
            models_loaded="Model names that answer requests",
            models_loading="Models that are being loaded",
            memory_level="Pressure on the host: 0 OK, 1 WATCH, 2 TIGHT, 3 CRITICAL",
            memory_available_bytes="Memory of the host, or of our cgroup, that can still be taken",
            memory_reserve_bytes="What of it no model may have",
            memory_watcher_alive="Whether a watcher keeps these numbers fresh",
            ladder_level="The highest level that a model acts on",
            ladder_degraded_models="Models that run with less than configured",
            process_start_time_seconds="When this server started, seconds since 1970",
            process_resident_memory_bytes="Memory of this process",
        ),
        *_ours("counter", False, requests_total="Chat and completion requests by outcome"),
        # ---- of each replica: model, replica, die
        *_ours(
            "counter", False,
            prompt_tokens_total="Prompt tokens read",
            cached_tokens_total="Prompt tokens that were warm and not read again",
            completion_tokens_total="Tokens delivered to clients",
            generation_seconds_total="Seconds spent in generations",
            forwards_total="Runs through the model",
            batched_answers_total="Answers that took part in runs through the model, beyond one for each run",
            sched_wasted_tokens_total="Tokens that were made and not read",
            queue_refused_total="Requests that the queue turned away, by reason",
        ),
        *_ours(
            "gauge", False,
            slots="Users that a replica serves at a time, as configured",
            slots_ceiling="Users that it serves at a time under the pressure of now",
            slots_busy="Slots that hold a running answer",
            queue_depth="Requests that may wait",
            kv_used_bytes="Bytes of keys and values in memory, warm conversations included",
            cached_tokens="Tokens of warm conversations",
            service_seconds="What an answer usually takes",
            die_used_bytes="Memory of a die that is charged",
            die_budget_bytes="Memory of a die that models may have",
        ),
        # ---- llama-server's, of the whole server
        *(
            Family("llamacpp:" + name, kind, text, (), True)
            for name, kind, text in (
                ("prompt_tokens_total", "counter", "Number of prompt tokens processed."),
                ("prompt_tokens_cached_total", "counter", "Number of prompt tokens reused from the cache."),
                ("prompt_seconds_total", "counter", "Prompt process time in seconds."),
                ("tokens_predicted_total", "counter", "Number of generation tokens processed."),
                ("tokens_predicted_seconds_total", "counter", "Predict process time in seconds."),
                ("n_decode_total", "counter", "Total number of runs through a model."),
                ("n_tokens_max", "counter", "Largest observed number of tokens in a context."),
                ("spec_decode_num_draft_tokens_total", "counter", "Draft tokens; there is no speculative decoding."),
                ("spec_decode_num_accepted_tokens_total", "counter", "Draft tokens that were accepted."),
                ("spec_decode_num_drafts_total", "counter", "Verification steps."),
                ("prompt_tokens_seconds", "gauge", "Average prompt throughput in tokens/s."),
                ("predicted_tokens_seconds", "gauge", "Average generation throughput in tokens/s."),
                ("requests_processing", "gauge", "Number of requests processing."),
                ("requests_deferred", "gauge", "Number of requests deferred."),
                ("n_busy_slots_per_decode", "gauge", "Average number of busy slots per run through a model."),
            )
        ),
        # ---- vLLM's, of each replica: model_name too
        *(
            Family("vllm:" + name, kind, text, bounds)
            for name, kind, text, bounds in (
                ("num_requests_running", "gauge", "Number of requests in model execution.", ()),
                ("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", ()),
                ("kv_cache_usage_perc", "gauge", "KV-cache usage of running requests. 1 means 100 percent.", ()),
                ("prompt_tokens_total", "counter", "Number of prompt tokens, cached ones included.", ()),
                ("generation_tokens_total", "counter", "Number of generation tokens processed.", ()),
                ("prefix_cache_queries_total", "counter", "Prefix cache queries, in tokens.", ()),
                ("prefix_cache_hits_total", "counter", "Prefix cache hits, in tokens.", ()),
                ("request_success_total", "counter", "Count of processed requests by finish reason.", ()),
                ("time_to_first_token_seconds", "histogram", "Time to first token in seconds.", FIRST_S),
                ("inter_token_latency_seconds", "histogram", "Time between two tokens in seconds.", GAP_S),
                ("e2e_request_latency_seconds", "histogram", "End to end request latency in seconds.", WHOLE_S),
                ("request_queue_time_seconds", "histogram", "Time spent waiting for a place.", WHOLE_S),
                ("request_prefill_time_seconds", "histogram", "Time spent reading the prompt.", WHOLE_S),
                ("request_decode_time_seconds", "histogram", "Time from the first token to the last.", WHOLE_S),
                ("request_prompt_tokens", "histogram", "Number of prompt tokens of a request.", TOKENS),
                ("request_generation_tokens", "histogram", "Number of tokens of an answer.", TOKENS),
            )
        ),
    )
}  # fmt: skip


class Gaps:
    """Values of one histogram that were gathered without a lock, by one thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = GAP_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """The figures of one server.  A name without a colon is one of ours."""

    def __init__(self) -> None:
        #: guards all three; held for no longer than a copy takes
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, float]] = {
            name: {"": 0.0} if family.plain else {} for name, family in FAMILIES.items() if family.kind != "histogram"
        }
        self._seen: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], float]] = weakref.WeakKeyDictionary()
        self._gaps: dict[str, dict[str, Gaps]] = {
            name: {} for name, family in FAMILIES.items() if family.kind == "histogram"
        }

    def add(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Raise a counter, or move a gauge."""
        series, key = self._values[_full(name)], _labels(labels)
        with self._lock:
            series[key] = series.get(key, 0.0) + amount

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        series, key = self._values[_full(name)], _labels(labels)
        with self._lock:
            series[key] = value

    def raise_to(self, name: str, value: float, /, **labels: str) -> None:
        """Set a counter that is kept elsewhere; it never falls."""
        series, key = self._values[_full(name)], _labels(labels)
        with self._lock:
            series[key] = max(value, series.get(key, 0.0))

    def advance(self, name: str, source: object, total: float, /, **labels: str) -> None:
        """Raise a counter by what a total that `source` keeps has grown since the last look."""
        series, key = self._values[_full(name)], _labels(labels)
        with self._lock:
            seen = self._seen.setdefault(source, {})
            series[key] = series.get(key, 0.0) + max(0.0, total - seen.get((name, key), 0.0))
            seen[name, key] = total

    def replace(self, name: str, rows: Iterable[tuple[Mapping[str, str], float]]) -> None:
        """All series of a gauge at once: what is not there any more is not shown any more."""
        full, fresh = _full(name), {_labels(labels): value for labels, value in rows}
        with self._lock:
            self._values[full] = fresh

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """One value of a histogram."""
        family = FAMILIES[_full(name)]
        gaps = Gaps(family.bounds)
        gaps.add(value)
        self.merge(name, gaps, **labels)

    def merge(self, name: str, gaps: Gaps, /, **labels: str) -> None:
        """Many values of a histogram, with the family's bounds."""
        family, key = FAMILIES[_full(name)], _labels(labels)
        assert tuple(gaps.bounds) == tuple(family.bounds)
        with self._lock:
            known = self._gaps[family.name].setdefault(key, Gaps(family.bounds))
            known.counts = [a + b for a, b in zip(known.counts, gaps.counts, strict=True)]
            known.total += gaps.total

    def value(self, name: str, /, **labels: str) -> float:
        """What a counter or gauge stands at, over all series that carry these labels."""
        wanted = [f'{key}="{_escape(value)}"' for key, value in labels.items()]
        with self._lock:
            series = dict(self._values[_full(name)])
        return sum(value for key, value in series.items() if all(word in key for word in wanted))

    def render(self) -> str:
        """The text that Prometheus scrapes."""
        with self._lock:
            values = {name: dict(series) for name, series in self._values.items()}
            gaps = {
                name: {key: (list(one.counts), one.total) for key, one in series.items()}
                for name, series in self._gaps.items()
            }
        lines: list[str] = []
        for name, family in FAMILIES.items():
            lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
            lines += [f"{name}{_braces(key)} {_number(value)}" for key, value in values.get(name, {}).items()]
            for key, (counts, total) in gaps.get(name, {}).items():
                lines += _histogram(family, key, counts, total)
        return "\n".join(lines) + "\n"


def _histogram(family: Family, key: str, counts: Sequence[int], total: float) -> list[str]:
    """Cumulative buckets, then sum and count."""
    lines, so_far = [], 0
    for bound, count in zip((*family.bounds, None), counts, strict=True):
        so_far += count
        le = 'le="+Inf"' if bound is None else f'le="{float(bound)}"'
        lines.append(f"{family.name}_bucket{_braces(f'{key},{le}' if key else le)} {so_far}")
    return [*lines, f"{family.name}_sum{_braces(key)} {_number(total)}", f"{family.name}_count{_braces(key)} {so_far}"]


def _full(name: str) -> str:
    return name if ":" in name else OURS + name


def _number(value: float) -> str:
    """Bytes to the last digit, seconds to ten."""
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _braces(key: str) -> str:
    return f"{{{key}}}" if key else ""


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{key}="{_escape(value)}"' for key, value in sorted(labels.items()))


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
