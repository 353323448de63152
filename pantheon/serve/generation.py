"""The one generation path: prompt -> context check -> prefill -> decode -> detokenizer -> emitter -> deltas [M079].

Streamed and whole answers, chats and plain completions all run through `Generation`, so that they can not differ.
The caller has the right to generate, a place of seating.py.  Must not know HTTP or the shape of a reply.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pantheon.engine.generate import Token, generate, never
from pantheon.engine.prefix_cache import Warm
from pantheon.serve.chat_job import Job
from pantheon.serve.emitter import Emitter, Event
from pantheon.serve.flight import Flight, timings_of
from pantheon.serve.loop_guard import EVERY, is_loop
from pantheon.serve.seating import Run, SoloRun
from pantheon.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from pantheon.accel.executor import RunnerState
    from pantheon.engine.model import Model


@dataclass(slots=True)
class Delta:
    """A piece of an answer.

    Channel "call": a call begins with a piece that has a `name` (and `call_id`), and goes on with nameless pieces of
    the same `index`, from 0.  `text` is a piece of its arguments, which joined are JSON unless the answer was cut.
    """

    channel: Literal["reasoning", "content", "call"]
    text: str
    index: int = 0
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Logprob:
    """What the model thought of one token: its bytes, its log-probability, the likeliest alternatives,
    and the ids of all these."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()
    id: int = -1
    top_ids: tuple[int, ...] = ()


class Step(NamedTuple):
    """What one token brought: deltas (none while text is held back), its log-probability when asked for, and its id,
    None for one that ends the answer."""

    deltas: list[Delta]
    logprob: Logprob | None = None
    token: int | None = None


