"""The table of `experts`: byte offsets and sizes.  Plain ints, for kernels and for those who make room."""

from __future__ import annotations

from pantheon.accel.cpu import fields as at
from pantheon.accel.cpu.layouts import ROWS

#: experts in use; then one entry of expert, first place, columns, tile for each of them
T_USED, USED, USED_BYTES = 0, 64, 32
#: words of one pair: its place, the first place and the tile of its expert
PLACE_WORDS = 3
#: the field of a product's row that says where in the table the places begin
PAIR = at.O_VALUE
#: row groups of one call of a kernel
STEP = 4
#: what a kernel may use of its thread's scratch; then as much for private copies of its row, context and phase
PRIVATE_BYTES = 1024
assert 8 * at.OP_WORDS + 8 * at.CONTEXT_WORDS + at.PHASE_BYTES <= PRIVATE_BYTES


def places(columns: int, experts: int, k: int, widest: int) -> int:
    """The most places that pairs take, each expert's padded to whole tiles."""
    return columns * k + min(experts, columns * k) * (widest - 1)


def offsets(columns: int, experts: int, k: int) -> tuple[int, int, int]:
    """Where in a table counts, pairs and places begin."""
    counts = USED + USED_BYTES * experts
    pairs = counts + 8 * experts
    return counts, pairs, pairs + 8 * PLACE_WORDS * columns * k


def table_bytes(columns: int, experts: int, k: int, widest: int) -> int:
    """Bytes of a whole table."""
    return offsets(columns, experts, k)[2] + 8 * places(columns, experts, k, widest)


def staging_bytes(columns: int, widest: int) -> int:
    """What a thread needs behind the kernels' own scratch."""
    return 2 * PRIVATE_BYTES + (columns + widest) * 4 * ROWS * STEP
