"""Integer dot products of packed weights and int8 activations: the code generators behind `block`.

Three instruction sets, all exact, so all give the same integers:
  AVX-512 / AVX VNNI  vpdpbusd; signed bytes are shifted by 128 and the column's sum is taken off again
  AVX2                vpmaddubsw adds pairs of unsigned * signed in 16 bits; as many are added up as can not overflow
                      (weights of b bits: 2 * (2^b - 1) * 127 each); signed bytes go in as |w| and sign(a, w)
  any                 the four byte planes of each lane
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pantheon.accel.cpu import layouts
from pantheon.accel.cpu.layouts import BY_ID, Kind
from pantheon.accel.cpu.tiles import pack_ir, unpack_ir
from pantheon.accel.cpu.vec import (
    I8,
    I16,
    I32,
    V_F32,
    V_I16,
    V_I32,
    f32x16,
    features,
    fma_ir,
    half_ir,
    iconst,
    llvm,
    load,
    splat_ir,
)  # fmt: skip

_HALF, _BYTES, _SHORTS = ir.VectorType(I32, 8), ir.VectorType(I8, 32), ir.VectorType(I16, 16)
_B64 = ir.VectorType(I8, 64)


def _byte_mask(value: int) -> Any:
    return iconst(value * 0x01010101)


def _bits(b: Any, vectors: dict[int, Any], p: int, width: int, to: int) -> Any:
    """The `width` bits of quad p out of bit-plane vectors, at bit `to` of each byte."""
    at = p * width
    v, shift = vectors[at // 8], to - at % 8
    if shift > 0:
        v = b.shl(v, iconst(shift))
    elif shift < 0:
        v = b.lshr(v, iconst(-shift))
    return b.and_(v, _byte_mask(((1 << width) - 1) << to))


def _table(ctx: Any, b: Any, nibbles: Any) -> Any:
    """IQ4_VALUES[nibble] in each byte."""
    values = [I8(v) for v in layouts.IQ4_VALUES]
    have, index = features(ctx), b.bitcast(nibbles, _B64)
    if "avx512bw" in have:
        r = llvm(b, "llvm.x86.avx512.pshuf.b.512", _B64, [ir.Constant(_B64, values * 4), index])
    elif "avx2" in have:
        table = ir.Constant(_BYTES, values * 2)
        parts = [llvm(b, "llvm.x86.avx2.pshuf.b", _BYTES, [table, b.bitcast(h, _BYTES)]) for h in _halves(b, nibbles)]
        r = b.shuffle_vector(*parts, ir.Constant(ir.VectorType(I32, 64), list(range(64))))
    else:
        r = ir.Constant(_B64, [I8(0)] * 64)
        for i, v in enumerate(values):
            r = b.select(b.icmp_signed("==", index, ir.Constant(_B64, [I8(i)] * 64)), ir.Constant(_B64, [v] * 64), r)
    return b.bitcast(r, V_I32)


def _weights(ctx: Any, b: Any, kind: Kind, q: Any) -> Callable[[int], Any]:
    """quad -> the bytes of 16 rows as <16 x i32>."""
    loaded: dict[int, Any] = {}

    def vector(i: int) -> Any:
        if i not in loaded:
            loaded[i] = load(b, q, V_I32, 64 * i)
        return loaded[i]

    def quad(p: int) -> Any:
        if kind.base_bits == 8:
            return vector(p)
        planes = {i: vector(i) for i in (p * kind.base_bits // 8,)}
        w = _bits(b, planes, p, kind.base_bits, 0)
        if kind.high_bits:
            high = {p * kind.high_bits // 8: vector(kind.base_bits + p * kind.high_bits // 8)}
            w = b.or_(w, _bits(b, high, p, kind.high_bits, kind.base_bits))
        return _table(ctx, b, w) if kind.table else w

    return quad


def _halves(b: Any, v: Any) -> list[Any]:
    pick = (list(range(8)), list(range(8, 16)))
    return [b.shuffle_vector(v, v, ir.Constant(ir.VectorType(I32, 8), p)) for p in pick]


def _join(b: Any, low: Any, high: Any) -> Any:
    return b.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 16), list(range(16))))


def _bias(b: Any, a: Any, n: int, column: int, offset: int, bits: int) -> Any:
    """2^bits times the int32 sum of a column's activations."""
    return b.shl(splat_ir(b, load(b, a, I32, offset * n + 4 * column)), iconst(bits))


