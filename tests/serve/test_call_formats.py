"""Tool calls of every format, piece by piece: any cut gives the same; malformed text is text (M044, M121-M123)."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pantheon.serve.call_formats import COMMON_TOOLS, DEEPSEEK_TOOLS, GEMMA_TOOLS, LLAMA3_TOOLS, PHI_TOOLS, ToolFormat
from pantheon.serve.emitter import Emitter

CITY = {"city": "Oslo"}
OSLO = [("f", CITY)]
TYPES = {"n": "integer", "s": "string", "o": "object", "b": "boolean"}
OFFERED: dict[str, Any] = {
    "f": {"properties": {"city": {"type": "string"}, **{key: {"type": kind} for key, kind in TYPES.items()}}},
    "g": None,
    "python": {"properties": {"code": {"type": "string"}}},
}
DS = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"


@dataclass
class Seen:
    """One answer: content, calls as [name, arguments], and how many pieces the arguments came in."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    pieces: int = 0
    complete: int = 0

    @property
    def values(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(pieces: list[str], tools: ToolFormat = COMMON_TOOLS, cut: bool = False, **options: Any) -> Seen:
    emitter, seen = Emitter(tools=tools, offered=OFFERED, **options), Seen()
    for events in [*(emitter.feed(p) for p in pieces), emitter.finish(cut=cut)]:
        for event in events:
            if event.channel == "content":
                seen.content += event.text
            elif event.name:
                seen.calls.append([event.name, event.text])
            else:
                seen.calls[-1][1] += event.text
            seen.pieces += event.channel == "call"
    seen.complete = emitter.calls
    return seen


FORMS: list[tuple[ToolFormat, str, list[tuple[str, Any]], str]] = [
    # Hermes, Qwen 2.5, Qwen 3
    (COMMON_TOOLS, '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>', OSLO, ""),
    (COMMON_TOOLS, 'a <tool_call>{"arguments": {"city": "Oslo"}, "name": "f"}</tool_call>\nb', OSLO, "a b"),
    (COMMON_TOOLS, '<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}', OSLO, ""),
    (COMMON_TOOLS, '<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}}</tool_call>', OSLO, ""),
    (COMMON_TOOLS, '<tool_call>{"name": "f", "arguments": {"s": "x\ny\\\'"}}</tool_call>',
     [("f", {"s": "x\ny'"})], ""),
    (COMMON_TOOLS, '<tool_call>[{"name": "f"}, {"name": "g", "arguments": null}]</tool_call>',
     [("f", {}), ("g", {})], ""),
    (COMMON_TOOLS, '<tool_call>{"name":"f","arguments":"{\\"city\\": \\"Oslo\\"}"}</tool_call>', OSLO, ""),
    (COMMON_TOOLS, '<tool_call>{"function": {"name": "f", "arguments": {"city": "Oslo"}}}</tool_call>', OSLO, ""),
    (COMMON_TOOLS, '<tool_call>{"name": "f", "arguments": {"b": True, "o": [1, -2.5e3,],}}</tool_call>',
     [("f", {"b": True, "o": [1, -2500.0]})], ""),
    (COMMON_TOOLS, '<tool_call>{"name": "f", "arguments": {"s": "</tool_call> \\"<tool_call>"}}</tool_call>.',
     [("f", {"s": '</tool_call> "<tool_call>'})], "."),
    (COMMON_TOOLS, '<tool_call>{"name": "f"}<tool_call>{"name": "g"}</tool_call>', [("f", {}), ("g", {})], ""),
    (COMMON_TOOLS, '<tool_call>{"name": "f"} Done.</tool_call>', [("f", {})], "Done."),
    # Qwen3-Coder, Qwen3.5
    (COMMON_TOOLS, "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
     OSLO, ""),
    (COMMON_TOOLS, "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=o>\n{\"a\": [1]}\n"
     "</parameter>\n</function>\n</tool_call>", [("f", {"n": 3, "o": {"a": [1]}})], ""),
    (COMMON_TOOLS, "<function=f></function>", [("f", {})], ""),
    (COMMON_TOOLS, "<function=f><parameter=city>Oslo", OSLO, ""),
    (COMMON_TOOLS, "<function=f>\n<parameter=s>\n\n a\"\\\n\n<parameter=b>\nmaybe\n</function>\n</tool_call> so",
     [("f", {"s": '\n a"\\\n', "b": "maybe"})], "so"),
    (COMMON_TOOLS, "<function=f>\n<parameter=s>\n<a></parameter>x\n</parameter>\n</function>",
     [("f", {"s": "<a></parameter>x"})], ""),
    (COMMON_TOOLS, '<function=f>{"city": "Oslo"}</function>', OSLO, ""),
    # Llama 3
    (LLAMA3_TOOLS, '{"name": "f", "parameters": {"city": "Oslo"}}', OSLO, ""),
    (LLAMA3_TOOLS, '{"type": "function", "function": "f", "parameters": {"city": "Oslo"}}', OSLO, ""),
    (LLAMA3_TOOLS, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
     [("f", {}), ("g", {})], ""),
    (LLAMA3_TOOLS, '<|python_tag|>f.call(city="Oslo")', OSLO, ""),
    (LLAMA3_TOOLS, '<|python_tag|>print("1")\nx', [("python", {"code": 'print("1")\nx'})], ""),
    (LLAMA3_TOOLS, '{"name": "nobody", "parameters": {}}', [], '{"name": "nobody", "parameters": {}}'),
    # Mistral: Nemo's list, Small's names
    (COMMON_TOOLS, '[TOOL_CALLS][{"name": "f", "arguments": {"city": "Oslo"}, "id": "abc123456"}]', OSLO, ""),
    (COMMON_TOOLS, '[TOOL_CALLS]f[ARGS]{"city": "Oslo"}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}', [*OSLO, ("g", {})], ""),
    (COMMON_TOOLS, '[TOOL_CALLS]f{"city": "Oslo"}', OSLO, ""),
    # Phi-4
    (PHI_TOOLS, '<|tool_call|>[{"name": "f", "arguments": {"city": "Oslo"}}]<|/tool_call|>', OSLO, ""),
    (PHI_TOOLS, 'functools[{"name": "f", "arguments": {"city": "Oslo"}}]', OSLO, ""),
    # Gemma 4, Gemma 3
    (GEMMA_TOOLS, '<|tool_call>call:f{city:<|"|>Oslo<|"|>}<tool_call|>', OSLO, ""),
    (GEMMA_TOOLS, '<|tool_call>call:f{o:{<|"|>a b<|"|>:[1,true,null],c:<|"|>"\\<|"|>},n:-1}<tool_call|>x',
     [("f", {"o": {"a b": [1, True, None], "c": '"\\'}, "n": -1})], "x"),
    (GEMMA_TOOLS, "```tool_code\nprint(f(city='Oslo'))\n```", OSLO, ""),
    # DeepSeek R1
    (DEEPSEEK_TOOLS, "<｜tool▁calls▁begin｜>" + DS.format("f", '{"city": "Oslo"}') + "\n" + DS.format("g", "{}")
     + "<｜tool▁calls▁end｜>", [*OSLO, ("g", {})], ""),
]  # fmt: skip


every_form = pytest.mark.parametrize(
    ("tools", "text", "expected", "content"), FORMS, ids=lambda value: value[:40] if type(value) is str else ""
)


@every_form
def test_formats_at_every_cut(tools: ToolFormat, text: str, expected: list[tuple[str, Any]], content: str) -> None:
    whole = read([text], tools)
    assert (whole.values, whole.content, whole.complete) == (expected, content, len(expected))
    for cut in range(1, len(text)):
        parts = read([text[:cut], text[cut:]], tools)
        assert (parts.calls, parts.content) == (whole.calls, whole.content)
    singly = read(list(text), tools)
    assert (singly.calls, singly.content) == (whole.calls, whole.content)


@every_form
def test_a_cap_at_every_place_leaves_a_beginning(
    tools: ToolFormat, text: str, expected: list[tuple[str, Any]], content: str
) -> None:
    """What a cap left of the calls is a beginning of them: no arguments are made up."""
    if "f.call(" in text:
        return  # up to the bracket it may be Python
    whole = read([text], tools)
    for end in range(len(text)):
        part = read([text[:end]], tools, cut=True)
        assert len(part.calls) <= len(whole.calls)
        for (name, arguments), (full_name, full) in zip(part.calls, whole.calls, strict=False):
            assert name == full_name and (full.startswith(arguments) or json.loads(arguments) == json.loads(full))


def test_arguments_come_in_pieces_B17() -> None:
    for tools, text, expected, _ in FORMS:
        # what stands where it must be read whole: Python, a string of JSON, arguments before the name
        late = ('\\"', "(", '"arguments": {"city": "Oslo"}, "name"', '"function": {')
        if expected == OSLO and not any(mark in text for mark in late):
            assert read(list(text), tools).pieces >= 6, text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>", "<tool_call></tool_call>", "<tool_call>{</tool_call>", "<tool_call>null</tool_call>",
        '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": ""}</tool_call>', "[TOOL_CALLS]", "[TOOL_CALLS]x",
        "<tool_call>" + "[" * 1_000 + "</tool_call>", "{" * 1_000, "<function=", "just words", "<function=f",
        '<tool_call>{"name": "f"', "<function=f>\nno", "<tool_call>\n{oops\n</tool_call> <tool_call> again",
        "<|python_tag|>import os", "<|tool_call>call:", "functools[]", "```tool_code\nimport os\n```",
    ],
)  # fmt: skip
def test_malformed_text_is_content_M123(text: str) -> None:
    for tools in (COMMON_TOOLS, GEMMA_TOOLS, PHI_TOOLS):
        assert (seen := read([text], tools)).content == text and not seen.calls
        assert read(list(text), tools).content == text


