"""Register tiles: n columns as a UniTuple of n float vectors, n a constant that unrolls when code is generated.

Every operation treats each column alike, so a column's numbers never depend on the tile's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pantheon.accel.cpu.vec import F32, I64, V_F32, at, const, f32x16, fma_ir, load, splat_ir

_i64 = types.int64


def pack_ir(b: Any, vectors: Sequence[Any]) -> Any:
    """Vectors as one LLVM array."""
    t = ir.Constant(ir.ArrayType(vectors[0].type, len(vectors)), ir.Undefined)
    for i, v in enumerate(vectors):
        t = b.insert_value(t, v, i)
    return t


def unpack_ir(b: Any, tile: Any, n: int) -> list[Any]:
    """The vectors of a tile."""
    return [b.extract_value(tile, i) for i in range(n)]


def _column(b: Any, addr: Any, stride: Any, c: int) -> Any:
    return b.add(addr, b.mul(stride, I64(c)))


@intrinsic(prefer_literal=True)
def tile_zero(tyctx, n):  # type: ignore[no-untyped-def]
    """n float vectors of zeros."""
    count = n.literal_value
    return types.UniTuple(f32x16, count)(n), lambda ctx, b, sig, a: pack_ir(b, [const(0.0)] * count)


@intrinsic
def tile_fma(tyctx, acc, v, addr, stride):  # type: ignore[no-untyped-def]
    """acc[c] + v * (the float at addr + c * stride)."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        out = []
        for c, f in enumerate(unpack_ir(b, a[0], acc.count)):
            out.append(fma_ir(ctx, b, a[1], splat_ir(b, load(b, _column(b, a[2], a[3], c), F32)), f))
        return pack_ir(b, out)

    return acc(acc, f32x16, _i64, _i64), codegen


@intrinsic
def tile_add(tyctx, acc, v):  # type: ignore[no-untyped-def]
    """acc[c] + v."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        return pack_ir(b, [b.fadd(f, a[1]) for f in unpack_ir(b, a[0], acc.count)])

    return acc(acc, f32x16), codegen


@intrinsic
def tile_store(tyctx, acc, addr, stride):  # type: ignore[no-untyped-def]
    """Column c to the 16 floats at addr + c * stride."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        for c, f in enumerate(unpack_ir(b, a[0], acc.count)):
            b.store(f, at(b, _column(b, a[1], a[2], c), V_F32), align=1)
        return ctx.get_dummy_value()

    return types.void(acc, _i64, _i64), codegen


@intrinsic
def tile_store_add(tyctx, acc, addr, stride):  # type: ignore[no-untyped-def]
    """Column c added to the 16 floats at addr + c * stride."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        for c, f in enumerate(unpack_ir(b, a[0], acc.count)):
            p = at(b, _column(b, a[1], a[2], c), V_F32)
            b.store(b.fadd(b.load(p, align=1), f), p, align=1)
        return ctx.get_dummy_value()

    return types.void(acc, _i64, _i64), codegen
