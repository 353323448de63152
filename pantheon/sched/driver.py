"""The driver: one thread that steps every active slot at once and samples it [M085, M105, M108].

It waits for no reader and for no owner: tokens go to rings that have room for all of them.  In between it queues for
the turn like anyone else.
"""

from __future__ import annotations

import threading

from pantheon import log, seams, settings
from pantheon.sched.compaction import Prompt, Step, compose
from pantheon.sched.shared import Shared
from pantheon.sched.slot import Actor, Phase, Slot

_log = log.logger("sched")
#: how often an idle driver looks for itself
_LOOK_S = 1.0


class Driver:
    """`step` is one turn; `start` does it over and over on a thread."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run until `join`."""
        name = f"pantheon-driver-{self._shared.model.name}"
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it has a thread."""
        return self._thread is not None

    def join(self) -> None:
        """Wait for the end, after `Shared.closing` was set and cv_work told."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def step(self) -> bool:
        """One forward over all active slots, if there are any.  Who is active is decided inside the turn."""
        shared = self._shared
        with shared.turnstile.turn():
            for slot in shared.prompts[:1]:
                try:
                    shared.catch_up(slot)
                except Exception as fault:  # of one prompt: nobody else is to notice
                    shared.fail(slot, fault)
            with shared.mu:
                step = self._compose_locked()
            if step is None:
                return False
            before_s = shared.counters.forward_s
            shared.carry_out(step, Actor.DRIVER)
            if shared.config.stats:
                _log_step(step, shared.counters.forward_s - before_s)
        return True

    def _compose_locked(self) -> Step | None:
        """The next step; slots that join it for the first time go BOUND -> DECODE."""
        shared, decodes = self._shared, []
        for slot in shared.slots:
            if _stepped(slot):
                assert slot.run is not None
                if slot.phase is Phase.BOUND:
                    slot.move(Phase.DECODE, Actor.DRIVER)
                decodes.append(slot.run.next_column)
        prompts = [slot.run.reading for slot in shared.prompts if slot.run is not None and slot.run.wants_step]
        step = compose(decodes, prompts, shared.config.chunk, shared.max_columns)
        if step is not None and step.parts and not step.parts[0].last:
            self._rotate_locked(prompts[0])
        return step

    def _rotate_locked(self, head: Prompt) -> None:
        """After its chunk a prompt goes behind the others: a long one does not hold a short one up [M113]."""
        slot = self._shared.slots[head.slot]
        self._shared.prompts.remove(slot)
        self._shared.prompts.append(slot)

    def _has_work_locked(self) -> bool:
        shared = self._shared
        riding = any(slot.run is not None and slot.run.wants_step for slot in shared.prompts)
        return riding or any(_stepped(slot) for slot in shared.slots)

    def _loop(self) -> None:
        shared, slow_s = self._shared, settings.get("PN_SLOW_DECODE_MS") / 1000
        while True:
            with shared.mu:
                while not shared.closing and not self._has_work_locked():
                    shared.wait_locked(shared.cv_work, _LOOK_S)
                if shared.closing:
                    return
                decoding = any(_stepped(slot) for slot in shared.slots)
            if slow_s and decoding:
                seams.SYSTEM_CLOCK.sleep(slow_s)
            try:
                self.step()
            except Exception as fault:
                _log.exception("the driver failed")
                shared.fail_all(fault)


def _stepped(slot: Slot) -> bool:
    return slot.phase in (Phase.BOUND, Phase.DECODE) and slot.run is not None and slot.run.wants_step


def _log_step(step: Step, took_s: float) -> None:
    prompt = sum(part.end - part.first for part in step.parts)
    _log.info("step %s", log.fields(width=len(step.decodes), prompt=prompt, ms=1000 * took_s))
