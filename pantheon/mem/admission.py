"""May this turn run, may this model load?  Pure decisions over bytes, in the order of the spec [M189-M198].

A refusal carries the numbers that decided: what there is (`have`: free bytes above the reserve), what it takes
(`need`), and the reserve that is kept.  Must not know HTTP, models or the watcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pantheon.mem.costs import REPLY_TOKENS, LoadCosts, TurnCosts
from pantheon.mem.mem_state import DieState, HostState, Level, MemState

#: prompts cut to less than this are not worth an answer
MIN_WINDOW = 16
TOO_LONG = "context_length_exceeded"


class Verdict(Enum):
    """What becomes of a turn."""

    ADMIT = "admit"
    CAP = "cap"
    REJECT = "reject"


@dataclass(frozen=True)
class Decision:
    """Of one turn.

    `n_ctx` is the window that holds for it; `fit_tokens` is the longest prompt that would be admitted now, for CAP what
    to cut the prompt to; `status` and `code` are those of the HTTP answer to a REJECT, else 200 and "".
    """

    verdict: Verdict
    status: int
    code: str
    reason: str
    have_bytes: int
    need_bytes: int
    reserve_bytes: int
    n_ctx: int
    fit_tokens: int

    @property
    def admitted(self) -> bool:
        """The turn may run, capped or not."""
        return self.verdict is not Verdict.REJECT


@dataclass(frozen=True)
class _Budget:
    """The place that binds: the host or one die."""

    where: str
    total: int
    have: int
    reserve: int


def admit_turn(
    costs: TurnCosts,
    state: MemState,
    *,
    prompt_tokens: int,
    max_tokens: int | None,
    n_ctx: int,
    cap_allowed: bool = False,
    window: int = 0,
    dies: Sequence[int] = (),
    psi_full_reject: float = 15.0,
    promised_bytes: int = 0,
) -> Decision:
    """Decide on one turn, before any of it runs [M201].

    Order: the model's context (400, or CAP when allowed [X21]); nothing is refused for memory while nobody watches it
    [M199]; a sustained stall; a reserve that is touched already; then the costs against what is free on the host and on
    the `dies` given.  A turn whose KV lies on accelerators (`costs.on_die`) adds nothing to what the load took.

    promised_bytes: what turns that run have been promised and have not taken yet; it is not free.

    window: the ladder's clamp (0: none).  It cuts only what may be cut; a turn that may not is judged by bytes alone,
    because TIGHT never refuses by itself [M102, X18].
    """
    host = state.host
    limit = min(n_ctx, window) if cap_allowed and window >= 2 * MIN_WINDOW else n_ctx
    reply = min(REPLY_TOKENS, n_ctx if max_tokens is None else max_tokens)
    budget = _turn_budget(costs, state, dies, promised_bytes)
    need = costs.bytes_for(min(prompt_tokens, n_ctx), min(reply, max(1, n_ctx - prompt_tokens)))

    def decision(verdict: Verdict, why: str, room: int, fit: int, status: int = 200, code: str = "") -> Decision:
        need_bytes = costs.bytes_for(fit, reply) if verdict is Verdict.CAP else need
        return Decision(verdict, status, code, why, budget.have, need_bytes, budget.reserve, room, fit)

    def refuse(why: str, fit: int = 0) -> Decision:
        return decision(Verdict.REJECT, why, 0, fit, 503, "memory_critical")

    if prompt_tokens >= n_ctx and not cap_allowed:
        return decision(Verdict.REJECT, "context", n_ctx, n_ctx - 1, 400, TOO_LONG)
    fit = limit - 1
    if state.alive:
        if host.psi_full_avg10 >= psi_full_reject:
            return refuse("sustained memory stall - retry")
        if host.level_bytes >= Level.CRITICAL:
            return refuse(f"the memory of the {host.bound_by} is inside its reserve")
        fit = largest_prompt(costs, budget.have, limit, reply)
    if prompt_tokens <= fit:
        return decision(Verdict.ADMIT, "fits", limit, fit)
    # a cut prompt leaves room for an answer
    cut = min(fit, limit - max(1, min(reply, limit // 4)))
    if cap_allowed and cut >= MIN_WINDOW:
        why = "context" if limit == n_ctx and fit == limit - 1 else "memory"
        return decision(Verdict.CAP, why, limit, cut)
    if prompt_tokens >= n_ctx:
        return decision(Verdict.REJECT, "context", n_ctx, n_ctx - 1, 400, TOO_LONG)
    if need > budget.total - budget.reserve:
        # it would not fit into an idle machine either: asking again would not help [K08]
        return decision(Verdict.REJECT, f"it never fits {budget.where}", n_ctx, fit, 400, TOO_LONG)
    return refuse(f"it does not fit into the free memory of {budget.where}", fit)


def _turn_budget(costs: TurnCosts, state: MemState, dies: Sequence[int], promised: int) -> _Budget:
    """The host's slack, or the free bytes of one of the dies where that is less."""
    host = state.host
    free = max(0, host.slack_bytes - promised)
    places = [_Budget(f"the {host.bound_by}", host.total_bytes, free, host.reserve_bytes)]
    known = [] if costs.on_die else [state.dies[i] for i in dies if i in state.dies]
    places += [_Budget(f"die {die.index}", die.total_bytes, *_die_bytes(die)) for die in known]
    return min(places, key=lambda place: place.have)


