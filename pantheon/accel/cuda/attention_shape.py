"""How a block of threads shares a tile of queries over a span, and where that lies in shared memory.  Plain ints.

Every sum has an order of its own, which the format and the size of a head fix: no shape of a block changes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pantheon.accel.cuda.kv import DIMS, SCALED, SPAN, row_scales, row_words
from pantheon.plan.state_spec import KVType

#: partial maxima and partial sums of a query's weights over a span: position p goes to p % RESIDUES
RESIDUES = 16
#: sums of V in a thread's registers, and how many of them may go through shared memory at a time
SUMS, ROUND = 32, 16
#: most words of V that threads take side by side, and most parts of a span that are summed apart
ABREAST, PARTS = 256, 16
#: of a query in shared memory: running maximum and sum, factors of the sum so far, of the span and, behind its last
#: span, of the result; first and end of what it sees of the span
MAXIMUM, TOTAL, OLD, NEW, LAST, FIRST, END, STATS = range(8)


@dataclass(frozen=True)
class Shape:
    """What a kernel is made for: a format, heads of `dim`, `group` to a KV head, a tile of queries, a block of threads.
    *_at: floats in shared memory."""

    kv_type: KVType
    dim: int
    group: int
    tile: int
    threads: int

    @property
    def per(self) -> int:
        """Dims of a word."""
        return DIMS[self.kv_type]

    @property
    def heads(self) -> int:
        """Heads of a tile."""
        return min(self.group, self.tile)

    @property
    def words(self) -> int:
        """Words of a row."""
        return row_words(self.kv_type, self.dim)

    @property
    def scales(self) -> int:
        """Scales of a row."""
        return row_scales(self.kv_type, self.dim)

    @property
    def ahead(self) -> int:
        """Words of K that a thread asks for before it needs the first of them."""
        return math.gcd(8, self.words, SCALED // self.per if self.scales else 8)

    @property
    def parts(self) -> int:
        """Positions p with equal p % parts are summed by one thread, then the parts in order."""
        return max(1, min(PARTS, ABREAST // self.words))

    @property
    def items(self) -> int:
        """Words of V abreast."""
        return self.parts * self.words

    @property
    def held(self) -> int:
        """Items of a thread."""
        return -(-self.items // self.threads)

    @property
    def queries(self) -> int:
        """Queries whose sums of V are taken at a time."""
        return min(self.tile, SUMS // self.per)

    @property
    def sums(self) -> int:
        """Their sums of one item."""
        return self.queries * self.per

    @property
    def halved(self) -> bool:
        """Whether those go through shared memory in two halves."""
        return self.held == 1 and self.sums > ROUND

    @property
    def rows(self) -> int:
        """Of those, what goes through shared memory at a time."""
        return self.sums // 2 if self.halved else self.sums

    @property
    def stride(self) -> int:
        """Floats from position to position in the scores: sixteen bytes abreast meet no bank twice."""
        return self.tile if self.tile <= 4 else self.tile + 4

    @property
    def scores_at(self) -> int:
        """Behind the queries, [dims of whole words][tile]."""
        return self.words * self.per * self.tile

    @property
    def sums_at(self) -> int:
        """Behind the scores."""
        return self.scores_at + SPAN * self.stride

    @property
    def stats_at(self) -> int:
        """Behind the sums, where the partial maxima and sums of weights lie before."""
        return self.sums_at + max(self.rows * self.items, 2 * RESIDUES * self.tile)

    @property
    def floats(self) -> int:
        """All of it."""
        return self.stats_at + STATS * self.tile
