"""plan/rope: tables against the formulas written out pair by pair, scaling variants included."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pantheon.plan.rope import RopeSpec, Yarn, rope_table, yarn_ramp

N_CTX = 300


def naive(spec: RopeSpec, factors: list[float] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [N_CTX, n_rot/2], one pair at a time."""
    cos, sin = np.empty((N_CTX, spec.n_rot // 2)), np.empty((N_CTX, spec.n_rot // 2))
    for pos in range(N_CTX):
        for i in range(spec.n_rot // 2):
            plain = pos * math.pow(spec.base, -2 * i / spec.n_rot)
            if factors is not None:
                plain /= factors[i]
            theta, scale = spec.freq_scale * plain, spec.attn_factor
            if spec.yarn is not None:
                low, high = spec.yarn.low, spec.yarn.high
                ramp = 1 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
                theta = theta * (1 - ramp) + plain * ramp
                scale *= 1 + 0.1 * math.log(1 / spec.freq_scale)
            cos[pos, i], sin[pos, i] = math.cos(theta) * scale, math.sin(theta) * scale
    return cos, sin


FACTORS = [1.0, 1.5, 2.0, 2.5, 4.0, 8.0, 16.0, 32.0]


@pytest.mark.parametrize(
    ("spec", "factors"),
    [
        (RopeSpec(16, 10000.0, "norm"), None),
        (RopeSpec(64, 100000.0, "norm"), None),
        (RopeSpec(16, 1e6, "neox", freq_scale=1 / 8), None),
        (RopeSpec(16, 500000.0, "norm", factors="rope_freqs.weight"), FACTORS),
        (RopeSpec(16, 10000.0, "neox", attn_factor=1.19, factors="rope_factors_long.weight"), FACTORS),
        (RopeSpec(64, 10000.0, "norm", freq_scale=0.25, yarn=Yarn(8.0, 20.0)), None),
        (RopeSpec(64, 10000.0, "norm", freq_scale=0.25, attn_factor=0.9, yarn=Yarn(0.0, 31.0)), None),
        (RopeSpec(16, 10000.0, "neox", freq_scale=0.5, yarn=Yarn(3.0, 3.0)), None),
    ],
)
def test_tables_equal_the_formula(spec: RopeSpec, factors: list[float] | None) -> None:
    cos, sin = rope_table(spec, N_CTX, None if factors is None else np.array(factors, np.float32))
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (N_CTX, spec.n_rot // 2)
    want_cos, want_sin = naive(spec, factors)
    np.testing.assert_allclose(cos, want_cos, rtol=0, atol=2e-7 * spec.attn_factor * 2)
    np.testing.assert_allclose(sin, want_sin, rtol=0, atol=2e-7 * spec.attn_factor * 2)


def test_position_zero_does_not_turn() -> None:
    cos, sin = rope_table(RopeSpec(8, 10000.0, "norm"), 1)
    assert (cos == 1).all() and (sin == 0).all()


def test_far_positions_stay_exact() -> None:
    """float32 angles would be off by 1e-2 at position 100k."""
    _, sin = rope_table(RopeSpec(2, 10000.0, "norm"), 131072)
    assert abs(sin[131071, 0] - math.sin(131071)) < 1e-6


@pytest.mark.parametrize(
    ("n_rot", "base", "n_ctx_orig"), [(64, 10000.0, 4096), (128, 1e6, 32768), (96, 500000.0, 8192), (64, 10000.0, 64)]
)
def test_yarn_ramp_bounds(n_rot: int, base: float, n_ctx_orig: int) -> None:
    """low and high are the pair indices that turn 32 times and once over the trained context."""
    ramp = yarn_ramp(n_rot, base, n_ctx_orig)
    assert ramp.low >= 0 and ramp.high <= n_rot - 1

    def turns(i: float) -> float:
        return n_ctx_orig * base ** (-2 * i / n_rot) / (2 * math.pi)

    assert ramp.low == 0 or turns(ramp.low) >= 32 > turns(ramp.low + 1)
    assert ramp.high == n_rot - 1 or turns(ramp.high - 1) > 1 >= turns(ramp.high)


def test_yarn_ramp_of_a_known_model() -> None:
    """n_rot 128, base 10000, trained at 4096: 20.94 and 45.03 before rounding."""
    assert yarn_ramp(128, 10000.0, 4096) == Yarn(20.0, 46.0)


def test_yarn_keeps_fast_pairs_and_scales_slow_ones() -> None:
    spec = RopeSpec(64, 10000.0, "norm", freq_scale=0.25, yarn=Yarn(8.0, 20.0))
    plain, scaled = RopeSpec(64, 10000.0, "norm"), RopeSpec(64, 10000.0, "norm", freq_scale=0.25)
    mscale = 1 + 0.1 * math.log(4)
    got = rope_table(spec, 50)[0] / mscale
    np.testing.assert_allclose(got[:, :9], rope_table(plain, 50)[0][:, :9], atol=1e-6)
    np.testing.assert_allclose(got[:, 20:], rope_table(scaled, 50)[0][:, 20:], atol=1e-6)


def test_a_table_is_the_same_however_many_positions_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RopeSpec(16, 10000.0, "norm")
    whole = rope_table(spec, N_CTX)
    monkeypatch.setattr("pantheon.plan.rope._BLOCK", 7)
    for once, parts in zip(whole, rope_table(spec, N_CTX), strict=True):
        assert np.array_equal(once, parts)
