"""How packed weights lie in memory: one description per weight type that packing and kernels both read.

Rows are taken in groups of 16, columns in blocks of 32.  A 64-byte word vector holds 4 consecutive values (bytes)
of sixteen rows, lane = row, so a product needs no horizontal sums.  Per block a type has

  quants   u32[base_bits + high_bits, 16]: quad p (values 4p … 4p+3) has its low bits in vector p * base_bits // 8
           at bit (p * base_bits) % 8 of each byte, its high bits likewise behind them
  subs     scale bytes (and minimum bytes) [16] each, for the block or for each half of it

and per super-block of `sup` blocks a header f16[16] of scales d, and one of minimums m where the type has them.
value = d * sub_scale * (q - bias) + m, or - m * sub_min.  Quants and scales are two planes, [group, block] each.
Knows no instructions and no files.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS, BLOCK = 16, 32
#: the most columns of one forward
MAX_COLUMNS = 256


@dataclass(frozen=True)
class Kind:
    """One weight type.  `bias_bits`: q stands for q - 2^bias_bits (0: unbiased); `table`: q indexes IQ4_VALUES."""

    id: int
    name: str
    base_bits: int
    high_bits: int = 0
    bias_bits: int = 0
    table: bool = False
    header_min: bool = False
    sup: int = 1
    subs: int = 0
    sub_mins: bool = False
    sub_signed: bool = False

    @property
    def signed(self) -> bool:
        """The bytes that meet the activation are signed."""
        return self.table or self.base_bits == 8

    @property
    def largest(self) -> int:
        """The largest magnitude of such a byte."""
        return 128 if self.signed else (1 << (self.base_bits + self.high_bits)) - 1

    @property
    def quant_bytes(self) -> int:
        """Bytes of one block of one group in the quant plane."""
        return 64 * (self.base_bits + self.high_bits)

    @property
    def header_bytes(self) -> int:
        """Bytes of the f16 header of a super-block of one group."""
        return 64 if self.header_min else 32

    @property
    def sub_bytes(self) -> int:
        """Bytes of the sub-scales of one block of one group."""
        return 16 * self.subs * (2 if self.sub_mins else 1)

    @property
    def scale_bytes(self) -> int:
        """Bytes of one super-block of one group in the scale plane."""
        return self.header_bytes + self.sup * self.sub_bytes

    def packed_bytes(self, rows: int, cols: int) -> tuple[int, int]:
        """(quant plane, scale plane) bytes of a matrix."""
        groups, blocks = -(-rows // ROWS), cols // BLOCK
        return groups * blocks * self.quant_bytes, groups * (blocks // self.sup) * self.scale_bytes


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(0, "Q4_0", 4, bias_bits=3),
        Kind(1, "Q4_1", 4, header_min=True),
        Kind(2, "Q5_0", 4, 1, bias_bits=4),
        Kind(3, "Q5_1", 4, 1, header_min=True),
        Kind(4, "Q8_0", 8),
        Kind(5, "Q2_K", 2, header_min=True, sup=8, subs=2, sub_mins=True),
        Kind(6, "Q3_K", 2, 1, bias_bits=2, subs=2, sup=8, sub_signed=True),
        Kind(7, "Q4_K", 4, header_min=True, sup=8, subs=1, sub_mins=True),
        Kind(8, "Q5_K", 4, 1, header_min=True, sup=8, subs=1, sub_mins=True),
        Kind(9, "Q6_K", 4, 2, bias_bits=5, subs=2, sup=8, sub_signed=True),
        Kind(10, "IQ4_NL", 4, table=True),
        Kind(11, "IQ4_XS", 4, table=True, subs=1, sup=8, sub_signed=True),
    )
}
BY_ID: dict[int, Kind] = {kind.id: kind for kind in KINDS.values()}

#: plain float types: a group of 16 rows is [cols, 16] values
FLOATS: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}

#: the 16 levels of IQ4_NL and IQ4_XS (a fact of the format)
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Activations of one block of a tile of n columns, ACT_BYTES * n bytes; offsets are in units of n bytes:
# q int8[n, 32], d float[n], then d * sum over the block, its first and its second half, then those sums as int32
ACT_BYTES = 64
ACT_D, ACT_S, ACT_S0, ACT_S1, ACT_I, ACT_I0, ACT_I1 = 32, 36, 40, 44, 48, 52, 56
