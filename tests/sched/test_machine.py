"""The scheduler under any order of joins, steps, slow reads, stops, cancels, faults, pressure, time and the end, one at a
time on one thread, `check_integrity` after each.  Every token is held against the single-user loop's.
[M087-M090, M093-M102, M106, M109, M128-M130, X06, X17, X23, X29, K01-K03]"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pantheon.engine.prefix_cache import PrefixCache
from pantheon.engine.sampler import SamplingParams
from pantheon.errors import Busy, Cancelled, PantheonError, Unavailable
from pantheon.mem.mem_state import Level
from pantheon.sched.handle import Handle
from pantheon.sched.scheduler import Place, SchedConfig, Scheduler
from tests.fakes import FakeClock
from tests.sched.echo_model import alone, echo_model

USERS, SLOTS, DEPTH, N_CTX = 3, 4, 3, 48
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=30)
WHICH = st.integers(0, 99)


@dataclass
class User:
    """What a test knows of one user."""

    place: Place
    number: int
    handle: Handle | None = None
    expected: list[int] = field(default_factory=list)
    got: list[int] = field(default_factory=list)
    lookahead: int | None = None
    told: bool = False


class Machine(RuleBasedStateMachine):
    """Owners, the driver, the memory watcher and the operator take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.users: list[User] = []
        self.arrivals = 0
        self.entered: list[int] = []
        self.closed = False

    @initialize(mixed=st.booleans(), chunk=st.integers(1, 9), cached=st.booleans())
    def build(self, mixed: bool, chunk: int, cached: bool) -> None:
        self.clock = FakeClock()
        self.model = echo_model(N_CTX)
        self.runner: Any = self.model.runner
        self.runner.max_columns = 8
        state = self.model.new_state(SLOTS)
        cache = PrefixCache(state, users=USERS, max_idle=60) if cached else None
        config = SchedConfig(USERS, DEPTH, wait_s=30, grace_s=2, chunk=chunk, mixed=mixed)
        self.scheduler = Scheduler(self.model, state, cache, config, self.clock, start=False)
        self.cache = cache

    # ---- people come and go ------------------------------------------------------------------------------------------

    @rule()
    def arrive(self) -> None:
        load = self.scheduler.load()
        try:
            place = self.scheduler.enter()
        except Busy as busy:
            assert busy.code == "queue_full" and load.queued == DEPTH and not self.closed
        except Unavailable as fault:
            assert fault.code == ("shutting_down" if self.closed else "memory_critical")
        else:
            self.users.append(User(place, self.arrivals))
            self.arrivals += 1

    def pick(self, which: int, **like: bool) -> User | None:
        """A user that is running or not."""
        found = [u for u in self.users if (u.handle is not None) == like["running"]]
        return found[which % len(found)] if found else None

    @rule(which=WHICH, ids=PROMPTS, n=st.integers(1, 12), session=st.none() | st.sampled_from("ab"),
          lookahead=st.none() | st.integers(1, 2), seed=st.none() | st.integers(0, 3))  # fmt: skip
    def begin(
        self, which: int, ids: list[int], n: int, session: str | None, lookahead: int | None, seed: int | None
    ) -> None:
        user = self.pick(which, running=False)
        if user is None:
            return
        try:
            if not user.place.inside:
                return
            params = SamplingParams(temperature=0 if seed is None else 1.0, seed=seed)
            user.handle = user.place.begin(
                ids, params, max_tokens=n, session=session, lookahead=lookahead, ignore_eog=True
            )
        except PantheonError as fault:
            assert fault.code in ("shutting_down", "queue_timeout", "memory_critical")
            assert fault.code != "shutting_down" or self.closed
            user.place.leave()
            self.users.remove(user)
        else:
            user.expected, user.got = alone(self.model, ids, params, n), []
            user.lookahead = lookahead

    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        """In any phase: waiting, inside, reading, decoding."""
        if self.users:
            user = self.users.pop(which % len(self.users))
            waste = user.handle.wasted if user.handle is not None else 0
            assert user.lookahead is None or waste <= user.lookahead
            user.place.leave()

    # ---- work --------------------------------------------------------------------------------------------------------

    @rule(steps=st.integers(1, 6))
    def drive(self, steps: int) -> None:
        for _ in range(steps):
            self.scheduler.driver.step()

    @rule(which=WHICH)
    def read_a_chunk(self, which: int) -> None:
        user = self.pick(which, running=True)
        if user is not None and user.handle is not None and user.handle.wants_chunk and not user.told:
            user.handle.read_chunk()

    @rule(which=WHICH, times=st.integers(1, 4))
    def pull(self, which: int, times: int) -> None:
        user = self.pick(which, running=True)
        for _ in range(times if user is not None else 0):
            assert user is not None and user.handle is not None
            try:
                token = user.handle.poll()
            except Cancelled:
                assert user.told
            except RuntimeError:
                assert self.faults
                user.place.end()
                user.handle = None
                return
            except Unavailable as fault:
                assert fault.code == "shutting_down" and self.closed
            else:
                if token is None:
                    return
                user.got.append(token.id)
                assert user.got == user.expected[: len(user.got)], "not the solo answer"
                assert token.is_last == (len(user.got) == len(user.expected))
                if token.is_last:
                    user.place.end()
                    user.handle = None
                    return

    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        user = self.pick(which, running=True)
        if user is not None and user.handle is not None:
            user.handle.cancel()
            user.told = True
            columns = len(self.runner.seen)
            self.scheduler.driver.step()
            slot = user.handle._slot.index
            assert all(slot not in c.slots for c in self.runner.seen[columns:]), "stepped after the cancel"
            self.users.remove(user)
            user.place.leave()

    faults = 0

    @precondition(lambda self: not self.closed)
    @rule()
    def a_forward_fails(self) -> None:
        self.runner.fail = RuntimeError("injected")
        self.scheduler.driver.step()
        self.faults += self.runner.fail is None
        self.runner.fail = None

    # ---- the world ---------------------------------------------------------------------------------------------------

    @rule(level=st.sampled_from(Level))
    def pressure(self, level: Level) -> None:
        self.scheduler.notify_pressure(level)

    @rule(ceiling=st.integers(0, 5))
    def ladder(self, ceiling: int) -> None:
        self.scheduler.set_ceiling(ceiling)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 31.0]))
    def time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.cache is not None)
    @rule(share=st.sampled_from([0.0, 0.5, 1.0]))
    def trim(self, share: float) -> None:
        assert self.cache is not None
        self.cache.trim(share)
        self.cache.trim(1.0)

    @precondition(lambda self: self.arrivals > 8)
    @rule()
    def shut_down(self) -> None:
        self.scheduler.close()
        self.closed = True

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        view, load = self.scheduler.view(), self.scheduler.load()
        busy = sum(slot["state"] != "idle" for slot in view["slots"])
        assert busy == sum(user.handle is not None for user in self.users), "a leaked slot"
        assert load.active + load.queued <= len(self.users), "a leaked place"
        # nobody is let in before somebody who came earlier
        inside = [user.number for user in self.users if user.place._ticket.inside]
        waiting = [user.number for user in self.users if not user.place._ticket.inside and not user.place._ticket.gone]
        assert not inside or not waiting or max(inside) < min(waiting), "somebody barged"
        assert self.runner.most_at_once <= 1

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            for user in self.users:
                user.place.leave()
            self.users.clear()
            self.sound()
            self.scheduler.close()


Machine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
