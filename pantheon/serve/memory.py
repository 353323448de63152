"""What the server does about memory: one gate and one ladder for each entry, moved at every look of the watcher.

Turns are admitted here before any of their tokens run [M201]; rungs are put into effect here: idle conversations give
way (4b), the KV format of new conversations shrinks (4a), windows are clamped (3).  Everything comes back when the
pressure is gone [X17].  Must not know HTTP or how memory is read.  Spec: areas N, O and P.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pantheon import log
from pantheon.engine.admit import Gate, smaller_kv
from pantheon.errors import Unavailable
from pantheon.mem.admission import Decision, Verdict
from pantheon.mem.costs import REPLY_TOKENS
from pantheon.mem.ladder import Rungs
from pantheon.mem.ledger import Ledger, Promise
from pantheon.mem.mem_state import Level, MemState
from pantheon.mem.memwatch import MemWatch
from pantheon.plan.state_spec import KVType
from pantheon.seams import SYSTEM_CLOCK, Clock
from pantheon.serve.entry import Entry
from pantheon.serve.metrics import Metrics
from pantheon.serve.registry import Registry, retry_s

if TYPE_CHECKING:
    from pantheon.accel.executor import RunnerState
    from pantheon.engine.model import Model

#: what idle conversations may keep of their usual share once new ones take a smaller format (4a) [X15]
WATCH_SHARE = 0.5
_log = log.logger("mem")


class MemoryKeeper:
    """Shared by the handlers and the watcher's thread.  watch None: memory is not watched, and nothing is refused."""

    def __init__(self, registry: Registry, watch: MemWatch | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._registry, self.watch, self._clock = registry, watch, clock
        #: guards _gates; taken below nothing, and nothing is called while it is held
        self._lock = threading.Lock()
        self._gates: weakref.WeakKeyDictionary[Entry, Gate] = weakref.WeakKeyDictionary()
        self._ledger = Ledger()
        #: held from a decision on a turn to its promise, so that two turns never count the same bytes; above all but
        #: the turn of a scheduler, whose holder admits
        self._admitting = threading.Lock()
        #: held while one state takes another's place; tried only
        self._moving = threading.Lock()
        if watch is not None:
            watch.subscribe(self._look)

    def gate(self, entry: Entry) -> Gate:
        """The gate of an entry.  Raises Unavailable when it was unloaded meanwhile."""
        with self._lock:
            found = self._gates.get(entry)
        if found is not None:
            return found
        model, state = entry.model, entry.state
        if model is None or state is None:
            raise Unavailable(f"the model {entry.name!r} was unloaded", code="model_unloading", retry_after=5)
        on_die = self._registry.dies.executor(entry.dies) == "cuda"
        made = Gate.of(
            model, self.watch, dies=entry.dies, name=entry.name, max_slots=_users(entry, state), on_die=on_die,
            can_evict=entry.prefix_cache is not None and not on_die, clock=self._clock,
        )  # fmt: skip
        with self._lock:
            return self._gates.setdefault(entry, made)

    # ---- the KV format ----------------------------------------------------------------------------------------

    def settle(self, entry: Entry, warm_tokens: int) -> None:
        """Give an entry the KV format that its rungs want (4a), before an answer begins.

        Its one state is replaced, and with it every idle conversation; so a turn that goes on with one keeps the old
        format, and the change waits for the next that begins anew [X15].  A state that a forward reads is never
        converted [M212], nor is one that other users sit in.  For the holder of gen_lock or of a place.
        """
        if warm_tokens or not self._moving.acquire(blocking=False):
            return
        try:
            self._settle(entry)
        finally:
            self._moving.release()

    def _settle(self, entry: Entry) -> None:
        model, state, cache, sched = entry.model, entry.state, entry.prefix_cache, entry.sched
        if model is None or state is None:
            return
        own, small = model.runner.kv_type, smaller_kv(model)
        want = small if small is not None and self.gate(entry).rungs.quantise_kv else own
        have = kv_type_of(model, state)
        if want is have or (sched is not None and not sched.resting):
            return
        try:
            fresh = model.new_state(state.n_slots, want)
        except (MemoryError, OSError):
            return
        moved = None if cache is None else cache.moved_to(fresh, model.plan.state.bytes_per_token(want))
        if sched is not None and not sched.rehouse(fresh, moved):
            return
        with self._registry.lock:
            entry.state, entry.prefix_cache = fresh, moved
        if cache is not None:
            cache.close()
        _log.info("new conversations %s", log.fields(model=entry.name, kv_type=want.value, was=have.value))

    # ---- turns ------------------------------------------------------------------------------------------------

    def level(self, entry: Entry) -> Level:
        """The worst of the host and of the entry's dies, now [X19]."""
        return self.gate(entry).level

    def admit(self, entry: Entry, prompt_tokens: int, max_tokens: int | None, warm_tokens: int = 0) -> Decision:
        """Allow a turn, or raise BadRequest or Unavailable with the numbers."""
        return self._admit(entry, prompt_tokens, max_tokens, warm_tokens, cap_allowed=False)

    def promise(
        self,
        entry: Entry,
        prompt_tokens: int,
        max_tokens: int | None,
        warm_tokens: int,
        written: Callable[[], int],
        *,
        capped: bool = False,
    ) -> Promise:
        """`admit`, and keep the bytes for it until `settled`.  For the holder of gen_lock or of a scheduler's turn.

        written: tokens that the turn has put into memory by now.  capped: the prompt was cut as `fit` said.
        """
        with self._admitting:
            found = self._admit(entry, prompt_tokens, max_tokens, warm_tokens, cap_allowed=capped)
            if found.verdict is Verdict.CAP:
                raise Unavailable(
                    "memory has become scarce since the prompt was cut; retry shortly", code="memory_critical",
                    retry_after=2, have_bytes=found.have_bytes, fit_tokens=found.fit_tokens,
                )  # fmt: skip
            return self._ledger.add(found.need_bytes, new_tokens(prompt_tokens, max_tokens, warm_tokens), written)

    def settled(self, promise: Promise | None) -> None:
        """The turn is over; idempotent."""
        if promise is not None:
            self._ledger.settle(promise)

    def fit(self, entry: Entry, prompt_tokens: int, max_tokens: int | None, warm_tokens: int = 0) -> int:
        """The tokens that a prompt may have which may be cut: as many as it has, or fewer [X21].

        Raises Unavailable when not even a cut one fits.
        """
        found = self._admit(entry, prompt_tokens, max_tokens, warm_tokens, cap_allowed=True)
        return min(prompt_tokens, found.fit_tokens)

    def _admit(
        self, entry: Entry, prompt_tokens: int, max_tokens: int | None, warm_tokens: int, *, cap_allowed: bool
    ) -> Decision:
        gate, state = self.gate(entry), entry.state
        assert state is not None
        evict = (lambda: self._evict(entry)) if gate.can_evict else None
        try:
            return gate.admit(
                state, prompt_tokens, max_tokens, cap_allowed=cap_allowed, warm_tokens=warm_tokens, evict=evict,
                promised=lambda: self._ledger.outstanding,
            )  # fmt: skip
        except Unavailable as fault:
            # what others were promised comes back when their answers end
            if self._ledger.outstanding and fault.retry_after is not None:
                usual_s = entry.service_s if entry.sched is None else entry.sched.load().service_s
                fault.retry_after = min(fault.retry_after, retry_s(usual_s))
            raise

    # ---- the ladder -------------------------------------------------------------------------------------------

    def _look(self, state: MemState) -> None:
        """After each look of the watcher, in its thread: move every ladder and do what its rungs say."""
        self._ledger.look()
        for entry in self._registry.all_entries():
            if entry.ready:
                # an entry may be freed while it is looked at
                with contextlib.suppress(Unavailable):
                    gate = self.gate(entry)
                    was = gate.rungs
                    self._apply(entry, was, gate.step(state))

    def _apply(self, entry: Entry, was: Rungs, now: Rungs) -> None:
        sched = entry.sched
        if sched is not None:
            # its waiters learn of a change at once, in both directions [M100, M208, K02]
            sched.notify_pressure(self.gate(entry).level)
            sched.set_ceiling(now.max_slots)
        share = idle_share(now)
        # again at every look: a conversation may have become idle since
        if share < 1 or share != idle_share(was):
            self._give_way(entry, share)

    def _give_way(self, entry: Entry, share: float) -> int:
        """Let idle conversations hold so much of what they may; how many were given up.  Those on CUDA dies stay: their
        memory is taken for as long as the model is loaded."""
        cache = entry.prefix_cache
        if cache is None or not self.gate(entry).can_evict:
            return 0
        gone = cache.trim(share)
        if gone:
            self._registry.dies.note_cache(entry.dies, entry.name, cache.extra_bytes())
            _log.info("idle conversations given up %s", log.fields(model=entry.name, slots=gone))
        return gone

    def _evict(self, entry: Entry) -> int:
        """Give every idle conversation up, once: what comes to rest later may stay as the rungs allow."""
        gone = self._give_way(entry, 0.0)
        self._give_way(entry, idle_share(self.gate(entry).rungs))
        return gone

    # ---- looking ----------------------------------------------------------------------------------------------

    @property
    def admission(self) -> str:
        """`on`, `off` when nobody watches, `stale` when the watcher has not looked for too long [X20]."""
        if self.watch is None or not self.watch.started:
            return "off"
        return "on" if self.watch.state.alive else "stale"

    def view(self) -> dict[str, Any]:
        """JSON-ready: what is known, who watches, and what each model gives up [M172, X14, X20]."""
        body: dict[str, Any] = {"admission": self.admission}
        if self.watch is not None:
            limits = self.watch.thresholds
            body |= self.watch.state.as_dict()
            body["watcher"] = {
                "alive": self.watch.alive,
                "age_s": round(self.watch.age_s(), 3) if self.watch.started else None,
                "poll_s": self.watch.interval_s,
                "restarts": self.watch.restarts,
                "errors": self.watch.errors,
            }
            body["thresholds"] = dict(vars(limits))
        rows = [self._row(entry) for entry in self._registry.all_entries() if entry.ready]
        return {**body, "ladder": [row for row in rows if row]}

    def _row(self, entry: Entry) -> dict[str, Any]:
        """Empty for an entry that is freed just now."""
        model, state, cache = entry.model, entry.state, entry.prefix_cache
        if model is None or state is None:
            return {}
        try:
            gate = self.gate(entry)
        except Unavailable:
            return {}
        rungs = gate.rungs
        return {
            "name": entry.name,
            "slot": entry.index,
            "dies": list(entry.dies),
            "level": rungs.level.name,
            "enabled": gate.enabled,
            "rungs": list(rungs.on),
            "notes": list(rungs.notes),
            "offered": list(gate.offered),
            "max_slots": rungs.max_slots,
            "prefill_window": rungs.prefill_window,
            "kv_type": kv_type_of(model, state).value,
            "kv_configured": model.runner.kv_type.value,
            "kv_reserved_bytes": state.nbytes(),
            "kv_used_bytes": cache.used_bytes() if cache is not None else None,
            "transitions": gate.transitions,
            "turns": dict(gate.counts),
        }

    def count(self, metrics: Metrics) -> None:
        """Set the gauges of memory [M172]."""
        watch = self.watch
        if watch is not None and watch.started:
            state = watch.state
            metrics.set("memory_level", int(state.level))
            metrics.set("memory_available_bytes", state.host.available_bytes)
            metrics.set("memory_reserve_bytes", state.host.reserve_bytes)
            metrics.set("memory_watcher_restarts_total", watch.restarts)
        metrics.set("memory_watcher_alive", int(self.admission == "on"))
        with self._lock:
            gates = list(self._gates.values())
        metrics.set("ladder_degraded_models", sum(gate.rungs.degraded for gate in gates))
        metrics.set("ladder_level", max((int(gate.rungs.level) for gate in gates), default=int(Level.OK)))


def new_tokens(prompt_tokens: int, max_tokens: int | None, warm_tokens: int) -> int:
    """What a turn is expected to put into memory."""
    reply = REPLY_TOKENS if max_tokens is None else min(REPLY_TOKENS, max_tokens)
    return max(0, prompt_tokens + reply - warm_tokens)


def _users(entry: Entry, state: RunnerState) -> int:
    """What rung 2 counts: the users of a scheduler, without one the conversations that the entry may hold."""
    sched = entry.sched
    return state.n_slots if sched is None else sched.config.users


def kv_type_of(model: Model, state: RunnerState) -> KVType:
    """The format that a state keeps its conversations in."""
    found: KVType = getattr(state, "kv_type", model.runner.kv_type)
    return found


def idle_share(rungs: Rungs) -> float:
    """What idle conversations may keep of what they usually may [X14, X15]."""
    if rungs.evict_idle:
        return 0.0
    return WATCH_SHARE if rungs.level >= Level.WATCH else 1.0