def largest_prompt(costs: TurnCosts, have_bytes: int, limit: int, reply_tokens: int) -> int:
    """The longest prompt below `limit` whose turn costs at most have_bytes; 0 when none does [M191].

    Costs grow with the prompt, so halving finds it.
    """

    def fits(n: int) -> bool:
        return costs.bytes_for(n, min(reply_tokens, max(1, limit - n))) <= have_bytes

    low, high = 0, max(0, limit - 1)
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ---- loads ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadDecision:
    """Of one load.  The bytes are those of the place that binds, named in `where`; `largest_ctx` is the longest context
    that would fit now, 0 when the weights alone do not."""

    fits: bool
    need_bytes: int
    have_bytes: int
    reserve_bytes: int
    largest_ctx: int
    where: str = "host"
    reason: str = ""


@dataclass(frozen=True)
class _Place:
    """One place that a load must fit into."""

    where: str
    costs: LoadCosts
    have: int
    reserve: int

    def need(self, n_ctx: int) -> int:
        """The most it ever takes: while it loads, or later with full contexts."""
        return max(self.costs.fixed_bytes + self.costs.spike_bytes, self.costs.bytes_for(n_ctx))

    @property
    def largest(self) -> float:
        """The longest context that fits here; below 0 when what does not depend on it does not fit."""
        if self.need(0) > self.have:
            return -1
        left, each = self.have - self.costs.fixed_bytes, self.costs.bytes_per_token
        return left // each if each else float("inf")


def admit_load(
    need: LoadCosts,
    host: HostState,
    dies: Sequence[tuple[LoadCosts, DieState]] = (),
    *,
    want_ctx: int,
    watched: bool = True,
) -> LoadDecision:
    """Decide on one load before any byte of it moves [M196-M198, X31].

    need: what the load takes on the host, and its spike; dies: the share of each die it is placed on, against that
    die's free bytes (which exclude the die's reserve).  watched False: nobody reads the host, which is then not asked.
    """
    places = [_Place(f"die {die.index}", costs, *_die_bytes(die)) for costs, die in dies]
    if watched:
        places.insert(0, _Place("the " + host.bound_by, need, max(0, host.slack_bytes), host.reserve_bytes))
    if not places:
        return LoadDecision(True, need.bytes_for(want_ctx), 0, 0, want_ctx, "", "nobody watches the memory")
    largest = int(max(0, min(want_ctx, *(place.largest for place in places))))
    # the place that misses the most is the one to name
    worst = max(places, key=lambda place: place.need(want_ctx) - place.have)
    fits = worst.need(want_ctx) <= worst.have
    reason = "" if fits else f"{worst.where}: {worst.need(want_ctx)} bytes needed, {worst.have} free above the reserve"
    return LoadDecision(fits, worst.need(want_ctx), worst.have, worst.reserve, largest, worst.where, reason)


def _die_bytes(die: DieState) -> tuple[int, int]:
    """(free within the budget, reserve) of a die: a budget shrinks when other processes take memory there [X32]."""
    reserve = max(0, die.total_bytes - die.budget_bytes)
    return max(0, min(die.free_bytes - reserve, die.budget_bytes - die.resident_bytes)), reserve
