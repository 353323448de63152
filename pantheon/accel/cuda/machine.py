"""What the hardware can and Numba's CUDA dialect has no word for: inline PTX, and a twin of each for the simulator.

Under NUMBA_ENABLE_CUDASIM=1 a kernel is plain Python, a thread of it a Python thread, so blocks have few of them:
`LANES` and `WARPS` are the shape of a block for kernels that give each thread several rows, `THREADS` for those that
walk elements.  Kernels must give the same numbers for any shape.  Source: PTX ISA 8.8.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint16
from numba.core import config

#: whether kernels run in Numba's simulator
SIMULATED = bool(config.ENABLE_CUDASIM)
#: threads of a block in x (rows of a group) and in y (parts of a sum), and of a block of an elementwise kernel
LANES, WARPS, THREADS = (1, 1, 1) if SIMULATED else (32, 8, 256)

#: types of kernel arguments
I32, I64, F32 = int32, int64, float32
WORDS, FLOATS, HALVES, BYTES = int32[::1], float32[::1], uint16[::1], uint8[::1]


#: marks a function that kernels call; in the simulator it stays plain Python, whose calls are cheap, and may not use
#: `cuda` itself
device_function: Any = (lambda f: f) if SIMULATED else cuda.jit(device=True, inline="always")


if SIMULATED:

    def half_to_float(bits):  # type: ignore[no-untyped-def]
        """The float16 in the low 16 bits."""
        return np.float32(np.uint16(int(bits) & 0xFFFF).view(np.float16))

    def float_to_half(x):  # type: ignore[no-untyped-def]
        """float16 bits, rounded to the nearest even."""
        return int(np.float16(x).view(np.uint16))

    def as_float(word):  # type: ignore[no-untyped-def]
        """A 32-bit word's float32."""
        return np.uint32(int(word) & 0xFFFFFFFF).view(np.float32)

    def as_word(x):  # type: ignore[no-untyped-def]
        """The bits of a float32."""
        return np.float32(x).view(np.int32)

    def dp4a(a, b, c):  # type: ignore[no-untyped-def]
        """c + the sum of the products of the four signed bytes of a and b."""
        x = np.uint32(int(a) & 0xFFFFFFFF).reshape(1).view(np.int8).astype(np.int32)
        y = np.uint32(int(b) & 0xFFFFFFFF).reshape(1).view(np.int8).astype(np.int32)
        return int(c) + int(x @ y)

    def exp2(x):  # type: ignore[no-untyped-def]
        """2^x, within two units of the last place."""
        return np.float32(np.exp2(np.float32(x)))

    def to_int(x):  # type: ignore[no-untyped-def]
        """The nearest int32, even ones among equals."""
        return int(np.rint(x))

    def fma(a, b, c):  # type: ignore[no-untyped-def]
        """a * b + c, rounded once."""
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))

    def prmt(a, b, selector):  # type: ignore[no-untyped-def]
        """Four bytes out of the eight of a (0 ... 3) and b (4 ... 7), each named by a nibble of the selector."""
        pool = np.array([a, b], np.int64).astype(np.uint32).view(np.uint8)
        return pool[[(int(selector) >> shift) & 7 for shift in (0, 4, 8, 12)]].view(np.int32)[0]

    def load(array, at):  # type: ignore[no-untyped-def]
        """array[at] through the read-only cache; `at` is not negative."""
        return array[at]

    def prefetch(array, at):  # type: ignore[no-untyped-def]
        """Ask memory for the line of array[at]."""

    class _Warp:
        """What the lanes of a warp hand each other."""

        def __init__(self) -> None:
            self.barrier = threading.Barrier(32, timeout=60)
            self.words = np.zeros((32, 6), np.int32)

    _warps: dict[int, _Warp] = collections.defaultdict(_Warp)

    def mma(a, b, even, odd):  # type: ignore[no-untyped-def]
        """A 16 x 8 tile of sums of products of signed bytes, over 32 values (a of 4 words, b of 2) or 16 (2 and 1).

        Lane 4g + t gives quad t of row g, of row g + 8, then quads t + 4 of them, and quads t (and t + 4) of column g;
        it gets rows g, g + 8 of columns 2t, 2t + 1: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1), with `even`
        added to column 2t and `odd` to 2t + 1.  All lanes of a warp call it together (sm_80).
        """
        place: Any = threading.current_thread()
        warp, lane = _warps[place.threadIdx.y], place.threadIdx.x
        warp.words[lane, : len(a) + len(b)] = (*a, *b)
        warp.barrier.wait()
        first, second, total = lane // 4 * 4, lane % 4 * 8, np.array([[even, odd]] * 2, np.int32)
        for i in range(len(b)):
            rows = warp.words[first : first + 4, 2 * i : 2 * i + 2].T.copy().view(np.int8)
            columns = warp.words[second : second + 8, len(a) + i].reshape(2, 4).copy().view(np.int8)
            total += rows.astype(np.int32) @ columns.T.astype(np.int32)
        warp.barrier.wait()
        return tuple(total.reshape(-1))

else:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic
    from numba.cuda.np.arrayobj import make_array

    _I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
    #: PTX of a load: bits, and the constraint of where it goes
    _LOADS = {_I32: ("b32", "=r"), _F32: ("f32", "=f"), _I16: ("b16", "=h")}

    def asm(b: Any, ptx: str, constraints: str, result: Any, args: Any) -> Any:
        """Inline PTX without side effects."""
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return b.asm(kind, ptx, constraints, args, side_effect=False)

    def asm_load(b: Any, kind: Any, address: Any, n: int = 1) -> list[Any]:
        """n = 1 or 4 values at an address, a multiple of their size, through the read-only cache."""
        name, out = _LOADS[kind]
        if n == 1:
            return [asm(b, f"ld.global.nc.{name} $0, [$1];", f"{out},l", kind, [address])]
        ptx = f"ld.global.nc.v4.{name} {{$0, $1, $2, $3}}, [$4];"
        found = asm(b, ptx, f"{out},{out},{out},{out},l", ir.LiteralStructType([kind] * 4), [address])
        return [b.extract_value(found, i) for i in range(4)]

    @intrinsic
    def half_to_float(typing_ctx, bits):  # type: ignore[no-untyped-def]
        """The float16 in the low 16 bits."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            return asm(b, "cvt.f32.f16 $0, $1;", "=f,h", _F32, [b.trunc(args[0], _I16)])

        return types.float32(types.int32), gen

    @intrinsic
    def float_to_half(typing_ctx, x):  # type: ignore[no-untyped-def]
        """float16 bits, rounded to the nearest even."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            return b.zext(asm(b, "cvt.rn.f16.f32 $0, $1;", "=h,f", _I16, args), _I32)

        return types.int32(types.float32), gen

    @intrinsic
    def as_float(typing_ctx, word):  # type: ignore[no-untyped-def]
        """A 32-bit word's float32."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            return b.bitcast(args[0], _F32)

        return types.float32(types.int32), gen

    @intrinsic
    def as_word(typing_ctx, x):  # type: ignore[no-untyped-def]
        """The bits of a float32."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            return b.bitcast(args[0], _I32)

        return types.int32(types.float32), gen

    @intrinsic
    def dp4a(typing_ctx, a, b, c):  # type: ignore[no-untyped-def]
        """c + the sum of the products of the four signed bytes of a and b (sm_61)."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            return asm(b, "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", _I32, args)

        return types.int32(types.int32, types.int32, types.int32), gen

    @intrinsic
    def exp2(typing_ctx, x):  # type: ignore[no-untyped-def]
        """2^x, within two units of the last place."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            return asm(b, "ex2.approx.ftz.f32 $0, $1;", "=f,f", _F32, args)

        return types.float32(types.float32), gen

    @intrinsic
    def to_int(typing_ctx, x):  # type: ignore[no-untyped-def]
        """The nearest int32, even ones among equals."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            return asm(b, "cvt.rni.s32.f32 $0, $1;", "=r,f", _I32, args)

        return types.int32(types.float32), gen

    @intrinsic
    def fma(typing_ctx, a, b, c):  # type: ignore[no-untyped-def]
        """a * b + c, rounded once."""
        f = types.float32
        return f(f, f, f), lambda ctx, builder, sig, args: builder.fma(*args)

    @intrinsic
    def prmt(typing_ctx, a, b, selector):  # type: ignore[no-untyped-def]
        """Four bytes out of the eight of a (0 ... 3) and b (4 ... 7), each named by a nibble of the selector."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            return asm(b, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", _I32, args)

        return types.int32(types.int32, types.int32, types.int32), gen

    @intrinsic
    def mma(typing_ctx, a, b, even, odd):  # type: ignore[no-untyped-def]
        """A 16 x 8 tile of sums of products of signed bytes, over 32 values (a of 4 words, b of 2) or 16 (2 and 1).

        Lane 4g + t gives quad t of row g, of row g + 8, then quads t + 4 of them, and quads t (and t + 4) of column g;
        it gets rows g, g + 8 of columns 2t, 2t + 1: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1), with `even`
        added to column 2t and `odd` to 2t + 1.  All lanes of a warp call it together (sm_80).
        """
        n = a.count + b.count
        parts = [", ".join(f"${i}" for i in range(*ends)) for ends in ((4,), (4, 4 + a.count), (4 + a.count, 4 + n))]
        ptx = (
            f"mma.sync.aligned.m16n8k{16 * b.count}.row.col.s32.s8.s8.s32 "
            f"{{{parts[0]}}}, {{{parts[1]}}}, {{{parts[2]}}}, {{${4 + n}, ${5 + n}, ${4 + n}, ${5 + n}}};"
        )

        def gen(ctx, builder, sig, args):  # type: ignore[no-untyped-def]
            words = [builder.extract_value(args[0], i) for i in range(a.count)]
            words += [builder.extract_value(args[1], i) for i in range(b.count)]
            words = [builder.trunc(word, _I32) if word.type != _I32 else word for word in words] + [*args[2:]]
            kind = ir.FunctionType(ir.LiteralStructType([_I32] * 4), [_I32] * len(words))
            found = builder.asm(kind, ptx, "=r,=r,=r,=r" + ",r" * len(words), words, side_effect=True)
            made = ir.Constant(ir.ArrayType(_I32, 4), ir.Undefined)
            for i in range(4):
                made = builder.insert_value(made, builder.extract_value(found, i), i)
            return made

        return types.UniTuple(types.int32, 4)(a, b, types.int32, types.int32), gen

    @intrinsic
    def load(typing_ctx, array, at):  # type: ignore[no-untyped-def]
        """array[at] through the read-only cache; `at` is not negative, and nothing in this launch writes there."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            data = make_array(sig.args[0])(ctx, b, args[0]).data
            address = b.ptrtoint(b.gep(data, [args[1]]), _I64)
            return asm_load(b, data.type.pointee, address)[0]

        return array.dtype(array, types.int64), gen

    @intrinsic
    def prefetch(typing_ctx, array, at):  # type: ignore[no-untyped-def]
        """Ask memory for the line of array[at], into the second cache."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            address = b.ptrtoint(b.gep(make_array(sig.args[0])(ctx, b, args[0]).data, [args[1]]), _I64)
            kind = ir.FunctionType(ir.VoidType(), [_I64])
            b.asm(kind, "prefetch.global.L2 [$0];", "l", [address], side_effect=True)
            return ctx.get_dummy_value()

        return types.void(array, types.int64), gen


__all__ = [
    "BYTES", "F32", "FLOATS", "HALVES", "I32", "I64", "LANES", "SIMULATED", "THREADS", "WARPS", "WORDS", "as_float",
    "as_word", "cuda", "device_function", "dp4a", "exp2", "float_to_half", "fma", "half_to_float", "load", "mma",
    "prefetch", "prmt", "to_int",
]  # fmt: skip
