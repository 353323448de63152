"""From ops to launches: the words that kernel modules and the runner share.  Imports no Numba.

Each kernel module turns the ops that it serves into `Launch`es; `table` asks them in the order of the plan.  Arrays of
a die go by name:

    weights    int32   packed matrices                     vectors   float32  norm weights, biases, taps
    tables     float32 rope tables                         scratch   float32  activation buffers, [column][stride]
    blocks     int32   quantised activations               columns   int32    [4][MAX_COLUMNS]: token, slot, position,
    kv         int32   keys and values, see kv.py                             then the wanted columns
    kv_scales  uint16  float16 scales of a quantised cache
    recurrent  float32 recurrent state of a state          logits    float32  rows of a state
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pantheon.accel.cuda.kv import KVLayout
from pantheon.plan.buffers import Buffer, Matrix, Vector
from pantheon.plan.builder import Plan

if TYPE_CHECKING:
    from pantheon.accel.cuda.kernel import Kernel

#: the most columns of one forward
MAX_COLUMNS = 256
#: an argument that stands for the number of columns of the forward (in the head: of wanted columns)
COUNT = "#"

#: (columns, reach) -> blocks in x and y; reach: one more than the highest position of the forward, rounded up to a
#: power of two, so that few different graphs are needed
Grid = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Launch:
    """One launch of a forward: which kernel for so many columns, over which grid, with what.

    args: names of arrays and COUNT as strings, offsets and counts as ints, numbers as floats.
    """

    pick: Callable[[int], Kernel]
    grid: Grid
    args: tuple[str | int | float, ...]


class At(NamedTuple):
    """A buffer in `scratch`: float index of column 0, floats from column to column."""

    at: int
    stride: int


@dataclass(frozen=True)
class Packed:
    """A matrix in `weights`, in words: the quants (or floats) at quants_at, the scales at scales_at.

    With experts, this is the first of them; the others follow at quant_words and scale_words.
    """

    type_name: str
    rows: int
    cols: int
    quants_at: int
    scales_at: int
    experts: int = 1
    quant_words: int = 0
    scale_words: int = 0


@dataclass(frozen=True)
class RopeTable:
    """A rope table in `tables`: [n_ctx][half] cosines at cos_at, sines at sin_at."""

    cos_at: int
    sin_at: int
    half: int
    pairing: str


@dataclass(frozen=True)
class Room:
    """Where quantised activations lie: word offsets in `blocks` of int8 quads and of int32 half sums, float offset in
    `scratch` of the scales."""

    quads_at: int
    sums_at: int
    scales_at: int


@dataclass(frozen=True)
class Memory:
    """Where everything of a plan lies on one die.  sm: compute capability times ten, 0 in the simulator."""

    plan: Plan
    sm: int
    n_ctx: int
    matrices: dict[Matrix, Packed]
    vectors: dict[Vector, int]
    buffers: dict[Buffer, At]
    ropes: tuple[RopeTable, ...]
    room: Room
    partials_at: int
    kv: KVLayout
    recurrent_at: tuple[int, ...]
    slot_floats: int

    def array_of(self, buffer: Buffer) -> str:
        """The array that a buffer lies in."""
        return "logits" if buffer is self.plan.logits else "scratch"
