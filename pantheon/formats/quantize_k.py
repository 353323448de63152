"""NumPy quantisers of two K types, Q4_K and Q6_K: float32 [n, 256] -> blocks.

Block layouts are ggml's.  Scales are searched as ggml's reference quantisers do: some tries around the largest value,
each solved for the least squares, weighted by size; the best is kept.  For tools: no model is quantised to serve it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
#: how far around the plain scale the tries go, in steps of 0.1 codes; ggml tries each step, which gains 0.1 % of error
_Q6_TRIES = range(-8, 9, 4)
_Q4_TRIES = range(0, 21, 2)


def q6_k(blocks: F32) -> U8:
    """128 bytes of low nibbles, 64 of upper bits, 16 int8 scales, f16 d; x = d * scale * (q - 32)."""
    parts = blocks.reshape(-1, 16, 16)
    scales = _symmetric_scales(parts)
    most = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)
    d = (most / np.float32(-128)).astype(np.float16)
    codes = np.rint(_divide(scales, d.astype(np.float32))).clip(-128, 127)
    step = (d.astype(np.float32) * codes)[:, :, None]
    q = (np.rint(_divide(parts, step)).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15) | ((q[:, :, 2:] & 15) << 4)
    high = (q[:, :, 0] >> 4) | ((q[:, :, 1] >> 4) << 2) | ((q[:, :, 2] >> 4) << 4) | ((q[:, :, 3] >> 4) << 6)
    n = len(blocks)
    planes = [low.reshape(n, 128), high.reshape(n, 64), codes.astype(np.int8).view(np.uint8), d.view(np.uint8)]
    return np.concatenate(planes, axis=1)


def q4_k(blocks: F32) -> U8:
    """f16 d, f16 dmin, 12 bytes of 6-bit scales and mins, 128 bytes of nibbles; x = d * scale * q - dmin * min."""
    parts = blocks.reshape(-1, 8, 32)
    scales, mins = _affine_scales(parts)
    d, least = ((top.max(axis=1, keepdims=True) / 63).astype(np.float16) for top in (scales, mins))
    codes, lows = (
        np.rint(_divide(values, top.astype(np.float32))).clip(0, 63).astype(np.uint8)
        for values, top in ((scales, d), (mins, least))
    )
    step = (d.astype(np.float32) * codes)[:, :, None]
    base = (least.astype(np.float32) * lows)[:, :, None]
    q = np.rint(_divide(parts + base, step)).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = np.empty((len(blocks), 12), np.uint8)
    packed[:, 0:4] = codes[:, :4] | ((codes[:, 4:] >> 4) << 6)
    packed[:, 4:8] = lows[:, :4] | ((lows[:, 4:] >> 4) << 6)
    packed[:, 8:12] = (codes[:, 4:] & 15) | ((lows[:, 4:] & 15) << 4)
    nibbles = (q[:, :, 0] | (q[:, :, 1] << 4)).reshape(-1, 128)
    return np.concatenate([d.view(np.uint8), least.view(np.uint8), packed, nibbles], axis=1)


def _divide(a: F32, b: F32) -> F32:
    """a / b, 0 where b is."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def _symmetric_scales(parts: F32) -> F32:
    """[n, 16]: for each part the scale whose codes -32 … 31 lose least, weighted by x²."""
    largest = np.take_along_axis(parts, np.abs(parts).argmax(axis=2)[:, :, None], axis=2)
    weight = parts * parts
    best = np.full(parts.shape[:2], -1, np.float32)
    scales = np.zeros(parts.shape[:2], np.float32)
    for shift in _Q6_TRIES:
        codes = np.rint(_divide(np.float32(-(32 + 0.1 * shift)) * parts, largest)).clip(-32, 31)
        weighted = weight * codes
        along, square = (weighted * parts).sum(axis=2), (weighted * codes).sum(axis=2)
        gain = _divide(along * along, square)
        better = gain > best
        scales[better], best[better] = _divide(along, square)[better], gain[better]
    return scales


def _affine_scales(parts: F32) -> tuple[F32, F32]:
    """[n, 8] scales and mins, none below 0: x ~ scale * q - min, q of 0 … 15, weighted by |x| and the part's size."""
    low, high = np.minimum(parts.min(axis=2), 0), parts.max(axis=2)
    span = (high - low)[:, :, None]
    weight = np.sqrt((parts * parts).mean(axis=2, keepdims=True)) + np.abs(parts)
    total, sum_x = weight.sum(axis=2), (weight * parts).sum(axis=2)
    sum_xx = (weight * parts * parts).sum(axis=2)
    scales, mins = span[:, :, 0] / 15, -low
    best = np.full(low.shape, np.inf, np.float32)
    for attempt in _Q4_TRIES:
        codes = np.rint(_divide(np.float32(14 + 0.1 * attempt) * (parts - low[:, :, None]), span)).clip(0, 15)
        weighted = weight * codes
        sum_q, sum_qq, sum_qx = weighted.sum(axis=2), (weighted * codes).sum(axis=2), (weighted * parts).sum(axis=2)
        scale, base = _fit(total, sum_q, sum_qq, sum_x, sum_qx)
        # the weighted error of x - scale q - base, from the sums
        lost = sum_xx + scale * scale * sum_qq + base * base * total
        lost += 2 * (scale * base * sum_q - scale * sum_qx - base * sum_x)
        better = (lost < best) & (scale > 0)
        scales, mins, best = (np.where(better, new, old) for new, old in ((scale, scales), (-base, mins), (lost, best)))
    return scales.astype(np.float32), np.maximum(mins, 0).astype(np.float32)


def _fit(n: F32, q: F32, qq: F32, x: F32, qx: F32) -> tuple[F32, F32]:
    """Least squares of x ~ scale q + base with base <= 0, from weighted sums."""
    scale = _divide(n * qx - q * x, n * qq - q * q)
    base = _divide(x - scale * q, n)
    above = base > 0
    return np.where(above, _divide(qx, qq), scale), np.where(above, np.float32(0), base)
