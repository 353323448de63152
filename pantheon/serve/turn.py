"""One request's right to generate: model found, place had, cancel reasons told apart, everything given back.

Shared by all APIs.  Must not know the shape of a request or a reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from pantheon import log
from pantheon.engine.generate import never
from pantheon.engine.load import on_dies
from pantheon.engine.prefix_cache import Marks
from pantheon.errors import Cancelled, PantheonError, Unavailable
from pantheon.mem.ledger import Promise
from pantheon.serve.chat_job import Job
from pantheon.serve.context import App
from pantheon.serve.flight import Flight
from pantheon.serve.generation import Generation, Result
from pantheon.serve.loading import close_state
from pantheon.serve.memory import new_tokens
from pantheon.serve.routes import Responder
from pantheon.serve.seating import Run, Seat, seat
from pantheon.serve.stream_head import StreamHead

if TYPE_CHECKING:
    from pantheon.accel.executor import RunnerState
    from pantheon.engine.model import Model

#: tokens that may be made in vain for an answer that can end by its text [X06]
LOOKAHEAD = 2
_log = log.logger("serve")


class Turn:
    """One request's use of an entry: a place on it, had or waited for, and the answers that are made there."""

    def __init__(
        self, app: App, seat: Seat, responder: Responder, session: str | None = None, prefix: Marks = ()
    ) -> None:
        entry = seat.entry
        assert entry.model is not None
        self.entry = entry
        self.model: Model = entry.model
        self.flight = Flight(entry, responder.arrived, responder.request_id, session)
        self._app, self._place, self._responder = app, seat.place, responder
        self._deadline = app.clock.monotonic() + app.request_timeout_s
        self._timed_out = False
        self._session, self._prefix = session, prefix
        self._run: Run | None = None
        self._promise: Promise | None = None
        #: the prompt was cut; what it leaves is no beginning of the next one [M131]
        self.capped = False

    @property
    def headers(self) -> dict[str, str]:
        """Say which model really answered [X25], that it did not see the whole conversation [X21], and what is known of
        the wait and of what was warm."""
        flight = self.flight
        found = {"X-Pantheon-Model": self.entry.name, "X-Pantheon-Replica": str(self.entry.index)}
        if self.capped:
            found["X-Pantheon-Context-Capped"] = "true"
        if flight.busy:
            found["X-Pantheon-Queue-Ms"] = f"{1000 * flight.queue_s:.0f}"
        if flight.answers:
            found["X-Pantheon-Cached-Tokens"] = str(flight.first_cached)
        return found

    def cancelled(self) -> bool:
        """Asked before each prefill chunk and each decode step."""
        return self.over() or self._responder.should_stop()

    def over(self) -> bool:
        """Whether it has to end, client or not; asked as well while a client takes nothing of what is written."""
        self._timed_out = self._app.clock.monotonic() >= self._deadline
        return self._timed_out or self.entry.evicting.is_set()

    def reason(self, fault: Cancelled) -> PantheonError:
        """What a client that is still there is told about a cancelled generation."""
        if self.entry.evicting.is_set():
            return Unavailable(f"the model {self.entry.name!r} was unloaded", code="model_unloading", retry_after=5)
        if self._timed_out:
            limit = self._app.request_timeout_s
            return PantheonError(f"the request ran into its limit of {limit:g} s", status=504, code="request_timeout")
        return fault

    def run(self, job: Job, head: StreamHead | None = None) -> Generation:
        """A generation on this turn's model, from what an earlier one left warm; the one before it is over.

        Waits for the place first, and asks whether memory allows the turn.  head: of a streamed answer, told how long
        the queue is and how far the prompt is read.

        Raises Busy (queue_timeout), Unavailable or Cancelled while it waits; BadRequest or Unavailable, with the
        numbers, when memory has no room.
        """
        self.end()
        cancelled = head.guard(self.cancelled) if head else self.cancelled
        self._wait(cancelled, head)
        # the KV format that memory wants now, unless this conversation is warm in another
        self._app.memory.settle(self.entry, self._warmth())
        guard = self._app.loop_guard if job.uncapped else 0
        run = self._place.begin(
            job.prompt_ids, job.params, max_tokens=job.limit, session=self._session, marks=self._prefix,
            constraint=job.new_constraint(), ignore_eog=job.ignore_eog,
            lookahead=LOOKAHEAD if guard or _may_end_itself(job) else None,
            cancelled=cancelled, on_prefill=partial(self._on_prefill, head),
            admit=lambda reused: self._admit(job, reused), keep=not self.capped,
        )  # fmt: skip
        self._run = run
        self.flight.begin(len(job.prompt_ids), run.reused, None if job.uncapped else job.limit)
        if head is not None:
            head.know(self.headers)
        return Generation(self.model, None, job, loop_guard=guard, run=run, flight=self.flight)

    def _wait(self, cancelled: Callable[[], bool], head: StreamHead | None) -> None:
        began_s = time.perf_counter()
        self._place.wait(cancelled, head.on_wait if head else None)
        self.flight.entered(time.perf_counter() - began_s)

    def _on_prefill(self, head: StreamHead | None, done: int, total: int) -> None:
        self.flight.on_prefill(done, total)
        if head is not None:
            head.on_prefill(done, total)

    def fit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """How long a prompt may be that may be cut.  Raises Unavailable with the numbers."""
        try:
            most = self._app.memory.fit(self.entry, prompt_tokens, max_tokens, self._warmth())
        except PantheonError as fault:
            self._app.metrics.add("turns_refused_total", fault.status == 503)
            raise
        self._app.metrics.add("turns_capped_total", most < prompt_tokens)
        return most

    @contextmanager
    def reading(self, tokens: int) -> Iterator[tuple[RunnerState, Callable[[], AbstractContextManager[object]]]]:
        """For texts that are read without an answer: a state of their own for so many positions, and the turn that each
        forward is to hold.  Waits and asks memory as `run` does, and raises what it raises."""
        self.end()
        self._wait(self.cancelled, None)
        entry = self.entry
        forward: Callable[[], AbstractContextManager[object]] = (
            nullcontext if entry.sched is None else entry.sched.turn
        )
        try:
            with forward():
                promise = self._app.memory.promise(entry, min(tokens, self.model.n_ctx - 1), 1, 0, lambda: 0)
        except PantheonError as fault:
            self._app.metrics.add("turns_refused_total", fault.status == 503)
            raise
        try:
            # with the turn: the state is made on the stream of a die, which a step may be captured from
            with forward(), on_dies(self._app.registry.dies.executor(entry.dies), entry.dies):
                state = self.model.runner.new_state(1, min(tokens, self.model.n_ctx))
            try:
                yield state, forward
            finally:
                with forward():
                    close_state(state)
        finally:
            self._app.memory.settled(promise)

    def _warmth(self) -> int:
        cache = self.entry.prefix_cache
        return cache.warmth(self._session, self._prefix).tokens if cache is not None else 0

    def _admit(self, job: Job, reused: int) -> None:
        """Ask whether memory allows this turn, before its first forward [M201].  Its later answers come as well, but
        for one that takes more than all before it, to a longer prompt.

        Raises BadRequest or Unavailable with the numbers; what was warm stays.
        """
        max_tokens = None if job.uncapped else job.limit
        before = self._promise
        if before is not None:
            if new_tokens(len(job.prompt_ids), max_tokens, reused) <= before.tokens:
                return
            self._promise = None
            self._app.memory.settled(before)
        try:
            self._promise = self._app.memory.promise(
                self.entry, len(job.prompt_ids), max_tokens, reused, self._written, capped=self.capped
            )
        except PantheonError as fault:
            self._app.metrics.add("turns_refused_total", fault.status == 503)
            raise

    def _written(self) -> int:
        """Tokens that this turn has put into memory."""
        run = self._run
        return len(run.held) - run.reused if run is not None else 0

    def end(self) -> None:
        """No generation of this turn runs any more; what the last one left is there for the next turn."""
        run, self._run = self._run, None
        self._place.end()
        cache = self.entry.prefix_cache
        if run is not None and cache is not None:
            self._app.registry.dies.note_cache(self.entry.dies, self.entry.name, cache.extra_bytes())

    def close(self, *, keep: bool = True) -> None:
        """Give the place back; keep: what the last answer left can be trusted."""
        if not keep:
            self._place.end(keep=False)
        self.end()
        self._place.leave()
        # it knows this turn: a circle would keep the model for a while
        promise, self._promise = self._promise, None
        self._app.memory.settled(promise)

    def note(self, run: Generation) -> Result:
        """Log a generation that is complete, and learn from it; the flight has counted it."""
        result = run.result
        assert result is not None, "a generation that was not read to its end"
        self.entry.learn(result.prompt_tokens - result.cached_tokens, result.prompt_ms / 1000)
        _log.info(
            "answered %s",
            log.fields(
                model=self.entry.name,
                prompt=result.prompt_tokens,
                cached=result.cached_tokens,
                completion=result.completion_tokens,
                finish=result.finish_reason,
                prompt_ms=result.prompt_ms,
                tok_s=result.timings["predicted_per_second"],
                looped=result.looped or None,
            ),
            extra=log.TEXT_ONLY,
        )
        return result


