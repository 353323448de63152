"""Recurrent layers: a causal convolution and the gated delta rule, on state that lies behind the KV rows of a slot.

Both run over all columns of a forward one after the other, and are cut by channels and by values instead, which do not
meet: a delta rule's matrix is kept as [value_dim/16][key_dim][16], so that sixteen of its columns stay in the first
cache while the tokens pass.  So numbers never depend on chunks, neighbours or threads; the chunked form of the rule
(ARCH.md §4.8), made for matrix units, would not keep that, and saves little here.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import float32

from pantheon.accel.cpu import cache
from pantheon.accel.cpu.fields import (
    C_KV,
    C_RECURRENT,
    C_SLOT_BYTES,
    C_SLOTS,
    O_A,
    O_B,
    O_C,
    O_D,
    O_E,
    O_F,
    O_N,
    O_OUT,
    O_OUT_BYTES,
    O_VALUE,
    O_X,
    O_X_BYTES,
    O_Y,
    O_Y_BYTES,
    P_COLUMNS,
)  # fmt: skip
from pantheon.accel.cpu.vec import (
    add,
    div,
    exp,
    fma,
    hsum,
    ld_f32,
    ld_i32,
    ld_i64,
    load_f32,
    mul,
    splat,
    st_f32,
    store_f32,
    sub,
)  # fmt: skip


@cache.jit
def _state(row, ctx, column):  # type: ignore[no-untyped-def]
    """The layer's state of a column's slot; O_E: where the layer begins."""
    slot = ld_i32(ld_i64(ctx + C_SLOTS) + 4 * column)
    return ld_i64(ctx + C_KV) + slot * ld_i64(ctx + C_SLOT_BYTES) + ld_i64(ctx + C_RECURRENT) + ld_i64(row + O_E)


def _conv():  # type: ignore[no-untyped-def]
    @cache.kernel
    def conv(row, ctx, thread, g0, g1, phase):  # type: ignore[no-untyped-def]
        """Channels 16 g0 … of O_N; O_D taps at O_A, O_B bytes apart.  The past: [taps - 1][channels], oldest first."""
        channels, taps = ld_i64(row + O_N), ld_i64(row + O_D)
        weights, apart = ld_i64(row + O_A), ld_i64(row + O_B)
        one = splat(float32(1))
        # column by column, since a column's channels share pages that those of the next one do not
        for column in range(ld_i64(phase + P_COLUMNS)):
            state = _state(row, ctx, column)
            x0 = ld_i64(row + O_X) + column * ld_i64(row + O_X_BYTES)
            out = ld_i64(row + O_OUT) + column * ld_i64(row + O_OUT_BYTES)
            for g in range(g0, g1):
                at = 64 * g
                past, x = state + at, load_f32(x0 + at)
                total = mul(load_f32(weights + (taps - 1) * apart + at), x)
                for j in range(taps - 1):
                    total = fma(load_f32(weights + j * apart + at), load_f32(past + 4 * j * channels), total)
                for j in range(taps - 2):
                    store_f32(past + 4 * j * channels, load_f32(past + 4 * (j + 1) * channels))
                store_f32(past + 4 * (taps - 2) * channels, x)
                store_f32(out + at, div(total, add(one, exp(sub(splat(float32(0)), total)))))

    return conv


@cache.jit
def _unit(x, dim, eps, scale):  # type: ignore[no-untyped-def]
    """A head divided by sqrt(sum of squares + eps), times scale."""
    squares = splat(float32(0))
    for i in range(0, dim, 16):
        v = load_f32(x + 4 * i)
        squares = fma(v, v, squares)
    factor = splat(scale / np.sqrt(hsum(squares) + eps))
    for i in range(0, dim, 16):
        store_f32(x + 4 * i, mul(load_f32(x + 4 * i), factor))


def _gates():  # type: ignore[no-untyped-def]
    @cache.kernel
    def gates(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """q and k at O_X: O_B heads of O_N each; O_D betas at O_OUT and decays at O_Y; O_A and O_C: rate and bias."""
        dim, heads, eps = ld_i64(row + O_N), ld_i64(row + O_B), ld_f32(row + O_VALUE)
        x = ld_i64(row + O_X) + column * ld_i64(row + O_X_BYTES)
        for h in range(2 * heads):
            scale = float32(1) / np.sqrt(float32(dim)) if h < heads else float32(1)
            _unit(x + 4 * h * dim, dim, eps, scale)
        beta = ld_i64(row + O_OUT) + column * ld_i64(row + O_OUT_BYTES)
        decay = ld_i64(row + O_Y) + column * ld_i64(row + O_Y_BYTES)
        for h in range(ld_i64(row + O_D)):
            st_f32(beta + 4 * h, float32(1) / (float32(1) + np.exp(-ld_f32(beta + 4 * h))))
            step = ld_f32(decay + 4 * h) + ld_f32(ld_i64(row + O_C) + 4 * h)
            if step < float32(20):
                step = np.log(float32(1) + np.exp(step))
            st_f32(decay + 4 * h, np.exp(ld_f32(ld_i64(row + O_A) + 4 * h) * step))

    return gates


def _rule():  # type: ignore[no-untyped-def]
    @cache.kernel
    def rule(row, ctx, thread, g0, g1, phase):  # type: ignore[no-untyped-def]
        """Sixteen values of a head for each g; O_N: key dim, O_D: value dim, O_B key heads, O_C and O_Y: betas and
        decays, O_F: where the matrices begin behind the layer's past inputs."""
        dim, wide, keys = ld_i64(row + O_N), ld_i64(row + O_D), ld_i64(row + O_B)
        for g in range(g0, g1):
            head, at = g * 16 // wide, g * 16 % wide
            for column in range(ld_i64(phase + P_COLUMNS)):
                s = _state(row, ctx, column) + ld_i64(row + O_F) + 64 * g * dim
                x = ld_i64(row + O_X) + column * ld_i64(row + O_X_BYTES)
                q = x + 4 * (head % keys) * dim
                k, v = q + 4 * keys * dim, x + 4 * (2 * keys * dim + head * wide + at)
                stride = column * ld_i64(row + O_Y_BYTES) + 4 * head
                beta, decay = ld_f32(ld_i64(row + O_C) + stride), splat(ld_f32(ld_i64(row + O_Y) + stride))
                out = ld_i64(row + O_OUT) + column * ld_i64(row + O_OUT_BYTES) + 4 * (head * wide + at)
                store_f32(out, _step(s, q, k, load_f32(v), beta, decay, dim))

    return rule


