"""The NumPy twin of the packing kernels: blocks of a model file taken apart, then laid out as `layouts` says.

raw bytes -> (q, header, subs):

q: uint8 [rows, blocks, 32]; header: uint16 [rows, supers, 1 or 2], f16 bits of d and m; subs: uint8 [rows, blocks, n],
sub-scales of the block (or of both halves), then sub-minimums; n may be 0.  Block layouts: ggml's, public facts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cpu.file_blocks import FILE_BLOCK
from pantheon.accel.cpu.layouts import BLOCK, FLOATS, KINDS, ROWS, Kind

U8 = NDArray[Any]  # uint8; NumPy's shifts by a Python int lose the type for mypy
Parts = tuple[U8, NDArray[np.uint16], U8]

def _halves(x: U8, first: int, end: int) -> NDArray[np.uint16]:
    """Bytes first … end-1 of each block as uint16."""
    return np.ascontiguousarray(x[..., first:end]).view(np.uint16)


def _nibbles(q: U8) -> U8:
    """[..., n] bytes -> [..., 2n]: all low nibbles, then all high ones."""
    return np.concatenate([q & 15, q >> 4], -1)


def _none(x: U8) -> U8:
    return np.zeros((*x.shape[:2], 0), np.uint8)


def _fifth(x: U8, at: int) -> U8:
    """32 single bits of the four bytes at `at`, at bit 4."""
    return np.unpackbits(x[..., at : at + 4], axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(x: U8) -> Parts:
    return _nibbles(x[..., 2:]), _halves(x, 0, 2), _none(x)


def _q4_1(x: U8) -> Parts:
    return _nibbles(x[..., 4:]), _halves(x, 0, 4), _none(x)


def _q5_0(x: U8) -> Parts:
    return _nibbles(x[..., 6:]) | _fifth(x, 2), _halves(x, 0, 2), _none(x)


def _q5_1(x: U8) -> Parts:
    return _nibbles(x[..., 8:]) | _fifth(x, 4), _halves(x, 0, 4), _none(x)


def _q8_0(x: U8) -> Parts:
    return x[..., 2:], _halves(x, 0, 2), _none(x)


def _blocks(q: U8) -> U8:
    """[rows, supers, 8, n] -> [rows, blocks, n]."""
    return q.reshape(q.shape[0], -1, q.shape[-1])


def _shifted(x: U8, step: int, count: int, mask: int) -> U8:
    """[..., n, width] -> [..., n * count, width]: the bit fields of each byte, lowest first."""
    fields = [(x >> (step * i)) & mask for i in range(count)]
    return np.stack(fields, -2).reshape(*x.shape[:-2], -1, x.shape[-1])


def _words(x: U8, width: int) -> U8:
    return x.reshape(*x.shape[:-1], -1, width)


def _q2_k(x: U8) -> Parts:
    q = _shifted(_words(x[..., 16:80], 32), 2, 4, 3)
    s = x[..., :16]
    subs = np.concatenate([_words(s & 15, 2), _words(s >> 4, 2)], -1)
    return _blocks(q), _halves(x, 80, 84), _blocks(subs)


def _q3_k(x: U8) -> Parts:
    low = _shifted(_words(x[..., 32:96], 32), 2, 4, 3)
    high = _shifted(x[..., None, :32], 1, 8, 1)
    s = x[..., 96:108]
    scale = np.concatenate([s[..., :8] & 15, s[..., :8] >> 4], -1)
    scale |= np.concatenate([(s[..., 8:] >> (2 * i)) & 3 for i in range(4)], -1) << 4
    subs = _words(scale - np.uint8(32), 2)
    return _blocks(low | high << 2), _halves(x, 108, 110), _blocks(subs)


def _six_bits(s: U8) -> U8:
    """12 bytes -> [..., 8, 2]: scale and minimum of each block of Q4_K and Q5_K."""
    scale = np.concatenate([s[..., :4] & 63, (s[..., 8:] & 15) | (s[..., :4] >> 6 << 4)], -1)
    low = np.concatenate([s[..., 4:8] & 63, (s[..., 8:] >> 4) | (s[..., 4:8] >> 6 << 4)], -1)
    return np.stack([scale, low], -1)


def _q4_k(x: U8) -> Parts:
    q = _shifted(_words(x[..., 16:], 32), 4, 2, 15)
    return _blocks(q), _halves(x, 0, 4), _blocks(_six_bits(x[..., 4:16]))


def _q5_k(x: U8) -> Parts:
    q = _shifted(_words(x[..., 48:], 32), 4, 2, 15) | _shifted(x[..., None, 16:48], 1, 8, 1) << 4
    return _blocks(q), _halves(x, 0, 4), _blocks(_six_bits(x[..., 4:16]))


def _q6_k(x: U8) -> Parts:
    low = _words(x[..., :128], 64)  # two halves of 128 values; each: 32 + 32 low nibbles, then the high ones
    low = _nibbles(low).reshape(*x.shape[:-1], 8, 32)
    high = _shifted(_words(x[..., 128:192], 32), 2, 4, 3)
    return _blocks(low | high << 4), _halves(x, 208, 210), _blocks(_words(x[..., 192:208], 2))


def _iq4_xs(x: U8) -> Parts:
    q = _nibbles(_words(x[..., 8:], 16))
    low = _shifted(x[..., 4:8, None], 4, 2, 15)[..., 0]
    high = _shifted(x[..., 2:4, None], 2, 4, 3)[..., 0]
    scale = (low | high << 4) - np.uint8(32)
    return _blocks(q), _halves(x, 0, 2), _blocks(scale[..., None])


UNPACK: dict[str, Callable[[U8], Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _q4_0, "IQ4_XS": _iq4_xs,
}  # fmt: skip


def packed(type_name: str, rows: U8, cols: int) -> tuple[U8, U8]:
    """(quants, scales) uint8 of the rows of a file, [n_rows, row bytes]."""
    groups = -(-len(rows) // ROWS)
    whole = _whole_groups(rows)
    if type_name in FLOATS:
        dtype = np.uint32 if FLOATS[type_name] == 4 else np.uint16
        turned = np.ascontiguousarray(whole).view(dtype).reshape(groups, ROWS, cols).transpose(0, 2, 1)
        return np.ascontiguousarray(turned).reshape(-1).view(np.uint8), np.zeros(0, np.uint8)
    kind = KINDS[type_name]
    quants, scales = (np.zeros(n, np.uint8) for n in kind.packed_bytes(len(rows), cols))
    blocks = cols // BLOCK
    q = quants.view(np.uint32).reshape(groups, blocks, -1, ROWS)
    planes = scales.reshape(groups, blocks // kind.sup, -1)
    _pack_groups(kind, whole, q, planes)
    if len(rows) % ROWS:  # rows that are not there are zero in every plane
        planes[-1, :, kind.header_bytes :].reshape(blocks // kind.sup, -1, ROWS)[..., len(rows) % ROWS :] = 0
    return quants, scales


def _whole_groups(rows: U8) -> U8:
    """Zero rows up to the next group."""
    missing = -len(rows) % ROWS
    return np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.uint8)]) if missing else rows


def _pack_groups(kind: Kind, rows: U8, quants: NDArray[np.uint32], scales: U8) -> None:
    file_bytes = FILE_BLOCK[kind.name][1]
    values, header, subs = UNPACK[kind.name](rows.reshape(len(rows), -1, file_bytes))
    groups, blocks = quants.shape[:2]
    quads = np.ascontiguousarray(values).view(np.uint32).reshape(groups, ROWS, blocks, 8).transpose(0, 2, 3, 1)
    bit_planes(quads, kind.base_bits, 0, quants[:, :, : kind.base_bits])
    if kind.high_bits:
        bit_planes(quads, kind.high_bits, kind.base_bits, quants[:, :, kind.base_bits :])
    supers = blocks // kind.sup
    h = scales[..., : kind.header_bytes].view(np.uint16).reshape(groups, supers, -1, ROWS)
    h[:] = header.reshape(groups, ROWS, supers, -1).transpose(0, 2, 3, 1)
    if kind.subs:
        to = scales[..., kind.header_bytes :].reshape(groups, supers, kind.sup, -1, ROWS)
        to[:] = subs.reshape(groups, ROWS, supers, kind.sup, -1).transpose(0, 2, 3, 4, 1)


def bit_planes(quads: NDArray[np.uint32], width: int, shift: int, out: NDArray[np.uint32]) -> None:
    """Bits shift … shift+width-1 of each byte of 8 quads into `width` words."""
    if width == 8:
        out[:] = quads
        return
    mask = np.uint32(((1 << width) - 1) * 0x01010101)
    for p in range(8):
        word, at = divmod(p * width, 8)
        bits = (quads[:, :, p] >> np.uint32(shift)) & mask
        if at == 0:
            out[:, :, word] = bits
        else:
            out[:, :, word] |= bits << np.uint32(at)
