"""Register tiles of `a` vectors abreast for each of n columns, a UniTuple of n * a vectors, column by column.

Where tiles.py multiplies one vector of weights with n columns, a grid takes `a` of them at once: enough sums in
flight to hide the latency of FMA when the columns are few.  Each column takes the same operations as in any other grid.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pantheon.accel.cpu.tiles import pack_ir, unpack_ir
from pantheon.accel.cpu.vec import F32, I8, I32, I64, V_F32, V_I16, V_I32, at, f32x16, fma_ir, half_ir, load, splat_ir

_i64 = types.int64


def _load_ir(ctx: Any, b: Any, fmt: int, addr: Any) -> Any:
    """16 cached values as floats; formats as in kv.FORMATS, and of 4 bits: 3 the low halves of 16 bytes, 4 their high
    halves, 5 the low halves of 8 bytes and then the high ones."""
    if fmt == 0:
        return load(b, addr, V_F32)
    if fmt == 1:
        return half_ir(ctx, b, load(b, addr, V_I16))
    if fmt == 2:
        return b.sitofp(b.sext(load(b, addr, ir.VectorType(I8, 16)), V_I32), V_F32)
    n = 8 if fmt == 5 else 16
    both = load(b, addr, ir.VectorType(I8, n))
    mask, shift = (ir.Constant(ir.VectorType(I8, n), [I8(value)] * n) for value in (15, 4))
    low, high = b.and_(both, mask), b.lshr(both, shift)
    if fmt == 5:
        low = b.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 16), list(range(16))))
    codes = b.zext(high if fmt == 4 else low, V_I32)
    return b.sitofp(b.sub(codes, ir.Constant(V_I32, [I32(8)] * 16)), V_F32)


def _step(b: Any, addr: Any, step: Any, i: int) -> Any:
    return b.add(addr, b.mul(step, I64(i)))


@intrinsic(prefer_literal=True)
def grid_load(tyctx, a, n, addr, apart, stride):  # type: ignore[no-untyped-def]
    """Vector i of column c from addr + c * stride + i * apart."""
    abreast, count = a.literal_value, n.literal_value

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        _, _, base, apart, stride = args
        rows = [_step(b, base, stride, c) for c in range(count)]
        return pack_ir(b, [load(b, _step(b, row, apart, i), V_F32) for row in rows for i in range(abreast)])

    return types.UniTuple(f32x16, abreast * count)(a, n, _i64, _i64, _i64), codegen


@intrinsic(prefer_literal=True)
def grid_store(tyctx, acc, a, addr, apart, stride):  # type: ignore[no-untyped-def]
    """Vector i of column c to addr + c * stride + i * apart."""
    abreast = a.literal_value

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        tile, _, base, apart, stride = args
        for j, f in enumerate(unpack_ir(b, tile, acc.count)):
            to = _step(b, _step(b, base, stride, j // abreast), apart, j % abreast)
            b.store(f, at(b, to, V_F32), align=1)
        return ctx.get_dummy_value()

    return types.void(acc, a, _i64, _i64, _i64), codegen


@intrinsic(prefer_literal=True)
def grid_fma(tyctx, acc, a, fmt, addr, apart, weights, stride):  # type: ignore[no-untyped-def]
    """Column c += the float at weights + c * stride times the cached vectors at addr + i * apart."""
    abreast, form = a.literal_value, fmt.literal_value

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        tile, _, _, base, apart, weights, stride = args
        given = [_load_ir(ctx, b, form, _step(b, base, apart, i)) for i in range(abreast)]
        sums, out = unpack_ir(b, tile, acc.count), []
        for c in range(acc.count // abreast):
            w = splat_ir(b, load(b, _step(b, weights, stride, c), F32))
            out += [fma_ir(ctx, b, x, w, sums[c * abreast + i]) for i, x in enumerate(given)]
        return pack_ir(b, out)

    return acc(acc, a, fmt, _i64, _i64, _i64, _i64), codegen


@intrinsic(prefer_literal=True)
def grid_scale(tyctx, acc, a, scales, addr, apart, stride, more):  # type: ignore[no-untyped-def]
    """The floats at addr + c * stride + i * apart = acc times 16 halves at scales + 32 i; `more`: added to."""
    abreast, adds = a.literal_value, more.literal_value

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        tile, _, scales, base, apart, stride, _ = args
        factors = [half_ir(ctx, b, load(b, scales, V_I16, 32 * i)) for i in range(abreast)]
        for j, f in enumerate(unpack_ir(b, tile, acc.count)):
            to = at(b, _step(b, _step(b, base, stride, j // abreast), apart, j % abreast), V_F32)
            s = factors[j % abreast]
            b.store(fma_ir(ctx, b, f, s, b.load(to, align=1)) if adds else b.fmul(f, s), to, align=1)
        return ctx.get_dummy_value()

    return types.void(acc, a, _i64, _i64, _i64, _i64, more), codegen
