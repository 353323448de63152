"""Rotary position tables: which angles a plan rotates by.  Facts: ARCH.md §3 of the reference material.

theta(pos, i) = pos * base^(-2i/n_rot), divided by the factor tensor where there is one, times the linear scale;
YaRN (Peng et al. 2023) blends the scaled and the plain angle over a ramp of the pair index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

#: positions that are computed at once
_BLOCK = 4096


@dataclass(frozen=True)
class Yarn:
    """The ramp of YaRN: below `low` plain angles, above `high` scaled ones (pair indices)."""

    low: float
    high: float


@dataclass(frozen=True)
class RopeSpec:
    """One rope table.  `pairing`: "norm" rotates (x[2i], x[2i+1]), "neox" rotates (x[i], x[i + n_rot/2]).

    `factors` names a tensor of n_rot/2 divisors; `attn_factor` multiplies both cos and sin.  A longrope model has
    `long_factors` as well: they hold for the whole of a context of more than `n_ctx_short` positions (ARCH.md §3).
    """

    n_rot: int
    base: float
    pairing: Literal["norm", "neox"]
    freq_scale: float = 1.0
    attn_factor: float = 1.0
    factors: str | None = None
    yarn: Yarn | None = None
    long_factors: str | None = None
    n_ctx_short: int = 0
    #: pairs that are not rotated
    still: tuple[int, ...] = ()

    def factors_at(self, n_ctx: int) -> str | None:
        """The tensor of divisors for a configured context; it never changes within a conversation."""
        return self.long_factors if self.long_factors is not None and n_ctx > self.n_ctx_short else self.factors


def yarn_ramp(n_rot: int, base: float, n_ctx_orig: int, beta_fast: float = 32.0, beta_slow: float = 1.0) -> Yarn:
    """The ramp bounds for a model trained at n_ctx_orig tokens."""

    def corr(beta: float) -> float:
        return n_rot * math.log(n_ctx_orig / (2 * math.pi * beta)) / (2 * math.log(base))

    return Yarn(max(0.0, math.floor(corr(beta_fast))), min(n_rot - 1.0, math.ceil(corr(beta_slow))))


def rope_table(
    spec: RopeSpec, n_ctx: int, factors: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(cos, sin), each float32 [n_ctx, n_rot/2]; `factors` are the values of the tensor that
    `spec.factors_at` names."""
    i = np.arange(spec.n_rot // 2, dtype=np.float64)
    freq = spec.base ** (-2.0 * i / spec.n_rot)
    if factors is not None:
        freq = freq / factors.astype(np.float64)
    scaled = freq * spec.freq_scale
    if spec.yarn is not None:
        span = max(0.001, spec.yarn.high - spec.yarn.low)
        ramp = 1.0 - np.clip((i - spec.yarn.low) / span, 0.0, 1.0)
        scaled = scaled * (1.0 - ramp) + freq * ramp
    scaled[list(spec.still)] = 0.0
    mscale = spec.attn_factor * (1.0 + 0.1 * math.log(1.0 / spec.freq_scale) if spec.yarn is not None else 1.0)
    cos = np.empty((n_ctx, len(i)), np.float32)
    sin = np.empty_like(cos)
    for first in range(0, n_ctx, _BLOCK):
        # float64 angles of a part at a time: all of a long context at once would cost many times the table
        theta = np.arange(first, min(first + _BLOCK, n_ctx), dtype=np.float64)[:, None] * scaled
        cos[first : first + _BLOCK] = np.cos(theta) * mscale
        sin[first : first + _BLOCK] = np.sin(theta) * mscale
    return cos, sin
