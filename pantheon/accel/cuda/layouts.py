"""How packed weights lie on a CUDA die, in 32-bit words: what `accel.cpu.layouts` says, in groups of 32 rows.

A warp reads one word of each row of a group at once, lane = row, so a product needs no sums across lanes.  The words
of a matrix:

  quants  [group][block of 32 columns][base_bits + high_bits][32 rows]: the bit planes of `Kind`
  scales  [group][super-block]: f16[32] of d, f16[32] of m where the type has minimums, then for each block its bytes
          u8[32] (or i8[32]) for each scale, and u8[32] for each minimum
  floats  F32 [group][column][32 rows]; F16 and BF16 [group][pair of columns][32 rows], the lower column in the low half

Rows and the odd last column that are not there are zero.  Knows no instructions and no files.
"""

from __future__ import annotations

from pantheon.accel.cpu.layouts import BLOCK, FLOATS, IQ4_VALUES, KINDS, Kind

#: rows of a group: the lanes of a warp
ROWS = 32
#: words of a header vector f16[32], and of a vector of sub-scale bytes
HEADER, SUB = ROWS // 2, ROWS // 4


def groups(rows: int) -> int:
    """Groups of 32 rows; the last may be padded."""
    return -(-rows // ROWS)


def quant_words(kind: Kind) -> int:
    """Words of one block of one group in the quant plane."""
    return ROWS * (kind.base_bits + kind.high_bits)


def header_words(kind: Kind) -> int:
    """Words of the headers of one super-block of one group."""
    return HEADER * (2 if kind.header_min else 1)


def sub_words(kind: Kind) -> int:
    """Words of the sub-scales and sub-minimums of one block of one group."""
    return SUB * kind.subs * (2 if kind.sub_mins else 1)


def scale_words(kind: Kind) -> int:
    """Words of one super-block of one group in the scale plane."""
    return header_words(kind) + kind.sup * sub_words(kind)


def float_words(type_name: str, cols: int) -> int:
    """Words of one row of a float type."""
    return cols if FLOATS[type_name] == 4 else -(-cols // 2)


def packed_words(type_name: str, rows: int, cols: int) -> tuple[int, int]:
    """(quant or float words, scale words) of a matrix."""
    if type_name in FLOATS:
        return groups(rows) * ROWS * float_words(type_name, cols), 0
    kind, blocks = KINDS[type_name], cols // BLOCK
    return groups(rows) * blocks * quant_words(kind), groups(rows) * (blocks // kind.sup) * scale_words(kind)


__all__ = [
    "BLOCK", "FLOATS", "HEADER", "IQ4_VALUES", "KINDS", "ROWS", "SUB", "Kind", "float_words", "groups", "header_words",
    "packed_words", "quant_words", "scale_words", "sub_words",
]  # fmt: skip