def test_what_goes_wrong_inside_arguments_stays_there() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1, oops}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    for pieces in ([text], list(text)):
        seen = read(pieces)
        assert seen.calls == [["f", '{"a": 1, oops}}'], ["g", "{}"]] and seen.content == ""


def test_bare_json_that_is_no_call_is_not_held_back() -> None:
    emitter = Emitter(tools=LLAMA3_TOOLS, offered={"f": None})
    assert emitter.feed('{"nam') == []
    assert [event.text for event in emitter.feed('e": "fr')] == []
    assert [event.text for event in emitter.feed('itz", ')] == ['{"name": "fritz", ']
    emitter = Emitter(tools=LLAMA3_TOOLS, offered={"f": None})
    assert [event.text for event in emitter.feed('{"age"')] == ['{"age"']
    emitter = Emitter(tools=LLAMA3_TOOLS, offered={"f": None})
    assert emitter.feed(' {"name": "f", "parameters": {') == [("call", "{", "f")]


def test_xml_values_take_their_types_from_the_schema() -> None:
    schema = {
        "$defs": {"k": {"enum": [1, 2]}},
        "properties": {
            "r": {"$ref": "#/$defs/k"}, "u": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "x": {},
            "c": {"const": 1},
        },
    }  # fmt: skip
    keys = {"r": "2", "u": "null", "x": "3", "c": "1"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in keys.items())
    emitter = Emitter(tools=COMMON_TOOLS, offered={"f": schema})
    events = [*emitter.feed(f"<function=f>\n{body}</function>"), *emitter.finish()]
    assert json.loads("".join(event.text for event in events)) == {"r": 2, "u": None, "x": "3", "c": 1}


PARTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=s>", "</parameter>", "[TOOL_CALLS]", "{",
     "}", "[", "]", '"name"', ":", '"f"', ",", '"arguments"', "[ARGS]", "1", "NaN", "\\", '"', " ", "\n",
     '{"name": "f"', ', "arguments": {', "<|python_tag|>", "f(s=1)", "<|tool_call>", "call:f", '<|"|>', "<tool_call|>",
     "s", ";"]
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(
    st.lists(PARTS, max_size=20).map("".join),
    st.lists(st.integers(0, 120), max_size=6),
    st.sampled_from([COMMON_TOOLS, LLAMA3_TOOLS, GEMMA_TOOLS, PHI_TOOLS]),
    st.booleans(),
)
def test_any_text_any_cut_M122(text: str, cuts: list[int], tools: ToolFormat, cut: bool) -> None:
    whole = read([text], tools, cut)
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    parts = read([text[a:b] for a, b in itertools.pairwise(edges)], tools, cut)
    assert (parts.calls, parts.content, parts.complete) == (whole.calls, whole.content, whole.complete)
    singly = read(list(text), tools, cut)
    assert (singly.calls, singly.content) == (whole.calls, whole.content)
    if not whole.calls:
        assert whole.content == text or "</think>" in text
