"""Register tiles: n columns of a product as a tuple of n numbers, n a constant that unrolls when code is generated.

Every operation treats each column alike, so a column's numbers never depend on the width of its tile.  In the
simulator a tile is a NumPy vector.  `like` is a tile that says how many columns there are.  `at` and `step` count
elements: column c's first is array[at + c * step], read through the read-only cache; the memory of all columns must
exist.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pantheon.accel.cuda.machine import SIMULATED


def zeros(n: int) -> Any:
    """A tile of n float32 zeros: a constant for kernels to close over."""
    return np.zeros(n, np.float32) if SIMULATED else (np.float32(0),) * n


if SIMULATED:

    def _rows(array, at, step, n, width):  # type: ignore[no-untyped-def]
        """[n, width]: `width` elements of each column."""
        plain = getattr(array, "_ary", array)
        return np.stack([plain[at + c * step : at + c * step + width] for c in range(n)])

    def _fma(a, b, c):  # type: ignore[no-untyped-def]
        """a * b + c in float64, rounded once to float32: a float32 product is exact there."""
        return (np.asarray(a, np.float64) * b + c).astype(np.float32)

    def gather(like, array, at, step):  # type: ignore[no-untyped-def]
        """The element of each column."""
        return _rows(array, at, step, len(like), 1)[:, 0]

    def dots(like, words, array, at, step):  # type: ignore[no-untyped-def]
        """int32: the sum of the products of the signed bytes of 4 or 8 words with as many of each column, read at a
        multiple of 4 words."""
        w = np.array(words, np.int32).view(np.int8).astype(np.int32)
        return _rows(array, at, step, len(like), len(words)).view(np.int8).astype(np.int32) @ w

    def add(a, b):  # type: ignore[no-untyped-def]
        """a + b."""
        return a + b

    def unbiased(ints, sums, bits):  # type: ignore[no-untyped-def]
        """ints - sums * 2^bits."""
        return ints - (sums << bits)

    def add_scaled(acc, weight, ints, scales):  # type: ignore[no-untyped-def]
        """acc + ints * (weight * scales), by fused multiply-adds."""
        return _fma(ints.astype(np.float32), weight * scales, acc)

    def add_shifted(acc, weight, ints, scales):  # type: ignore[no-untyped-def]
        """acc + weight * (scales * ints), by fused multiply-adds."""
        return _fma(weight, scales * ints.astype(np.float32), acc)

    def add_floats(acc, weights, array, at, step):  # type: ignore[no-untyped-def]
        """acc + weights[0] * column[0] + ..., in this order, by fused multiply-adds; 1 weight, or 4 with columns read
        at a multiple of 4."""
        rows = _rows(array, at, step, len(acc), len(weights))
        for i, w in enumerate(weights):
            acc = _fma(w, rows[:, i], acc)
        return acc

    def store(array, at, step, tile):  # type: ignore[no-untyped-def]
        """Write column c to array[at + c * step]."""
        for c, value in enumerate(tile):
            array[at + c * step] = value

else:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic
    from numba.cuda.np.arrayobj import make_array

    from pantheon.accel.cuda.machine import asm, asm_load

    _I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
    _KINDS = {types.int32: _I32, types.float32: _F32}

    def asm_tuple(b: Any, values: list[Any]) -> Any:
        """Values as the LLVM array of a tuple."""
        made = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
        for i, value in enumerate(values):
            made = b.insert_value(made, value, i)
        return made

    def asm_list(b: Any, kind: Any, value: Any) -> list[Any]:
        """The values of such a tuple."""
        return [b.extract_value(value, i) for i in range(kind.count)]

    def _addresses(ctx: Any, b: Any, n: int, kind: Any, array: Any, at: Any, step: Any) -> list[Any]:
        """The address of each of n columns.  Each from the one before, by an addition that LLVM does not see through:
        it would keep 2 registers for every column otherwise."""
        data = make_array(kind)(ctx, b, array).data
        size = _I64(kind.dtype.bitwidth // 8)
        places = [b.ptrtoint(b.gep(data, [at]), _I64)]
        while len(places) < n:
            places.append(asm(b, "add.s64 $0, $1, $2;", "=l,l,l", _I64, [places[-1], b.mul(step, size)]))
        return places

    def _mapped(f: Any, kinds: Any, result: Any) -> Any:
        """Code that applies f to the tiles among the arguments column by column; other arguments are shared."""
        n = next(kind.count for kind in kinds if isinstance(kind, types.UniTuple))

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            columns = [
                asm_list(b, kind, a) if isinstance(kind, types.UniTuple) else [a] * n
                for kind, a in zip(sig.args, args, strict=True)
            ]
            return asm_tuple(b, [f(b, *column) for column in zip(*columns, strict=True)])

        return types.UniTuple(result, n)(*kinds), gen

    @intrinsic
    def gather(typing_ctx, like, array, at, step):  # type: ignore[no-untyped-def]
        """The element of each column."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            places = _addresses(ctx, b, like.count, array, *args[1:])
            return asm_tuple(b, [asm_load(b, _KINDS[array.dtype], place)[0] for place in places])

        return types.UniTuple(array.dtype, like.count)(like, array, types.int64, types.int64), gen

    @intrinsic
    def dots(typing_ctx, like, words, array, at, step):  # type: ignore[no-untyped-def]
        """int32: the sum of the products of the signed bytes of 4 or 8 words with as many of each column, read at a
        multiple of 4 words."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            w, sums = asm_list(b, words, args[1]), []
            if w[0].type != _I32:  # int32 operations give int64 in Numba
                w = [b.trunc(word, _I32) for word in w]
            for place in _addresses(ctx, b, like.count, array, *args[2:]):
                x: list[Any] = []
                for first in range(0, words.count, 4):
                    x += asm_load(b, _I32, b.add(place, _I64(4 * first)), 4)
                total = _I32(0)
                for pair in zip(w, x, strict=True):
                    total = asm(b, "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", _I32, [*pair, total])
                sums.append(total)
            return asm_tuple(b, sums)

        return types.UniTuple(types.int32, like.count)(like, words, array, types.int64, types.int64), gen

    @intrinsic
    def add(typing_ctx, a, c):  # type: ignore[no-untyped-def]
        """a + c of int32 tiles."""
        return _mapped(lambda b, x, y: b.add(x, y), (a, c), types.int32)

    @intrinsic
    def unbiased(typing_ctx, ints, sums, bits):  # type: ignore[no-untyped-def]
        """ints - sums * 2^bits."""
        return _mapped(lambda b, i, s, n: b.sub(i, b.shl(s, n)), (ints, sums, types.int32), types.int32)

    @intrinsic
    def add_scaled(typing_ctx, acc, weight, ints, scales):  # type: ignore[no-untyped-def]
        """acc + ints * (weight * scales), by fused multiply-adds."""
        return _mapped(
            lambda b, f, w, i, d: b.fma(b.sitofp(i, _F32), b.fmul(w, d), f), (acc, weight, ints, scales), types.float32
        )

    @intrinsic
    def add_shifted(typing_ctx, acc, weight, ints, scales):  # type: ignore[no-untyped-def]
        """acc + weight * (scales * ints), by fused multiply-adds."""
        return _mapped(
            lambda b, f, w, i, d: b.fma(w, b.fmul(d, b.sitofp(i, _F32)), f), (acc, weight, ints, scales), types.float32
        )

    @intrinsic
    def add_floats(typing_ctx, acc, weights, array, at, step):  # type: ignore[no-untyped-def]
        """acc + weights[0] * column[0] + ..., in this order, by fused multiply-adds; 1 weight, or 4 with columns read
        at a multiple of 4."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            totals, w = asm_list(b, acc, args[0]), asm_list(b, weights, args[1])
            for c, place in enumerate(_addresses(ctx, b, acc.count, array, *args[2:])):
                for pair in zip(w, asm_load(b, _F32, place, weights.count), strict=True):
                    totals[c] = b.fma(*pair, totals[c])
            return asm_tuple(b, totals)

        return acc(acc, weights, array, types.int64, types.int64), gen

    @intrinsic
    def store(typing_ctx, array, at, step, tile):  # type: ignore[no-untyped-def]
        """Write column c to array[at + c * step]."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            data = make_array(array)(ctx, b, args[0]).data
            for c, value in enumerate(asm_list(b, tile, args[3])):
                b.store(value, b.gep(data, [b.add(args[1], b.mul(args[2], _I64(c)))]))
            return ctx.get_dummy_value()

        return types.void(array, types.int64, types.int64, tile), gen


__all__ = ["add", "add_floats", "add_scaled", "add_shifted", "dots", "gather", "store", "unbiased", "zeros"]
