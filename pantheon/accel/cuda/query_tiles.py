"""Tiles of queries for attention: n numbers as a tuple, n a constant that unrolls when code is generated; in the
simulator a NumPy vector.

`array` is shared memory, where a tile lies at a multiple of four floats, or of its own size.  `like` is a tuple whose
length says how many dims a word of the cache holds, and so its format (see `kv`); a word gives float32 values without
conversions: 8 or 4 bits as the last ones of 2^23.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pantheon.accel.cuda.machine import SIMULATED

#: what is taken from the values of a word of 4 or 8, as floats of 2^23 and more
_BIASES = {4: 8388608.0 + 128, 8: 8388608.0 + 8}

if SIMULATED:

    def _fma(a, b, c):  # type: ignore[no-untyped-def]
        """a * b + c in float64, rounded once to float32: a float32 product is exact there."""
        return (np.asarray(a, np.float64) * b + c).astype(np.float32)

    def _dims(words, like):  # type: ignore[no-untyped-def]
        """The dims of each word, in order."""
        plain = np.array(words, np.int32).reshape(-1)
        if len(like) <= 2:
            return plain.view(np.float32 if len(like) == 1 else np.float16).astype(np.float32)
        bits = 32 // len(like)
        parts = plain[:, None] >> (bits * np.arange(len(like))) & ((1 << bits) - 1)
        return (parts.reshape(-1) - (1 << (bits - 1))).astype(np.float32)

    def again(i):  # type: ignore[no-untyped-def]
        """i, of 32 bits, of which the compiler knows nothing: what follows from it is worked out here, not kept."""
        return i

    def get(array, at):  # type: ignore[no-untyped-def]
        """array[at]; `at` is not negative."""
        return array[at]

    def keep(array, at, x):  # type: ignore[no-untyped-def]
        """array[at] = x; `at` is not negative."""
        array[at] = x

    def take(like, array, at):  # type: ignore[no-untyped-def]
        """array[at] …"""
        return array[at : at + len(like)]

    def put(array, at, tile):  # type: ignore[no-untyped-def]
        """array[at] … = tile."""
        array[at : at + len(tile)] = tile

    def add_times(acc, tile, x):  # type: ignore[no-untyped-def]
        """acc + tile * x."""
        return _fma(tile, x, acc)

    def add_words(acc, words, like, array, at):  # type: ignore[no-untyped-def]
        """acc + the sum over the dims of the words, in order, of dim * tile of the array, one tile behind the other."""
        for i, x in enumerate(_dims(words, like)):
            acc = _fma(array[at + i * len(acc) : at + (i + 1) * len(acc)], x, acc)
        return acc

    def add_outer(acc, words, scales, like, array, at, step):  # type: ignore[no-untyped-def]
        """acc[d * n + j] + the sum over the words, in order, of dim d of the word * number j of its tile, which is
        array[at + word * step + j], times its scale unless scales is None."""
        n = len(acc) // len(like)
        for i, word in enumerate(words):
            tile = array[at + i * step : at + i * step + n]
            tile = tile if scales is None else tile * scales[i]
            acc = _fma(np.tile(tile, len(like)), np.repeat(_dims(word, like), n), acc)
        return acc

    def add_seen(acc, word, scale, like, array, at, first, end, p):  # type: ignore[no-untyped-def]
        """As `add_outer` of one word and one scale, for queries j with array[first + j] <= p < array[end + j] only."""
        n = len(acc) // len(like)
        seen = (array[first : first + n] <= p) & (p < array[end : end + n])
        both = add_outer(acc, (word,), None if scale is None else (scale,), like, array, at, 0)
        return np.where(np.resize(seen, len(acc)), both, acc)

    def halves(tile):  # type: ignore[no-untyped-def]
        """The first half of a tile, and the second."""
        return tile[: len(tile) // 2], tile[len(tile) // 2 :]

else:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic
    from numba.cuda.np.arrayobj import make_array

    from pantheon.accel.cuda.machine import asm
    from pantheon.accel.cuda.tiles import asm_list, asm_tuple

    _I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

    def _floats(n: int) -> Any:
        return types.UniTuple(types.float32, n)

    def _vectors(ctx: Any, b: Any, kind: Any, array: Any, at: Any, n: int) -> list[tuple[Any, int]]:
        """Pointers to vectors of 4, 2 or 1 floats that make up n of them, and the width."""
        data = make_array(kind)(ctx, b, array).data
        width = next(w for w in (4, 2, 1) if n % w == 0)
        vector = (ir.VectorType(_F32, width) if width > 1 else _F32).as_pointer(data.type.addrspace)
        return [(b.bitcast(b.gep(data, [b.add(at, _I64(i))]), vector), width) for i in range(0, n, width)]

    def _load(ctx: Any, b: Any, kind: Any, array: Any, at: Any, n: int) -> list[Any]:
        found = []
        for pointer, width in _vectors(ctx, b, kind, array, at, n):
            vector = b.load(pointer, align=4 * width)
            found += [b.extract_element(vector, _I32(i)) for i in range(width)] if width > 1 else [vector]
        return found

    def _values(b: Any, word: Any, n: int) -> list[Any]:
        """The n dims of a word."""
        if n == 1:
            return [b.bitcast(word, _F32)]
        bits = 32 // n
        parts = [b.lshr(word, _I32(bits * i)) if i else word for i in range(n)]
        if n == 2:
            return [asm(b, "cvt.f32.f16 $0, $1;", "=f,h", _F32, [b.trunc(part, _I16)]) for part in parts]
        large = [b.or_(b.and_(part, _I32((1 << bits) - 1)), _I32(0x4B000000)) for part in parts]
        return [b.fsub(b.bitcast(part, _F32), _F32(_BIASES[n])) for part in large]

    @intrinsic
    def again(typing_ctx, i):  # type: ignore[no-untyped-def]
        """i, of 32 bits, of which the compiler knows nothing: what follows from it is worked out here, not kept."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            kind = ir.FunctionType(_I32, [_I32])
            return b.sext(b.asm(kind, "mov.b32 $0, $1;", "=r,r", [b.trunc(args[0], _I32)], side_effect=True), _I64)

        return types.int64(types.int64), gen

    @intrinsic
    def get(typing_ctx, array, at):  # type: ignore[no-untyped-def]
        """array[at]; `at` is not negative."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            return b.load(b.gep(make_array(array)(ctx, b, args[0]).data, [args[1]]))

        return array.dtype(array, types.int64), gen

    @intrinsic
    def keep(typing_ctx, array, at, x):  # type: ignore[no-untyped-def]
        """array[at] = x; `at` is not negative."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            b.store(args[2], b.gep(make_array(array)(ctx, b, args[0]).data, [args[1]]))
            return ctx.get_dummy_value()

        return types.void(array, types.int64, array.dtype), gen

    @intrinsic
    def take(typing_ctx, like, array, at):  # type: ignore[no-untyped-def]
        """array[at] …"""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            return asm_tuple(b, _load(ctx, b, array, args[1], args[2], like.count))

        return _floats(like.count)(like, array, types.int64), gen

    @intrinsic
    def put(typing_ctx, array, at, tile):  # type: ignore[no-untyped-def]
        """array[at] … = tile."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            values = asm_list(b, tile, args[2])
            for pointer, width in _vectors(ctx, b, array, args[0], args[1], tile.count):
                vector = values.pop(0) if width == 1 else ir.Constant(ir.VectorType(_F32, width), ir.Undefined)
                for i in range(width if width > 1 else 0):
                    vector = b.insert_element(vector, values.pop(0), _I32(i))
                b.store(vector, pointer, align=4 * width)
            return ctx.get_dummy_value()

        return types.void(array, types.int64, tile), gen

    @intrinsic
    def add_times(typing_ctx, acc, tile, x):  # type: ignore[no-untyped-def]
        """acc + tile * x."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            pairs = zip(asm_list(b, acc, args[0]), asm_list(b, tile, args[1]), strict=True)
            return asm_tuple(b, [b.fma(y, args[2], total) for total, y in pairs])

        return acc(acc, tile, types.float32), gen

    @intrinsic
    def add_words(typing_ctx, acc, words, like, array, at):  # type: ignore[no-untyped-def]
        """acc + the sum over the dims of the words, in order, of dim * tile of the array, one tile behind the other."""

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            totals, place = asm_list(b, acc, args[0]), args[4]
            for word in asm_list(b, words, args[1]):
                for x in _values(b, word, like.count):
                    tile = _load(ctx, b, array, args[3], place, acc.count)
                    totals = [b.fma(y, x, total) for y, total in zip(tile, totals, strict=True)]
                    place = b.add(place, _I64(acc.count))
            return asm_tuple(b, totals)

        return acc(acc, words, like, array, types.int64), gen

    @intrinsic
    def add_outer(typing_ctx, acc, words, scales, like, array, at, step):  # type: ignore[no-untyped-def]
        """acc[d * n + j] + the sum over the words, in order, of dim d of the word * number j of its tile, which is
        array[at + word * step + j], times its scale unless scales is None."""
        n, scaled = acc.count // like.count, not isinstance(scales, types.NoneType)

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            totals, place = asm_list(b, acc, args[0]), args[5]
            for i, word in enumerate(asm_list(b, words, args[1])):
                tile = _load(ctx, b, array, args[4], place, n)
                if scaled:
                    tile = [b.fmul(y, b.extract_value(args[2], i)) for y in tile]
                pairs = [(x, y) for x in _values(b, word, like.count) for y in tile]
                totals = [b.fma(y, x, total) for (x, y), total in zip(pairs, totals, strict=True)]
                place = b.add(place, args[6])
            return asm_tuple(b, totals)

        return acc(acc, words, scales, like, array, types.int64, types.int64), gen

    @intrinsic
    def add_seen(typing_ctx, acc, word, scale, like, array, at, first, end, p):  # type: ignore[no-untyped-def]
        """As `add_outer` of one word and one scale, for queries j with array[first + j] <= p < array[end + j] only."""
        n, scaled = acc.count // like.count, not isinstance(scale, types.NoneType)

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            totals, dims = asm_list(b, acc, args[0]), _values(b, args[1], like.count)
            tile, least, most = (_load(ctx, b, array, args[4], place, n) for place in args[5:8])
            for j in range(n):
                y = b.fmul(tile[j], args[2]) if scaled else tile[j]
                seen = b.and_(b.fcmp_ordered("<=", least[j], args[8]), b.fcmp_ordered("<", args[8], most[j]))
                for d, x in enumerate(dims):
                    total = totals[d * n + j]
                    totals[d * n + j] = b.select(seen, b.fma(y, x, total), total)
            return asm_tuple(b, totals)

        i64 = types.int64
        return acc(acc, types.int32, scale, like, array, i64, i64, i64, types.float32), gen

    @intrinsic
    def halves(typing_ctx, tile):  # type: ignore[no-untyped-def]
        """The first half of a tile, and the second."""
        half = _floats(tile.count // 2)

        def gen(ctx, b, sig, args):  # type: ignore[no-untyped-def]
            values = asm_list(b, tile, args[0])
            pair = [asm_tuple(b, values[: half.count]), asm_tuple(b, values[half.count :])]
            return ctx.make_tuple(b, sig.return_type, pair)

        return types.UniTuple(half, 2)(tile), gen
