"""Packing kernels: row groups of a tensor in the model file -> the packed layout, one kernel for each weight type.

Each takes (source, quants, scales, cols, rows, row_bytes, g0, g1): groups g0 … g1-1 of a matrix whose first row lies at
`source`.  The destination is zeroed memory; rows missing in a last group stay zero.  Block layouts: ggml's, public
facts.  A quad is four values, a byte each in a 32-bit word.
"""

from __future__ import annotations

import functools

from numba import int64, void

from pantheon.accel.cpu import cache
from pantheon.accel.cpu.file_blocks import FILE_BLOCK
from pantheon.accel.cpu.layouts import BLOCK, FLOATS, KINDS, ROWS
from pantheon.accel.cpu.vec import I8, at, ld_i32, ld_u8, ld_u16, op, st_i32, st_u16

_SIGNATURE = void(*(int64,) * 8)
_IDS = {name: kind.id for name, kind in KINDS.items()}
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS = (
    _IDS[name] for name in "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()
)
_NIBBLES, _TWOS, _ONES = 0x0F0F0F0F, 0x03030303, 0x01010101
#: where d, and m behind it, lie in a file block
_HEADER_AT = {Q2_K: 80, Q3_K: 108, Q6_K: 208}
#: where the nibbles of types with blocks of 32 begin
_NIBBLES_AT = {Q4_0: 2, Q4_1: 4, Q5_0: 6, Q5_1: 8, IQ4_NL: 2}


@op(void, int64, int64)
def st_u8(ctx, b, addr, x):  # type: ignore[no-untyped-def]
    b.store(b.trunc(x, I8), at(b, addr, I8))


@cache.jit
def _spread(bits):  # type: ignore[no-untyped-def]
    """Bit i of four to bit 0 of byte i."""
    return ((bits & 15) * 0x00204081) & _ONES


@cache.jit
def _field(address, shift, mask):  # type: ignore[no-untyped-def]
    return (ld_i32(address) >> shift) & mask


@cache.jit
def _halves(address, p):  # type: ignore[no-untyped-def]
    """Quad p of 16 bytes that hold values 0 … 15 in their low nibbles, 16 … 31 in the high ones."""
    return _field(address + 4 * (p & 3), p >> 2 << 2, _NIBBLES)


def _quads(KIND):  # type: ignore[no-untyped-def]
    """The function (file block, block of 32 in it, p) -> quad p."""
    AT = _NIBBLES_AT.get(KIND, 0)

    @cache.jit
    def quad(x, b, p):  # type: ignore[no-untyped-def]
        if KIND == Q8_0:
            return ld_i32(x + 2 + 4 * p)
        if KIND in (Q4_0, Q4_1, IQ4_NL):
            return _halves(x + AT, p)
        if KIND in (Q5_0, Q5_1):
            return _halves(x + AT, p) | _spread(ld_i32(x + AT - 4) >> (4 * p)) << 4
        if KIND == IQ4_XS:
            return _halves(x + 8 + 16 * b, p)
        if KIND == Q2_K:
            return _field(x + 16 + 32 * (b >> 2) + 4 * p, 2 * (b & 3), _TWOS)
        if KIND == Q3_K:
            return _field(x + 32 + 32 * (b >> 2) + 4 * p, 2 * (b & 3), _TWOS) | _field(x + 4 * p, b, _ONES) << 2
        if KIND == Q4_K:
            return _field(x + 16 + 32 * (b >> 1) + 4 * p, 4 * (b & 1), _NIBBLES)
        if KIND == Q5_K:
            low = _field(x + 48 + 32 * (b >> 1) + 4 * p, 4 * (b & 1), _NIBBLES)
            return low | _field(x + 16 + 4 * p, b, _ONES) << 4
        low = _field(x + 64 * (b >> 2) + 32 * (b & 1) + 4 * p, 4 * ((b >> 1) & 1), _NIBBLES)  # Q6_K
        return low | _field(x + 128 + 32 * (b >> 2) + 4 * p, 2 * (b & 3), _TWOS) << 4

    return quad


@cache.jit
def _six_bits(s, b, low):  # type: ignore[no-untyped-def]
    """Scale (low = 0) or minimum (1) of block b in the 12 bytes of Q4_K and Q5_K."""
    if b < 4:
        return ld_u8(s + 4 * low + b) & 63
    return ((ld_u8(s + 4 + b) >> (4 * low)) & 15) | (ld_u8(s + 4 * low + b - 4) >> 6 << 4)


