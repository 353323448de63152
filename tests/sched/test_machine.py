"""The scheduler under any order of joins, steps, slow reads, stops, cancels, faults, pressure, time and the end, one at
a time on one thread, `check_integrity` after each.  Every token is held against the single-user loop's.
[M087-M090, M093-M102, M106, M109, M128-M130, M216, X06, X17, X23, X29, K01-K03]"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pantheon.engine.prefix_cache import PrefixCache
from pantheon.engine.sampler import SamplingParams
from pantheon.errors import Busy, Cancelled, PantheonError, Unavailable
from pantheon.mem.mem_state import Level
from pantheon.sched.handle import Handle
from pantheon.sched.scheduler import Place, SchedConfig, Scheduler
from tests.fakes import FakeClock
from tests.sched.echo_model import alone, echo_model

USERS, SLOTS, DEPTH, N_CTX = 3, 4, 3, 48
WHICH = st.integers(0, 99)
SYSTEM = [7, 8, 9]
#: prompt, max_tokens, session, lookahead, seed
Asked = tuple[list[int], int, str | None, int | None, int | None]
ASKED = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=30).map(lambda ids: [*SYSTEM, *ids]),
    st.integers(1, 12),
    st.none() | st.sampled_from("ab"),
    st.none() | st.integers(1, 2),
    st.none() | st.integers(0, 3),
)


@dataclass
class User:
    """What a test knows of one user."""

    place: Place
    number: int
    handle: Handle | None = None
    expected: list[int] = field(default_factory=list)
    got: list[int] = field(default_factory=list)
    lookahead: int | None = None


class Machine(RuleBasedStateMachine):
    """Owners, the driver, the memory watcher and the operator take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.users: list[User] = []
        self.arrivals = self.answers = self.faults = self.moves = 0
        self.closed = False

    @initialize(
        mixed=st.booleans(),
        chunk=st.integers(1, 9),
        cached=st.booleans(),
        first=st.lists(ASKED, min_size=1, max_size=5),
    )
    def build(self, mixed: bool, chunk: int, cached: bool, first: list[Asked]) -> None:
        self.clock = FakeClock()
        self.model = echo_model(N_CTX)
        self.runner: Any = self.model.runner
        self.runner.max_columns = 8
        state = self.model.new_state(SLOTS)
        cache = PrefixCache(state, users=USERS, max_idle=60) if cached else None
        config = SchedConfig(USERS, DEPTH, wait_s=30, grace_s=2, chunk=chunk, mixed=mixed)
        self.scheduler = Scheduler(self.model, state, cache, config, self.clock, start=False)
        self.cache = cache
        for asked in first:
            self.join(asked)

    # ---- people come and go ------------------------------------------------------------------------------------------

    @rule(asked=ASKED)
    def join(self, asked: Asked) -> None:
        """Ask for a place, and begin at once if there is one."""
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
            self.begin(self.users[-1], asked)

    @rule(which=WHICH, asked=ASKED)
    def go_on(self, which: int, asked: Asked) -> None:
        """Somebody who waited begins if it can now; somebody who was inside begins the next answer."""
        resting = [user for user in self.users if user.handle is None]
        if resting:
            self.begin(resting[which % len(resting)], asked)

    def begin(self, user: User, asked: Asked) -> None:
        ids, n, session, lookahead, seed = asked
        params = SamplingParams(temperature=0 if seed is None else 1.0, seed=seed)
        try:
            if not user.place.inside:
                return
            user.handle = user.place.begin(
                ids, params, max_tokens=n, session=session, lookahead=lookahead, ignore_eog=True
            )
        except PantheonError as fault:
            assert fault.code in ("shutting_down", "queue_timeout", "memory_critical")
            assert fault.code != "shutting_down" or self.closed
            self.dismiss(user)
        else:
            user.expected, user.got, user.lookahead = alone(self.model, ids, params, n), [], lookahead

    def dismiss(self, user: User) -> None:
        waste = user.handle.wasted if user.handle is not None else 0
        assert user.lookahead is None or waste <= user.lookahead
        self.users.remove(user)
        user.place.leave()

    @rule(which=WHICH, how=st.sampled_from(["leave", "cancel", "fail"]))
    def stop(self, which: int, how: str) -> None:
        """In any phase: waiting, inside, reading, decoding; or a forward fails."""
        if how == "fail":
            self.runner.fail = RuntimeError("injected")
            self.scheduler.driver.step()
            self.faults += self.runner.fail is None
            self.runner.fail = None
        elif self.users:
            user = self.users[which % len(self.users)]
            if how == "cancel" and user.handle is not None:
                user.handle.cancel()
                columns, slot = len(self.runner.seen), user.handle._slot.index
                self.scheduler.driver.step()
                assert all(slot not in c.slots for c in self.runner.seen[columns:]), "stepped after the cancel"
                with pytest.raises(Cancelled):
                    user.handle.poll()
            self.dismiss(user)

    # ---- work --------------------------------------------------------------------------------------------------------

    @rule(moves=st.lists(st.tuples(st.sampled_from(["drive", "read", "pull"]), WHICH), min_size=6, max_size=40))
    def work(self, moves: list[tuple[str, int]]) -> None:
        """The driver steps, an owner reads a chunk of its prompt, an owner pulls a token."""
        for what, which in moves:
            running = [user for user in self.users if user.handle is not None]
            user = running[which % len(running)] if running else None
            if what == "drive":
                self.scheduler.driver.step()
            elif user is not None and user.handle is not None and user.handle.wants_chunk:
                user.handle.read_chunk()
            elif user is not None:
                self.pull(user)
            self.sound()

    def pull(self, user: User) -> None:
        assert user.handle is not None
        try:
            token = user.handle.poll()
        except RuntimeError:
            assert self.faults
            self.dismiss(user)
        except Unavailable as fault:
            assert fault.code == "shutting_down" and self.closed
            self.dismiss(user)
        else:
            if token is not None:
                user.got.append(token.id)
                assert user.got == user.expected[: len(user.got)], "not the solo answer"
                assert token.is_last == (len(user.got) == len(user.expected))
                if token.is_last:
                    user.place.end()
                    user.handle = None
                    self.answers += 1

    # ---- the world ---------------------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(["pressure", "ladder", "time", "trim", "rehouse", "end"]), level=st.sampled_from(Level),
          ceiling=st.integers(0, 5), seconds=st.sampled_from([0.1, 1.0, 2.5, 31.0]))  # fmt: skip
    def world(self, what: str, level: Level, ceiling: int, seconds: float) -> None:
        """Pressure flips, the ladder moves, time passes, idle conversations are given up, the state is changed for
        another (a rung that changes the KV format), the server ends."""
        if what == "pressure":
            self.scheduler.notify_pressure(level)
        elif what == "ladder":
            self.scheduler.set_ceiling(ceiling)
        elif what == "time":
            self.clock.advance(seconds)
        elif what == "trim" and self.cache is not None:
            self.cache.trim(ceiling / 5)
            self.cache.trim(1.0)
        elif what == "rehouse":
            self.rehouse()
        elif what == "end" and self.arrivals > 6:
            self.scheduler.close()
            self.closed = True

    def rehouse(self) -> None:
        """Another state, if nobody sits in the old one; rows left in the old one would be missed in the new one."""
        state = self.model.new_state(SLOTS)
        cache = PrefixCache(state, users=USERS, max_idle=60) if self.cache is not None else None
        moved = self.scheduler.rehouse(state, cache)
        assert moved == self.scheduler.resting == all(user.handle is None for user in self.users)
        if moved:
            self.cache, self.moves = cache, self.moves + 1

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


