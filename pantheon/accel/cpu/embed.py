"""Embedding rows: one row of a packed table as floats, exactly the file's values."""

from __future__ import annotations

import functools

from numba import float32, int64

from pantheon.accel.cpu import cache
from pantheon.accel.cpu.fields import C_TOKENS, O_A, O_B, O_N, O_OUT, O_OUT_BYTES, O_VALUE
from pantheon.accel.cpu.layouts import FLOATS, IQ4_VALUES, KINDS, ROWS
from pantheon.accel.cpu.vec import ld_bf16, ld_f16, ld_f32, ld_i32, ld_i64, ld_u8, st_f32

_LEVELS = IQ4_VALUES


@cache.jit
def _signed(byte):  # type: ignore[no-untyped-def]
    return byte - 256 if byte >= 128 else byte


def _make_quantised(BASE, HIGH, BIAS, TABLE, MIN, SUP, SUBS, SUB_MINS, SUB_SIGNED, QUANT, HEAD, SUB):  # type: ignore[no-untyped-def]
    SCALE, OFFSET, MASK, HMASK = HEAD + SUP * SUB, (1 << BIAS) if BIAS else 0, (1 << BASE) - 1, (1 << HIGH) - 1

    @cache.kernel
    def embed(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        token = ld_i32(ld_i64(ctx + C_TOKENS) + 4 * column)
        blocks, factor = ld_i64(row + O_N), ld_f32(row + O_VALUE)
        out = ld_i64(row + O_OUT) + column * ld_i64(row + O_OUT_BYTES)
        g, lane = token // ROWS, token % ROWS
        for blk in range(blocks):
            q = ld_i64(row + O_A) + (g * blocks + blk) * QUANT + 4 * lane
            s = ld_i64(row + O_B) + (g * (blocks // SUP) + blk // SUP) * SCALE
            d = ld_f16(s + 2 * lane)
            m = ld_f16(s + 32 + 2 * lane) if MIN else float32(0)
            sub = s + HEAD + blk % SUP * SUB + lane
            for i in range(32):
                p, t, half = i >> 2, i & 3, i // 16 if SUBS == 2 else 0
                v = (ld_u8(q + 64 * (p * BASE // 8) + t) >> (p * BASE % 8)) & MASK
                if HIGH:
                    h = ld_u8(q + 64 * (BASE + p * HIGH // 8) + t) >> (p * HIGH % 8)
                    v |= (h & HMASK) << BASE
                if TABLE:
                    v = int64(_LEVELS[v])
                elif BASE == 8:
                    v = _signed(v)
                scale, low = d, m
                if SUBS:
                    byte = ld_u8(sub + 16 * half)
                    scale = d * float32(_signed(byte) if SUB_SIGNED else byte)
                    if SUB_MINS:
                        low = -(m * float32(ld_u8(sub + 16 * (SUBS + half))))
                x = scale * float32(v - OFFSET)
                if MIN:
                    x = x + low
                st_f32(out + 4 * (32 * blk + i), x * factor)

    return embed


def _make_float(TYPE, SIZE):  # type: ignore[no-untyped-def]
    @cache.kernel
    def embed_float(row, ctx, thread, column, part, phase):  # type: ignore[no-untyped-def]
        token = ld_i32(ld_i64(ctx + C_TOKENS) + 4 * column)
        cols, factor = ld_i64(row + O_N), ld_f32(row + O_VALUE)
        out = ld_i64(row + O_OUT) + column * ld_i64(row + O_OUT_BYTES)
        w = ld_i64(row + O_A) + (token // ROWS * cols * ROWS + token % ROWS) * SIZE
        for k in range(cols):
            at = w + k * ROWS * SIZE
            if TYPE == 0:
                st_f32(out + 4 * k, ld_f32(at) * factor)
            elif TYPE == 1:
                st_f32(out + 4 * k, ld_f16(at) * factor)
            else:
                st_f32(out + 4 * k, ld_bf16(at) * factor)

    return embed_float


@functools.cache
def kernel(type_name: str) -> int:
    """The address of the kernel that looks rows of a table of this type up."""
    if type_name in FLOATS:
        return _make_float(list(FLOATS).index(type_name), FLOATS[type_name])
    k = KINDS[type_name]
    made: int = _make_quantised(
        k.base_bits, k.high_bits, k.bias_bits, int(k.table), int(k.header_min), k.sup, k.subs, int(k.sub_mins),
        int(k.sub_signed), k.quant_bytes, k.header_bytes, k.sub_bytes,
    )  # fmt: skip
    return made
