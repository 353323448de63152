"""Tells the memory watcher about the dies: at each of its looks at the host, the live bytes of every die [X32].

The watcher knows no dies and the die manager no watcher; this is the wire between them.
"""

from __future__ import annotations

from pantheon.accel.die_manager import DieManager
from pantheon.mem.memwatch import MemWatch


def feed_dies(watch: MemWatch, dies: DieManager) -> None:
    """Tell now and before each look, for as long as the watcher looks.  Without dies nothing is done."""
    if not len(dies):
        return

    def tell() -> None:
        dies.refresh()
        for info in dies.snapshot():
            watch.set_die(
                info.index, info.total_bytes, info.free_bytes,
                budget_bytes=info.budget_bytes, resident_bytes=info.charged_bytes + info.cache_bytes,
            )  # fmt: skip

    tell()
    watch.add_source(tell)
