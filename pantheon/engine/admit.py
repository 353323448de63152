"""From models to bytes and back: what a load or a turn of this very model costs, and whether memory allows it.

The glue between plans and `pantheon.mem`, which knows neither plans nor models.  Every refusal carries the numbers
that decided it: have, need and reserve [M202].  Must not know HTTP or the registry.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pantheon import log, settings
from pantheon.accel.die import DieInfo
from pantheon.engine.footprint import Footprint, footprint
from pantheon.engine.generate import PREFILL_CHUNK
from pantheon.errors import BadRequest, PantheonError, Unavailable
from pantheon.mem.admission import Decision, LoadDecision, Verdict, admit_load, admit_turn
from pantheon.mem.costs import LoadCosts, TurnCosts
from pantheon.mem.ladder import Ladder, LadderConfig, Rungs, plan_for
from pantheon.mem.mem_state import DieState, HostState, Level, MemState
from pantheon.plan.builder import Plan
from pantheon.plan.state_spec import KVType
from pantheon.seams import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from pantheon.accel.executor import Progress, RunnerState
    from pantheon.engine.model import Model
    from pantheon.mem.memwatch import MemWatch

#: Python objects of metadata and tokenizer, per vocabulary entry: measured with SmolLM2 (49152 entries, 21 MB)
VOCAB_ENTRY_BYTES = 440
#: pages of scratch are taken as columns use them, and a chunk of a prompt is half of the most columns
SCRATCH_USED = 0.5
#: what a load takes for a while beside the packed weights: kernel compilers of a cold start, blocks being unpacked
LOAD_SPIKE_BYTES = 256 << 20
_log = log.logger("mem")


# ---- loads ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LoadPlan:
    """What loading a file would take, from its header alone, and whether it may.  `dies` are those it was planned for,
    empty for the CPU."""

    path: str
    need: Footprint
    costs: LoadCosts
    decision: LoadDecision
    dies: tuple[int, ...] = ()

    def check(self) -> LoadPlan:
        """Itself; raises PantheonError 507 with the numbers when it does not fit [M198, M202, X31]."""
        if not self.decision.fits:
            raise load_refusal(self)
        return self

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, for the dry run and GET /admin/plan; `bytes` by part, with one full conversation as kv."""
        plan, kv = self.need.plan, self.need.kv_type
        return {
            "path": self.path,
            "fits": self.decision.fits,
            "n_ctx": self.need.n_ctx,
            "n_ctx_train": plan.n_ctx_train if plan else None,
            "kv_type": kv.value if kv else None,
            "executor": self.need.executor,
            "users": self.need.users,
            "bytes": {**self.need.parts, "vocab": vocab_bytes(plan)},
            "spike_bytes": self.costs.spike_bytes,
            "need_bytes": self.decision.need_bytes,
            "have_bytes": self.decision.have_bytes,
            "reserve_bytes": self.decision.reserve_bytes,
            "largest_ctx": self.decision.largest_ctx,
            "bound_by": self.decision.where,
            "dies": list(self.dies),
        }


def plan_load(
    path: str | Path,
    *,
    ctx: int | None = None,
    kv_type: str | None = None,
    executor: str = "cpu",
    threads: int | None = None,
    state: MemState | None = None,
    dies: Sequence[DieInfo] = (),
    fit_ctx: bool = False,
    users: int = 1,
) -> LoadPlan:
    """Read a file's header and decide whether it could be loaded now; no weight is touched.

    Arguments as for load_model.  state: what the watcher sees; None, or one that is not alive, leaves the host out
    [M199].  dies: where it would go.  fit_ctx: take the largest context that fits instead of refusing [X31].  Raises
    what load_model raises for a file that can not be loaded.
    """
    need = footprint(str(path), ctx=ctx, executor=executor, threads=threads, kv_type=kv_type, users=users)
    found = decide_load(str(path), need, state, dies)
    if not fit_ctx or found.decision.fits or found.decision.largest_ctx < 2:
        return found
    return decide_load(str(path), need.at(found.decision.largest_ctx), state, dies)


def decide_load(path: str, need: Footprint, state: MemState | None, dies: Sequence[DieInfo] = ()) -> LoadPlan:
    """Whether something of that size may be loaded now, and else which context would do [X31]."""
    decision = _decide(need, state, dies)
    if not decision.fits:
        # scratch depends on the context too, so that only a new prediction tells
        low, high = 0, need.n_ctx
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _decide(need.at(middle), state, dies).fits else (low, middle)
        decision = replace(decision, largest_ctx=low)
    return LoadPlan(path, need, load_costs(need), decision, tuple(die.index for die in dies))


