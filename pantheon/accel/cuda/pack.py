"""Packing kernels: whole rows as they lie in the model file -> the words that `layouts` describes, on the die.

Each takes (raw, weights, quants_at, scales_at, cols, first_row, n_rows, row_bytes): `raw` holds n_rows rows of
row_bytes each, the first of which is row `first_row`, a multiple of 32, of a matrix of `cols` columns whose planes
begin at quants_at and scales_at.  Rows behind the last one in its group become zeros.  One warp takes one super-block
(one word column, for floats) of one group, lane = row.
"""

from __future__ import annotations

import functools

from pantheon.accel.cpu.file_blocks import FILE_BLOCK
from pantheon.accel.cuda import file_fields, layouts
from pantheon.accel.cuda.file_fields import half, word
from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.layouts import BLOCK, FLOATS, KINDS, ROWS
from pantheon.accel.cuda.machine import BYTES, I32, I64, LANES, SIMULATED, WARPS, WORDS, cuda, device_function

_TYPES = (BYTES, WORDS, I64, I64, I32, I32, I32, I32)
#: more blocks than this share nothing out any better
_MOST_BLOCKS = 4096


@device_function
def _as_int32(x):  # type: ignore[no-untyped-def]
    """The low 32 bits as a signed number, which the simulator's arrays insist on."""
    return ((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def _planes(quad, BASE, HIGH):  # type: ignore[no-untyped-def]
    """The function (raw, x, b, w) -> word w of the bit planes of block b."""
    LOW, REST = 0x01010101 * ((1 << BASE) - 1), 0x01010101 * ((1 << HIGH) - 1)

    @device_function
    def low_word(raw, x, b, w):  # type: ignore[no-untyped-def]
        found = I64(0)
        for k in range(8 // BASE):
            found |= (quad(raw, x, b, w * (8 // BASE) + k) & LOW) << (k * BASE)
        return found

    if not HIGH:
        return low_word

    @device_function
    def plane_word(raw, x, b, w):  # type: ignore[no-untyped-def]
        if w < BASE:
            return low_word(raw, x, b, w)
        found = I64(0)
        for k in range(8 // HIGH):
            found |= ((quad(raw, x, b, (w - BASE) * (8 // HIGH) + k) >> BASE) & REST) << (k * HIGH)
        return found

    return plane_word


def _scales(sub, HEADER_AT, HEADER, SUB):  # type: ignore[no-untyped-def]
    """The function (raw, x, row_bytes, there, w) -> word w of a super-block in the scale plane; rows from the one
    whose block begins at x, `there` of them."""
    HALF, QUADS = ROWS // 2, ROWS // 4

    @device_function
    def scale_word(raw, x, row_bytes, there, w):  # type: ignore[no-untyped-def]
        found = I64(0)
        if w < HEADER:
            which, pair = w // HALF, w % HALF
            for t in range(2):
                r = 2 * pair + t
                if r < there:
                    found |= half(raw, x + r * row_bytes + HEADER_AT + 2 * which) << (16 * t)
        else:
            vector, rows = (w - HEADER) // QUADS, (w - HEADER) % QUADS
            for t in range(4):
                r = 4 * rows + t
                if r < there:
                    found |= (sub(raw, x + r * row_bytes, vector // SUB, vector % SUB) & 255) << (8 * t)
        return found

    return scale_word


def _quantised(name):  # type: ignore[no-untyped-def]
    kind = KINDS[name]
    BITS, FILE, SPAN, SUP = kind.base_bits + kind.high_bits, FILE_BLOCK[name][1], BLOCK * kind.sup, kind.sup
    QUANTS, SCALES, HEADER = layouts.quant_words(kind), layouts.scale_words(kind), layouts.header_words(kind)
    vectors = max(1, layouts.sub_words(kind) // layouts.SUB)
    plane_word = _planes(file_fields.QUADS[name], kind.base_bits, kind.high_bits)
    scale_word = _scales(file_fields.subs(name), file_fields.HEADER_AT.get(name, 0), HEADER, vectors)

    def pack(raw, weights, quants_at, scales_at, cols, first_row, n_rows, row_bytes):  # type: ignore[no-untyped-def]
        supers, stride = I64(cols) // SPAN, I64(row_bytes)
        items = (I64(n_rows) + ROWS - 1) // ROWS * supers
        first, step = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y, cuda.gridDim.x * cuda.blockDim.y
        for item in range(first, items, step):
            row, s = item // supers * ROWS, item % supers
            x, there, unit = row * stride + s * FILE, n_rows - row, (first_row + row) // ROWS * supers + s
            q = quants_at + unit * (SUP * QUANTS)
            for lane in range(cuda.threadIdx.x, ROWS, cuda.blockDim.x):
                for i in range(SUP * BITS):
                    found = I64(0)
                    if lane < there:
                        found = plane_word(raw, x + lane * stride, i // BITS, i % BITS)
                    weights[q + i * ROWS + lane] = _as_int32(found)
            to = scales_at + unit * SCALES
            for w in range(cuda.threadIdx.x, SCALES, cuda.blockDim.x):
                weights[to + w] = _as_int32(scale_word(raw, x, stride, there, w))

    return pack


def _float(SIZE):  # type: ignore[no-untyped-def]
    PER_WORD = 4 // SIZE

    @device_function
    def float_word(raw, at, whole):  # type: ignore[no-untyped-def]
        return word(raw, at) if whole else half(raw, at)

    def pack(raw, weights, quants_at, scales_at, cols, first_row, n_rows, row_bytes):  # type: ignore[no-untyped-def]
        words = (I64(cols) + PER_WORD - 1) // PER_WORD
        items = (I64(n_rows) + ROWS - 1) // ROWS * words
        first, step = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y, cuda.gridDim.x * cuda.blockDim.y
        for item in range(first, items, step):
            row, k = item // words * ROWS, item % words
            to = quants_at + ((first_row + row) // ROWS * words + k) * ROWS
            for lane in range(cuda.threadIdx.x, ROWS, cuda.blockDim.x):
                found = I64(0)
                if row + lane < n_rows:
                    # a last odd column has nobody in its upper half
                    found = float_word(raw, (row + lane) * row_bytes + 4 * k, (k + 1) * PER_WORD <= cols)
                weights[to + lane] = _as_int32(found)

    return pack


@functools.cache
def pack(type_name: str) -> Kernel:
    """The packing kernel of a weight type that has kernels; grid as `pack_grid` says."""
    body = _float(FLOATS[type_name]) if type_name in FLOATS else _quantised(type_name)
    return Kernel(f"pack {type_name}", body, _TYPES, (LANES, WARPS))


def pack_grid(type_name: str, n_rows: int, cols: int) -> tuple[int, int]:
    """Blocks of a launch that packs so many rows."""
    if SIMULATED:
        return 1, 1
    units = layouts.float_words(type_name, cols) if type_name in FLOATS else cols // (BLOCK * KINDS[type_name].sup)
    return max(1, min(_MOST_BLOCKS, -(-layouts.groups(n_rows) * units // WARPS))), 1


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [pack(name) for name in (*KINDS, *FLOATS)]
