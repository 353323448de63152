"""The account of one request that generates: where its time went, how far it is, what it cost.

Filled by the request's own thread, read by any other: /metrics, /slots, the log line and the reply's `timings` all tell
the same figures.  Must not know how tokens are made, or the shape of a request or reply.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pantheon.serve.entry import Entry
from pantheon.serve.metrics import Gaps, Metrics

#: sessions may be named after people: their hashes can not be guessed back, and are good for one run of the server
_SALT = secrets.token_bytes(16)


def labels_of(entry: Entry) -> dict[str, str]:
    """What tells one replica's figures from another's."""
    dies = ",".join(map(str, entry.dies)) or "cpu"
    return {"model": entry.name, "replica": str(entry.index), "die": dies}


def session_hash(session: str | None) -> str | None:
    """A session as it may stand in a log."""
    return hashlib.blake2b(session.encode(), digest_size=6, key=_SALT).hexdigest() if session else None


def timings_of(
    cached: int, read: int, prompt_ms: float, made: int, predicted_ms: float, queue_ms: float = 0.0,
    ttft_ms: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    """`timings` as llama-server's clients read them, and our two.

    The first token comes with the last forward of the prompt: it is no step of decoding, and no part of its rate.
    """
    steps = max(0, made - 1)
    # rates are those of the rounded times, so that they can be checked
    prompt_ms, predicted_ms = round(prompt_ms, 3), round(predicted_ms, 3)
    return {
        "cache_n": cached,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / read if read else 0.0,
        "prompt_per_second": 1000 * read / prompt_ms if prompt_ms > 0 else 0.0,
        "predicted_n": made,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
        "predicted_per_second": 1000 * steps / predicted_ms if steps and predicted_ms > 0 else 0.0,
        "queue_ms": round(queue_ms, 3),
        "ttft_ms": round(ttft_ms, 3),
    }


class Flight:
    """One request on one entry; its answers run one after the other.  Times in seconds of time.perf_counter."""

    def __init__(self, entry: Entry, arrived: float, request_id: str = "", session: str | None = None) -> None:
        """arrived: when the request was here in full."""
        self.entry, self.request_id, self.session = entry, request_id, session_hash(session)
        self.labels = labels_of(entry)
        self.arrived = self._mark = arrived
        self.phase = "queued"
        self.queue_s = 0.0
        self.ttft_s: float | None = None
        # of the answer that runs now
        self.prompt_tokens = self.cached_tokens = self.read = self.made = 0
        self.limit: int | None = None
        self._began = self._first = arrived
        # of all answers
        self.answers = self.forwards = self.first_cached = 0
        self.prompt_total = self.cached_total = self.made_total = 0
        self.prompt_s = self.predicted_s = 0.0
        self.finish: list[str] = []
        self.gaps = Gaps()

    # ---- the request's thread -----------------------------------------------------------------------------------

    def entered(self, waited_s: float) -> None:
        """The wait for a place is over.  For the first answer; the later ones have theirs."""
        if self.phase == "queued":
            self.queue_s, self.phase = waited_s, "idle"

    def begin(self, prompt_tokens: int, cached_tokens: int, limit: int | None) -> None:
        """An answer begins; the one before it is over."""
        self._settle()
        self.prompt_tokens, self.cached_tokens, self.read, self.made = prompt_tokens, cached_tokens, cached_tokens, 0
        self.limit, self.phase = limit, "prefill"
        self.answers += 1
        if self.answers == 1:
            self.first_cached = cached_tokens
        self.prompt_total += prompt_tokens
        self.cached_total += cached_tokens
        self._began = self._first = time.perf_counter()

    def on_prefill(self, done: int, total: int) -> None:
        """So much of the prompt is read."""
        self.forwards += done > self.read
        self.read = done

    def on_token(self, counts: bool = True) -> None:
        """A token is there; not `counts`: it ends the answer and is no part of it."""
        now = time.perf_counter()
        if self.phase == "prefill":
            self.phase, self.read, self._first = "decode", self.prompt_tokens, now
            if self.ttft_s is None:
                self.ttft_s = now - self.arrived
        else:
            self.forwards += 1
            self.gaps.add(now - self._mark)
        self._mark = now
        self.made += counts

    def end(self, finish: str | None = None) -> None:
        """The answer that ran is over; finish: why, None when it was cut off."""
        if finish is not None:
            self.finish.append(finish)
        self._settle()

    def leave(self) -> None:
        """The request is over."""
        if self.phase == "queued":
            self.queue_s = time.perf_counter() - self.arrived
        self._settle()

    def _settle(self) -> None:
        if self.phase in ("prefill", "decode"):
            now = time.perf_counter()
            first = self._first if self.phase == "decode" else now
            self.prompt_s += first - self._began
            self.predicted_s += now - first
            self.made_total += self.made
            self.phase = "idle"

    # ---- any thread ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether it holds a place."""
        return self.phase != "queued"

    @property
    def made_now(self) -> int:
        """Tokens of the answer that runs now, not yet in `made_total`."""
        return self.made if self.phase in ("prefill", "decode") else 0

    def timings(self) -> dict[str, float]:
        """Of the answer that runs now, so far."""
        now = time.perf_counter()
        decoding = self.phase == "decode"
        # before the first chunk nothing was done
        prompt_s = self._first - self._began if decoding else now - self._began if self.read > self.cached_tokens else 0
        return timings_of(
            self.cached_tokens, self.read - self.cached_tokens, 1000 * prompt_s, self.made,
            1000 * (now - self._first) if decoding else 0.0, 1000 * self.queue_s, 1000 * (self.ttft_s or 0),
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """For the log line of the request: figures, never text."""
        return {
            "model": self.entry.name,
            "replica": self.entry.index,
            "dies": list(self.entry.dies),
            "session": self.session,
            "queue_ms": round(1000 * self.queue_s, 3),
            "ttft_ms": round(1000 * self.ttft_s, 3) if self.ttft_s is not None else None,
            "prompt_ms": round(1000 * self.prompt_s, 3),
            "predicted_ms": round(1000 * self.predicted_s, 3),
            "prompt_tokens": self.prompt_total,
            "cached_tokens": self.cached_total,
            "completion_tokens": self.made_total,
            "answers": self.answers,
            "finish": self.finish,
        }


class Flights:
    """Who is on which entry now; what they did goes to the metrics when they leave."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        #: guards _all
        self._lock = threading.Lock()
        self._all: dict[Flight, None] = {}

    def on(self, entry: Entry) -> list[Flight]:
        """Those of one entry, oldest first."""
        with self._lock:
            return [flight for flight in self._all if flight.entry is entry]

    @contextmanager
    def track(self, flight: Flight) -> Iterator[Flight]:
        """Show a flight while the body runs, then count it."""
        with self._lock:
            self._all[flight] = None
        try:
            yield flight
        finally:
            flight.leave()
            with self._lock:
                del self._all[flight]
            self._count(flight)

    def _count(self, flight: Flight) -> None:
        metrics, labels = self._metrics, flight.labels
        read = flight.prompt_total - flight.cached_total
        for name, amount in (
            ("prompt_tokens_total", flight.prompt_total),
            ("cached_tokens_total", flight.cached_total),
            ("completion_tokens_total", flight.made_total),
            ("generation_seconds_total", flight.prompt_s + flight.predicted_s),
        ):
            metrics.add(name, amount, **labels)
        for name, amount in (
            ("prompt_tokens_total", read),
            ("prompt_tokens_cached_total", flight.cached_total),
            ("prompt_seconds_total", flight.prompt_s),
            ("tokens_predicted_total", flight.made_total),
            ("tokens_predicted_seconds_total", flight.predicted_s),
        ):
            metrics.add(f"llamacpp:{name}", amount)
        metrics.raise_to("llamacpp:n_tokens_max", flight.prompt_tokens + flight.made)
        if flight.entry.sched is None:
            metrics.add("forwards_total", flight.forwards, **labels)
        self._count_as_vllm(flight, {**labels, "model_name": labels["model"]})

    def _count_as_vllm(self, flight: Flight, labels: dict[str, str]) -> None:
        metrics = self._metrics
        metrics.add("vllm:prompt_tokens_total", flight.prompt_total, **labels)
        metrics.add("vllm:generation_tokens_total", flight.made_total, **labels)
        metrics.add("vllm:prefix_cache_queries_total", flight.prompt_total, **labels)
        metrics.add("vllm:prefix_cache_hits_total", flight.cached_total, **labels)
        metrics.observe("vllm:request_queue_time_seconds", flight.queue_s, **labels)
        if not flight.answers:
            return
        # a tool call is an end by the model too
        reasons = ["length" if reason == "length" else "stop" for reason in flight.finish]
        for reason in reasons + ["abort"] * (flight.answers - len(reasons)):
            metrics.add("vllm:request_success_total", finished_reason=reason, **labels)
        if flight.ttft_s is not None:
            metrics.observe("vllm:time_to_first_token_seconds", flight.ttft_s, **labels)
        metrics.merge("vllm:inter_token_latency_seconds", flight.gaps, **labels)
        metrics.observe("vllm:e2e_request_latency_seconds", time.perf_counter() - flight.arrived, **labels)
        metrics.observe("vllm:request_prefill_time_seconds", flight.prompt_s, **labels)
        metrics.observe("vllm:request_decode_time_seconds", flight.predicted_s, **labels)
        metrics.observe("vllm:request_prompt_tokens", flight.prompt_total / flight.answers, **labels)
        metrics.observe("vllm:request_generation_tokens", flight.made_total, **labels)
