"""SIMD values and memory access for kernels: 16 lanes of 32 bits as ordinary Numba values.

Addresses are int64; the caller keeps the memory alive and in range.  On CPUs without 512-bit registers LLVM splits
a value in two or four.  Instructions are chosen from the feature string that keys Numba's cache, so that a shared
cache, or NUMBA_CPU_NAME / NUMBA_CPU_FEATURES, can not pair code with the wrong CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
V_I32, V_F32, V_I16 = ir.VectorType(I32, 16), ir.VectorType(F32, 16), ir.VectorType(I16, 16)
_ELEMENT = {"i32": I32, "f32": F32}


class VecType(types.Type):
    """16 lanes of int32 or float32."""

    def __init__(self, element: str) -> None:
        self.element = element
        super().__init__(name=f"Vec16({element})")


@register_model(VecType)
class VecModel(models.PrimitiveModel):
    """Held as one LLVM vector."""

    def __init__(self, manager: Any, fe_type: VecType) -> None:
        super().__init__(manager, fe_type, ir.VectorType(_ELEMENT[fe_type.element], 16))


i32x16, f32x16 = VecType("i32"), VecType("f32")
_i64, _f32, _i32 = types.int64, types.float32, types.int32


# --- building blocks of code generators: b is the LLVM builder ---------------------------------------------------
def features(ctx: Any) -> frozenset[str]:
    """Instruction sets of the CPU that is compiled for, without the leading +."""
    return frozenset(f[1:] for f in ctx.codegen().magic_tuple()[2].split(",") if f.startswith("+"))


def at(b: Any, addr: Any, ty: Any) -> Any:
    """The address as a typed pointer."""
    return b.inttoptr(addr, ty.as_pointer())


def load(b: Any, addr: Any, ty: Any, offset: int = 0) -> Any:
    """An unaligned load."""
    return b.load(at(b, b.add(addr, I64(offset)) if offset else addr, ty), align=1)


def splat_ir(b: Any, x: Any, n: int = 16) -> Any:
    """n lanes of x."""
    v = b.insert_element(ir.Constant(ir.VectorType(x.type, n), ir.Undefined), x, I32(0))
    return b.shuffle_vector(v, v, ir.Constant(ir.VectorType(I32, n), [0] * n))


def llvm(b: Any, name: str, ret: Any, args: Sequence[Any], **kw: Any) -> Any:
    """A call of an LLVM intrinsic or a C function."""
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(ret, [a.type for a in args]), name)
    return b.call(fn, args, **kw)


def const(value: float) -> Any:
    """16 lanes of a float constant."""
    return ir.Constant(V_F32, [F32(value)] * 16)


def iconst(value: int) -> Any:
    """16 lanes of an int32 constant."""
    return ir.Constant(V_I32, [I32(value)] * 16)


def fma_ir(ctx: Any, b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z; two roundings where the CPU has no FMA (the library's fmaf would be far too slow)."""
    if features(ctx) & {"fma", "avx512f"}:
        return llvm(b, "llvm.fma.v16f32", V_F32, [x, y, z])
    return b.fadd(b.fmul(x, y), z)


def half_ir(ctx: Any, b: Any, bits: Any) -> Any:
    """16 halves (as int16) to floats."""
    if features(ctx) & {"f16c", "avx512f"}:
        return b.fpext(b.bitcast(bits, ir.VectorType(F16, 16)), V_F32)
    w = b.zext(bits, V_I32)
    body = b.shl(b.and_(w, iconst(0x7FFF)), iconst(13))
    # 2^112 moves the exponent bias from 15 to 127, denormals included; all-ones exponents are put right behind
    value = b.bitcast(b.fmul(b.bitcast(body, V_F32), const(2.0**112)), V_I32)
    special = b.icmp_signed("==", b.and_(w, iconst(0x7C00)), iconst(0x7C00))
    value = b.select(special, b.or_(body, iconst(0x7F800000)), value)
    return b.bitcast(b.or_(value, b.shl(b.and_(w, iconst(0x8000)), iconst(16))), V_F32)


