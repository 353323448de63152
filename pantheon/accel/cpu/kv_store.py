"""Writes keys and values of a forward's columns into the cache, in the layout of `kv`."""

from __future__ import annotations

import functools

from numba import float32

from pantheon.accel.cpu import cache
from pantheon.accel.cpu.fields import (
    C_BLOCK_BYTES,
    C_KV,
    C_POSITIONS,
    C_SCRATCH,
    C_SCRATCH_BYTES,
    C_SLOT_BYTES,
    C_SLOTS,
    O_A,
    O_B,
    O_D,
    O_F,
    O_N,
    O_X,
    O_X_BYTES,
    O_Y,
    O_Y_BYTES,
)  # fmt: skip
from pantheon.accel.cpu.kv import BLOCK, WIDTH
from pantheon.accel.cpu.vec import (
    hmax,
    ld_f16,
    ld_f32,
    ld_i32,
    ld_i64,
    ld_u8,
    ld_u16,
    load_f32,
    mul,
    splat,
    st_f32,
    st_u8,
    st_u16,
    store_f16,
    store_f32,
    store_i8_sum,
    vabs,
    vmax,
    vmin,
)  # fmt: skip


@cache.jit
def _quantise(row, dim, scales):  # type: ignore[no-untyped-def]
    """Floats at row become int8 in place, padded with zeros to blocks of 32; a half for each at scales, BLOCK apart."""
    most, least = splat(float32(127)), splat(float32(-127))
    for block in range((dim + 31) // 32):
        v0, v1 = load_f32(row + 128 * block), load_f32(row + 128 * block + 64)
        top = hmax(vmax(vabs(v0), vabs(v1)))
        store_f16(row + 32 * block, splat(top * float32(1.0 / 127.0)))
        st_u16(scales + 2 * BLOCK * block, ld_u16(row + 32 * block))
        d = ld_f16(row + 32 * block)  # what a reader will see
        inverse = splat(float32(1) / d if d > float32(0) else float32(0))
        store_i8_sum(row + 32 * block, vmax(vmin(mul(v0, inverse), most), least))
        store_i8_sum(row + 32 * block + 16, vmax(vmin(mul(v1, inverse), most), least))


@cache.jit
def _quantise_4(row, dim, scales):  # type: ignore[no-untyped-def]
    """Floats at row become 8 + int4, a byte each, padded as above: the largest magnitude becomes -8."""
    for block in range((dim + 31) // 32):
        x0, top = row + 128 * block, float32(0)
        v0 = load_f32(x0)
        for d in range(32):
            x = ld_f32(x0 + 4 * d)
            top = x if abs(x) > abs(top) else top
        store_f16(row + 32 * block, splat(top * float32(-0.125)))
        st_u16(scales + 2 * BLOCK * block, ld_u16(row + 32 * block))
        d16 = ld_f16(row + 32 * block)
        if block == 0:  # the halves lay where it begins
            store_f32(x0, v0)
        inverse = float32(1) / d16 if d16 != float32(0) else float32(0)
        for d in range(32):
            x = ld_f32(x0 + 4 * d) * inverse
            st_u8(row + 32 * block + d, int(min(max(x + float32(8.5), float32(0)), float32(15))))


def _make_convert(FMT):  # type: ignore[no-untyped-def]
    @cache.jit
    def convert(x, row, dim, scales):  # type: ignore[no-untyped-def]
        """dim floats at x as the format has them at row, padded with zeros to 32."""
        for d in range(dim):
            st_f32(row + 4 * d, ld_f32(x + 4 * d))
        for d in range(dim, (dim + 31) // 32 * 32):
            st_f32(row + 4 * d, float32(0))
        if FMT == 1:
            for d in range(0, dim, 16):
                store_f16(row + 2 * d, load_f32(row + 4 * d))
        if FMT == 2:
            _quantise(row, dim, scales)
        if FMT == 3:
            _quantise_4(row, dim, scales)

    return convert


def _make_store(FMT):  # type: ignore[no-untyped-def]
    STEP = WIDTH[FMT]
    convert = _make_convert(FMT)

    @cache.kernel
    def store_kv(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        """O_X: k, O_Y: v."""
        dim, tmp = ld_i64(row + O_N), ld_i64(ctx + C_SCRATCH) + thread * ld_i64(ctx + C_SCRATCH_BYTES)
        slot = ld_i32(ld_i64(ctx + C_SLOTS) + 4 * column)
        position = ld_i32(ld_i64(ctx + C_POSITIONS) + 4 * column)
        at = position % BLOCK
        k = ld_i64(ctx + C_KV) + slot * ld_i64(ctx + C_SLOT_BYTES) + ld_i64(row + O_A)
        k += position // BLOCK * ld_i64(ctx + C_BLOCK_BYTES)
        x = ld_i64(row + O_X) + column * ld_i64(row + O_X_BYTES)
        y = ld_i64(row + O_Y) + column * ld_i64(row + O_Y_BYTES)
        for _ in range(ld_i64(row + O_D)):
            v, padded = k + ld_i64(row + O_F), (dim + 15) // 16 * 16
            convert(x, tmp, dim, k + BLOCK * dim * STEP // 16 + 2 * at)
            to = k + at // 16 * dim * STEP
            for d in range(dim):
                if FMT == 0:
                    st_f32(to + 64 * d + 4 * (at % 16), ld_f32(tmp + 4 * d))
                elif FMT == 1:
                    st_u16(to + 32 * d + 2 * (at % 16), ld_u16(tmp + 2 * d))
                elif FMT == 2:
                    st_u8(to + 16 * d + at % 16, ld_u8(tmp + d))
                elif d % 2 == 0:
                    st_u8(to + 8 * d + at % 16, ld_u8(tmp + d) | ld_u8(tmp + d + 1) << 4)
            convert(y, tmp, dim, v + BLOCK * padded * STEP // 16 + 2 * at)
            for d in range(padded):
                to = v + (d // 16 * BLOCK + at) * STEP
                if FMT == 0:
                    st_f32(to + 4 * (d % 16), ld_f32(tmp + 4 * d))
                elif FMT == 1:
                    st_u16(to + 2 * (d % 16), ld_u16(tmp + 2 * d))
                elif FMT == 2:
                    st_u8(to + d % 16, ld_u8(tmp + d))
                elif d % 16 < 8:
                    st_u8(to + d % 16, ld_u8(tmp + d) | ld_u8(tmp + d + 8) << 4)
            k += ld_i64(row + O_B)
            x += 4 * dim
            y += 4 * dim

    return store_kv


@functools.cache
def kernel(fmt: int) -> int:
    """The address of the store kernel of a format of kv.FORMATS."""
    made: int = _make_store(fmt)
    return made
