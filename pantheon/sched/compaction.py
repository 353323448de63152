"""Which columns the next forward carries.  Pure: decides from numbers, touches no slot and no state.

Active slots are packed into columns [0, n); idle ones cost nothing [M105].  A column names its slot, so that nothing is
ever moved when users join, leave or finish in any order: there is no permutation to get wrong [M106, M107].  Behind the
decode columns a forward may carry pieces of prompts, so that decoders lose nothing while someone joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pantheon.accel.executor import Columns


class Decode(NamedTuple):
    """A slot's next column: its last token goes to `position`."""

    slot: int
    token: int
    position: int


class Prompt(NamedTuple):
    """A slot whose prompt `ids` lies in the state up to `done`.  A forward ends at each of `stops` at the latest: there
    a state that can not be cut anywhere is remembered."""

    slot: int
    ids: Sequence[int]
    done: int
    stops: tuple[int, ...] = ()


class Part(NamedTuple):
    """Tokens [first, end) of a slot's prompt ride in a forward; `last`: the prompt ends with them."""

    slot: int
    first: int
    end: int
    last: bool


class Step(NamedTuple):
    """One forward.  Its wanted rows are those of `decodes` in order, then those of the parts that are last."""

    columns: Columns
    decodes: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def landing(self) -> tuple[int, ...]:
        """The slot of each wanted row."""
        return (*self.decodes, *(part.slot for part in self.parts if part.last))


def cut(prompts: Sequence[Prompt], budget: int) -> tuple[Part, ...]:
    """Up to `budget` tokens of the prompts, the first of them first; what it leaves goes to those behind it."""
    parts = []
    for prompt in prompts:
        end = min([len(prompt.ids), prompt.done + budget, *(stop for stop in prompt.stops if stop > prompt.done)])
        if end > prompt.done:
            parts.append(Part(prompt.slot, prompt.done, end, end == len(prompt.ids)))
            budget -= end - prompt.done
    return tuple(parts)


def compose(decodes: Sequence[Decode], prompts: Sequence[Prompt], chunk: int, max_columns: int) -> Step | None:
    """The next forward, or None when there is nothing to do.

    prompts: in the order in which they are served; at most `chunk` of their tokens ride along, fewer where the
    decode columns leave less of max_columns.
    """
    decodes = decodes[:max_columns]
    parts = cut(prompts, min(chunk, max_columns - len(decodes)))
    n = len(decodes) + sum(part.end - part.first for part in parts)
    if not n:
        return None
    tokens, slots, positions = (np.empty(n, np.int32) for _ in range(3))
    wanted = list(range(len(decodes)))
    for at, decode in enumerate(decodes):
        slots[at], tokens[at], positions[at] = decode
    at, ids = len(decodes), {prompt.slot: prompt.ids for prompt in prompts}
    for part in parts:
        end = at + part.end - part.first
        tokens[at:end] = ids[part.slot][part.first : part.end]
        slots[at:end] = part.slot
        positions[at:end] = np.arange(part.first, part.end)
        at = end
        if part.last:
            wanted.append(end - 1)
    columns = Columns(tokens, slots, positions, np.array(wanted, np.int32))
    return Step(columns, tuple(decode.slot for decode in decodes), parts)
