"""What a grammar of tool calls is, and the one of Qwen3-Coder's tags: `<function=name><parameter=key>value…`.

The values are texts of no type: the schema of the parameter says what they are.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from pantheon.engine.schema_types import types_of
from pantheon.serve.call_values import typed_text
from pantheon.serve.scan import Ended, Malformed, Out, Scan, Steps, collect, escaped, json_value

_TAG_NAME = re.compile(r"[^>\s]")
_END = "</parameter>"
_END_TAGS = ("\n" + _END, _END, "\n<parameter=", "\n</function>")

Offered = Mapping[str, Any]


class Sink(Protocol):
    """Takes what a block holds.  A call is `begin`, any number of `arguments`, `end`."""

    @property
    def open(self) -> bool: ...

    def begin(self, name: str) -> None: ...

    def arguments(self, text: str) -> None: ...

    def end(self) -> None: ...

    def content(self, text: str) -> None: ...


#: (scan, sink, offered tools: name -> schema); the opening marker is still to be taken
Grammar = Callable[[Scan, Sink, Offered], Steps[None]]


def function(scan: Scan, sink: Sink, offered: Offered) -> Steps[None]:
    """`<function=name>`, then `<parameter=key>value</parameter>` any number of times, or JSON (Llama 3.1)."""
    scan.take(len("<function="))
    name = yield from scan.word(_TAG_NAME)
    if not name or (yield from scan.need()) != ">":
        raise Malformed
    scan.take()
    c = yield from scan.blanks()
    if c == "{":
        sink.begin(name)
        yield from json_value(scan, sink.arguments)
        yield from scan.blanks()
        if (yield from scan.which("</function>")):
            scan.take(len("</function>"))
        sink.end()
        return
    schema = offered.get(name)
    opening = "{"
    while True:
        c = yield from scan.blanks()
        found = yield from scan.which("<parameter=", "</function>")
        if found == "<parameter=":
            if not sink.open:
                sink.begin(name)
            scan.take(len(found))
            sink.arguments(opening)
            yield from _parameter(scan, sink.arguments, schema)
            opening = ", "
            continue
        if found:
            scan.take(len(found))
        elif (c == "" and not sink.open) or scan.cut_within("<parameter=", "</function>"):
            raise Ended
        elif c:
            raise Malformed
        break
    if not sink.open:
        sink.begin(name)
        sink.arguments("{")
    sink.arguments("}")
    sink.end()


def _parameter(scan: Scan, out: Out, schema: Any) -> Steps[None]:
    """`key>value</parameter>`, as a member of an object.  A text goes out as it comes."""
    key = yield from scan.word(_TAG_NAME)
    if not key or (yield from scan.need()) != ">":
        raise Malformed
    scan.take()
    if (yield from scan.peek()) == "\n":
        scan.take()
    properties = schema.get("properties") if isinstance(schema, dict) else None
    kinds = types_of(properties.get(key) if isinstance(properties, dict) else None, schema)
    out(f'"{escaped(key)}": ')
    if kinds <= {"string"}:
        out('"')
        yield from _value(scan, lambda text: out(escaped(text)))
        out('"')
    else:
        out(typed_text((yield from collect(partial(_value, scan))), kinds))


def _value(scan: Scan, out: Out) -> Steps[None]:
    """The text of a parameter; an end tag that nothing of the call follows is part of it (an XML file, say).

    The end of the answer ends it as well.  Raises Ended when a cap cut it off.
    """
    while found := (yield from scan.until(_END_TAGS, out)):
        if not found.endswith(_END):
            scan.take()
            return
        if (yield from scan.behind(len(found), "<parameter=", "</function>", "</tool_call>")):
            scan.take(len(found))
            return
        out(scan.take(len(found)))
    if scan.cut:
        raise Ended


def bare_function(scan: Scan, sink: Sink, offered: Offered) -> Steps[None]:
    scan.closing = ("</function>",)
    yield from function(scan, sink, offered)
    scan.commit()
    yield from scan.blanks()
    if (yield from scan.which("</tool_call>")):
        scan.take(len("</tool_call>"))
