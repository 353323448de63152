"""One request's right to generate: model found, lock taken, cancel reasons told apart, everything given back.

Shared by the chat and the completions API.  Must not know the shape of a request or a reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pantheon import log
from pantheon.engine.prefix_cache import Marks, Warm
from pantheon.errors import Cancelled, PantheonError, Unavailable
from pantheon.serve.context import App
from pantheon.serve.generation import Generation, Job, Result
from pantheon.serve.registry import Entry
from pantheon.serve.routes import Responder
from pantheon.serve.stream_head import StreamHead

if TYPE_CHECKING:
    from pantheon.accel.executor import RunnerState
    from pantheon.engine.model import Model

_log = log.logger("serve")


class Turn:
    """Holds an entry and its gen_lock for one request."""

    def __init__(
        self, app: App, entry: Entry, responder: Responder, session: str | None = None, prefix: Marks = ()
    ) -> None:
        assert entry.model is not None and entry.state is not None
        self.entry = entry
        self.model: Model = entry.model
        self.state: RunnerState = entry.state
        self._app, self._responder = app, responder
        self._deadline = app.clock.monotonic() + app.request_timeout_s
        self._timed_out = False
        self._session, self._prefix = session, prefix
        self._warm: Warm | None = None
        self._admitted = False
        #: the prompt was cut; what it leaves is no beginning of the next one [M131]
        self.capped = False

    @property
    def headers(self) -> dict[str, str]:
        """Says which model really answered [X25], and that it did not see the whole conversation [X21]."""
        capped = {"X-Pantheon-Context-Capped": "true"} if self.capped else {}
        return {"X-Pantheon-Model": self.entry.name, **capped}

    def cancelled(self) -> bool:
        """Asked before each prefill chunk and each decode step."""
        self._timed_out = self._app.clock.monotonic() >= self._deadline
        return self._timed_out or self.entry.evicting.is_set() or self._responder.should_stop()

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

        head: of a streamed answer, told how far the prompt is read.
        """
        self.close()
        self._settle()
        self._warm = self.entry.seat(job.prompt_ids, self._session, self._prefix)
        self._admit(job)
        return Generation(
            self.model, self.state, job, cancelled=head.guard(self.cancelled) if head else self.cancelled,
            on_prefill=head.on_prefill if head else None,
            loop_guard=self._app.loop_guard if job.uncapped else 0, warm=self._warm,
        )  # fmt: skip

    def fit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """How long a prompt may be that may be cut; that admits the turn.  Raises Unavailable with the numbers."""
        try:
            most = self._app.memory.fit(self.entry, prompt_tokens, max_tokens, self._warmth())
        except PantheonError as fault:
            self._app.metrics.add("turns_refused_total", fault.status == 503)
            raise
        self._app.metrics.add("turns_capped_total", most < prompt_tokens)
        self._admitted = True
        return most

    def _warmth(self) -> int:
        cache = self.entry.prefix_cache
        return cache.warmth(self._session, self._prefix).tokens if cache is not None else 0

    def _settle(self) -> None:
        """The KV format that memory wants now, unless this conversation is warm in another."""
        self._app.memory.settle(self.entry, self._warmth())
        assert self.entry.state is not None
        self.state = self.entry.state

    def _admit(self, job: Job) -> None:
        """Ask whether memory allows this turn, before its first forward [M201]; its later answers come as well.

        Raises BadRequest or Unavailable with the numbers; what was warm stays.
        """
        if self._admitted:
            return
        assert self._warm is not None
        max_tokens = None if job.uncapped else job.limit
        try:
            self._app.memory.admit(self.entry, len(job.prompt_ids), max_tokens, self._warm.reused)
        except PantheonError as fault:
            self.close()
            self._app.metrics.add("turns_refused_total", fault.status == 503)
            raise
        self._admitted = True

    def close(self, *, keep: bool = True) -> None:
        """No generation of this turn runs any more; `keep` what the last one left for the next turn."""
        warm, self._warm = self._warm, None
        cache = self.entry.prefix_cache
        if warm is not None and cache is not None:
            warm.end(keep=keep and not self.capped)
            self._app.registry.dies.note_cache(self.entry.dies, self.entry.name, cache.extra_bytes())

    def note(self, run: Generation) -> Result:
        """Count and log a generation that is complete."""
        result = run.result
        assert result is not None, "a generation that was not read to its end"
        metrics = self._app.metrics
        self.entry.learn(result.prompt_tokens - result.cached_tokens, result.prompt_ms / 1000)
        metrics.add("prompt_tokens_total", result.prompt_tokens)
        metrics.add("cached_tokens_total", result.cached_tokens)
        metrics.add("completion_tokens_total", result.completion_tokens)
        metrics.add("generation_seconds_total", (result.prompt_ms + result.predicted_ms) / 1000)
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
        )
        return result


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
    """Acquire the entry for `name` and its gen_lock; session and prefix say where the conversation may be warm.

    Raises NotFound, Unavailable or Busy, at once as a rule; afterwards whatever the body raises, a Cancelled replaced
    by what the client should hear.
    """
    outcome = "error"
    try:
        with app.registry.seat(
            name, strict=app.strict_model, session=session, prefix=prefix, left=responder.hung_up
        ) as entry:
            mine, keep = Turn(app, entry, responder, session, prefix), False
            app.metrics.add("requests_in_flight")
            try:
                yield mine
                keep = True
            except Cancelled as fault:
                outcome, keep = "cancelled", True
                app.metrics.add("cancelled_total")
                _log.info("cancelled %s", log.fields(model=entry.name))
                raise mine.reason(fault) from None
            finally:
                # a fault may have left anything behind
                mine.close(keep=keep)
                app.metrics.add("requests_in_flight", -1)
        outcome = "ok"
    except PantheonError as fault:
        outcome = outcome if outcome == "cancelled" else fault.code or fault.type
        raise
    finally:
        app.metrics.add("requests_total", outcome=outcome)
