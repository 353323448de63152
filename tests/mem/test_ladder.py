"""The degradation ladder [M205-M215, X15, X17, X18, K06, K25]."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pantheon.mem.ladder import PERSIST_S, RELEASE_S, Held, Ladder, LadderConfig, Rungs, next_held, plan_for
from pantheon.mem.mem_state import Level

OK, WATCH, TIGHT, CRITICAL = Level
FULL = LadderConfig(max_slots=8, window=16384, can_quantise_kv=True, can_evict=True)
POLL_S = 0.25

configs = st.builds(LadderConfig, st.integers(1, 64), st.integers(0, 1 << 20), st.booleans(), st.booleans())
levels = st.sampled_from(list(Level))


def test_m205_a_plan_has_absolute_values() -> None:
    plan = plan_for(TIGHT, FULL)
    assert (plan.level, plan.max_slots, plan.prefill_window, plan.quantise_kv, plan.evict_idle) == (
        TIGHT,
        4,
        8192,
        True,
        True,
    )
    assert plan.degraded and plan.on == ("4a", "2", "3", "4b")


def test_m207_k25_watch_engages_4a_only() -> None:
    plan = plan_for(WATCH, FULL)
    assert plan.on == ("4a",) and plan.quantise_kv
    assert (plan.max_slots, plan.prefill_window, plan.evict_idle) == (8, 16384, False)


def test_m208_slots_are_halved_and_then_one() -> None:
    assert [plan_for(level, FULL).max_slots for level in Level] == [8, 8, 4, 1]
    assert [plan_for(level, LadderConfig()).max_slots for level in Level] == [1, 1, 1, 1]


def test_m209_the_window_is_halved_and_quartered() -> None:
    assert [plan_for(level, FULL).prefill_window for level in Level] == [16384, 16384, 8192, 4096]
    assert [plan_for(level, LadderConfig(window=0)).prefill_window for level in Level] == [0, 0, 0, 0]


def test_m210_x14_a_rung_that_can_do_nothing_is_not_offered() -> None:
    plain = LadderConfig(max_slots=1, window=16384)
    assert plan_for(WATCH, plain).on == ()
    assert plan_for(CRITICAL, plain).on == ("3",)


def test_x18_the_window_is_clamped_only_when_tight_lasts() -> None:
    assert plan_for(TIGHT, FULL, persisted=False).on == ("4a", "2", "4b")
    assert plan_for(CRITICAL, FULL, persisted=False).prefill_window == 4096


@given(configs, st.booleans())
def test_m206_at_ok_the_plan_is_the_configuration(config: LadderConfig, persisted: bool) -> None:
    assert plan_for(OK, config, persisted=persisted) == Rungs(OK, config.max_slots, config.window)


@given(configs, levels, levels, st.booleans())
def test_m211_a_higher_level_never_relaxes_a_rung(config: LadderConfig, a: Level, b: Level, persisted: bool) -> None:
    low, high = (plan_for(level, config, persisted=persisted) for level in sorted((a, b)))
    assert 1 <= high.max_slots <= low.max_slots <= config.max_slots
    assert 0 <= high.prefill_window <= low.prefill_window <= config.window
    assert (high.prefill_window > 0) == (config.window > 0)
    assert (high.quantise_kv, high.evict_idle) >= (low.quantise_kv, low.evict_idle)
    assert set(low.on) <= set(high.on) and len(high.on) == len(high.notes)


# ---- time -------------------------------------------------------------------------------------------------------


def test_x18_k06_up_at_once_and_down_when_it_has_been_less_for_a_while() -> None:
    ladder = Ladder(FULL)
    assert ladder.step(TIGHT, 0.0).on == ("4a", "2", "4b")
    assert ladder.step(TIGHT, POLL_S).on == ("4a", "2", "3", "4b"), "one poll more"
    assert ladder.step(OK, 2 * POLL_S).on == ("4a", "2", "3", "4b"), "a moment of calm is none"
    assert ladder.step(OK, 3 * POLL_S) == plan_for(OK, FULL), "RELEASE_S after the last TIGHT"


def test_x18_a_blip_engages_nothing_twice() -> None:
    lines: list[str] = []
    ladder = Ladder(FULL, log=lines.append)
    for poll in range(40):
        ladder.step(TIGHT if poll % 2 else OK, poll * POLL_S)
    assert len(lines) == 2 == ladder.transitions, "engaged, then the window; flickering changes nothing"


def test_x17_full_capacity_is_back_within_a_second_of_ok() -> None:
    """The worst case: the host recovers just after a poll, at the end of any history."""
    ladder = Ladder(FULL)
    for poll, level in enumerate([WATCH, CRITICAL, TIGHT, CRITICAL, WATCH, TIGHT]):
        ladder.step(level, poll * POLL_S)
    recovered_s = 5 * POLL_S
    poll_s = recovered_s
    while ladder.rungs.degraded:
        poll_s += POLL_S
        ladder.step(OK, poll_s)
    assert poll_s - recovered_s <= 1.0
    assert ladder.rungs.max_slots == 8 and ladder.rungs.prefill_window == 16384


def test_m213_x18_a_line_for_each_transition_and_none_for_a_request() -> None:
    lines: list[str] = []
    ladder = Ladder(LadderConfig(max_slots=8, window=16384), log=lines.append)
    for poll in range(20):
        ladder.step(TIGHT, poll * POLL_S)
    for poll in range(20, 40):
        ladder.step(OK, poll * POLL_S)
    assert lines == [
        "[ladder] TIGHT -> slots 8 -> 4",
        "[ladder] TIGHT -> prefill window clamped 16384 -> 8192",
        "[ladder] OK -> full capacity again",
    ]


def test_an_eased_level_says_what_stays() -> None:
    lines: list[str] = []
    ladder = Ladder(FULL, log=lines.append)
    for poll, level in enumerate([CRITICAL, CRITICAL, WATCH, WATCH, WATCH]):
        ladder.step(level, poll * POLL_S)
    assert lines[-1] == "[ladder] WATCH -> eased, still on: new conversations keep a smaller KV cache"


def test_m215_m169_a_ladder_that_is_off_is_the_configuration() -> None:
    ladder = Ladder(FULL, enabled=False)
    for poll, level in enumerate(Level):
        assert ladder.step(level, poll * POLL_S) == plan_for(OK, FULL)
    assert ladder.transitions == 0


histories = st.lists(st.tuples(levels, st.sampled_from([0.0, 0.01, POLL_S, 0.6, 5.0])), min_size=1, max_size=40)


@given(histories)
def test_a_ladder_acts_on_the_worst_of_the_last_half_second(history: list[tuple[Level, float]]) -> None:
    held, now_s, seen = Held(), 0.0, list[tuple[float, Level]]()
    for level, pause_s in history:
        now_s += pause_s
        seen.append((now_s, level))
        held = next_held(held, level, now_s)
        assert held.level == max(one for at_s, one in seen if now_s - at_s < RELEASE_S)
        assert (held.tight_s is not None) == (held.level >= TIGHT)


@given(configs, histories)
def test_rungs_follow_the_level_in_force_and_always_recover(
    config: LadderConfig, history: list[tuple[Level, float]]
) -> None:
    lines: list[str] = []
    ladder, now_s = Ladder(config, log=lines.append), 0.0
    for level, pause_s in history:
        now_s += pause_s
        rungs = ladder.step(level, now_s)
        in_force = ladder.held.level
        assert in_force >= level
        assert rungs in (plan_for(in_force, config), plan_for(in_force, config, persisted=False))
    assert len(lines) == ladder.transitions <= 2 * len(history)
    assert ladder.step(OK, now_s + RELEASE_S) == plan_for(OK, config)
    assert PERSIST_S < POLL_S < RELEASE_S
