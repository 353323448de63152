"""The first phase of a load: what a model takes, whether it may, and the dies it is bound to [M058].

Reads the head of a file and moves none of its weights.  Must not know HTTP.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pantheon import seams
from pantheon.accel.die_manager import Taken
from pantheon.engine.admit import decide_load
from pantheon.engine.footprint import Footprint, footprint
from pantheon.engine.prefix_cache import SLOTS
from pantheon.engine.split import Share
from pantheon.errors import PantheonError
from pantheon.serve.registry import Entry, Registry

if TYPE_CHECKING:
    from pantheon.serve.loading import LoadOptions, ModelSpec


@dataclass(frozen=True)
class Placed:
    """What a model takes, the dies it was given, and its part of each."""

    need: Footprint
    taken: Taken
    shares: tuple[Share, ...]

    @property
    def most_slots(self) -> int:
        """Conversations that a state may have room for: one of each user, and on CUDA dies, where all memory is taken
        at once, as many more as the budgets allow."""
        rooms = [
            (budget - charge) // share.slot_bytes
            for budget, charge, share in zip(self.taken.budgets, self.taken.charges, self.shares, strict=True)
            if share.slot_bytes
        ]
        return self.need.users + min(rooms, default=SLOTS)

    def charges(self, n_slots: int) -> list[int]:
        """Bytes on each die with a state of so many slots."""
        more = n_slots - self.need.users
        return [
            charge + more * share.slot_bytes for charge, share in zip(self.taken.charges, self.shares, strict=True)
        ]

    def idle_tokens(self, options: LoadOptions) -> int | None:
        """Tokens that idle conversations may hold beside running ones, None for any number: what is left of the dies'
        budgets, or a quarter of the host's slack."""
        if not self.need.token_bytes:
            return None
        if not self.taken.dies:
            watch = options.watch
            return None if watch is None else max(0, watch.state.host.slack_bytes) // 4 // self.need.token_bytes
        rooms = [
            (budget - charge) // share.token_bytes
            for budget, charge, share in zip(self.taken.budgets, self.taken.charges, self.shares, strict=True)
            if share.token_bytes
        ]
        return min(rooms, default=0)


def place(registry: Registry, entry: Entry, spec: ModelSpec, options: LoadOptions) -> Placed:
    """Admit a load and bind its dies; no lock of the registry is held while the file is read.

    Raises PantheonError for a file that can not be loaded, for dies that are not there or taken, and 507 with the
    numbers for what does not fit.
    """
    wanted = None if entry.auto else entry.dies
    need = footprint(
        spec.path, ctx=spec.ctx or options.ctx, executor=options.executor_of(registry.dies, wanted),
        threads=registry.dies.threads(wanted or (), options.threads), kv_type=options.kv_type, users=options.users,
    )  # fmt: skip
    seams.hit("admit")
    seen = options.watch.state if options.watch is not None else None
    decide_load(spec.path, need, seen).check()
    registry.dies.refresh()
    taken = Taken((), (), ()) if wanted == () else _take(registry, entry, spec.path, need, wanted)
    registry.place(entry, taken.dies, sum(taken.charges))
    seams.hit("bind")
    return Placed(need, taken, need.shares(taken.budgets) or () if taken.dies else ())


def look_again(path: str, need: Footprint, options: LoadOptions) -> None:
    """Admit it once more, with upload_lock held: loads that were admitted beside it have taken their memory by now."""
    if options.watch is not None and options.watch.started:
        with contextlib.suppress(PantheonError):  # what can not be read grows stale by itself
            options.watch.poll_once()
        decide_load(path, need, options.watch.state).check()


def _take(registry: Registry, entry: Entry, path: str, need: Footprint, wanted: tuple[int, ...] | None) -> Taken:
    """Choose and bind dies; a refusal for want of room says which context would fit [X31]."""
    try:
        return registry.dies.take(entry.name, need.need, wanted)
    except PantheonError as fault:
        if fault.code != "die_full":
            raise
        free = [info for info in registry.dies.snapshot() if info.usable and info.model in (None, entry.name)]
        on = [info for info in free if wanted is None or info.index in wanted]
        fault.extra["largest_ctx"] = decide_load(path, need, None, on).decision.largest_ctx
        raise