def to_half_ir(ctx: Any, b: Any, x: Any) -> Any:
    """16 floats to halves (as int16), to nearest even."""
    if features(ctx) & {"f16c", "avx512f"}:
        return b.bitcast(b.fptrunc(x, ir.VectorType(F16, 16)), V_I16)
    w = b.bitcast(x, V_I32)
    sign = b.and_(b.lshr(w, iconst(16)), iconst(0x8000))
    mag = b.and_(w, iconst(0x7FFFFFFF))
    # below 2^-14: adding 0.5 aligns the half's last denormal bit with the float's last bit, so the FPU rounds
    tiny = b.sub(b.bitcast(b.fadd(b.bitcast(mag, V_F32), const(0.5)), V_I32), iconst(0x3F000000))
    odd = b.and_(b.lshr(mag, iconst(13)), iconst(1))
    normal = b.lshr(b.add(b.add(mag, iconst(0xFFF - (112 << 23))), odd), iconst(13))
    nan = b.icmp_signed(">", mag, iconst(0x7F800000))
    over = b.select(nan, iconst(0x7E00), iconst(0x7C00))
    r = b.select(b.icmp_signed("<", mag, iconst(113 << 23)), tiny, normal)
    r = b.select(b.icmp_signed(">=", mag, iconst(0x47800000)), over, r)
    return b.trunc(b.or_(r, sign), V_I16)


