"""The allowance of one rendering: how long, how much text, how much memory a chat template may take [B37].

A chat template comes out of a model file, so it is a stranger's program.  The checks run in the rendering thread
itself: every loop turn, call, filter, operator and output piece passes through a `Guard`, so that no signal, no
watchdog thread and no second process is needed and a refused template leaves nothing behind.  Operations whose
cost a single step can not bound (a width of 10**10, `'x' * 10**10`) are judged before they are done.

This module knows values and limits; it must not know Jinja.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

#: processor time of one rendering, in seconds; and wall time, for a machine whose processors are all busy elsewhere
MAX_SECONDS = 2.0
MAX_WALL_SECONDS = 3.0
#: characters of one string and of the whole output
MAX_CHARS = 8 * 1024 * 1024
#: items of one list that a template builds
MAX_ITEMS = 250_000
#: nested values of one container that a template builds, shared ones counted each time they would print
MAX_NODES = 500_000
#: bytes of new values of one rendering, besides `INPUT_FACTOR` times the size of what it was given
MAX_NEW_BYTES = 96 * 1024 * 1024
INPUT_FACTOR = 16
#: bits of a whole number
MAX_BITS = 16_384
#: a width or precision inside a format string
MAX_WIDTH = 4096
#: characters of what `strip` removes and `strftime_now` formats
MAX_SET = 1024
#: text that the slow, regex-based filters take
MAX_SLOW_CHARS = 64 * 1024

_CLOCK_EVERY = 64
_ITEM_BYTES = 64


class LimitExceeded(Exception):
    """A template went over its allowance; the message says which."""


class Guard:
    """What one rendering has left.  Owned by the rendering thread; no lock."""

    __slots__ = ("bytes_left", "cpu_deadline", "now", "ticks", "wall_deadline")

    def __init__(self, input_chars: int = 0, *, seconds: float = MAX_SECONDS, now: datetime | None = None) -> None:
        self.cpu_deadline = time.thread_time() + seconds
        self.wall_deadline = time.monotonic() + seconds * MAX_WALL_SECONDS / MAX_SECONDS
        self.bytes_left = MAX_NEW_BYTES + INPUT_FACTOR * input_chars
        self.ticks = 0
        self.now = now

    def tick(self) -> None:
        """One step; looks at the clock every few."""
        self.ticks += 1
        if self.ticks % _CLOCK_EVERY == 0:
            self.check_time()

    def check_time(self) -> None:
        if time.thread_time() > self.cpu_deadline or time.monotonic() > self.wall_deadline:
            raise LimitExceeded(f"rendering took longer than {MAX_SECONDS:g} s")

    def charge(self, n_bytes: int) -> None:
        """Take `n_bytes` of new memory from the allowance; one large value also looks at the clock."""
        self.bytes_left -= n_bytes
        if self.bytes_left < 0:
            raise LimitExceeded("rendering built more text than a prompt can need")
        if n_bytes > 65_536:
            self.check_time()

    def text(self, value: str) -> str:
        """Account for a new string."""
        limit_chars(len(value))
        self.charge(sys.getsizeof(value))
        return value

    def shallow(self, value: Any) -> Any:
        """Account for the result of an operator or literal that only refers to values that exist already."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, int):
            limit_bits(value.bit_length())
        elif isinstance(value, (list, tuple, dict)):
            self.weigh(value)
            self.charge(sys.getsizeof(value))
        return value

    def deep(self, value: Any) -> Any:
        """Account for the result of a call or filter, whose items are new as well."""
        if isinstance(value, (list, tuple, dict)):
            nodes, chars = self.weigh(value)
            self.charge(nodes * _ITEM_BYTES + chars)
            return value
        return self.shallow(value)

    def weigh(self, value: Any) -> tuple[int, int]:
        """(values, characters) that `value` would print, shared parts counted every time.

        Refuses before counting far beyond the limits: a list that holds itself twice over thirty levels is small in
        memory and endless on paper.
        """
        nodes = chars = 0
        stack = [value]
        while stack:
            item = stack.pop()
            nodes += 1
            if isinstance(item, str):
                chars += len(item)
            elif isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, (list, tuple)):
                stack.extend(item)
            if nodes + len(stack) > MAX_NODES or chars > MAX_CHARS:
                raise LimitExceeded("rendering built a container that is too large")
            if nodes % 4096 == 0:
                self.check_time()
        return nodes, chars


