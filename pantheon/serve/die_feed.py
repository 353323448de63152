"""Tells the memory watcher about the dies: at each of its looks at the host, the live bytes of every die [X32].

The watcher knows no dies and the die manager no watcher; this is the wire between them.
"""

from __future__ import annotations

from collections.abc import Callable

from pantheon.accel.die_manager import DieManager
from pantheon.mem.mem_state import MemState
from pantheon.mem.memwatch import MemWatch


def feed_dies(watch: MemWatch, dies: DieManager) -> Callable[[], None]:
    """Begin to tell; returns what ends it.  Without dies nothing is done."""
    if not len(dies):
        return lambda: None
    seen_at = [-1.0]

    def tell(state: MemState) -> None:
        # set_die publishes too: only a new look at the host is a reason
        if state.host.at_s == seen_at[0]:
            return
        seen_at[0] = state.host.at_s
        dies.refresh()
        for info in dies.snapshot():
            watch.set_die(
                info.index, info.total_bytes, info.free_bytes,
                budget_bytes=info.budget_bytes, resident_bytes=info.charged_bytes + info.cache_bytes,
            )  # fmt: skip

    end = watch.subscribe(tell)
    tell(watch.state)
    return end
