"""Naive NumPy twins of the kernels, written from the op vocabulary and not from the kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pantheon.plan.state_spec import KVType

A = NDArray[np.float64]

BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}  # fmt: skip
#: where the f16 scales of a block lie
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip


def random_blocks(rng: np.random.Generator, type_name: str, rows: int, cols: int) -> NDArray[np.uint8]:
    """Any bytes are a valid block; only the f16 scales are chosen, some negative or denormal."""
    values, nbytes = BLOCKS[type_name]
    raw = rng.integers(0, 256, (rows, cols // values, nbytes), dtype=np.uint8)
    for at in SCALES[type_name]:
        scale = rng.uniform(-0.02, 0.02, raw.shape[:2])
        scale[rng.random(scale.shape) < 0.05] *= 1e-4
        raw[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return raw


def int8_blocks(x: NDArray[np.floating]) -> A:
    """What int8 activations in blocks of 32 with one scale leave of x [n, k]."""
    blocks = x.astype(np.float32).reshape(len(x), -1, 32)
    top = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(top > 0, np.rint(blocks * (np.float32(127) / top)), 0)
    return (q.astype(np.float64) * (top * np.float32(1 / 127)).astype(np.float64)).reshape(x.shape)


def rms_norm(x: A, weight: A, eps: float, groups: int) -> A:
    parts = x.reshape(len(x), groups, -1)
    out = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps) * weight
    return out.reshape(x.shape)


def rope(x: A, heads: int, n_rot: int, base: float, pairing: str, positions: NDArray[np.integer]) -> A:
    out = x.reshape(len(x), heads, -1).copy()
    for c, position in enumerate(positions):
        for i in range(n_rot // 2):
            angle = position * base ** (-2 * i / n_rot)
            a, b = (2 * i, 2 * i + 1) if pairing == "norm" else (i, i + n_rot // 2)
            u, v = out[c, :, a].copy(), out[c, :, b].copy()
            out[c, :, a] = u * np.cos(angle) - v * np.sin(angle)
            out[c, :, b] = u * np.sin(angle) + v * np.cos(angle)
    return out.reshape(x.shape)


def gate(x: A, up: A, act: str) -> A:
    if act == "silu":
        return x / (1 + np.exp(-x)) * up
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) * up


def cached(x: A, kv_type: KVType) -> A:
    """Rows [..., dim] as a cache of this format gives them back."""
    if kv_type not in (KVType.Q8_0, KVType.Q4_0):
        return x.astype(np.float16 if kv_type is KVType.F16 else np.float32)
    out = np.zeros(x.shape)
    for at in np.ndindex(x.shape[:-1]):
        for first in range(0, x.shape[-1], 32):
            block = x[at][first : first + 32].astype(np.float32)
            out[at][first : first + 32] = (_int8 if kv_type is KVType.Q8_0 else _int4)(block)
    return out


def _int8(block: NDArray[np.float32]) -> A:
    scale = np.float32(np.float16(np.abs(block).max() * np.float32(1 / 127)))
    quants = np.clip(np.rint(block * (np.float32(1) / scale)), -127, 127) if scale else 0 * block
    return quants * np.float64(scale)


def _int4(block: NDArray[np.float32]) -> A:
    """-8 is the value of the largest magnitude, whatever its sign."""
    scale = np.float32(np.float16(block[np.abs(block).argmax()] / np.float32(-8)))
    quants = np.clip(np.floor(block * (np.float32(1) / scale) + np.float32(8.5)), 0, 15) - 8 if scale else 0 * block
    return quants * np.float64(scale)


def attention(q: A, k: A, v: A, kv_heads: int, scale: float, window: int = 0) -> A:
    """One conversation from position 0: q [n, heads, dim], k and v [n, kv_heads, dim]; returns [n, heads, dim]."""
    out = np.zeros_like(q)
    group = q.shape[1] // kv_heads
    for c in range(len(q)):
        first = max(0, c + 1 - window) if window else 0
        for h in range(q.shape[1]):
            scores = k[first : c + 1, h // group] @ q[c, h] * scale
            weights = np.exp(scores - scores.max())
            out[c, h] = weights / weights.sum() @ v[first : c + 1, h // group]
    return out
