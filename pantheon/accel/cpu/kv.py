"""How keys and values lie in a slot, and what attention needs beside them.  Plain ints: no Numba.

A slot is a row of blocks of BLOCK positions; a block holds all layers, a layer all KV heads, a head K, then V:

    K [BLOCK/16][dim][16 positions]   V [dim padded to 16, /16][BLOCK positions][16]

so that sixteen scores come from `dim` FMAs without horizontal sums, and a conversation costs memory, huge pages
too, in proportion to its length.  Q8_0 stores int8 and keeps F16 scales [dim/32][BLOCK] behind K and behind V:
one for every 32 dims of a position.  Q4_0 stores 8 + int4, two dims of one position to a byte, since positions are
written side by side: of K dims 2i and 2i+1, [BLOCK/16][dim/2][16]; of V dims i and i+8 of sixteen, [BLOCK][8].
"""

from __future__ import annotations

from pantheon.accel.cpu.arena import round_up
from pantheon.plan.builder import Plan
from pantheon.plan.state_spec import KVType

#: positions of a block of memory, and of one step of the online softmax
BLOCK = 128
#: positions whose sums stand alone before they are merged: attention over a long context is cut here, always
SPAN = 256
#: most queries that pass over the keys and values of a block together
QUERIES = 48
#: most columns whose attention may be cut by positions, and bytes for their partial sums
SPLIT_COLUMNS, PARTIAL_BYTES = 16, 32 << 20

#: a query's running softmax: maximum, sum, and in a line of its own the weighted sum of V
STATE_SUM, STATE = 4, 64
#: scores of one query over a block
SCORES = 4 * BLOCK
#: queries of one register tile, at most
TILE = 6

#: formats as kernels know them
FORMATS = {KVType.F32: 0, KVType.F16: 1, KVType.Q8_0: 2, KVType.Q4_0: 3}
#: bytes of 16 values
WIDTH = (64, 32, 16, 8)


def state_bytes(dim: int) -> int:
    """One query's running softmax for heads of `dim`."""
    return STATE + 4 * round_up(dim, 16)


def thread_bytes(dim: int) -> int:
    """Scratch of one thread: queries, two states and a position each, two tiles of scores, a row of K and V."""
    return QUERIES * (4 * dim + 2 * state_bytes(dim) + 8) + 2 * TILE * SCORES + 8 * round_up(dim, 32) + 256


def split_columns(heads: int, dim: int, n_ctx: int) -> int:
    """Columns of one forward whose partial sums find room."""
    return max(0, min(SPLIT_COLUMNS, PARTIAL_BYTES // partial_bytes(1, heads, dim, n_ctx)))


def partial_bytes(columns: int, heads: int, dim: int, n_ctx: int) -> int:
    """Bytes of partial sums: a state for every column, head and span."""
    return columns * heads * -(-n_ctx // SPAN) * state_bytes(dim)


def scale_bytes(fmt: int, dim: int) -> int:
    """Scales of K or V of one head in a block."""
    return 2 * BLOCK * -(-dim // 32) if fmt >= 2 else 0


def key_bytes(fmt: int, dim: int) -> int:
    """K of one head in a block."""
    return BLOCK * dim * WIDTH[fmt] // 16 + scale_bytes(fmt, dim)


def value_bytes(fmt: int, dim: int) -> int:
    """V of one head in a block."""
    return BLOCK * round_up(dim, 16) * WIDTH[fmt] // 16 + scale_bytes(fmt, dim)


def layers(plan: Plan, kv_type: KVType) -> tuple[list[int], int]:
    """(where each KV layer begins in a block, bytes of a block)."""
    fmt, starts, total = FORMATS[kv_type], [], 0
    for spec in plan.state.kv:
        starts.append(total)
        total += spec.kv_heads * (key_bytes(fmt, spec.k_dim) + value_bytes(fmt, spec.v_dim))
    return starts, total