class _Local(threading.local):
    guard: Guard | None = None


_local = _Local()


def current() -> Guard:
    """The guard of this thread's rendering; outside of one, a fresh one."""
    guard = _local.guard
    return Guard() if guard is None else guard


class guarded:
    """`with guarded(guard):` makes `guard` this thread's; nests."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    def __enter__(self) -> Guard:
        self.outer = _local.guard
        _local.guard = self.guard
        return self.guard

    def __exit__(self, *_: object) -> None:
        _local.guard = self.outer


# -- judged before they are done -------------------------------------------------------------------------------------


def limit_chars(n: int) -> None:
    if n > MAX_CHARS:
        raise LimitExceeded(f"rendering built a text longer than {MAX_CHARS} characters")


def limit_items(n: int) -> None:
    if n > MAX_ITEMS:
        raise LimitExceeded(f"rendering built a list of more than {MAX_ITEMS} items")


def limit_bits(n: int) -> None:
    if n > MAX_BITS:
        raise LimitExceeded("rendering built a number that is too large")


def limit_slow(value: Any, limit: int = MAX_SLOW_CHARS) -> None:
    if isinstance(value, str) and len(value) > limit:
        raise LimitExceeded(f"this operation takes at most {limit} characters")


def bounded(values: Iterable[Any]) -> list[Any]:
    """The items as a list, refused beyond MAX_ITEMS."""
    guard = current()
    if isinstance(values, (str, list, tuple, dict)):
        limit_items(len(values))
        return list(values)
    items = list(islice(values, MAX_ITEMS + 1))
    limit_items(len(items))
    guard.charge(len(items) * _ITEM_BYTES)
    return items


def join(separator: str, values: Iterable[Any]) -> list[str]:
    """The items of a join as strings, once their joined length is known to be allowed."""
    texts = [v if isinstance(v, str) else current().text(str(v)) for v in bounded(values)]
    limit_chars(sum(map(len, texts)) + len(separator) * max(0, len(texts) - 1))
    return texts


def replaced(text: str, old: str, new: str, count: Any = -1) -> None:
    """Judge `text.replace(old, new, count)`."""
    if len(new) > len(old):
        hits = text.count(old)
        if isinstance(count, int) and count >= 0:
            hits = min(hits, count)
        limit_chars(len(text) + hits * (len(new) - len(old)))


def operands(operator: str, left: Any, right: Any) -> None:
    """Judge a binary operator before it runs."""
    if operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, (str, bytes, list, tuple)) and isinstance(times, int):
                check = limit_items if isinstance(many, (list, tuple)) else limit_chars
                check(len(many) * max(0, times))
        if isinstance(left, int) and isinstance(right, int):
            limit_bits(left.bit_length() + right.bit_length())
    elif operator == "+":
        if isinstance(left, str) and isinstance(right, str):
            limit_chars(len(left) + len(right))
        elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            limit_items(len(left) + len(right))
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
            limit_bits(left.bit_length() * max(0, right))
    elif operator == "%" and isinstance(left, str):
        percent(left, right)


def percent(text: str, args: Any) -> None:
    """Judge `text % args`: widths, and how often the largest argument may be printed."""
    fields, widths = _percent_fields(text)
    largest = max((_printed(a) for a in _arguments(args)), default=0)
    limit_chars(len(text) + widths + fields * largest)


def _arguments(args: Any) -> Iterable[Any]:
    if isinstance(args, Mapping):
        return args.values()
    return args if isinstance(args, tuple) else (args,)


def _printed(value: Any) -> int:
    """No fewer characters than `value` prints."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (Mapping, list, tuple)):
        nodes, chars = current().weigh(value)
        return nodes * 8 + chars * 12
    return 64 if isinstance(value, (bool, float, int)) and not _is_wide(value) else 8192


