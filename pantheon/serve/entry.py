"""`Entry`: one loaded model instance in the registry, and what is known about it.

Must not know the table it stands in, HTTP or how a model is loaded.  Spec: M055.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pantheon.engine.prefix_cache import Marks, Warm
from pantheon.serve.placement import remaining_s

if TYPE_CHECKING:
    from pantheon.accel.executor import RunnerState
    from pantheon.engine.model import Model
    from pantheon.engine.prefix_cache import PrefixCache
    from pantheon.sched.scheduler import Scheduler

#: what a token of a prompt costs before it was measured
_PROMPT_S = 0.001


@dataclass(eq=False)
class Entry:
    """One model instance [M055].  The fields down to `last_use` are guarded by the registry's lock.

    `model` and `state` are None until published.  `dies` is empty for a model on the CPU, and until the dies are chosen
    when `auto`.  `gen_lock` is held by the one request that generates; `sched` shares the model between several, and is
    None on the single-user path.
    `evicting` tells a running generation to stop; `left` asks whether the client of the running one has hung up.
    """

    name: str
    path: str
    index: int
    dies: tuple[int, ...] = ()
    auto: bool = False
    model: Model | None = None
    state: RunnerState | None = None
    used: bool = True
    unloading: bool = False
    refs: int = 0
    last_use: int = 0
    created: int = 0
    vram_bytes: int = 0
    stage: str = "waiting"
    progress: float = 0.0
    reserved_at: float = 0.0
    sched: Scheduler | None = None
    prefix_cache: PrefixCache | None = None
    gen_lock: threading.Lock = field(default_factory=threading.Lock)
    evicting: threading.Event = field(default_factory=threading.Event)
    # written by the holder of gen_lock only
    began_at: float = 0.0
    service_s: float = 2.0
    answers: int = 0
    prompt_s: float = _PROMPT_S
    left: Callable[[], bool] | None = None

    @property
    def n_dies(self) -> int:
        """0: resident on the CPU [M006]."""
        return len(self.dies)

    @property
    def ready(self) -> bool:
        """Published and open for new requests."""
        return self.used and self.model is not None and not self.unloading

    @property
    def users(self) -> int:
        """Answers at a time.  Read `sched` once: whoever only looks may meet an entry that is freed just now."""
        sched = self.sched
        return 1 if sched is None else sched.config.users

    @property
    def pc_lock(self) -> threading.Lock | None:
        """What guards the prefix cache; None without one."""
        cache = self.prefix_cache
        return cache.lock if cache is not None else None

    def report(self, stage: str, done: int, total: int) -> None:
        """Note how far a load is: kernels after weights, each counted from 0 to 1."""
        self.stage, self.progress = stage, (done / total if total else 0.0)

    def seat(self, ids: Sequence[int], session: str | None, marks: Marks) -> Warm:
        """Where in the state a prompt runs, and what it need not read again.  For the holder of gen_lock."""
        if self.prefix_cache is None:
            return Warm(None, 0, 0, ids)
        return self.prefix_cache.begin(ids, session, marks)

    def learn(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens were read in so many seconds.  For the holder of gen_lock."""
        if tokens >= 16:
            self.prompt_s += 0.3 * (seconds / tokens - self.prompt_s)

    def served(self, seconds: float) -> None:
        """An answer took so long.  For the holder of gen_lock."""
        self.service_s += max(0.3, 1 / (self.answers + 1)) * (seconds - self.service_s)
        self.answers += 1

    def wait_s(self, now: float) -> float:
        """When this entry should have a free place, from the generations before."""
        sched = self.sched
        if sched is not None:
            return sched.load().wait_s
        return remaining_s(self.refs, max(0.0, now - self.began_at), self.service_s)
