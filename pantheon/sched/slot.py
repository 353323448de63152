"""A slot's life as a table: which move is legal, and who may make it [M087, M088]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pantheon.sched.run import Run


class Phase(Enum):
    """What a slot is doing."""

    IDLE = "idle"
    PREFILL = "prefill"
    BOUND = "bound"
    DECODE = "decode"


class Actor(Enum):
    """Who moves a slot: the request's own thread, or the thread that steps all slots."""

    OWNER = "owner"
    DRIVER = "driver"


_OWNER, _BOTH = frozenset({Actor.OWNER}), frozenset(Actor)

#: every legal move.  Who reads the end of a prompt binds the slot: the owner in turns of its own, or the driver when
#: prompts ride in its forwards.  The driver never ends a slot: it marks the run and its owner lets go.
MOVES: Mapping[tuple[Phase, Phase], frozenset[Actor]] = {
    (Phase.IDLE, Phase.PREFILL): _OWNER,
    (Phase.PREFILL, Phase.BOUND): _BOTH,
    (Phase.BOUND, Phase.DECODE): frozenset({Actor.DRIVER}),
    (Phase.PREFILL, Phase.IDLE): _OWNER,
    (Phase.BOUND, Phase.IDLE): _OWNER,
    (Phase.DECODE, Phase.IDLE): _OWNER,
}


class IllegalMove(RuntimeError):
    """A bug of ours: a move that the table does not have."""


@dataclass(eq=False)
class Slot:
    """One conversation's place in the state.  Guarded by Shared.mu; changed by the holder of the turn."""

    index: int
    phase: Phase = Phase.IDLE
    run: Run | None = None

    def move(self, to: Phase, who: Actor) -> None:
        """Go to another phase.  Raises IllegalMove."""
        if who not in MOVES.get((self.phase, to), ()):
            raise IllegalMove(f"slot {self.index}: {who.value} may not move it from {self.phase.value} to {to.value}")
        self.phase = to
