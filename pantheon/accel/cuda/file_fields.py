"""Reading a block of a model file inside a kernel: quads of codes, and the bytes of sub-scales and sub-minimums.

`raw` is the file's uint8 array, x the index of a block's first byte, b a block of 32 values in it.  A quad is four
codes, a byte each in the low 32 bits of an int64.  Block layouts: ggml's, public facts.
"""

from __future__ import annotations

from typing import Any

from pantheon.accel.cuda.machine import I64, device_function

_NIBBLES, _TWOS, _ONES = 0x0F0F0F0F, 0x03030303, 0x01010101
#: where d, and m behind it, lie in a block; elsewhere they begin it
HEADER_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}


@device_function
def byte(raw, at):  # type: ignore[no-untyped-def]
    return I64(raw[at])


@device_function
def half(raw, at):  # type: ignore[no-untyped-def]
    """The 16 bits at a byte."""
    return byte(raw, at) | byte(raw, at + 1) << 8


@device_function
def word(raw, at):  # type: ignore[no-untyped-def]
    """The 32 bits at a byte: blocks are aligned to two bytes only."""
    return half(raw, at) | half(raw, at + 2) << 16


@device_function
def _field(raw, at, shift, mask):  # type: ignore[no-untyped-def]
    return (word(raw, at) >> shift) & mask


@device_function
def _codes(raw, at, p):  # type: ignore[no-untyped-def]
    """Quad p of 16 bytes: values 0 … 15 in their low nibbles, 16 … 31 in the high ones."""
    return _field(raw, at + 4 * (p & 3), p >> 2 << 2, _NIBBLES)


@device_function
def _fifths(raw, at, p):  # type: ignore[no-untyped-def]
    """Bits 4p … 4p+3 of the 32 at a byte, each at bit 4 of a byte of its own."""
    return ((((byte(raw, at + (p >> 1)) >> (4 * (p & 1))) & 15) * 0x00204081) & _ONES) << 4


@device_function
def _q4_0(raw, x, b, p):  # type: ignore[no-untyped-def]
    return _codes(raw, x + 2, p)


@device_function
def _q4_1(raw, x, b, p):  # type: ignore[no-untyped-def]
    return _codes(raw, x + 4, p)


@device_function
def _q5_0(raw, x, b, p):  # type: ignore[no-untyped-def]
    return _codes(raw, x + 6, p) | _fifths(raw, x + 2, p)


@device_function
def _q5_1(raw, x, b, p):  # type: ignore[no-untyped-def]
    return _codes(raw, x + 8, p) | _fifths(raw, x + 4, p)


@device_function
def _q8_0(raw, x, b, p):  # type: ignore[no-untyped-def]
    return word(raw, x + 2 + 4 * p)


@device_function
def _q2_k(raw, x, b, p):  # type: ignore[no-untyped-def]
    return _field(raw, x + 16 + 32 * (b >> 2) + 4 * p, 2 * (b & 3), _TWOS)


@device_function
def _q3_k(raw, x, b, p):  # type: ignore[no-untyped-def]
    return _field(raw, x + 32 + 32 * (b >> 2) + 4 * p, 2 * (b & 3), _TWOS) | _field(raw, x + 4 * p, b, _ONES) << 2


@device_function
def _q4_k(raw, x, b, p):  # type: ignore[no-untyped-def]
    return _field(raw, x + 16 + 32 * (b >> 1) + 4 * p, 4 * (b & 1), _NIBBLES)


@device_function
def _q5_k(raw, x, b, p):  # type: ignore[no-untyped-def]
    low = _field(raw, x + 48 + 32 * (b >> 1) + 4 * p, 4 * (b & 1), _NIBBLES)
    return low | _field(raw, x + 16 + 4 * p, b, _ONES) << 4


@device_function
def _q6_k(raw, x, b, p):  # type: ignore[no-untyped-def]
    low = _field(raw, x + 64 * (b >> 2) + 32 * (b & 1) + 4 * p, 4 * ((b >> 1) & 1), _NIBBLES)
    return low | _field(raw, x + 128 + 32 * (b >> 2) + 4 * p, 2 * (b & 3), _TWOS) << 4


@device_function
def _iq4_xs(raw, x, b, p):  # type: ignore[no-untyped-def]
    return _codes(raw, x + 8 + 16 * b, p)


@device_function
def _no_subs(raw, x, b, i):  # type: ignore[no-untyped-def]
    return I64(0)


@device_function
def _subs_q2_k(raw, x, b, i):  # type: ignore[no-untyped-def]
    return (byte(raw, x + 2 * b + (i & 1)) >> (4 * (i >> 1))) & 15


@device_function
def _subs_q3_k(raw, x, b, i):  # type: ignore[no-untyped-def]
    j = 2 * b + i
    low = (byte(raw, x + 96 + (j & 7)) >> (j >> 3 << 2)) & 15
    return (low | ((byte(raw, x + 104 + (j & 3)) >> (2 * (j >> 2))) & 3) << 4) - 32


@device_function
def _subs_six_bits(raw, x, b, i):  # type: ignore[no-untyped-def]
    """Scale (i = 0) or minimum (1) of a block in the 12 bytes of Q4_K and Q5_K."""
    if b < 4:
        return byte(raw, x + 4 + 4 * i + b) & 63
    return ((byte(raw, x + 8 + b) >> (4 * i)) & 15) | (byte(raw, x + 4 * i + b) >> 6 << 4)


@device_function
def _subs_q6_k(raw, x, b, i):  # type: ignore[no-untyped-def]
    return byte(raw, x + 192 + 2 * b + i)


@device_function
def _subs_iq4_xs(raw, x, b, i):  # type: ignore[no-untyped-def]
    low = (byte(raw, x + 4 + (b >> 1)) >> (4 * (b & 1))) & 15
    return (low | ((byte(raw, x + 2 + (b >> 2)) >> (2 * (b & 3))) & 3) << 4) - 32


#: type -> (raw, x, b, p) -> quad p of block b
QUADS: dict[str, Any] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _q4_0, "IQ4_XS": _iq4_xs,
}  # fmt: skip
_SUBS: dict[str, Any] = {
    "Q2_K": _subs_q2_k, "Q3_K": _subs_q3_k, "Q4_K": _subs_six_bits, "Q5_K": _subs_six_bits, "Q6_K": _subs_q6_k,
    "IQ4_XS": _subs_iq4_xs,
}  # fmt: skip


def subs(type_name: str) -> Any:
    """(raw, x, b, i) -> byte i of the sub-scales, then sub-minimums, of block b; signed ones may be negative."""
    return _SUBS.get(type_name, _no_subs)
