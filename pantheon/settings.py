"""Every environment flag, once: name, parser, default, unit, effect.

`get(name)` reads the environment on each call (tests set it with monkeypatch) and refuses what it can not parse;
`check_all()` does so for every flag at start, so that a typo stops the server instead of being ignored [X09].
docs/reference/env-flags.md is checked against this table.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pantheon.errors import PantheonError

GIB = 1 << 30
MAX_DIES = 16
#: Slots that BATCH_SLOTS=1 (or on) means, and the most it can ask for.
BATCH_SLOTS, MAX_BATCH_SLOTS = 8, 64
#: The rules of text.stable_prefix.
STABLE_RULES = ("attribution", "time")


class SettingError(PantheonError):
    """An environment flag with a value that it does not take."""

    status = 500
    code = "bad_setting"


@dataclass(frozen=True)
class Setting:
    """One environment flag; `parse` raises ValueError with what it accepts; `secret` keeps the value out of every
    output."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    unit: str
    effect: str
    secret: bool = False


# ---- parsers --------------------------------------------------------------------------------------------------------


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


def number(low: float, high: float) -> Callable[[str], float]:
    """A parser of decimal numbers from low to high."""

    def parse(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            found = low - 1
        if not low <= found <= high:
            raise ValueError(f"expects a number from {low:g} to {high:g}")
        return found

    return parse


def choice(*words: str) -> Callable[[str], str]:
    """A parser of one of these words."""

    def parse(value: str) -> str:
        if value not in words:
            raise ValueError(f"expects one of {', '.join(words)}")
        return value

    return parse


_ON, _OFF = ("1", "on", "true", "yes"), ("0", "off", "false", "no")


def switch(value: str) -> int:
    """1 or 0, also as on/off, true/false, yes/no."""
    word = value.strip().lower()
    if word not in (*_ON, *_OFF):
        raise ValueError("expects 0 or 1 (or on, off, true, false)")
    return int(word in _ON)


def slots(value: str) -> int:
    """A number of batch slots: off and 0 are none, on and 1 the usual eight, N is N [M084, X09, X30]."""
    word = value.strip().lower()
    if word in (*_ON, *_OFF):
        return BATCH_SLOTS if word in _ON else 0
    try:
        return integer(2, MAX_BATCH_SLOTS)(word)
    except ValueError:
        raise ValueError(f"expects 0 (off), 1 (on: {BATCH_SLOTS} slots) or 2 to {MAX_BATCH_SLOTS} slots") from None


_UNITS = {"": 1, "b": 1} | {f"{u}{end}": 1 << 10 * n for n, u in enumerate("kmgt", 1) for end in ("", "b", "ib")}


def size(value: str) -> int:
    """Bytes: `1073741824`, `1GiB`, `512M`; every unit is a power of 1024."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("expects bytes, such as 1073741824, 512MiB or 1.5GiB")
    whole, _, part = match[1].partition(".")
    unit = _UNITS[match[2].lower()]
    return int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)


def virtual_dies(value: str) -> tuple[int, ...]:
    """Bytes of each virtual die: `4x2GiB`, or a list such as `2GiB,2x512MiB`."""
    dies: list[int] = []
    for part in value.split(","):
        count, found, each = part.strip().rpartition("x")
        if found and not re.fullmatch("[0-9]{1,2}", count):
            raise ValueError("expects COUNTxSIZE, such as 4x2GiB, or a list of them")
        dies += [size(each)] * (int(count) if found else 1)
    if not 1 <= len(dies) <= MAX_DIES or min(dies) < 1024:
        raise ValueError(f"expects 1 to {MAX_DIES} dies of at least 1 KiB, such as 4x2GiB")
    return tuple(dies)


def url(value: str) -> str:
    """An http or https address without query, credentials or trailing slash."""
    found = re.fullmatch(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[^\s/?#@\[\]:]+)(?::([0-9]{1,5}))?(?:/[^\s?#]*)?", value)
    if found is None or not 0 < int(found[1] or 1) < 1 << 16:
        raise ValueError("expects an address such as http://127.0.0.1:9000")
    return value.rstrip("/")


def identifier(value: str) -> str:
    """Up to 128 printable characters."""
    if len(value) > 128 or not value.isprintable():
        raise ValueError("expects at most 128 printable characters")
    return value


def key(value: str) -> str:
    """A secret that fits in a header."""
    if not value.isascii() or not value.isprintable() or value != value.strip():
        raise ValueError("expects printable ASCII without blanks around it")
    return value


def rules(value: str) -> str:
    """Names of rules with commas between them, each once; `off` for none."""
    words = list(dict.fromkeys(word.strip() for word in value.split(",")))
    if words != ["off"] and not all(word in STABLE_RULES for word in words):
        raise ValueError(f"expects off, or some of {','.join(STABLE_RULES)}")
    return ",".join(words)


# ---- the table ------------------------------------------------------------------------------------------------------

_TABLE = (
    Setting("PN_KERNEL_CACHE", _text, "", "folder", "where compiled kernels are kept (default: ~/.cache/pantheon)"),
    Setting("PN_LOG_FORMAT", choice("text", "json"), "text", "text or json", "log lines of a server"),
    Setting("PN_CHAT_CHATML_THINK", switch, 0, "0 or 1", "open each ChatML answer with <think>"),
    Setting("PN_STABLE_PREFIX", rules, "attribution", "rules", "volatile lines kept out of system prompts"),
    # dies
    Setting("PN_VIRTUAL_DIES", virtual_dies, None, "COUNTxSIZE", "CPU-backed dies with a byte budget each"),
    Setting("PN_DIE_RESERVE_BYTES", size, GIB, "bytes", "kept free on every CUDA die; on others when set"),
    # memory
    Setting("PN_MEMWATCH_POLL_MS", integer(10, 60_000), 250, "ms", "how often host and die memory are looked at"),
    Setting("PN_HOST_RESERVE_BYTES", size, None, "bytes", "host memory kept free (default: 15 %, at least 1 GiB)"),
    Setting("PN_PSI_FULL_REJECT", number(0.01, 100), 15.0, "%", "PSI full avg10 from which on the host is CRITICAL"),
    Setting("PN_PSI_SOME_TIGHT", number(0.01, 100), 10.0, "%", "PSI some avg10 from which on the host is TIGHT"),
    Setting("PN_LOAD_SPIKE_BYTES", size, 2_576_980_378, "bytes", "host memory that a load takes for a while, at most"),
    Setting("PN_LADDER_DISABLE", switch, 0, "0 or 1", "turn the degradation ladder off"),
    Setting("QWEN35_KV_Q4", switch, 0, "0 or 1", "KV caches in 4 bits, where --kv-type does not say otherwise"),
    # many users on one model
    Setting("QWEN35_BATCH_SLOTS", slots, 0, "slots", "users that share one model at a time"),
    Setting("QWEN35_BS_DRIVER_SAMPLE", switch, 1, "0 or 1", "sample ahead of the readers; 0: in lockstep with them"),
    Setting("QWEN35_BS_PREFILL_BATCH", switch, 1, "0 or 1", "read prompts in chunks; 0: token by token"),
    Setting("QWEN35_BS_PREFILL_CHUNK", integer(1, 4096), 128, "tokens", "prompt tokens per turn"),
    Setting("QWEN35_BS_STATS", switch, 0, "0 or 1", "log the time of each step"),
    Setting("BS_QUEUE_DEPTH", integer(0, 4096), 32, "requests", "requests that may wait for a slot"),
    Setting("PN_QUEUE_WAIT_S", number(0.1, 86_400), 30.0, "s", "how long a request may wait for a slot"),
    Setting("PN_BS_MIXED", switch, 1, "0 or 1", "prompts ride in the forwards that decode; 0: in their own"),
    Setting("PN_ASYNC_POLL_US", integer(50, 100_000), 500, "µs", "longest sleep between two looks at a GPU's step"),
    Setting("QWEN35_GPU_FULL_LOGITS", _refuse, None, "-", "refused: the server does not start while it is set"),
    # router and admin
    Setting("PANTHEON_REGISTRY_URL", url, None, "URL", "register with the router at this address"),
    Setting("PANTHEON_REGISTRY_TRANSPORT", choice("local", "smg"), "local", "local or smg", "how to register there"),
    Setting("PANTHEON_REGISTRY_KEY", key, None, "key", "bearer token for the router", secret=True),
    Setting("PANTHEON_NODE_ID", identifier, "node0", "name", "this machine's name in registrations"),
    Setting("PANTHEON_ENDPOINT", url, None, "URL", "where the router reaches this server (default: its own URL)"),
    Setting("PANTHEON_DRAIN_S", number(0, 3600), 30.0, "s", "how long a registered server ends answers at a stop"),
    Setting("PANTHEON_ADMIN_KEY", key, None, "key", "demand this key on the admin routes", secret=True),
    # test seams
    Setting("PN_SLOW_DECODE_MS", integer(0, 60_000), 0, "ms", "test seam: sleep so long before each decode step"),
    Setting("PN_FAIL_AT", _text, "", "points", "test seam: `point[@k],…` raises at the k-th hit of a failure point"),
    Setting("PN_HOST_ROOT", _text, "/", "folder", "test seam: folder that stands for / when host signals are read"),
)  # fmt: skip

SETTINGS: dict[str, Setting] = {s.name: s for s in _TABLE}
_PREFIXES = ("PN_", "QWEN35_", "PANTHEON_")


# ---- reading --------------------------------------------------------------------------------------------------------


def get(name: str) -> Any:
    """The value of one flag.  Raises SettingError, which names the flag and what it accepts."""
    setting = SETTINGS[name]
    raw = os.environ.get(name)
    if raw is None or raw == "":
        return setting.default
    shown = "…" if setting.secret else raw
    try:
        return setting.parse(raw)
    except ValueError as fault:
        raise SettingError(f"{name}={shown}: {fault}", param=name) from None


def given(name: str) -> bool:
    """Whether a flag of the table was set by whoever started us; an empty value is none."""
    return bool(os.environ.get(SETTINGS[name].name))


def check_all() -> dict[str, Any]:
    """Parse every flag; returns those that differ from their default (`set` for a secret)."""
    values = {name: get(name) for name in SETTINGS}
    changed = {name: value for name, value in values.items() if value != SETTINGS[name].default}
    return {name: "set" if SETTINGS[name].secret else value for name, value in changed.items()}


def origins() -> list[tuple[str, Any, str]]:
    """(name, value, `env` or `default`) of every flag; a secret's value is `set`."""
    rows = []
    for name, setting in SETTINGS.items():
        value = get(name)
        rows.append((name, "set" if setting.secret and value else value, "env" if given(name) else "default"))
    return rows


def unknown_names(environ: Mapping[str, str] | None = None) -> list[tuple[str, str | None]]:
    """(name, the flag it was meant to be or None) of what looks like a flag of ours and is none."""
    found = []
    for name in sorted(os.environ if environ is None else environ):
        if name in SETTINGS:
            continue
        close = difflib.get_close_matches(name.upper(), SETTINGS, 1, 0.8)
        if name.startswith(_PREFIXES) or (close and name.upper().startswith((*_PREFIXES, "BS_"))):
            found.append((name, close[0] if close else None))
    return found
