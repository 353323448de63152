"""The emitter: channels, markers across pieces, stop strings; any chunking gives the same answer (M121, M122)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pantheon.serve.call_formats import COMMON_TOOLS, LLAMA3_TOOLS
from pantheon.serve.emitter import Emitter, thought_tags


def run(pieces: list[str], stop: tuple[str, ...] = (), **options: Any) -> tuple[dict[str, str], str | None]:
    emitter = Emitter(stop, **options)
    joined = {"reasoning": "", "content": ""}
    for events in [*(emitter.feed(p) for p in pieces), emitter.finish()]:
        for event in events:
            assert event.text or event.name
            # a call as its name and its arguments
            joined[event.channel] = joined.get(event.channel, "") + (event.name and f"[{event.name}]") + event.text
    return joined, emitter.stopped


@pytest.mark.parametrize(
    ("pieces", "reasoning", "content"),
    [
        (["plain ", "text"], "", "plain text"),
        (["<think>", "why", "</think>", "\n\n", "so"], "why", "so"),
        (["\n<thi", "nk>\nwhy\n", "</th", "ink>\n\nso"], "why", "so"),
        (["<think>\n\n</think>\n\nso"], "", "so"),
        (["<think>cut"], "cut", ""),
        (["a </think> b"], "", "a  b"),
        (["use `<think>` tags"], "", "use `<think>` tags"),
        (["<thinker> is text"], "", "<thinker> is text"),
        (["<think"], "", "<think"),
        (["   "], "", "   "),
        (["  lead"], "", "  lead"),
        (["x</thin"], "", "x</thin"),
        ([], "", ""),
    ],
)
def test_reasoning_and_content(pieces: list[str], reasoning: str, content: str) -> None:
    """M043, B21."""
    joined, _ = run(pieces)
    assert (joined["reasoning"], joined["content"]) == (reasoning, content)


def test_template_that_opened_the_thought() -> None:
    """B21a: the prompt ends inside <think>."""
    joined, _ = run(["plan\n", "</th", "ink>", "\n\n", "answer"], starts_in_reasoning=True)
    assert joined == {"reasoning": "plan", "content": "answer"}
    joined, _ = run(["<think>\nplan</think>x"], starts_in_reasoning=True)
    assert joined == {"reasoning": "plan", "content": "x"}


@pytest.mark.parametrize(
    ("mark", "opening", "closing"),
    [
        ("<|channel>", "<|channel>thought\n", "<channel|>"),
        ("[THINK]", "[THINK]", "[/THINK]"),
        ("", "<think>", "</think>"),
    ],
)
def test_other_tags_of_a_thought(mark: str, opening: str, closing: str) -> None:
    thought = thought_tags(f"a template with {mark} in it")
    assert thought == (opening, closing)
    for text in (f"{opening}why{closing}\nso <think>", f" {opening}\nwhy\n{closing}so <think>"):
        for pieces in ([text], list(text)):
            joined, _ = run(pieces, thought=thought)
            assert (joined["reasoning"], joined["content"]) == ("why", "so <think>")


def test_reasoning_parser_can_be_off() -> None:
    joined, _ = run(["<think>a</think>b"], parse_reasoning=False)
    assert joined["content"] == "<think>a</think>b"


@pytest.mark.parametrize(
    ("pieces", "stop", "content", "stopped"),
    [
        (["north", " sou", "th ea", "st", " west"], ("south east",), "north ", "south east"),
        (["ab", "c", "e"], ("abcd", "bcx"), "abce", None),
        (["ab", "cx", "e"], ("abcd", "bcx"), "a", "bcx"),
        (["abcdefghij"], ("cdefghi",), "ab", "cdefghi"),
        (["a\nb"], ("\n",), "a", "\n"),
        (["\nb"], ("\n",), "", "\n"),
        (["x", "y"], ("xy", "y"), "", "xy"),
        (["held sou"], ("south",), "held sou", None),
        (["<think>a b</think>c b d"], (" b",), "c", " b"),
        (["</think>"], ("</think>",), "", "</think>"),
    ],
)
def test_stop_strings(pieces: list[str], stop: tuple[str, ...], content: str, stopped: str | None) -> None:
    """M042, B20a, B20b."""
    joined, ended = run(pieces, stop)
    assert (joined["content"], ended) == (content, stopped)


def test_nothing_of_a_stop_string_is_shown_early() -> None:
    emitter = Emitter(("south east",))
    assert [e.text for p in ("north", " sou", "th ea") for e in emitter.feed(p)] == ["north", " "]
    assert emitter.feed("st west") == [] and emitter.stopped == "south east"
    assert emitter.feed("more") == [] and emitter.finish() == []


def test_a_false_start_is_released_at_once() -> None:
    emitter = Emitter(("abcd",))
    assert [event.text for event in emitter.feed("xab")] == ["x"]
    assert [event.text for event in emitter.feed("z")] == ["abz"]


def test_without_tools_their_markers_are_text() -> None:
    assert run(["<tool_call>x</tool_call>"])[0]["content"] == "<tool_call>x</tool_call>"


PARTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "stop", "st", "<", "/", "think>", "a", " ", "\n", "{"),
        *('"', "\\", "é🤖"),
    ]
)


@settings(deadline=None, max_examples=300)
@given(
    text=st.lists(PARTS, max_size=14).map("".join),
    cuts=st.lists(st.integers(0, 80), max_size=12),
    stop=st.lists(st.sampled_from(["stop", "top", "st", "\n\n", "<", "a "]), max_size=2),
    inside=st.booleans(),
    tools=st.sampled_from([None, COMMON_TOOLS, LLAMA3_TOOLS]),
)
@example(text="<think> </think>", cuts=[3], stop=[], inside=False, tools=None)
def test_any_chunking_gives_the_same_channels(
    text: str, cuts: list[int], stop: list[str], inside: bool, tools: Any
) -> None:
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    options = {"stop": tuple(stop), "starts_in_reasoning": inside, "tools": tools}
    whole = run([text], **options)
    assert run(pieces, **options) == whole
    assert run(list(text), **options) == whole
    for pattern in stop:
        assert pattern not in whole[0]["content"]


@settings(deadline=None, max_examples=200)
@given(text=st.text(alphabet="<>/thinkolcaseTO_[]{} \n", max_size=60))
def test_nothing_is_lost(text: str) -> None:
    """Every character comes out in order, but for think tags and the white space around them."""
    joined, _ = run(list(text))
    if "</think>" not in text and not text.lstrip().startswith("<think>"):
        assert joined["content"] == text


def test_a_marker_behind_bare_json_that_was_no_call_counts() -> None:
    """The first piece behind a block that was none was skipped, whatever it was."""
    offered = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
    call = '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'
    for pieces in (['{"note": 1} ' + call], ['{"note"', ": 1} ", call], list('{"note": 1}' + call)):
        joined, _ = run(pieces, tools=LLAMA3_TOOLS, offered=offered)
        assert joined["call"] == '[f]{"a": "x"}' and joined["content"].startswith('{"note": 1}')