def _fence(b: Any, values: list[Any]) -> list[Any]:
    """The same registers behind an empty asm: keeps LLVM from running column by column with all weights spilled."""
    kinds = [v.type for v in values]
    tied = ",".join(["=x"] * len(values) + [str(i) for i in range(len(values))] + ["~{memory}"])
    shape = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    r = b.asm(shape, "", tied, values, side_effect=True)
    return [b.extract_value(r, i) for i in range(len(values))]


def _dots_vnni(ctx: Any, b: Any, kind: Kind, quad: Any, quads: range, a: Any, n: int, sums: int) -> list[Any]:
    bits = 7 if kind.signed else kind.bias_bits
    acc = [iconst(0)] * n
    if bits:
        acc = [b.sub(iconst(0), _bias(b, a, n, c, sums, bits)) for c in range(n)]
    wide = "avx512vnni" in features(ctx) and "avx512f" in features(ctx)
    for p in quads:
        w = quad(p)
        if kind.signed:
            w = b.xor(w, _byte_mask(0x80))
        for c in range(n):
            x = load(b, a, I32, 32 * c + 4 * p)
            if wide:  # LLVM folds the broadcast into the instruction
                acc[c] = llvm(b, "llvm.x86.avx512.vpdpbusd.512", V_I32, [acc[c], w, splat_ir(b, x)])
            else:
                name, x8 = "llvm.x86.avx512.vpdpbusd.256", splat_ir(b, x, 8)
                acc[c] = _join(
                    b,
                    *(llvm(b, name, _HALF, [s, u, x8]) for s, u in zip(_halves(b, acc[c]), _halves(b, w), strict=True)),
                )
    return acc


def _pair_sums(b: Any, kind: Kind, quads: list[tuple[list[Any], list[Any]]], xs: list[Any], half: int) -> Any:
    """<16 x i16>: the products of some quads of one column, added up pair by pair."""
    total = None
    for (words, sizes), x in zip(quads, xs, strict=True):
        y = llvm(b, "llvm.x86.avx2.psign.b", _BYTES, [x, words[half]]) if kind.signed else x
        pair = llvm(b, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, [sizes[half], y])
        total = pair if total is None else b.add(total, pair)
    return total