def _is_wide(value: float) -> bool:
    return isinstance(value, int) and value.bit_length() > 200


def _percent_fields(text: str) -> tuple[int, int]:
    """(number of fields, sum of their widths) of a percent format; refuses `*` and widths beyond MAX_WIDTH."""
    at = fields = widths = 0
    guard = current()
    while (at := text.find("%", at)) >= 0:
        guard.tick()
        at, fields = at + 1, fields + 1
        if text.startswith("(", at):
            at = _closing(text, at)
        spec = _SPEC.match(text, at)
        assert spec is not None  # every part of it is optional
        for part in spec.groups():
            if part == "*" or (part and (len(part) > 6 or int(part) > MAX_WIDTH)):
                raise LimitExceeded(f"a format width is at most {MAX_WIDTH}")
            widths += int(part or 0)
        at = spec.end() + 1
    return fields, widths


_SPEC = re.compile(r"[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?[hlL]?", re.ASCII)


def _closing(text: str, at: int) -> int:
    """Just behind the parenthesis that closes the one at `at`."""
    depth = 0
    for index in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    return len(text)


def field_width(spec: str) -> None:
    """Judge the format spec of one `str.format` field."""
    if any(len(n) > 6 or int(n) > MAX_WIDTH for n in re.findall(r"\d+", spec)):
        raise LimitExceeded(f"a format width is at most {MAX_WIDTH}")


# -- methods ---------------------------------------------------------------------------------------------------------

_STR = frozenset(
    "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip "
    "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines "
    "startswith strip swapcase title upper zfill".split()
)
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STR),
    (dict, frozenset(("get", "items", "keys", "values", "copy"))),
    (list, frozenset(("count", "index", "copy"))),
    (tuple, frozenset(("count", "index"))),
    (float, frozenset(("is_integer",))),
    (int, frozenset(("bit_length",))),
)


def is_allowed_method(owner: Any, name: str) -> bool:
    """Whether a template may call this method of a value (bytes, generators and the rest offer none)."""
    return any(isinstance(owner, kind) and name in names for kind, names in _METHODS)


def method(owner: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Judge a call of a string method; returns the arguments to use (a join's items are made a list)."""
    first = args[0] if args else None
    if name in ("center", "ljust", "rjust", "zfill") and isinstance(first, int):
        limit_chars(first)
    elif name == "expandtabs":
        size = kwargs.get("tabsize", 8 if first is None else first)
        limit_chars(len(owner) + owner.count("\t") * size if isinstance(size, int) else 0)
    elif name == "replace" and len(args) >= 2 and isinstance(first, str) and isinstance(args[1], str):
        replaced(owner, first, args[1], args[2] if len(args) > 2 else -1)
    elif name == "join" and len(args) == 1:
        if isinstance(first, str):
            limit_items(len(first))
        items = bounded(args[0])
        limit_chars(sum(len(i) for i in items if isinstance(i, str)) + len(owner) * max(0, len(items) - 1))
        return [items]
    elif name in ("strip", "lstrip", "rstrip") and isinstance(first, str):
        limit_slow(first, MAX_SET)
    elif name in ("split", "rsplit"):
        separator = kwargs.get("sep", first)
        if isinstance(separator, str) and separator:
            limit_items(owner.count(separator) + 1)
        else:
            limit_slow(owner, 4 * MAX_ITEMS)
    elif name == "splitlines":
        limit_slow(owner, 4 * MAX_ITEMS)
    return args
