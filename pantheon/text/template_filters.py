"""Jinja's filters and tests, each within the allowance of the rendering [B37].

A filter is known here with what it may cost: a judge looks at its arguments before it runs, and what it returns is
accounted for.  `pass_context` on the wrappers also keeps Jinja from running filters while it compiles.

This module knows Jinja's filters; it must not know messages, tokenizers or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context
from jinja2.tests import TESTS
from jinja2.utils import _PassArg, pass_context

from pantheon.text import template_guard as guard

_TESTS: Mapping[str, Any] = TESTS
Judge = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]

# what only picks one of the values that exist already
_PICKS = frozenset(("first", "last", "min", "max", "random", "default", "d", "attr", "string", "safe"))


def build_filters() -> dict[str, Callable[..., Any]]:
    """Every filter of Jinja, wrapped; `tojson` is the environment's own."""
    table = {name: _wrapped(name, function, _JUDGES.get(name)) for name, function in FILTERS.items()}
    table.update(join=_join, sum=_sum, list=_list)
    return table


def build_tests() -> dict[str, Callable[..., Any]]:
    """Every test of Jinja, counted as a step."""
    return {name: _wrapped(name, function, None) for name, function in _TESTS.items()}


def _wrapped(name: str, function: Callable[..., Any], judge: Judge | None) -> Callable[..., Any]:
    kind = _PassArg.from_obj(function)
    picks = name in _PICKS

    @pass_context
    def run(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        current = guard.current()
        current.tick()
        if judge is not None:
            judge(value, args, kwargs)
        if kind is None:
            result = function(value, *args, **kwargs)
        elif kind is _PassArg.context:
            result = function(context, value, *args, **kwargs)
        elif kind is _PassArg.eval_context:
            result = function(context.eval_ctx, value, *args, **kwargs)
        else:
            result = function(context.environment, value, *args, **kwargs)
        if result is value or (picks and result.__class__ is not str):
            return result
        return current.shallow(result) if picks else current.deep(result)

    return run


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    current = guard.current()
    current.tick()
    if isinstance(value, str):
        guard.limit_items(len(value))
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), guard.bounded(value))
    separator = str(d)
    return current.text(separator.join(guard.join(separator, value)))


@pass_context
def _sum(context: Context, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    """A sum by the guarded `+`: Python's own takes quadratic time over lists."""
    items = guard.bounded(iterable)
    if attribute is not None:
        items = list(map(make_attrgetter(context.environment, attribute), items))
    total = start
    for item in items:
        total = context.environment.call_binop(context, "+", total, item)  # type: ignore[attr-defined]
    return total


@pass_context
def _list(context: Context, value: Any) -> list[Any]:
    return guard.current().shallow(guard.bounded(value))


# -- judges ----------------------------------------------------------------------------------------------------------


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], at: int, name: str, default: Any) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _at_most(limit: int, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Text beyond the limit, or a container that prints beyond it, is refused."""
    guard.limit_slow(value, limit)
    if not isinstance(value, str):
        nodes, _ = guard.current().weigh(value)
        guard.limit_items(nodes)
    for text in (*args, *kwargs.values()):
        guard.limit_slow(text)


def _items(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if isinstance(value, str):
        guard.limit_items(len(value))


def _portions(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _items(value, args, kwargs)
    for size in (*args, *kwargs.values()):
        if isinstance(size, int):
            guard.limit_items(size)


def _width(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    width = _argument(args, kwargs, 0, "width", 80)
    guard.limit_chars(width if isinstance(width, int) else 0)


def _indent(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    width = _argument(args, kwargs, 0, "width", 4)
    size = len(width) if isinstance(width, str) else width
    text = str(value)
    lines = text.count("\n") + 2
    guard.limit_items(lines)
    guard.limit_chars(len(text) + lines * size if isinstance(size, int) else 0)


def _replace(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    old, new = _argument(args, kwargs, 0, "old", ""), _argument(args, kwargs, 1, "new", "")
    guard.replaced(str(value), str(old), str(new), _argument(args, kwargs, 2, "count", -1))


def _format(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    guard.percent(str(value), kwargs or args)


def _trim(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    guard.limit_slow(_argument(args, kwargs, 0, "chars", None), guard.MAX_SET)


def _round(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    precision = _argument(args, kwargs, 0, "precision", 0)
    guard.limit_bits(abs(precision) * 4 if isinstance(precision, int) else 0)


def _wordwrap(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _at_most(guard.MAX_SLOW_CHARS, value, (), {})
    for text in (*args, *kwargs.values()):
        guard.limit_slow(text, 80)


_SLOW = partial(_at_most, guard.MAX_SLOW_CHARS)
_LONG = partial(_at_most, 4 * guard.MAX_ITEMS)

_JUDGES: dict[str, Judge] = {
    **dict.fromkeys(("map", "select", "selectattr", "reject", "rejectattr", "sort", "unique", "groupby"), _items),
    **dict.fromkeys(("batch", "slice"), _portions),
    **dict.fromkeys(("urlize", "striptags", "pprint", "xmlattr"), _SLOW),
    **dict.fromkeys(("wordcount", "title", "urlencode"), _LONG),
    "wordwrap": _wordwrap,
    "center": _width,
    "indent": _indent,
    "replace": _replace,
    "format": _format,
    "trim": _trim,
    "round": _round,
}