def _may_end_itself(job: Job) -> bool:
    """Whether the owner may end the answer before the sampler does: by a stop string, or after its last call."""
    return bool(job.stop) or job.max_calls is not None


def elsewhere(app: App, name: str | None, fault: PantheonError) -> bool:
    """Whether a request that lost its replica to a forced unload, nothing of its answer sent, can be made again."""
    entries = app.registry.all_entries()
    ready = {entry.name for entry in entries if entry.ready}
    # a name that is still being unloaded is refused, whichever other model is here: asking again would not end
    any_name = len(ready) == 1 and not app.strict_model and all(entry.name != name for entry in entries)
    return fault.code == "model_unloading" and (name in ready or any_name)


@contextmanager
def turn(
    app: App, name: str | None, responder: Responder, session: str | None = None, prefix: Marks = ()
) -> Iterator[Turn]:
    """Acquire the entry for `name` and a place on it; session and prefix say where the conversation may be warm.

    Raises NotFound, Unavailable or Busy, at once as a rule; with a scheduler the place may stand in a queue until
    `Turn.run`.  Afterwards whatever the body raises, a Cancelled replaced by what the client should hear.
    """
    outcome = "error"
    try:
        with seat(
            app.registry, name, strict=app.strict_model, session=session, prefix=prefix, left=responder.hung_up,
            level=app.memory.level,
        ) as found:  # fmt: skip
            mine, keep = Turn(app, found, responder, session, prefix), False
            app.metrics.add("requests_in_flight")
            responder.stop_waiting_when(mine.over)
            try:
                with app.flights.track(mine.flight):
                    yield mine
                keep = True
            except Cancelled as fault:
                outcome, keep = "cancelled", True
                app.metrics.add("cancelled_total")
                _log.info("cancelled %s", log.fields(model=mine.entry.name), extra=log.TEXT_ONLY)
                raise mine.reason(fault) from None
            finally:
                responder.stop_waiting_when(never)
                # a fault may have left anything behind
                mine.close(keep=keep)
                responder.facts |= mine.flight.facts()
                app.metrics.add("requests_in_flight", -1)
        outcome = "ok"
    except PantheonError as fault:
        outcome = outcome if outcome == "cancelled" else fault.code or fault.type
        raise
    finally:
        app.metrics.add("requests_total", outcome=outcome)