def _decide(need: Footprint, state: MemState | None, dies: Sequence[DieInfo]) -> LoadDecision:
    """One context, yes or no: on the host, and on the dies if there are any [M196-M198]."""
    if need.plan is None:
        return LoadDecision(True, 0, 0, 0, need.n_ctx)
    host = state.host if state is not None else HostState(0, 0)
    watched = state is not None and state.alive
    decision = admit_load(load_costs(need), host, _shares(need, dies), want_ctx=need.n_ctx, watched=watched)
    budgets = [die.budget_bytes for die in dies]
    if dies and need.shares(budgets) is None:
        named = ", ".join(str(die.index) for die in dies)
        where = f"die {named}" if len(dies) == 1 else f"dies {named}"
        reserve = max(0, sum(die.total_bytes for die in dies) - sum(budgets))
        return LoadDecision(False, need.die_bytes, sum(budgets), reserve, 0, where, "too big")
    return decision


def load_costs(need: Footprint) -> LoadCosts:
    """Predicted parts as costs on the host; what grows with the context is told apart by dividing it [M196, X16]."""
    parts, n_ctx = need.parts, max(1, need.n_ctx)
    if need.on_die:
        return LoadCosts(vocab_bytes(need.plan), spike_bytes=load_spike(need))
    return LoadCosts(
        weights_bytes=parts.get("weights", 0) + vocab_bytes(need.plan),
        kv_bytes_per_token=math.ceil(parts.get("kv", 0) / n_ctx),
        scratch_bytes=math.ceil(SCRATCH_USED * parts.get("scratch", 0)),
        table_bytes_per_token=math.ceil(parts.get("tables", 0) / n_ctx),
        spike_bytes=load_spike(need),
    )


def vocab_bytes(plan: Plan | None) -> int:
    """What metadata and tokenizer take as Python objects."""
    return VOCAB_ENTRY_BYTES * plan.n_vocab if plan is not None else 0


