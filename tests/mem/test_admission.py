"""Turns and loads against bytes, in the order of the spec [M189-M198, X16, X21, X31]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pantheon.mem.admission import MIN_WINDOW, Decision, Verdict, admit_load, admit_turn, largest_prompt
from pantheon.mem.costs import REPLY_TOKENS, LoadCosts, TurnCosts
from pantheon.mem.mem_state import DieState, HostState, Level, MemState
from pantheon.mem.pressure import level_of_bytes

GIB, MIB = 1 << 30, 1 << 20
COSTS = TurnCosts(kv_bytes_per_token=1000, column_bytes=100, max_columns=128)


def host(slack: int, reserve: int = GIB, **fields: Any) -> MemState:
    """A watched host with so much above its reserve."""
    available = reserve + slack
    level = level_of_bytes(available, reserve)
    return MemState(
        HostState(8 * GIB, available, reserve_bytes=reserve, level=level, level_bytes=level, **fields), alive=True
    )


def ask(state: MemState, prompt: int, costs: TurnCosts = COSTS, **options: Any) -> Decision:
    return admit_turn(costs, state, **{"prompt_tokens": prompt, "max_tokens": 100, "n_ctx": 8192, **options})


# ---- turns ------------------------------------------------------------------------------------------------------


def test_m189_a_sustained_stall_refuses_whatever_the_bytes_say() -> None:
    found = ask(host(6 * GIB, psi_full_avg10=20.0), 10)
    assert (found.verdict, found.status, found.code) == (Verdict.REJECT, 503, "memory_critical")
    assert found.reason == "sustained memory stall - retry"
    assert ask(host(6 * GIB, psi_full_avg10=14.9), 10).verdict is Verdict.ADMIT
    assert ask(host(6 * GIB, psi_full_avg10=6.0), 10, psi_full_reject=5).verdict is Verdict.REJECT


@pytest.mark.parametrize("slack", [0, -1, -GIB])
def test_m190_k07_a_reserve_that_is_touched_refuses_even_what_costs_the_host_nothing(slack: int) -> None:
    for costs in (COSTS, replace(COSTS, on_die=True)):
        found = ask(host(slack), 10, costs)
        assert (found.verdict, found.status, found.have_bytes) == (Verdict.REJECT, 503, 0)


def test_m190_m195_a_turn_on_a_die_costs_the_host_nothing() -> None:
    costs = replace(COSTS, on_die=True, kv_bytes_per_token=1 << 40)
    found = ask(host(1), 8000, costs)
    assert (found.verdict, found.need_bytes, found.n_ctx) == (Verdict.ADMIT, 0, 8192)
    capped = ask(host(1), 8000, costs, cap_allowed=True, window=4096)
    assert capped.verdict is Verdict.CAP and capped.fit_tokens < 4096


def test_m191_m192_the_turn_must_fit_into_what_is_above_the_reserve() -> None:
    need = 1000 * (2000 + 100) + 100 * 128
    assert ask(host(need), 2000).verdict is Verdict.ADMIT
    found = ask(host(need - 1), 2000)
    assert (found.verdict, found.status, found.code) == (Verdict.REJECT, 503, "memory_critical")
    assert (found.have_bytes, found.need_bytes, found.reserve_bytes) == (need - 1, need, GIB), "M202: the numbers"
    assert found.fit_tokens == 1999


def test_m191_a_die_that_has_less_than_the_host_binds() -> None:
    state = replace(host(GIB), dies={3: DieState(3, 100 * MIB, 10 * MIB, budget_bytes=100 * MIB)})
    found = ask(state, 8000, replace(COSTS, kv_bytes_per_token=2000), dies=(3,))
    assert (found.verdict, found.have_bytes, found.reserve_bytes) == (Verdict.REJECT, 10 * MIB, 0)
    assert "die 3" in found.reason
    assert ask(state, 8000, dies=(4,)).verdict is Verdict.ADMIT


def test_m193_activations_are_bounded_by_the_chunk() -> None:
    assert [COSTS.activation_bytes(n) for n in (0, 1, 128, 129, 10**6)] == [0, 100, 12800, 12800, 12800]
    assert replace(COSTS, resident_columns=100).activation_bytes(128) == 2800


def test_what_is_resident_already_is_not_paid_twice() -> None:
    warm = replace(COSTS, resident_tokens=1900, resident_columns=128)
    assert warm.bytes_for(2000, 100) == 1000 * 200
    assert warm.bytes_for(100, 0) == 0


def test_a_long_answer_is_charged_in_part_because_most_end_early() -> None:
    assert ask(host(GIB), 10, max_tokens=None).need_bytes == ask(host(GIB), 10, max_tokens=10**9).need_bytes
    assert ask(host(GIB), 10, max_tokens=None).need_bytes == COSTS.bytes_for(10, REPLY_TOKENS)
    assert ask(host(GIB), 8190, max_tokens=None).need_bytes == COSTS.bytes_for(8190, 2)


def test_x21_a_prompt_beyond_the_context_is_a_400_by_default_and_cut_when_allowed() -> None:
    found = ask(host(6 * GIB), 8192)
    assert (found.verdict, found.status, found.code) == (Verdict.REJECT, 400, "context_length_exceeded")
    assert (found.n_ctx, found.fit_tokens) == (8192, 8191)
    found = ask(host(6 * GIB), 8192, cap_allowed=True)
    assert (found.verdict, found.status, found.reason) == (Verdict.CAP, 200, "context")
    assert found.fit_tokens == 8192 - 100, "the answer has its room"


def test_x21_memory_caps_only_where_that_is_allowed() -> None:
    state = host(1000 * 1000)
    assert ask(state, 4000).status == 503
    found = ask(state, 4000, cap_allowed=True)
    assert (found.verdict, found.reason) == (Verdict.CAP, "memory")
    assert COSTS.bytes_for(found.fit_tokens, 100) <= found.have_bytes


def test_x21_what_would_be_cut_to_nothing_is_refused() -> None:
    state = host(1000 * (100 + MIN_WINDOW - 1))
    assert ask(state, 4000, cap_allowed=True).verdict is Verdict.REJECT


def test_k08_what_could_never_fit_is_a_400_because_asking_again_would_not_help() -> None:
    found = ask(host(6 * GIB), 8000, replace(COSTS, kv_bytes_per_token=MIB))
    assert (found.status, found.code) == (400, "context_length_exceeded") and "never" in found.reason
    found = ask(host(GIB), 5000, replace(COSTS, kv_bytes_per_token=MIB))
    assert found.status == 503, "an idle machine would have room"


def test_m102_x18_the_window_of_a_tight_host_cuts_only_what_may_be_cut() -> None:
    tight = host(GIB // 8)
    assert tight.level is Level.TIGHT
    assert ask(tight, 6000, window=4096).verdict is Verdict.ADMIT
    found = ask(tight, 6000, window=4096, cap_allowed=True)
    assert (found.verdict, found.n_ctx, found.fit_tokens) == (Verdict.CAP, 4096, 4096 - 100)
    assert ask(tight, 3000, window=4096, cap_allowed=True).verdict is Verdict.ADMIT


def test_m199_nothing_is_refused_for_memory_that_nobody_watches() -> None:
    blind = replace(host(-GIB, psi_full_avg10=99.0), alive=False)
    assert ask(blind, 8000, replace(COSTS, kv_bytes_per_token=1 << 40)).verdict is Verdict.ADMIT
    assert ask(blind, 9000).status == 400, "the context is no matter of memory"


tokens = st.integers(1, 1 << 18)
costs = st.builds(
    TurnCosts,
    kv_bytes_per_token=st.integers(0, 1 << 20),
    column_bytes=st.integers(0, 1 << 16),
    max_columns=st.integers(1, 512),
    state_bytes=st.integers(0, 1 << 24),
    resident_tokens=st.integers(0, 1 << 14),
    resident_columns=st.integers(0, 512),
    on_die=st.booleans(),
)
states = st.builds(
    lambda slack, reserve, full, alive: replace(host(slack, reserve, psi_full_avg10=full), alive=alive),
    st.integers(-(1 << 34), 1 << 36), st.integers(0, 1 << 34), st.sampled_from([0.0, 1.0, 15.0]), st.booleans(),
)  # fmt: skip


@given(costs, st.integers(0, 1 << 36), st.integers(1, 1 << 18), st.integers(0, 4096))
def test_m191_the_window_found_is_the_largest_that_fits(costs: TurnCosts, have: int, limit: int, reply: int) -> None:
    found = largest_prompt(costs, have, limit, reply)

    def need(n: int) -> int:
        return costs.bytes_for(n, min(reply, max(1, limit - n)))

    assert 0 <= found < limit or (found, limit) == (0, 1)
    if found:
        assert need(found) <= have
    if found < limit - 1:
        assert need(found + 1) > have or costs.bytes_for(found + 1, reply) > have


@given(costs, states, tokens, st.none() | st.integers(0, 1 << 20), st.integers(2, 1 << 18), st.booleans(), tokens)
def test_every_decision_keeps_its_promises(
    costs: TurnCosts, state: MemState, prompt: int, max_tokens: int | None, n_ctx: int, cap: bool, window: int
) -> None:
    found = admit_turn(
        costs, state, prompt_tokens=prompt, max_tokens=max_tokens, n_ctx=n_ctx, cap_allowed=cap, window=window
    )
    assert found.status in (200, 400, 503) and found.admitted == (found.status == 200)
    assert min(found.have_bytes, found.need_bytes, found.reserve_bytes, found.fit_tokens) >= 0
    if found.verdict is Verdict.ADMIT:
        assert prompt < n_ctx
        assert not state.alive or found.need_bytes <= found.have_bytes
    elif found.verdict is Verdict.CAP:
        assert cap and MIN_WINDOW <= found.fit_tokens < min(prompt, found.n_ctx)
        assert not state.alive or costs.bytes_for(found.fit_tokens, 1) <= found.have_bytes
    elif found.status == 503:
        assert state.alive and found.code == "memory_critical"
    else:
        assert found.code == "context_length_exceeded"


@given(costs, states, tokens, st.integers(0, 1 << 34))
def test_more_memory_never_turns_an_admission_into_a_refusal(
    costs: TurnCosts, state: MemState, prompt: int, more: int
) -> None:
    first = ask(state, prompt, costs, n_ctx=1 << 18)
    available = state.host.available_bytes + more
    level = level_of_bytes(available, state.host.reserve_bytes)
    richer = replace(state, host=replace(state.host, available_bytes=available, level=level, level_bytes=level))
    assert ask(richer, prompt, costs, n_ctx=1 << 18).admitted >= first.admitted


# ---- loads ------------------------------------------------------------------------------------------------------

LOAD = LoadCosts(weights_bytes=500 * MIB, kv_bytes_per_token=10_000, scratch_bytes=20 * MIB, table_bytes_per_token=240)


def test_m196_weights_scratch_and_a_full_context_must_fit() -> None:
    need = 520 * MIB + 10_240 * 8192
    found = admit_load(LOAD, host(need).host, want_ctx=8192)
    assert (found.fits, found.need_bytes, found.have_bytes, found.largest_ctx) == (True, need, need, 8192)
    found = admit_load(LOAD, host(need - 1).host, want_ctx=8192)
    assert (found.fits, found.largest_ctx, found.reserve_bytes, found.where) == (False, 8191, GIB, "the host")


def test_m198_m168_a_load_spike_that_does_not_fit_refuses_with_the_numbers() -> None:
    """3 GiB available, 1 GiB reserve: 2.4 GiB have no room, however small the model."""
    spike = 2_576_980_378
    found = admit_load(LoadCosts(MIB, spike_bytes=spike), host(2 * GIB).host, want_ctx=512)
    assert (found.fits, found.largest_ctx) == (False, 0)
    assert (found.have_bytes, found.need_bytes, found.reserve_bytes) == (2 * GIB, MIB + spike, GIB)
    assert admit_load(LoadCosts(MIB, spike_bytes=spike), host(3 * GIB).host, want_ctx=512).fits


def test_the_spike_is_over_before_the_context_fills() -> None:
    costs = replace(LOAD, spike_bytes=80 * MIB)
    assert admit_load(costs, host(LOAD.bytes_for(8192)).host, want_ctx=8192).fits


def test_x31_the_largest_context_that_fits_is_reported() -> None:
    found = admit_load(LOAD, host(520 * MIB + 10_240 * 1000 + 5).host, want_ctx=32768)
    assert (found.fits, found.largest_ctx) == (False, 1000)
    assert admit_load(LOAD, host(519 * MIB).host, want_ctx=32768).largest_ctx == 0


def test_m197_every_die_must_hold_its_share_and_the_one_that_misses_most_is_named() -> None:
    share = LoadCosts(100 * MIB, 5000, 1 * MIB)
    good = DieState(0, GIB, GIB, budget_bytes=GIB)
    small = DieState(1, 128 * MIB, 128 * MIB, budget_bytes=120 * MIB)
    found = admit_load(LoadCosts(0), host(GIB).host, [(share, good), (share, small)], want_ctx=8192)
    assert (found.fits, found.where, found.have_bytes, found.reserve_bytes) == (False, "die 1", 120 * MIB, 8 * MIB)
    assert found.largest_ctx == (120 * MIB - 101 * MIB) // 5000
    assert admit_load(LoadCosts(0), host(GIB).host, [(share, good)], want_ctx=8192).fits


def test_m196_x32_the_reserve_of_a_die_and_what_others_took_are_not_free() -> None:
    share = LoadCosts(100 * MIB)
    die = DieState(0, 2 * GIB, 150 * MIB + GIB, budget_bytes=GIB)
    assert admit_load(LoadCosts(0), host(GIB).host, [(share, die)], want_ctx=1).fits
    taken = replace(die, free_bytes=50 * MIB + GIB)
    assert not admit_load(LoadCosts(0), host(GIB).host, [(share, taken)], want_ctx=1).fits
    resident = replace(die, resident_bytes=950 * MIB)
    assert not admit_load(LoadCosts(0), host(GIB).host, [(share, resident)], want_ctx=1).fits


def test_m199_a_load_is_not_refused_for_memory_that_nobody_watches() -> None:
    assert admit_load(LOAD, HostState(0, 0), want_ctx=8192, watched=False).fits


loads = st.builds(
    LoadCosts,
    weights_bytes=st.integers(0, 1 << 36),
    kv_bytes_per_token=st.integers(0, 1 << 20),
    scratch_bytes=st.integers(0, 1 << 28),
    table_bytes_per_token=st.integers(0, 4096),
    n_slots=st.integers(1, 8),
    spike_bytes=st.integers(0, 1 << 32),
)


@given(loads, st.integers(-(1 << 30), 1 << 38), st.integers(1, 1 << 20))
def test_x31_the_largest_context_fits_and_one_more_does_not(need: LoadCosts, slack: int, want: int) -> None:
    state = host(slack).host
    found = admit_load(need, state, want_ctx=want)
    assert found.fits == (found.need_bytes <= found.have_bytes) and 0 <= found.largest_ctx <= want
    if found.fits:
        assert found.largest_ctx == want
    else:
        assert found.largest_ctx < want
        assert not admit_load(need, state, want_ctx=found.largest_ctx + 1).fits
    if found.largest_ctx:
        assert admit_load(need, state, want_ctx=found.largest_ctx).fits
