"""Many users on one model: the flags and settings of the batch scheduler, and what they mean together.

Turns words into a `SchedConfig`; starts nothing.  Spec: M083-M085, M099, M112, M114, X09, X30.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from pantheon import settings
from pantheon.sched.shared import SchedConfig


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `serve` that are about several users."""
    add = parser.add_argument_group("several users on one model").add_argument
    most = settings.MAX_BATCH_SLOTS
    add("-np", "--parallel", type=_taking(settings.integer(-1, most)), metavar="N", help=f"answer N requests at a time, up to {most}, and let more of them wait; 0 answers one and refuses the rest (default: QWEN35_BATCH_SLOTS, or 0; -1 is the default)")  # fmt: skip # noqa: E501
    add("--queue-depth", type=_taking(settings.integer(0, 4096)), metavar="N", help="requests that may wait (default: BS_QUEUE_DEPTH, or 32)")  # fmt: skip # noqa: E501
    add("--queue-wait", type=_taking(settings.number(0.1, 86_400)), metavar="S", help="seconds that one may wait (default: PN_QUEUE_WAIT_S, or 30)")  # fmt: skip # noqa: E501


def _taking(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A settings' parser for argparse, which keeps its words."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as fault:
            raise argparse.ArgumentTypeError(f"{text!r}: {fault}") from None

    return checked


def users(args: argparse.Namespace) -> int:
    """How many at a time; 0 without the scheduler.  Raises SettingError."""
    found: int = args.parallel if args.parallel not in (None, -1) else settings.get("QWEN35_BATCH_SLOTS")
    return found


def batch_config(args: argparse.Namespace) -> SchedConfig | None:
    """The scheduler of every model, None for one answer at a time [M117].  Raises SettingError."""
    n = users(args)
    if not n:
        return None
    whole = bool(settings.get("QWEN35_BS_PREFILL_BATCH"))
    return SchedConfig(
        users=n,
        queue_depth=settings.get("BS_QUEUE_DEPTH") if args.queue_depth is None else args.queue_depth,
        wait_s=settings.get("PN_QUEUE_WAIT_S") if args.queue_wait is None else args.queue_wait,
        chunk=settings.get("QWEN35_BS_PREFILL_CHUNK") if whole else 1,
        mixed=bool(settings.get("PN_BS_MIXED")),
        lockstep=not settings.get("QWEN35_BS_DRIVER_SAMPLE"),
        stats=bool(settings.get("QWEN35_BS_STATS")),
    )
