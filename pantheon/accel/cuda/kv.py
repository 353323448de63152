"""How keys and values lie on a die, and what attention needs beside them.  Plain ints: no Numba.

`kv` holds int32 words, each of some dims of one head at one position; dims that are missing in the last word are 0:

    F32 one float    F16 two float16    Q8_0 four times 128 + int8    Q4_0 eight times 8 + int4    (lowest bits first)

A slot is a row of blocks of BLOCK positions; a block holds all layers, a layer all KV heads, a head K, then V:

    K [words of a row][BLOCK positions]    V [BLOCK positions][words of a row]

since neighbouring threads take neighbouring positions for scores, and neighbouring dims for sums of values.  The
float16 scales of Q8_0 and Q4_0, one for every 32 dims, lie alike in `kv_scales`: of K [dim/32][BLOCK], of V
[BLOCK][dim/32].  So a prefix is whole blocks from the start of a slot: one range of each array.
"""

from __future__ import annotations

from dataclasses import dataclass

from pantheon.plan.builder import Plan
from pantheon.plan.ops import Attend
from pantheon.plan.state_spec import KVType

#: positions of a block of memory
BLOCK = 128
#: positions whose sums stand alone before they are merged, in ascending order: attention is cut here, always
SPAN = 256
#: most columns of a forward whose spans are spread over the die, and floats for their partial sums
SPLIT_COLUMNS, PARTIAL_FLOATS = 32, 16 << 20
#: of a partial sum: maximum, sum of weights, then the weighted sum of V
PARTIAL_HEAD = 2

#: dims of a word
DIMS = {KVType.F32: 1, KVType.F16: 2, KVType.Q8_0: 4, KVType.Q4_0: 8}
#: dims that share a scale
SCALED = 32


def row_words(kv_type: KVType, dim: int) -> int:
    """Words of one head's K or V at one position."""
    return -(-dim // DIMS[kv_type])


def row_scales(kv_type: KVType, dim: int) -> int:
    """Scales of one head's K or V at one position."""
    return -(-dim // SCALED) if kv_type in (KVType.Q8_0, KVType.Q4_0) else 0


def spans(n: int) -> int:
    """Spans that n positions reach into."""
    return -(-n // SPAN)


def split_columns(heads: int, dim: int, n_ctx: int) -> int:
    """Columns of one forward whose partial sums find room."""
    return min(SPLIT_COLUMNS, PARTIAL_FLOATS // (heads * spans(n_ctx) * (PARTIAL_HEAD + dim)))


def partial_floats(plan: Plan, n_ctx: int) -> int:
    """Floats of `scratch` for the partial sums of whatever op needs most: [column][head][span][PARTIAL_HEAD + dim]."""
    needs = [0]
    for op in plan.body:
        if isinstance(op, Attend):
            columns = split_columns(op.heads, op.head_dim, n_ctx)
            needs.append(columns * op.heads * spans(n_ctx) * (PARTIAL_HEAD + op.head_dim))
    return max(needs)


@dataclass(frozen=True)
class KVLayer:
    """Where a layer lies in a block, in words of `kv` and in elements of `kv_scales`: its first head, a head's size,
    V behind a head's K."""

    words_at: int
    head_words: int
    value_words_at: int
    scales_at: int
    head_scales: int
    value_scales_at: int


@dataclass(frozen=True)
class KVLayout:
    """Slots of up to n_ctx positions, one behind the other in `kv` (int32) and in `kv_scales` (uint16)."""

    kv_type: KVType
    n_ctx: int
    layers: tuple[KVLayer, ...]
    block_words: int
    block_scales: int

    @staticmethod
    def of(plan: Plan, kv_type: KVType, n_ctx: int) -> KVLayout:
        """The layout of a plan's KV layers."""
        layers, words, scales = [], 0, 0
        for spec in plan.state.kv:
            key, value = (BLOCK * row_words(kv_type, dim) for dim in (spec.k_dim, spec.v_dim))
            key_scales, value_scales = (BLOCK * row_scales(kv_type, dim) for dim in (spec.k_dim, spec.v_dim))
            layers.append(KVLayer(words, key + value, key, scales, key_scales + value_scales, key_scales))
            words += spec.kv_heads * (key + value)
            scales += spec.kv_heads * (key_scales + value_scales)
        return KVLayout(kv_type, n_ctx, tuple(layers), words, scales)

    @property
    def slot_words(self) -> int:
        """Elements of `kv` of one slot."""
        return blocks(self.n_ctx) * self.block_words

    @property
    def slot_scales(self) -> int:
        """Elements of `kv_scales` of one slot."""
        return blocks(self.n_ctx) * self.block_scales

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in both arrays."""
        return 4 * self.slot_words + 2 * self.slot_scales

    def copy_ranges(self, source: int, target: int, n: int, first: int = 0) -> tuple[tuple[str, int, int, int], ...]:
        """What to copy so that slot target begins with source's first n positions, of which it has the first `first`:
        (array, index to copy from, index to copy to, elements) each.  Whole blocks; what lies behind n is never read.
        """
        skip = min(first, n) // BLOCK
        count = blocks(n) - skip
        parts = (("kv", self.slot_words, self.block_words), ("kv_scales", self.slot_scales, self.block_scales))
        return tuple(
            (name, source * slot + skip * block, target * slot + skip * block, count * block)
            for name, slot, block in parts
            if block and count > 0
        )


def blocks(n: int) -> int:
    """Blocks that n positions reach into."""
    return -(-n // BLOCK)