def load_spike(need: Footprint) -> int:
    """Host bytes that a load takes for a while: what was set, else computed and at most the default.  2.4 GiB was one
    engine's burst on one machine [M198]; ours unpacks a tensor at a time."""
    limit = int(settings.get("PN_LOAD_SPIKE_BYTES"))
    if settings.given("PN_LOAD_SPIKE_BYTES") or need.plan is None:
        return limit if need.plan is not None else 0
    weights = need.parts.get("weights", 0)
    values = sum(m.rows * m.cols for m in need.plan.matrices())
    largest = max((m.rows * m.cols for m in need.plan.matrices()), default=0)
    return min(limit, LOAD_SPIKE_BYTES + (weights * largest // values if values else 0))


def _shares(need: Footprint, dies: Sequence[DieInfo]) -> list[tuple[LoadCosts, DieState]]:
    """Each die's part of a plan that can be split over them [M197]."""
    found = need.shares([die.budget_bytes for die in dies]) or () if dies else ()
    shares = []
    for part, die in zip(found, dies, strict=False):
        grows = need.users * part.token_bytes * need.n_ctx
        costs = LoadCosts(max(0, part.nbytes - grows), part.token_bytes, n_slots=need.users)
        shares.append((costs, DieState(die.index, die.total_bytes, die.total_bytes, Level.OK, die.budget_bytes)))
    return shares


def load_refusal(plan: LoadPlan) -> PantheonError:
    """507 with the numbers, and the longest context that would do."""
    found = plan.decision
    short = found.need_bytes - found.have_bytes
    hint = (
        f"a context of {found.largest_ctx} tokens would fit"
        if found.largest_ctx >= 2
        else f"free {size_text(short)} first, or use a smaller model"
    )
    room = size_text(found.have_bytes)
    if found.reserve_bytes:
        room += f" above the reserve of {size_text(found.reserve_bytes)}"
    return PantheonError(
        f"{plan.path}: needs {size_text(found.need_bytes)} with a context of {plan.need.n_ctx} tokens, but "
        f"there is {room} on {found.where}: {hint}",
        status=507, type="invalid_request_error", code="out_of_memory", param="ctx",
        need_bytes=found.need_bytes, have_bytes=found.have_bytes, reserve_bytes=found.reserve_bytes,
        spike_bytes=plan.costs.spike_bytes, largest_ctx=found.largest_ctx,
    )  # fmt: skip


def size_text(nbytes: int) -> str:
    """Bytes for people."""
    return f"{nbytes / (1 << 30):.2f} GiB" if abs(nbytes) >= 1 << 28 else f"{nbytes / (1 << 20):.1f} MiB"


# ---- the KV format of rung 4a -----------------------------------------------------------------------------------


def smaller_kv(model: Model) -> KVType | None:
    """The KV format that new conversations take under pressure; None when the model's own is the smallest there is."""
    own = model.runner.kv_type
    spec = model.plan.state
    fits = [kind for kind in model.kv_types if spec.bytes_per_token(kind) < spec.bytes_per_token(own)]
    # the least that still reads as well as 16 bits do for chats; 4-bit caches do not
    return KVType.Q8_0 if KVType.Q8_0 in fits else None


def prepare_smaller_kv(model: Model, progress: Progress | None = None) -> None:
    """Compile it while memory is there: under pressure nobody wants a compiler to start.  Raises nothing."""
    kind = smaller_kv(model)
    if kind is None or settings.get("PN_LADDER_DISABLE"):
        return
    try:
        model.runner.variant(kind).warm_up(progress)  # type: ignore[attr-defined]
    except Exception:
        _log.warning("the smaller KV cache is not prepared %s", log.fields(model=model.name), exc_info=True)


# ---- turns ------------------------------------------------------------------------------------------------------


@dataclass
class Gate:
    """What memory allows one entry: its ladder, and the admission of its turns.  Safe to use from several threads.

    It keeps numbers of the model, not the model: it must not outlive an unload.  watch None: nobody looks at memory,
    nothing is refused for it [M199].  on_die: conversations lie in memory of accelerators that the load took, so that
    turns cost the host nothing [M190, M195].
    """

    n_ctx: int
    watch: MemWatch | None = None
    dies: tuple[int, ...] = ()
    name: str = ""
    scratch_bytes: int = 0
    max_columns: int = PREFILL_CHUNK
    max_slots: int = 1
    can_quantise_kv: bool = False
    can_evict: bool = False
    on_die: bool = False
    clock: Clock = SYSTEM_CLOCK
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        #: guards _ladder, _columns and counts; nothing is called while it is held but the log
        self._lock = threading.Lock()
        config = LadderConfig(self.max_slots, self.n_ctx, self.can_quantise_kv, self.can_evict)
        self._ladder = Ladder(config, enabled=not settings.get("PN_LADDER_DISABLE"), log=self._say)
        self._columns = 0

    @classmethod
    def of(cls, model: Model, watch: MemWatch | None = None, **options: Any) -> Gate:
        """The gate of a loaded model."""
        runner = model.runner
        scratch = runner.memory().get("scratch", 0)
        return cls(
            model.n_ctx, watch, scratch_bytes=scratch, max_columns=runner.max_columns,
            can_quantise_kv=smaller_kv(model) is not None, **options,
        )  # fmt: skip

    def _say(self, line: str) -> None:
        (_log.warning if self.level > Level.OK else _log.info)("%s %s", line, log.fields(model=self.name))

    # ---- the ladder -------------------------------------------------------------------------------------------

    def step(self, state: MemState | None = None) -> Rungs:
        """Look at the level of this model and move the ladder; the rungs that are on."""
        if self.watch is None:
            return self._ladder.rungs
        level = (state or self.watch.state).level_for(self.dies)
        with self._lock:
            return self._ladder.step(level, self.clock.monotonic())

    @property
    def level(self) -> Level:
        """The worst of the host and of this model's dies, now [X19]."""
        return Level.OK if self.watch is None else self.watch.level_for(self.dies)

    @property
    def rungs(self) -> Rungs:
        """The rungs that are on, as of the last step."""
        return self._ladder.rungs

    @property
    def enabled(self) -> bool:
        """Whether there is a ladder at all [M215]."""
        return self._ladder.enabled

    @property
    def offered(self) -> tuple[str, ...]:
        """The rungs that can do something for this model [X14]."""
        return plan_for(Level.CRITICAL, self._ladder.config).on

    @property
    def transitions(self) -> int:
        """How often the rungs have changed."""
        return self._ladder.transitions

    # ---- turns ------------------------------------------------------------------------------------------------

    def costs(self, state: RunnerState, warm_tokens: int = 0) -> TurnCosts:
        """What a turn on this state costs [X16]: its own KV rows, and the scratch that no turn has touched yet."""
        return TurnCosts(
            kv_bytes_per_token=math.ceil(state.nbytes() / max(1, state.n_slots * state.n_ctx)),
            column_bytes=math.ceil(self.scratch_bytes / max(1, self.max_columns)),
            max_columns=min(PREFILL_CHUNK, self.max_columns),
            resident_tokens=warm_tokens,
            resident_columns=self._columns,
            on_die=self.on_die,
        )

    def admit(
        self,
        state: RunnerState,
        prompt_tokens: int,
        max_tokens: int | None,
        *,
        cap_allowed: bool = False,
        warm_tokens: int = 0,
        evict: Callable[[], int] | None = None,
        promised: Callable[[], int] = lambda: 0,
    ) -> Decision:
        """Decide on a turn, before any of it runs: ADMIT, or CAP to `fit_tokens` where the caller allows that [M200].

        `evict` gives idle conversations up and returns how many went: they go before a turn is refused.  `promised`:
        the bytes that other turns will still take.

        Raises BadRequest `context_length_exceeded` or Unavailable `memory_critical`, with the numbers.
        """
        self.step()
        decision = self._decide(state, prompt_tokens, max_tokens, cap_allowed, warm_tokens, promised())
        if decision.status == 503 and self.watch is not None and evict is not None and evict():
            self.watch.poll_once()
            decision = self._decide(state, prompt_tokens, max_tokens, cap_allowed, warm_tokens, promised())
        with self._lock:
            self.counts[decision.verdict.value] = self.counts.get(decision.verdict.value, 0) + 1
            if decision.admitted:
                self._columns = max(self._columns, min(PREFILL_CHUNK, prompt_tokens))
        if decision.verdict is Verdict.REJECT:
            raise turn_refusal(decision, prompt_tokens, self.n_ctx, self._retry_after())
        return decision

    def _decide(
        self, state: RunnerState, prompt_tokens: int, max_tokens: int | None, cap_allowed: bool, warm_tokens: int,
        promised_bytes: int,
    ) -> Decision:  # fmt: skip
        seen = self.watch.state if self.watch is not None else MemState(HostState(0, 0))
        rungs = self._ladder.rungs
        return admit_turn(
            self.costs(state, warm_tokens),
            seen,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            n_ctx=state.n_ctx,
            cap_allowed=cap_allowed,
            window=rungs.prefill_window if "3" in rungs.on else 0,
            psi_full_reject=self.watch.thresholds.psi_full_reject if self.watch is not None else 100.0,
            promised_bytes=promised_bytes,
        )

    def _retry_after(self) -> int:
        """Seconds until it may be worth another try: a stall's average falls by e in ten seconds; scarce bytes come
        back when an answer or a load ends, which is guessed from how long they have been scarce [X08]."""
        if self.watch is None:
            return 1
        host, limit = self.watch.state.host, self.watch.thresholds.psi_full_reject
        if host.psi_full_avg10 >= limit:
            return int(min(60, max(1, math.ceil(10 * math.log(host.psi_full_avg10 / limit) + 1))))
        return int(min(60, max(2, round(self.watch.level_age_s() / 2))))


def turn_refusal(decision: Decision, prompt_tokens: int, n_ctx: int, retry_after: int) -> PantheonError:
    """The HTTP answer to a REJECT: 400 when asking again would not help, else 503 with Retry-After [X10, X21]."""
    if decision.status == 400:
        return BadRequest(
            f"This model's maximum context length is {n_ctx} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages."
            if decision.reason == "context"
            else f"{prompt_tokens} tokens need {size_text(decision.need_bytes)}: {decision.reason}, which has room for "
            f"{decision.fit_tokens} tokens. Please reduce the length of the messages.",
            code="context_length_exceeded", param="messages",
            n_prompt_tokens=prompt_tokens, n_ctx=n_ctx, fit_tokens=decision.fit_tokens,
        )  # fmt: skip
    return Unavailable(
        f"not enough memory for this request: {decision.reason} (it needs {size_text(decision.need_bytes)}, "
        f"{size_text(decision.have_bytes)} are free above the reserve of {size_text(decision.reserve_bytes)}); retry "
        f"in {retry_after} s",
        code="memory_critical", retry_after=retry_after, reason=decision.reason,
        have_bytes=decision.have_bytes, need_bytes=decision.need_bytes, reserve_bytes=decision.reserve_bytes,
        fit_tokens=decision.fit_tokens,
    )  # fmt: skip
