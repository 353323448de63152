"""The Jinja environment of chat templates: what Hugging Face's `apply_chat_template` offers, inside an allowance.

Immutable sandbox, trim_blocks, lstrip_blocks, loop controls, a `generation` tag, a `tojson` that keeps UTF-8 and HTML
as they are, `raise_exception`, `strftime_now`, `namespace` [B34].  Everything a template can spend time or memory
with is led through `template_guard` [B37]: the compiler below sends loops, literals, slices, `~` and comparisons
there, Jinja's own hooks do it for calls, operators, filters, tests and output.

This module knows Jinja; it must not know messages, tokenizers or requests.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Cycler, Joiner, Namespace

from pantheon.text import template_guard as guard
from pantheon.text.template_filters import build_filters, build_tests
from pantheon.text.template_values import ToolCall

_OPERATORS = frozenset(("+", "-", "*", "/", "//", "**", "%"))


class RaisedByTemplate(JinjaError):
    """`raise_exception(text)`: the template refuses, in its own words."""


class SafeNamespace(Namespace):
    """A namespace that prints as a name: its values may refer to themselves."""

    def __repr__(self) -> str:
        return "<Namespace>"


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Formatter(SandboxedFormatter):
    """`str.format` that judges widths and counts what it prints."""

    printed = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        guard.field_width(format_spec)
        text = super().format_field(value, format_spec)
        self.printed += len(text)
        guard.limit_chars(self.printed)
        guard.current().tick()
        return text


class _Generator(CodeGenerator):
    """Compiles what Jinja would leave to plain Python into calls that are accounted for."""

    def _wrapped(self, call: str, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write(f"environment.{call}(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._wrapped("literal", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._wrapped("literal", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._wrapped("literal", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.step(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._wrapped("sliced", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One for the process; holds no state of a rendering, so that any thread may use it."""

    code_generator_class = _Generator
    intercepted_binops = _OPERATORS

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationTag],
            finalize=self.printed,
        )
        self.filters = build_filters()
        self.tests = build_tests()  # type: ignore[assignment]
        self.filters["tojson"] = to_json
        self.filters[_ITERABLE] = _iterable
        self.globals.clear()
        self.globals.update(
            range=safe_range,
            dict=dict,
            cycler=Cycler,
            joiner=Joiner,
            namespace=SafeNamespace,
            raise_exception=raise_exception,
            strftime_now=strftime_now,
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Jinja's tree, with a step at the head of every loop turn and a check of what is looped over."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            step = nodes.EnvironmentAttribute("step()", lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(step, lineno=loop.lineno))
            loop.iter = nodes.Filter(loop.iter, _ITERABLE, [], [], None, None, lineno=loop.lineno)
        for node in tree.find_all(nodes.Node):
            node.environment = self
        return tree

    # -- hooks of the compiled code

    def step(self, value: Any = None) -> Any:
        guard.current().tick()
        return value

    def literal(self, value: Any) -> Any:
        current = guard.current()
        current.tick()
        return current.shallow(value)

    def sliced(self, value: Any) -> Any:
        current = guard.current()
        current.tick()
        return current.text(value) if isinstance(value, str) else value

    def concatenated(self, values: Sequence[Any]) -> str:
        return guard.current().text("".join(guard.join("", values)))

    def printed(self, value: Any) -> Any:
        """Each value on its way to the output (or into a `set` block)."""
        current = guard.current()
        current.tick()
        return value if isinstance(value, str) else current.text(str(value))

    @staticmethod
    def concat(pieces: Any) -> str:
        """The end of a macro, block or `set` block."""
        pieces = list(pieces)
        guard.limit_chars(sum(map(len, pieces)))
        return guard.current().text("".join(pieces))

    # -- hooks of Jinja's sandbox

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in the sandbox, with short ways for what templates read in quadratic loops."""
        names = _OWN_NAMES.get(type(obj))
        if names is not None and attribute not in names and not attribute.startswith("_"):
            try:
                items = object.__getattribute__(obj, "_Namespace__attrs") if names is _NO_NAMES else obj
                return items[attribute]
            except LookupError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        current = guard.current()
        current.tick()
        guard.operands(operator, left, right)
        return current.shallow(self.binop_table[operator](left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        current = guard.current()
        current.tick()
        owner = getattr(obj, "__self__", None)
        positional: Sequence[Any] = args
        if isinstance(obj, (types.BuiltinMethodType, types.MethodType)) and isinstance(owner, _VALUES):
            name = obj.__name__
            if not guard.is_allowed_method(owner, name):
                raise SecurityError(f"{type(owner).__name__}.{name}() is not offered to chat templates")
            if isinstance(owner, str):
                positional = guard.method(owner, name, args, kwargs)
        elif isinstance(obj, types.BuiltinMethodType) or (isinstance(obj, type) and obj not in _TYPES):
            raise SecurityError(f"{obj!r} is not safely callable")
        elif isinstance(obj, LoopContext) and args and isinstance(args[0], str):
            guard.limit_items(len(args[0]))
        result = super().call(context, obj, *positional, **kwargs)
        if result is owner or (isinstance(owner, dict) and isinstance(result, str)):
            return result  # what was there before is not new
        return current.deep(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        if not isinstance(value, (types.BuiltinMethodType, types.MethodType)) or not isinstance(owner, str):
            return None
        name = value.__name__
        if name not in ("format", "format_map"):
            return None

        def format_text(*args: Any, **kwargs: Any) -> str:
            if name == "format_map":
                return _Formatter(self).vformat(owner, (), args[0])
            return _Formatter(self).vformat(owner, args, kwargs)

        return format_text


_VALUES = (str, bytes, list, tuple, dict, int, float, types.GeneratorType)
_NO_NAMES: frozenset[str] = frozenset()
# types whose attributes are their items, but for these names
_OWN_NAMES = {dict: frozenset(dir(dict)), ToolCall: frozenset(dir(ToolCall)), SafeNamespace: _NO_NAMES}
_TYPES = frozenset((dict, Cycler, Joiner, SafeNamespace))
_ITERABLE = "iterable of a loop"  # no template can spell it


def _iterable(value: Any) -> Any:
    if isinstance(value, str):
        guard.limit_items(len(value))
    return value


def raise_exception(message: Any) -> None:
    raise RaisedByTemplate(str(message))


def strftime_now(form: str) -> str:
    """The time of the rendering (local, or the one the caller injected) in any strftime format."""
    guard.limit_slow(form, guard.MAX_SET)
    return (guard.current().now or datetime.now()).strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps as Hugging Face configures it: UTF-8 and `<>&'` stay as they are."""
    current = guard.current()
    current.tick()
    if isinstance(indent, int):
        guard.limit_chars(0 if indent <= 80 else guard.MAX_CHARS + 1)
    for text in (indent, *(separators or ())):
        guard.limit_slow(text, 80)
    current.weigh(value)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return current.text(encoder.encode(value))
    return current.text("".join(_pieces(encoder.iterencode(value))))


def _pieces(chunks: Iterator[str]) -> Iterator[str]:
    """Indented JSON repeats its indent on every line, so its size shows only while it is written."""
    total = 0
    for chunk in chunks:
        total += len(chunk)
        guard.limit_chars(total)
        guard.current().tick()
        yield chunk


ENVIRONMENT = TemplateEnvironment()