Machine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase


@pytest.mark.parametrize("seed", range(10))
def test_long_walks(seed: int) -> None:
    """The same steps in longer walks than hypothesis takes."""
    chance = random.Random(seed)

    def asked() -> Asked:
        ids = [*SYSTEM, *(chance.randrange(2) for _ in range(chance.randrange(1, 30)))]
        return ids, chance.randrange(1, 13), chance.choice([None, "a", "b"]), chance.choice([None, 1, 2]), None

    machine = Machine()
    machine.build(mixed=seed % 2 == 0, chunk=chance.randrange(1, 9), cached=seed % 5 != 4, first=[asked()])
    for _ in range(500):
        which = chance.randrange(100)
        match chance.choice("jjjjggggggddwwwwwwso"):
            case "j":
                machine.join(asked())
            case "g":
                machine.go_on(which, asked())
            case "d":
                done = [user for user in machine.users if user.handle is None and user.got]
                if done:
                    machine.dismiss(chance.choice(done))
            case "s":
                machine.stop(which, chance.choice(["leave", "cancel", "fail"]))
            case "o":
                what = chance.choice(["pressure", "ladder", "time", "trim", "rehouse"])
                level = chance.choice([Level.OK, Level.OK, Level.OK, Level.TIGHT, Level.CRITICAL])
                machine.world(what, level, chance.randrange(6), chance.choice([0.1, 1.0, 2.5]))
            case _:
                kinds = ["drive", "read", "pull"]
                machine.work([(chance.choice(kinds), chance.randrange(100)) for _ in range(chance.randrange(10, 40))])
        machine.sound()
    totals = machine.scheduler.view()["totals"]
    assert machine.answers > 20 and totals["decode_columns"] > 100 and totals["runs"] > 30, totals
    assert machine.cache is None or totals["cached_tokens"] > 50
    for user in list(machine.users):
        machine.dismiss(user)
    machine.world("rehouse", Level.OK, 0, 0.0)
    assert machine.moves, "nobody was in the way"
    machine.world("pressure", Level.OK, 0, 0.0)
    machine.join(asked())
    machine.world("end", Level.OK, 0, 0.0)
    machine.work([("drive", 0), *(("pull", i) for i in range(40))])
    machine.teardown()
