"""What to give up at which level: rungs that only ever reduce, and come back whole [M205-M215].

`plan_for` is pure and knows nothing but a level and a configuration.  `Ladder` adds time: a rung engages at once, the
window clamp when the level lasts, and it is let go when the level has been lower for half a second [X18, K06].
Order of the rungs [K25]: WATCH 4a, TIGHT 2, 3 and 4b.  Must not know models, states or who applies a rung.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pantheon.mem.mem_state import Level

#: a level must have lasted so long before the window is clamped: one poll more than the first (with room for jitter)
PERSIST_S = 0.2
#: a rung stays for so long after the level has fallen: two polls
RELEASE_S = 0.5


@dataclass(frozen=True)
class LadderConfig:
    """What the operator configured, and what the engine can do about it.

    `max_slots`: users at a time; `window`: the longest prompt, 0 for no limit; `can_quantise_kv`: a smaller KV format
    than the configured one exists for this model (4a); `can_evict`: idle conversations can be dropped for real (4b).
    """

    max_slots: int = 1
    window: int = 0
    can_quantise_kv: bool = False
    can_evict: bool = False


@dataclass(frozen=True)
class Rungs:
    """What is on, as absolute values [M205]: never more than configured, never more at a higher level [M211].

    `max_slots` (rung 2), `prefill_window` (rung 3; 0 is no clamp), `quantise_kv` (4a: new states), `evict_idle` (4b:
    conversations that nobody is using go).  `on` names the rungs that take something away, in the order in which they
    engage, `notes` says what each does.
    """

    level: Level = Level.OK
    max_slots: int = 1
    prefill_window: int = 0
    quantise_kv: bool = False
    evict_idle: bool = False
    on: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def degraded(self) -> bool:
        """Something is less than configured."""
        return bool(self.on)


def plan_for(level: Level, config: LadderConfig, *, persisted: bool = True) -> Rungs:
    """The rungs of a level.  At OK they equal the configuration [M206]; a higher level never relaxes one [M211].

    persisted: the level has lasted, so that the window may be clamped [X18]; CRITICAL does not wait for that.
    """
    tight, critical = level >= Level.TIGHT, level >= Level.CRITICAL
    slots = 1 if critical else max(1, config.max_slots // 2) if tight else config.max_slots
    window = config.window
    if window and (critical or (tight and persisted)):
        window = max(1, window // (4 if critical else 2))
    quantise = level >= Level.WATCH and config.can_quantise_kv
    evict = tight and config.can_evict
    rungs = [
        (quantise, "4a", "new conversations keep a smaller KV cache"),
        (slots < config.max_slots, "2", f"slots {config.max_slots} -> {slots}"),
        (window < config.window, "3", f"prefill window clamped {config.window} -> {window}"),
        (evict, "4b", "idle conversations are dropped"),
    ]
    on = tuple(name for engaged, name, _ in rungs if engaged)
    notes = tuple(note for engaged, _, note in rungs if engaged)
    return Rungs(level, slots, window, quantise, evict, on, notes)


@dataclass(frozen=True)
class Held:
    """What a ladder remembers.  `seen_s[level]`: when the watcher last said at least this; `level`: the one acted on,
    the highest of the last RELEASE_S; `tight_s`: since when that has been TIGHT or more (None: it is not)."""

    level: Level = Level.OK
    seen_s: tuple[float, ...] = (float("-inf"),) * len(Level)
    tight_s: float | None = None


def next_held(held: Held, level: Level, now_s: float) -> Held:
    """The memory after the watcher said `level` at now_s: up at once, down when it has been less for RELEASE_S."""
    seen = tuple(now_s if level >= one else held.seen_s[one] for one in Level)
    acted = max(one for one in Level if level >= one or now_s - seen[one] < RELEASE_S)
    since = now_s if held.tight_s is None else held.tight_s
    return Held(acted, seen, since if acted >= Level.TIGHT else None)


def _silent(line: str) -> None:
    """No log."""


@dataclass
class Ladder:
    """The ladder of one model.  Not locked: its owner steps it from one thread at a time.

    `log` is called once for each change, never for each request [X18]: `[ladder] TIGHT -> prefill window clamped
    16384 -> 8192` [M213].  `enabled` False: the configuration, whatever the level [M215].
    """

    config: LadderConfig = field(default_factory=LadderConfig)
    enabled: bool = True
    log: Callable[[str], None] = _silent
    held: Held = field(default_factory=Held)
    transitions: int = 0
    rungs: Rungs = field(init=False)

    def __post_init__(self) -> None:
        self.rungs = plan_for(Level.OK, self.config)

    def step(self, level: Level, now_s: float) -> Rungs:
        """Take note of a level; the rungs that are on from now."""
        if not self.enabled:
            return self.rungs
        self.held = next_held(self.held, level, now_s)
        since = self.held.tight_s
        rungs = plan_for(self.held.level, self.config, persisted=since is not None and now_s - since >= PERSIST_S)
        old, self.rungs = self.rungs, rungs
        if rungs.notes != old.notes:
            self.transitions += 1
            self.log(f"[ladder] {rungs.level.name} -> {_change(old, rungs)}")
        return rungs


def _change(old: Rungs, new: Rungs) -> str:
    """What one transition brought: rungs that are new or changed, else those that are left."""
    if not new.degraded:
        return "full capacity again"
    fresh = [note for note in new.notes if note not in old.notes]
    return ", ".join(fresh) if fresh else "eased, still on: " + ", ".join(new.notes)