def op(ret: Any, *params: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: `f(ctx, builder, *llvm_values)` becomes an intrinsic of a fixed signature."""

    def wrap(f: Callable[..., Any]) -> Any:
        def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            r = f(ctx, b, *args)
            return ctx.get_dummy_value() if r is None else r

        def typer(tyctx: Any, *given: Any) -> Any:
            return ret(*params), codegen

        # Numba binds arguments by name and can not bind *given
        names = [Parameter(f"a{i}", Parameter.POSITIONAL_OR_KEYWORD) for i in range(len(params))]
        typer.__signature__ = Signature([Parameter("tyctx", Parameter.POSITIONAL_OR_KEYWORD), *names])  # type: ignore[attr-defined]
        typer.__name__ = f.__name__
        typer.__doc__ = f.__doc__
        return intrinsic(typer)

    return wrap


# --- loads and stores -------------------------------------------------------------------------------------------
@op(_i64, _i64)
def ld_i64(ctx, b, addr):  # type: ignore[no-untyped-def]
    return load(b, addr, I64)


@op(_i64, _i64)
def ld_i32(ctx, b, addr):  # type: ignore[no-untyped-def]
    return b.sext(load(b, addr, I32), I64)


@op(_i64, _i64)
def ld_u8(ctx, b, addr):  # type: ignore[no-untyped-def]
    return b.zext(load(b, addr, I8), I64)


@op(_i64, _i64)
def ld_u16(ctx, b, addr):  # type: ignore[no-untyped-def]
    return b.zext(load(b, addr, I16), I64)


@op(_f32, _i64)
def ld_f32(ctx, b, addr):  # type: ignore[no-untyped-def]
    return load(b, addr, F32)


@op(_f32, _i64)
def ld_f16(ctx, b, addr):  # type: ignore[no-untyped-def]
    return b.extract_element(half_ir(ctx, b, splat_ir(b, load(b, addr, I16))), I32(0))


@op(_f32, _i64)
def ld_bf16(ctx, b, addr):  # type: ignore[no-untyped-def]
    return b.bitcast(b.shl(b.zext(load(b, addr, I16), I32), I32(16)), F32)


@op(types.void, _i64, _i64)
def st_i64(ctx, b, addr, x):  # type: ignore[no-untyped-def]
    b.store(x, at(b, addr, I64), align=1)


@op(types.void, _i64, _i64)
def st_i32(ctx, b, addr, x):  # type: ignore[no-untyped-def]
    b.store(b.trunc(x, I32), at(b, addr, I32), align=1)


@op(types.void, _i64, _i64)
def st_u8(ctx, b, addr, x):  # type: ignore[no-untyped-def]
    b.store(b.trunc(x, I8), at(b, addr, I8), align=1)


@op(types.void, _i64, _i64)
def st_u16(ctx, b, addr, x):  # type: ignore[no-untyped-def]
    b.store(b.trunc(x, I16), at(b, addr, I16), align=1)


@op(types.void, _i64, _f32)
def st_f32(ctx, b, addr, x):  # type: ignore[no-untyped-def]
    b.store(x, at(b, addr, F32), align=1)


@op(f32x16, _i64)
def load_f32(ctx, b, addr):  # type: ignore[no-untyped-def]
    return load(b, addr, V_F32)


@op(f32x16, _i64)
def load_f16(ctx, b, addr):  # type: ignore[no-untyped-def]
    return half_ir(ctx, b, load(b, addr, V_I16))


@op(f32x16, _i64)
def load_bf16(ctx, b, addr):  # type: ignore[no-untyped-def]
    return b.bitcast(b.shl(b.zext(load(b, addr, V_I16), V_I32), iconst(16)), V_F32)


@op(types.void, _i64, f32x16)
def store_f32(ctx, b, addr, v):  # type: ignore[no-untyped-def]
    b.store(v, at(b, addr, V_F32), align=1)


@op(types.void, _i64, f32x16)
def store_f16(ctx, b, addr, v):  # type: ignore[no-untyped-def]
    b.store(to_half_ir(ctx, b, v), at(b, addr, V_I16), align=1)


@op(_i64, _i64, f32x16)
def store_i8_sum(ctx, b, addr, v):  # type: ignore[no-untyped-def]
    """Round 16 floats in [-127, 127] to int8 (nearest even), store them, return their sum."""
    i = b.fptosi(llvm(b, "llvm.rint.v16f32", V_F32, [v]), V_I32)
    small = ir.VectorType(I8, 16)
    b.store(b.trunc(i, small), at(b, addr, small), align=1)
    return b.sext(llvm(b, "llvm.vector.reduce.add.v16i32", I32, [i]), I64)


@op(f32x16, _i64)
def load_pairs(ctx, b, addr):  # type: ignore[no-untyped-def]
    """8 floats, each twice: the angles of 8 adjacent pairs."""
    v = load(b, addr, ir.VectorType(F32, 8))
    return b.shuffle_vector(v, v, ir.Constant(ir.VectorType(I32, 16), [i // 2 for i in range(16)]))


@op(f32x16, f32x16)
def swap_pairs(ctx, b, v):  # type: ignore[no-untyped-def]
    """(-x1, x0, -x3, x2 …): the other half of each pair, signed as a rotation needs it."""
    r = b.shuffle_vector(v, v, ir.Constant(ir.VectorType(I32, 16), [i ^ 1 for i in range(16)]))
    return b.fmul(r, ir.Constant(V_F32, [F32(-1.0), F32(1.0)] * 8))


@intrinsic(prefer_literal=True)
def prefetch(tyctx, addr, nbytes):  # type: ignore[no-untyped-def]
    """Ask for the cache lines of the next `nbytes` (a constant) at addr; harmless wherever it points."""
    lines = range(0, nbytes.literal_value, 64)

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        line = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        fn = cgutils.get_or_insert_function(b.module, line, "llvm.prefetch.p0")
        for offset in lines:
            b.call(fn, [at(b, b.add(args[0], I64(offset)), I8), I32(0), I32(3), I32(1)])  # read, keep, data
        return ctx.get_dummy_value()

    return types.void(_i64, nbytes), codegen


# --- arithmetic -------------------------------------------------------------------------------------------------
@op(f32x16, _f32)
def splat(ctx, b, x):  # type: ignore[no-untyped-def]
    return splat_ir(b, x)


@op(f32x16, f32x16, f32x16)
def add(ctx, b, x, y):  # type: ignore[no-untyped-def]
    return b.fadd(x, y)


@op(f32x16, f32x16, f32x16)
def sub(ctx, b, x, y):  # type: ignore[no-untyped-def]
    return b.fsub(x, y)


@op(f32x16, f32x16, f32x16)
def mul(ctx, b, x, y):  # type: ignore[no-untyped-def]
    return b.fmul(x, y)


@op(f32x16, f32x16, f32x16)
def div(ctx, b, x, y):  # type: ignore[no-untyped-def]
    return b.fdiv(x, y)


@op(f32x16, f32x16, f32x16, f32x16)
def fma(ctx, b, x, y, z):  # type: ignore[no-untyped-def]
    return fma_ir(ctx, b, x, y, z)


@op(f32x16, f32x16, f32x16)
def vmax(ctx, b, x, y):  # type: ignore[no-untyped-def]
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@op(f32x16, f32x16, f32x16)
def vmin(ctx, b, x, y):  # type: ignore[no-untyped-def]
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@op(f32x16, f32x16)
def vabs(ctx, b, x):  # type: ignore[no-untyped-def]
    return llvm(b, "llvm.fabs.v16f32", V_F32, [x])


@op(_f32, f32x16)
def hmax(ctx, b, x):  # type: ignore[no-untyped-def]
    return llvm(b, "llvm.vector.reduce.fmax.v16f32", F32, [x], fastmath=("nnan",))


@op(_f32, f32x16)
def hsum(ctx, b, x):  # type: ignore[no-untyped-def]
    """The sum of the lanes, by halving: the order is the same wherever it is inlined."""
    n = 16
    while n > 1:
        n //= 2
        low = b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, n), list(range(n))))
        high = b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, n), list(range(n, 2 * n))))
        x = b.fadd(low, high)
    return b.extract_element(x, I32(0))


@op(f32x16, f32x16, _i64, _i64)
def keep_lanes(ctx, b, v, first, end):  # type: ignore[no-untyped-def]
    """v in lanes first … end-1, -inf elsewhere."""
    lane = ir.Constant(V_I32, [I32(i) for i in range(16)])
    lo, hi = (splat_ir(b, b.trunc(x, I32)) for x in (first, end))
    keep = b.and_(b.icmp_signed(">=", lane, lo), b.icmp_signed("<", lane, hi))
    return b.select(keep, v, const(float("-inf")))


@op(f32x16, f32x16)
def exp(ctx, b, x):  # type: ignore[no-untyped-def]
    """e^x to about 1e-7 relative, for x <= 88; 0 below -87.3 (Cephes' expf: 2^n times a polynomial)."""
    tiny = b.fcmp_ordered("<", x, const(-87.3))
    x = b.select(b.fcmp_ordered(">", x, const(88.0)), const(88.0), b.select(tiny, const(-87.3), x))
    n = llvm(b, "llvm.rint.v16f32", V_F32, [b.fmul(x, const(1.4426950408889634))])
    r = fma_ir(ctx, b, n, const(-0.693359375), x)
    r = fma_ir(ctx, b, n, const(2.12194440e-4), r)
    p = const(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma_ir(ctx, b, p, r, const(c))
    p = fma_ir(ctx, b, b.fmul(p, r), r, b.fadd(r, const(1.0)))
    e = b.shl(b.add(b.fptosi(n, V_I32), iconst(127)), iconst(23))
    return b.select(tiny, const(0.0), b.fmul(p, b.bitcast(e, V_F32)))


@op(types.void, _i64, _i64, _i64, _i64, _i64, _i64, _i64)
def call_op(ctx, b, fn, *args):  # type: ignore[no-untyped-def]
    """Call the kernel at address fn with OP_SIGNATURE."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 6)
    b.call(b.inttoptr(fn, kind.as_pointer()), args)