@dataclass(frozen=True)
class Result:
    """How an answer ended [M054].  `completion_tokens` counts tokens whose text was delivered or consumed (by a stop
    string, a marker or a tool call); the end-of-generation token is none of them [M046].  `cached_tokens` of the prompt
    were not run again; `stop_word` is the stop string that was hit.  Times in ms."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int
    prompt_ms: float
    predicted_ms: float
    context_capped: bool = False
    dropped_tokens: int = 0
    looped: bool = False
    cached_tokens: int = 0
    stop_word: str | None = None
    queue_ms: float = 0.0
    ttft_ms: float = 0.0

    @property
    def timings(self) -> dict[str, float]:
        """The figures that llama.cpp's clients read, and the request's wait and time to its first token."""
        return timings_of(
            self.cached_tokens, self.prompt_tokens - self.cached_tokens, self.prompt_ms, self.completion_tokens,
            self.predicted_ms, self.queue_ms, self.ttft_ms,
        )  # fmt: skip


class Generation:
    """One run of a job.  Iterate over its steps once; then `result` is set.

    Raises Cancelled out of the iteration when `cancelled` says yes; leaving the iteration early ends the run.
    """

    def __init__(
        self,
        model: Model,
        state: RunnerState | None,
        job: Job,
        *,
        cancelled: Callable[[], bool] = never,
        on_prefill: Callable[[int, int], None] | None = None,
        loop_guard: int = 0,
        run: Run | None = None,
        flight: Flight | None = None,
    ) -> None:
        """`loop_guard`: end an answer whose last so many tokens repeat one cycle (0: never).  `run`: where its tokens
        come from; without one, from slot 0 of `state`, with nothing in it, under `cancelled` and `on_prefill`.
        `flight`: the account that is told of each token."""
        assert run is not None or state is not None
        self._run = run if run is not None else _alone(model, state, job, cancelled, on_prefill)
        self.result: Result | None = None
        self.tokens = 0
        self._job, self._flight = job, flight
        self._tokenizer = model.tokenizer
        self._detokenizer = Detokenizer(model.tokenizer)
        self._emitter = Emitter(
            job.stop,
            starts_in_reasoning=job.opens_reasoning,
            parse_reasoning=job.parse_reasoning,
            thought=job.thought,
            tools=job.format,
            offered=job.tools,
        )
        self._markers = job.markers
        #: how many calls have begun
        self._calls = 0
        self._loop_guard, self._ids, self._looped = loop_guard, list[int](), False

    def __iter__(self) -> Iterator[Step]:
        began = first = time.perf_counter()
        reason: Literal["stop", "length"] | None = None
        # an iterator that is left early gives its slot back
        with closing(iter(self._run)) as tokens:
            for token in tokens:
                if self._flight is not None:
                    self._flight.on_token(not token.is_eog)
                if token.n == 1:
                    first = time.perf_counter()
                last = token.is_last or self._loops(token)
                step = self._take(token, last)
                reason = self._end(token, last)
                if reason is not None:
                    # before the last step goes out: nothing more is made for it, and its reader may already ask
                    self._run.cancel()
                    self._finish(reason, began, first)
                yield step
                if reason is not None:
                    return

    def _loops(self, token: Token) -> bool:
        if self._loop_guard:
            self._ids.append(token.id)
            self._looped = token.n % EVERY == 0 and is_loop(self._ids, self._loop_guard)
        return self._looped

    def _take(self, token: Token, last: bool) -> Step:
        """One token's deltas; with the last one, all that was held back."""
        self.tokens += not token.is_eog
        events = [] if token.is_eog else self._emitter.feed(self._text(token.id))
        if last:
            events += self._emitter.feed(self._detokenizer.flush())
            events += self._emitter.finish(cut=self._cut(token))
        deltas = [delta for event in events if (delta := self._delta(event)) is not None]
        return Step(deltas) if token.is_eog else Step(deltas, self._logprob(token), token.id)

    def _text(self, token: int) -> str:
        """What a token adds to the text: a marker that is a control token must be seen by the emitter."""
        if self._tokenizer.is_control(token) and (text := self._tokenizer.token_text(token)) in self._markers:
            return self._detokenizer.flush() + text
        return self._detokenizer.push(token)

    def _delta(self, event: Event) -> Delta | None:
        """None for what follows the last call that the request allows."""
        if event.channel != "call":
            return Delta(event.channel, event.text)
        self._calls += event.name != ""
        if self._job.max_calls is not None and self._calls > self._job.max_calls:
            return None
        call_id = f"call_{secrets.token_hex(12)}" if event.name else ""
        return Delta("call", event.text, self._calls - 1, call_id, event.name)

    def _end(self, token: Token, last: bool) -> Literal["stop", "length"] | None:
        """Whether, and why, the answer ends with this token."""
        if self._emitter.stopped is not None:
            return "stop"
        if self._job.max_calls is not None and self._emitter.calls >= self._job.max_calls:
            return "stop"
        if not last:
            return None
        return "length" if self._cut(token) else "stop"

    def _cut(self, token: Token) -> bool:
        """Whether the last token is so for a cap; a constraint that is complete ends the run below the limit."""
        return self._looped or not (token.is_eog or token.n < self._job.limit)

    def _finish(self, reason: Literal["stop", "length"], began: float, first: float) -> None:
        flight = self._flight
        self.result = Result(
            finish_reason="tool_calls" if self._calls and reason == "stop" else reason,
            prompt_tokens=len(self._job.prompt_ids),
            completion_tokens=self.tokens,
            prompt_ms=1000 * (first - began),
            predicted_ms=1000 * (time.perf_counter() - first),
            context_capped=self._job.dropped_tokens > 0,
            dropped_tokens=self._job.dropped_tokens,
            looped=self._looped,
            cached_tokens=self._run.reused,
            stop_word=self._emitter.stopped,
            queue_ms=1000 * flight.queue_s if flight is not None else 0.0,
            ttft_ms=1000 * (flight.ttft_s or 0.0) if flight is not None else 0.0,
        )
        if flight is not None:
            flight.end(self.result.finish_reason)

    def _logprob(self, token: Token) -> Logprob | None:
        if token.logprob is None:
            return None
        top = tuple((self._bytes(other), value) for other, value in token.top)
        ids = tuple(other for other, _ in token.top)
        return Logprob(self._bytes(token.id), token.logprob, top, token.id, ids)

    def _bytes(self, token: int) -> bytes:
        # a model may have more rows than its tokenizer has texts
        return self._tokenizer.token_bytes(token, special=True) if token < self._tokenizer.n_vocab else b""


def _alone(
    model: Model, state: Any, job: Job, cancelled: Callable[[], bool],
    on_prefill: Callable[[int, int], None] | None,
) -> Run:  # fmt: skip
    tokens = generate(
        model, state, job.prompt_ids, job.params, max_tokens=job.limit, cancelled=cancelled, on_prefill=on_prefill,
        constraint=job.new_constraint(), ignore_eog=job.ignore_eog,
    )  # fmt: skip
    return SoloRun(Warm(None, 0, 0, ()), tokens)