def _subs(KIND):  # type: ignore[no-untyped-def]
    """The function (file block, block of 32 in it, i) -> byte i of its sub-scales and sub-minimums."""

    @cache.jit
    def sub(x, b, i):  # type: ignore[no-untyped-def]
        if KIND == Q2_K:
            return (ld_u8(x + 2 * b + (i & 1)) >> (4 * (i >> 1))) & 15
        if KIND == Q3_K:
            j = 2 * b + i
            low = (ld_u8(x + 96 + (j & 7)) >> (j >> 3 << 2)) & 15
            return (low | ((ld_u8(x + 104 + (j & 3)) >> (2 * (j >> 2))) & 3) << 4) - 32
        if KIND in (Q4_K, Q5_K):
            return _six_bits(x + 4, b, i)
        if KIND == Q6_K:
            return ld_u8(x + 192 + 2 * b + i)
        low = (ld_u8(x + 4 + (b >> 1)) >> (4 * (b & 1))) & 15  # IQ4_XS
        return (low | ((ld_u8(x + 2 + (b >> 2)) >> (2 * (b & 3))) & 3) << 4) - 32

    return sub


def _planes(quad, BASE, HIGH):  # type: ignore[no-untyped-def]
    """The function (file block, block of 32 in it, to): its eight quads to bit planes, 64 bytes from word to word."""
    LOW, REST = _ONES * ((1 << BASE) - 1), _ONES * ((1 << HIGH) - 1)

    @cache.jit
    def planes(x, b, to):  # type: ignore[no-untyped-def]
        for w in range(BASE):
            word = int64(0)
            for k in range(8 // BASE):
                word |= (quad(x, b, w * (8 // BASE) + k) & LOW) << (k * BASE)
            st_i32(to + 64 * w, word)
        for w in range(HIGH):
            word = int64(0)
            for k in range(8 // HIGH):
                word |= ((quad(x, b, w * (8 // HIGH) + k) >> BASE) & REST) << (k * HIGH)
            st_i32(to + 64 * (BASE + w), word)

    return planes


def _make_quantised(KIND, BASE, HIGH, SUP, QUANT, HEAD, SUB, HEADER, FILE):  # type: ignore[no-untyped-def]
    planes, sub = _planes(_quads(KIND), BASE, HIGH), _subs(KIND)

    @cache.compiled(_SIGNATURE)
    def pack(source, quants, scales, cols, rows, row_bytes, g0, g1):  # type: ignore[no-untyped-def]
        supers = cols // (BLOCK * SUP)
        for g in range(g0, g1):
            for s in range(supers):
                q = quants + (g * supers + s) * (SUP * QUANT)
                to = scales + (g * supers + s) * (HEAD + SUP * SUB)
                for lane in range(min(ROWS, rows - g * ROWS)):
                    x = source + (g * ROWS + lane) * row_bytes + s * FILE
                    for h in range(HEAD // 32):
                        st_u16(to + 32 * h + 2 * lane, ld_u16(x + HEADER + 2 * h))
                    for b in range(SUP):
                        planes(x, b, q + b * QUANT + 4 * lane)
                        if SUB:
                            for i in range(SUB // 16):
                                st_u8(to + HEAD + b * SUB + 16 * i + lane, sub(x, b, i))

    return pack


def _make_float(SIZE):  # type: ignore[no-untyped-def]
    TILE = 16

    @cache.compiled(_SIGNATURE)
    def pack_float(source, quants, scales, cols, rows, row_bytes, g0, g1):  # type: ignore[no-untyped-def]
        for g in range(g0, g1):
            for first in range(0, cols, TILE):
                for lane in range(min(ROWS, rows - g * ROWS)):
                    x = source + (g * ROWS + lane) * row_bytes
                    for k in range(first, min(first + TILE, cols)):
                        to = quants + ((g * cols + k) * ROWS + lane) * SIZE
                        if SIZE == 4:
                            st_i32(to, ld_i32(x + 4 * k))
                        else:
                            st_u16(to, ld_u16(x + 2 * k))

    return pack_float


@functools.cache
def kernel(type_name: str) -> int:
    """The address of the packing kernel of one weight type."""
    if type_name in FLOATS:
        return _make_float(FLOATS[type_name])
    k = KINDS[type_name]
    header_at, file_bytes = _HEADER_AT.get(k.id, 0), FILE_BLOCK[type_name][1]
    made: int = _make_quantised(
        k.id, k.base_bits, k.high_bits, k.sup, k.quant_bytes, k.header_bytes, k.sub_bytes, header_at, file_bytes
    )
    return made
