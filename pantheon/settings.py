"""Every environment flag, once: name, parser, default, unit, effect.

`get(name)` reads the environment on each call (tests set it with monkeypatch) and refuses what it can not parse;
`check_all()` does so for every flag at start, so that a typo stops the server instead of being ignored [X09].
docs/reference/env-flags.md is checked against this table.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pantheon.errors import PantheonError


class SettingError(PantheonError):
    """An environment flag with a value that it does not take."""

    status = 500
    code = "bad_setting"


@dataclass(frozen=True)
class Setting:
    """One environment flag; `parse` raises ValueError with what it accepts."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    unit: str
    effect: str


def _text(value: str) -> str:
    return value


def _refuse(value: str) -> None:
    raise ValueError("not supported: it would copy the logits of a 248k vocabulary to the host at every step")


def integer(low: int, high: int) -> Callable[[str], int]:
    """A parser of whole numbers from low to high."""

    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise ValueError(f"expects a whole number from {low} to {high}")
        return number

    return parse


_TABLE = (
    Setting("PN_KERNEL_CACHE", _text, "", "folder", "where compiled kernels are kept (default: ~/.cache/pantheon)"),
    Setting("PN_SLOW_DECODE_MS", integer(0, 60_000), 0, "ms", "test seam: sleep so long before each decode step"),
    Setting("PN_FAIL_AT", _text, "", "points", "test seam: `point[@k],…` raises at the k-th hit of a failure point"),
    Setting("PN_HOST_ROOT", _text, "/", "folder", "test seam: folder that stands for / when host signals are read"),
    Setting("PN_CHAT_CHATML_THINK", integer(0, 1), 0, "0 or 1", "open each ChatML answer with <think>"),
    Setting("QWEN35_GPU_FULL_LOGITS", _refuse, None, "-", "refused: the server does not start while it is set"),
)

SETTINGS: dict[str, Setting] = {s.name: s for s in _TABLE}


def get(name: str) -> Any:
    """The value of one flag.  Raises SettingError, which names the flag and what it accepts."""
    setting = SETTINGS[name]
    raw = os.environ.get(name)
    if raw is None or raw == "":
        return setting.default
    try:
        return setting.parse(raw)
    except ValueError as fault:
        raise SettingError(f"{name}={raw}: {fault}", param=name) from None


def check_all() -> dict[str, Any]:
    """Parse every flag; returns those that differ from their default."""
    values = {name: get(name) for name in SETTINGS}
    return {name: value for name, value in values.items() if value != SETTINGS[name].default}