@cache.jit
def _step(s, q, k, v, beta, decay, dim):  # type: ignore[no-untyped-def]
    """One token: s [dim, 16] decays, learns and answers.  Four sums each, since one would wait for itself."""
    zero = splat(float32(0))
    a, b, c, d = zero, zero, zero, zero
    for i in range(0, dim, 4):
        a = fma(mul(load_f32(s + 64 * i), decay), splat(ld_f32(k + 4 * i)), a)
        b = fma(mul(load_f32(s + 64 * i + 64), decay), splat(ld_f32(k + 4 * i + 4)), b)
        c = fma(mul(load_f32(s + 64 * i + 128), decay), splat(ld_f32(k + 4 * i + 8)), c)
        d = fma(mul(load_f32(s + 64 * i + 192), decay), splat(ld_f32(k + 4 * i + 12)), d)
    delta = mul(sub(v, add(add(a, b), add(c, d))), splat(beta))
    a, b, c, d = zero, zero, zero, zero
    for i in range(0, dim, 4):
        n0 = fma(delta, splat(ld_f32(k + 4 * i)), mul(load_f32(s + 64 * i), decay))
        n1 = fma(delta, splat(ld_f32(k + 4 * i + 4)), mul(load_f32(s + 64 * i + 64), decay))
        n2 = fma(delta, splat(ld_f32(k + 4 * i + 8)), mul(load_f32(s + 64 * i + 128), decay))
        n3 = fma(delta, splat(ld_f32(k + 4 * i + 12)), mul(load_f32(s + 64 * i + 192), decay))
        store_f32(s + 64 * i, n0)
        store_f32(s + 64 * i + 64, n1)
        store_f32(s + 64 * i + 128, n2)
        store_f32(s + 64 * i + 192, n3)
        a = fma(n0, splat(ld_f32(q + 4 * i)), a)
        b = fma(n1, splat(ld_f32(q + 4 * i + 4)), b)
        c = fma(n2, splat(ld_f32(q + 4 * i + 8)), c)
        d = fma(n3, splat(ld_f32(q + 4 * i + 12)), d)
    return add(add(a, b), add(c, d))


_MAKERS = {"conv": _conv, "gates": _gates, "rule": _rule}


@functools.cache
def kernel(name: str) -> int:
    """The address of one of these kernels."""
    made: int = _MAKERS[name]()
    return made
