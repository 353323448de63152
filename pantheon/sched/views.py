"""What a scheduler shows of itself: plain values, ready for JSON.  Names as in the metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pantheon.sched.shared import Shared
from pantheon.sched.slot import Slot


def view(shared: Shared) -> dict[str, Any]:
    """Slots, queue, turnstile, level and totals at one moment."""
    with shared.mu:
        gate, turnstile = shared.overflow, shared.turnstile
        return {
            "slots": [_slot(slot) for slot in shared.slots],
            "users": {"inside": gate.inside, "ceiling": gate.ceiling, "most": gate.places},
            "queue": {
                "waiting": len(gate.queue),
                "depth": gate.depth,
                "wait_s": gate.wait_s,
                "service_s": round(gate.service_s, 3),
                "refused": dict(gate.refused),
            },
            "turnstile": {"serving": turnstile.serving, "waiting": turnstile.waiting},
            "level": gate.level.name,
            "mixed": shared.config.mixed,
            "totals": asdict(shared.counters),
        }


def _slot(slot: Slot) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": slot.index, "state": slot.phase.value}
    if slot.run is not None:
        run = slot.run
        shown |= {
            "prompt_tokens": len(run.ids),
            "cached_tokens": run.warm.reused,
            "read_tokens": min(len(run.warm.held), len(run.ids)),
            "made_tokens": run.n,
            "unread_tokens": len(run.ring),
            "budget_tokens": run.limit,
        }
    return shown
