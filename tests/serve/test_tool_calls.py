"""Tool-call text of every format that the emitter finds; malformed text is text, never an error (M044, M123)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pantheon.serve.tool_calls import parse_tool_block

CITY = {"city": "Oslo"}


def calls(text: str, **options: Any) -> list[tuple[str, Any]]:
    return [(c.name, json.loads(c.arguments)) for c in parse_tool_block(text, **options)[0]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>', [("f", CITY)]),
        ('<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}', [("f", CITY)]),
        ('<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}}</tool_call>', [("f", CITY)]),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', [("f", {"a": "x\ny"})]),
        ('<tool_call>[{"name": "f"}, {"name": "g", "arguments": null}]</tool_call>', [("f", {}), ("g", {})]),
        ('<tool_call>{"name":"f","arguments":"{\\"city\\": \\"Oslo\\"}"}</tool_call>', [("f", CITY)]),
        ('<tool_call>{"function": {"name": "f", "arguments": {"city": "Oslo"}}}</tool_call>', [("f", CITY)]),
        ('{"name": "f", "parameters": {"city": "Oslo"}}', [("f", CITY)]),
        ('{"type": "function", "function": "f", "parameters": {"city": "Oslo"}}', [("f", CITY)]),
        ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", {}), ("g", {})]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"city": "Oslo"}}]', [("f", CITY)]),
        ('[TOOL_CALLS]f[ARGS]{"city": "Oslo"}', [("f", CITY)]),
        ('[TOOL_CALLS]f{"city": "Oslo"}', [("f", CITY)]),
        ("<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>", [("f", CITY)]),
        ("<function=f></function>", [("f", {})]),
        ("<function=f><parameter=city>Oslo", [("f", CITY)]),
    ],
)
def test_formats(text: str, expected: list[tuple[str, Any]]) -> None:
    found, leftover = parse_tool_block(text)
    assert [(c.name, json.loads(c.arguments)) for c in found] == expected
    assert leftover == ""


def test_xml_values_take_their_types_from_the_schema() -> None:
    types = {"n": "integer", "s": "string", "o": "object", "b": "boolean"}
    schema = {"properties": {key: {"type": kind} for key, kind in types.items()}}
    text = (
        "<function=f><parameter=n>3</parameter><parameter=s>3</parameter><parameter=o>{\"a\": [1]}</parameter>"
        "<parameter=b>maybe</parameter></function>"
    )  # fmt: skip
    assert calls(text, schemas={"f": schema}) == [("f", {"n": 3, "s": "3", "o": {"a": [1]}, "b": "maybe"})]


def test_only_offered_names_are_calls() -> None:
    text = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    assert parse_tool_block(text, names={"ls"}) == ([], text)
    assert calls(text, names={"rm"}) == [("rm", {})]


@pytest.mark.parametrize(
    "text",
    [
        "", "<tool_call>", "<tool_call></tool_call>", "<tool_call>{</tool_call>", "<tool_call>null</tool_call>",
        '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": ""}</tool_call>', "[TOOL_CALLS]", "[TOOL_CALLS]x",
        "<tool_call>" + "[" * 100_000 + "</tool_call>", "{" * 100_000, "<function=", "just words",
    ],
)  # fmt: skip
def test_malformed_text_comes_back(text: str) -> None:
    assert parse_tool_block(text) == ([], text)


PARTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "[TOOL_CALLS]", "{",
     "}", "[", "]", '"name"', ":", '"f"', ",", '"arguments"', "[ARGS]", "1", "NaN", "\\", '"', " "]
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(st.lists(PARTS, max_size=20).map("".join))
def test_never_raises_and_arguments_are_text(text: str) -> None:
    found, leftover = parse_tool_block(text)
    assert all(call.name and isinstance(call.arguments, str) for call in found)
    assert leftover == ("" if found else text)