def _dots_avx2(ctx: Any, b: Any, kind: Kind, quad: Any, quads: range, a: Any, n: int, sums: int) -> list[Any]:
    room = max(1, 32767 // (2 * kind.largest * 127))
    step = 1 if room >= 4 else room  # quads taken abreast; where many fit, 16-bit sums stay in registers instead
    ones = ir.Constant(_SHORTS, [I16(1)] * 16)
    zero = ir.Constant(_HALF, [I32(0)] * 8)
    total, short = [zero] * (2 * n), [ir.Constant(_SHORTS, [I16(0)] * 16)] * (2 * n)
    for i, first in enumerate(range(quads.start, quads.stop, step)):
        taken = []
        for p in range(first, first + step):
            words = [b.bitcast(h, _BYTES) for h in _halves(b, quad(p))]
            sizes = [llvm(b, "llvm.abs.v32i8", _BYTES, [w, ir.IntType(1)(0)]) for w in words] if kind.signed else words
            taken.append((words, sizes))
        full = room < 4 or (i + 1) % room == 0 or first + step == quads.stop
        for c in range(n):
            offsets = [32 * c + 4 * p for p in range(first, first + step)]
            xs = [b.bitcast(splat_ir(b, load(b, a, I32, at), 8), _BYTES) for at in offsets]
            for h in (2 * c, 2 * c + 1):
                short[h] = b.add(short[h], _pair_sums(b, kind, taken, xs, h & 1))
                if full:
                    total[h] = b.add(total[h], llvm(b, "llvm.x86.avx2.pmadd.wd", _HALF, [short[h], ones]))
                    short[h] = ir.Constant(_SHORTS, [I16(0)] * 16)
        if n > 1:
            if full:
                total = _fence(b, total)
            else:
                short = _fence(b, short)
    acc = [_join(b, *total[2 * c : 2 * c + 2]) for c in range(n)]
    if kind.bias_bits:
        acc = [b.sub(v, _bias(b, a, n, c, sums, kind.bias_bits)) for c, v in enumerate(acc)]
    return acc


def _dots_any(ctx: Any, b: Any, kind: Kind, quad: Any, quads: range, a: Any, n: int, sums: int) -> list[Any]:
    acc = [iconst(0)] * n
    if kind.bias_bits:
        acc = [b.sub(iconst(0), _bias(b, a, n, c, sums, kind.bias_bits)) for c in range(n)]
    for p in quads:
        w = quad(p)
        for t in range(4):
            plane = b.shl(w, iconst(24 - 8 * t))
            plane = (b.ashr if kind.signed else b.lshr)(plane, iconst(24))
            for c in range(n):
                x = b.sext(load(b, a, I8, 32 * c + 4 * p + t), I32)
                acc[c] = b.add(acc[c], b.mul(plane, splat_ir(b, x)))
    return acc


def _dots(ctx: Any, b: Any, kind: Kind, q: Any, a: Any, n: int) -> list[list[Any]]:
    """<16 x i32> [1 or 2 halves][n columns]: sum of (q - bias) * activation."""
    have = features(ctx)
    vnni = ("avx512vnni" in have and "avx512f" in have) or "avxvnni" in have
    make = _dots_vnni if vnni else _dots_avx2 if "avx2" in have else _dots_any
    quad = _weights(ctx, b, kind, q)
    if kind.subs == 2:
        return [make(ctx, b, kind, quad, range(4 * h, 4 * h + 4), a, n, (layouts.ACT_I0, layouts.ACT_I1)[h])
                for h in range(2)]  # fmt: skip
    return [make(ctx, b, kind, quad, range(8), a, n, layouts.ACT_I)]


def _sub(b: Any, s: Any, offset: int, signed: bool) -> Any:
    """16 sub-scale bytes as floats."""
    v = load(b, s, ir.VectorType(I8, 16), offset)
    return b.sitofp((b.sext if signed else b.zext)(v, V_I32), V_F32)


@intrinsic(prefer_literal=True)
def block(tyctx, acc, kind_id, q, s, d, m, a):  # type: ignore[no-untyped-def]
    """acc[c] += one block of 16 rows times column c: quants at q, sub-scales at s, header vectors d and m,
    activations of the tile at a.  The same operations in the same order for every tile width."""
    n, kind = acc.count, BY_ID[kind_id.literal_value]

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        f, _, q_, s_, d_, m_, a_ = args
        out = unpack_ir(b, f, n)
        for h, ints in enumerate(_dots(ctx, b, kind, q_, a_, n)):
            dw = b.fmul(d_, _sub(b, s_, 16 * h, kind.sub_signed)) if kind.subs else d_
            mw = m_
            if kind.sub_mins:
                mw = b.fneg(b.fmul(m_, _sub(b, s_, 16 * (kind.subs + h), False)))
            sums = (layouts.ACT_S0, layouts.ACT_S1)[h] if kind.subs == 2 else layouts.ACT_S
            for c in range(n):
                scale = b.fmul(dw, splat_ir(b, load(b, a_, ir.FloatType(), layouts.ACT_D * n + 4 * c)))
                out[c] = fma_ir(ctx, b, b.sitofp(ints[c], V_F32), scale, out[c])
                if kind.header_min:
                    x = splat_ir(b, load(b, a_, ir.FloatType(), sums * n + 4 * c))
                    out[c] = fma_ir(ctx, b, mw, x, out[c])
        return pack_ir(b, out)

    i = types.int64
    return acc(acc, kind_id, i, i, f32x16, f32x16, i), codegen


@intrinsic(prefer_literal=True)
def header(tyctx, kind_id, s, which):  # type: ignore[no-untyped-def]
    """Header vector 0 (d) or 1 (m) at s; zeros when the type has none."""
    kind, k = BY_ID[kind_id.literal_value], which.literal_value

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        if k == 1 and not kind.header_min:
            return ir.Constant(V_F32, [ir.FloatType()(0.0)] * 16)
        return half_ir(ctx, b, load(b, args[1], V_I16, 32 * k))

    return f32x16(kind_id, types.int64, which), codegen


