"""Forced tool calls: `tool_choice` in the syntax of each template family, and answers behind a thought.  [B09]"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from pantheon.engine import constraint as module
from pantheon.engine.constraint import make_constraint
from pantheon.engine.constraint_tools import TOOL_SYNTAXES, tool_syntax
from pantheon.errors import BadRequest
from pantheon.serve.call_formats import COMMON_TOOLS, DEEPSEEK_TOOLS, GEMMA_TOOLS, LLAMA3_TOOLS, PHI_TOOLS
from pantheon.serve.emitter import Emitter
from tests.engine.constrained import TOKENIZER, N, run, valid

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string", "enum": ["Oslo", "Köln"]}},
        },
    },
}
NOTE = {
    "type": "function",
    "function": {
        "name": "schreibe-Größe",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "tags": {"type": "array", "items": {"enum": ["x"]}, "maxItems": 2},
            },
            "required": ["text", "tags"],
            "additionalProperties": False,
        },
    },
}
PLAIN = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, NOTE, PLAIN]
NAMES = {"get_weather", "schreibe-Größe", "ping"}


def forced(choice: Any = "required", **options: Any) -> dict[str, Any]:
    return {"type": "tools", "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False} | options


def check_call(call: dict[str, Any], key: str = "arguments") -> str:
    assert set(call) == {"name", key}
    tool = next(t for t in TOOLS if t["function"]["name"] == call["name"])  # type: ignore[index]
    schema = tool["function"].get("parameters", {"type": "object", "additionalProperties": False})  # type: ignore[union-attr, attr-defined]
    arguments = call[key]
    if call["name"] == "get_weather":
        assert arguments["city"] in ("Oslo", "Köln") and 1 <= arguments.get("days", 1) <= 9
    else:
        assert valid(schema, arguments)
    return str(call["name"])


@pytest.mark.parametrize("seed", range(12))
def test_required_forces_a_hermes_call(seed: int) -> None:
    """[B09a]"""
    text, complete = run(forced(), seed)
    assert text.startswith("<tool_call>\n{")
    if complete:
        body = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text, re.S)
        assert body
        check_call(json.loads(body[1]))


@pytest.mark.parametrize("syntax", ["hermes", "llama3", "mistral", "xml"])
def test_a_named_choice_gives_that_name_in_every_syntax(syntax: str) -> None:
    """[B09a]"""
    ended = 0
    for seed in range(6):
        text, complete = run(forced({"type": "function", "function": {"name": "get_weather"}}, syntax=syntax), seed)
        assert "get_weather" in text and "ping" not in text
        ended += complete
        if not complete:
            continue
        if syntax == "hermes":
            check_call(json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>")))
        elif syntax == "llama3":
            check_call(json.loads(text), "parameters")
        elif syntax == "mistral":
            check_call(json.loads(text.removeprefix("[TOOL_CALLS]"))[0])
        else:
            head = r"<tool_call>\n<function=get_weather>\n<parameter=city>\n(Oslo|Köln)\n</parameter>\n"
            tail = r"(<parameter=days>\n[1-9]\n</parameter>\n)?</function>\n</tool_call>"
            assert re.fullmatch(head + tail, text), text
    assert ended >= 3


def test_the_mistral_marker_is_the_control_token() -> None:
    constraint = make_constraint(TOKENIZER, forced(syntax="mistral"))
    assert constraint is not None
    logits = np.zeros(N, np.float32)
    constraint.mask(logits)
    assert np.flatnonzero(logits == 0).tolist() == [TOKENIZER.token_id("[TOOL_CALLS]")]


def test_a_user_defined_marker_is_spelled_by_its_token_as_the_tokenizer_would() -> None:
    constraint = make_constraint(TOKENIZER, forced())
    assert constraint is not None
    logits = np.zeros(N, np.float32)
    constraint.mask(logits)
    assert logits[TOKENIZER.token_id("<tool_call>")] == 0


def test_bare_strings_of_the_xml_form_stop_at_the_closing_tag() -> None:
    choice = {"type": "function", "function": {"name": "schreibe-Größe"}}
    constraint = make_constraint(TOKENIZER, forced(choice, syntax="xml"))
    assert constraint is not None
    text = "<tool_call>\n<function=schreibe-Größe>\n<parameter=text>\nx < y\n</b>\n</parameter>\n<parameter=tags>\n"
    for token in TOKENIZER.encode(text + '["x"]\n</parameter>\n</function>\n</tool_call>'):
        assert not constraint.done
        constraint.accept(token)
    assert constraint.done


def test_parallel_calls_may_follow_when_allowed() -> None:
    call = b'<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    named = {"type": "function", "function": {"name": "ping"}}
    # who asks for one function reads one call: instructor refuses two
    for choice, parallel in (("required", True), ("required", False), (named, True)):
        allowed = choice == "required" and parallel
        constraint = make_constraint(TOKENIZER, forced(choice, parallel_tool_calls=parallel))
        assert constraint is not None
        for token in TOKENIZER.encode(call):
            constraint.accept(token)
        assert constraint.done is not allowed
        if allowed:
            for token in TOKENIZER.encode(b"\n" + call):
                constraint.accept(token)


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_other_choices_force_nothing(choice: Any) -> None:
    """[B09c] none and auto leave the model free; the serving floor leaves tools out for none."""
    assert make_constraint(TOKENIZER, forced(choice)) is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tools": []}, "tool_choice"),
        ({"syntax": "morse"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": 3}}]}, "tools[0]"),
    ],
)
def test_bad_tool_requests_name_the_field(options: dict[str, Any], param: str) -> None:
    """[B09b]"""
    with pytest.raises(BadRequest) as caught:
        make_constraint(TOKENIZER, forced() | options)
    assert caught.value.param == param


def test_the_syntax_is_read_off_the_template() -> None:
    assert tool_syntax("{{ '<tool_call>' }} {{ '{\"name\"' }}") == "hermes"
    assert tool_syntax("<tool_call>\n<function=") == "xml"
    assert tool_syntax("[TOOL_CALLS]") == "mistral"
    assert tool_syntax("<|python_tag|>") == "llama3"
    assert tool_syntax("{{ messages }}") == "hermes"


def test_after_reasoning_the_answer_begins_behind_the_closing_tag() -> None:
    constraint = make_constraint(TOKENIZER, {"type": "json_object"}, opens_reasoning=True)
    assert constraint is not None
    for byte in b"hm <b> {1} </thin </think>\n\n":
        constraint.accept(byte)
    logits = np.zeros(N, np.float32)
    constraint.mask(logits)
    assert logits[ord("x")] == -np.inf and logits[ord("{")] == 0
    for byte in b"{}":
        constraint.accept(byte)
    assert constraint.done


def test_thinking_may_not_end_the_answer() -> None:
    constraint = make_constraint(TOKENIZER, forced(), opens_reasoning=True)
    assert constraint is not None
    constraint.accept(ord("a"))
    logits = np.zeros(N, np.float32)
    constraint.mask(logits)
    assert logits[257] == -np.inf and logits[258] == -np.inf and logits[ord("z")] == 0


def test_without_llguidance_a_forced_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "llguidance", None)
    with pytest.raises(BadRequest, match="forced tool_choice can't be enforced") as caught:
        make_constraint(TOKENIZER, forced())
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("parameters", [None, {"type": "object", "properties": {}}])
def test_a_function_of_no_parameters_gets_none(parameters: Any) -> None:
    """By the letter such an object is open, and a small model goes on inventing arguments."""
    tool = {"type": "function", "function": {"name": "ping", "parameters": parameters}}
    constraint = make_constraint(TOKENIZER, forced(tools=[tool]))
    assert constraint is not None
    for token in TOKENIZER.encode('<tool_call>\n{"name": "ping", "arguments": {'):
        constraint.accept(token)
    logits = np.zeros(N, np.float32)
    constraint.mask(logits)
    assert logits[ord('"')] == -np.inf and logits[ord("}")] == 0


def test_what_can_not_be_enforced_is_told_in_one_sentence() -> None:
    """The grammar that was made of the schema, and the engine's own words for it, are nothing to the caller."""
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}}
    tool = {"type": "function", "function": {"name": "ping", "parameters": schema}}
    with pytest.raises(BadRequest) as caught:
        make_constraint(TOKENIZER, forced(tools=[tool]))
    assert str(caught.value) == "tool_choice can't be enforced: Pointer '/$defs/none' does not exist"
    with pytest.raises(BadRequest, match="it refers to itself and nothing else$"):
        make_constraint(TOKENIZER, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}})


@pytest.mark.parametrize("syntax", sorted(TOOL_SYNTAXES))
def test_a_forced_call_is_read_back_as_it_was_meant(syntax: str) -> None:
    """What the grammar of a syntax lets through, is a call for the parser of the answers."""
    ended = 0
    for seed in range(8):
        choice = "required" if seed % 2 else {"type": "function", "function": {"name": "get_weather"}}
        text, complete = run(forced(choice, syntax=syntax), seed)
        if not complete:
            continue
        ended += 1
        emitter = Emitter(tools=FORMATS[syntax], offered={tool["function"]["name"]: _schema(tool) for tool in TOOLS})
        events = [*emitter.feed(text), *emitter.finish()]
        assert [event.channel for event in events] == ["call"] and emitter.calls == 1, text
        call = {"name": events[0].name, "arguments": json.loads(events[0].text)}
        if syntax == "gemma" and call["name"] == "ping":
            continue  # takes anything there
        check_call(call)
    assert ended >= 4


def _schema(tool: dict[str, Any]) -> Any:
    return tool["function"].get("parameters")


FORMATS = {
    **dict.fromkeys(("hermes", "xml", "mistral", "mistral_named"), COMMON_TOOLS),
    **{"llama3": LLAMA3_TOOLS, "phi": PHI_TOOLS, "gemma": GEMMA_TOOLS, "deepseek": DEEPSEEK_TOOLS},
}


def test_the_syntax_of_every_template_family() -> None:
    assert tool_syntax("[TOOL_CALLS] [ARGS]") == "mistral_named"
    assert tool_syntax("'<|tool_call>call:' '}<tool_call|>'") == "gemma"
    assert tool_syntax("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'") == "deepseek"
    assert tool_syntax("'<|tool|>' + tools") == "phi"


# ---- a format or a call ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("syntax", sorted(TOOL_SYNTAXES))
def test_a_format_beside_tools_lets_either_be_written(syntax: str) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    constraint = make_constraint(TOKENIZER, forced("auto", syntax=syntax, response_format=form))
    assert constraint is not None
    logits = np.zeros(N, np.float32)
    constraint.mask(logits)
    allowed = set(np.flatnonzero(logits == 0).tolist())
    assert ord("{") in allowed and ord("I") not in allowed and 257 not in allowed
    opening = {"mistral": "[TOOL_CALLS]", "mistral_named": "[TOOL_CALLS]"}.get(syntax)
    assert opening is None or TOKENIZER.token_id(opening) in allowed
    for byte in b'{"ok": true}':
        constraint.accept(byte)
    assert constraint.done
    if syntax == "hermes":
        constraint = make_constraint(TOKENIZER, forced("auto", response_format=form))
        assert constraint is not None
        for token in TOKENIZER.encode(b'<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'):
            assert not constraint.done
            constraint.accept(token)
        assert constraint.done, "parallel calls are off"


# ---- strict tools under auto ----------------------------------------------------------------------------------------


def strict_tools(syntax: str = "hermes", **options: Any) -> Any:
    weather = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    return make_constraint(TOKENIZER, {"type": "openings", "tools": [weather, NOTE], "syntax": syntax}, **options)


def may_follow(constraint: Any) -> set[int]:
    logits = np.zeros(N, np.float32)
    constraint.mask(logits)
    return set(np.flatnonzero(logits == 0).tolist())


def say(constraint: Any, text: str) -> Any:
    for token in TOKENIZER.encode(text):
        constraint.accept(token)
    return constraint


def test_tools_that_are_not_strict_leave_the_answer_free() -> None:
    assert make_constraint(TOKENIZER, {"type": "openings", "tools": TOOLS, "syntax": "hermes"}) is None


def test_a_strict_call_obeys_its_schema_and_the_text_around_it_is_free() -> None:
    constraint = say(strict_tools(), "Let me see <tool_cal no: ")
    assert len(may_follow(constraint)) == N and not constraint.done
    say(constraint, "<tool_call>")
    assert may_follow(constraint) <= {ord("\n"), ord(" "), ord("{"), *(TOKENIZER.token_id(w) for w in ('{"', "\n  "))}
    say(constraint, '\n{"name": "get_weather", "arguments": {"city": "')
    assert may_follow(constraint) == {ord("O"), ord("K")}
    say(constraint, 'Oslo", "days": ')
    assert may_follow(constraint) <= {*range(ord("1"), ord("9") + 1), ord(" "), ord("\n"), TOKENIZER.token_id("\n  ")}
    say(constraint, "3}}\n</tool_call>")
    assert len(may_follow(constraint)) == N and not constraint.done
    say(constraint, '\n<tool_call>\n{"name": "schreibe-Größe", "arguments": {"any')
    assert ord("x") in may_follow(constraint), "a tool that is not strict gets any arguments"


def test_a_token_that_goes_on_behind_the_mark_is_taken_along() -> None:
    constraint = strict_tools("xml")
    say(constraint, "<function=get_weather")
    assert len(may_follow(constraint)) == N
    say(constraint, ">")
    assert may_follow(constraint) <= {ord("\n"), ord(" "), ord("<"), TOKENIZER.token_id("\n  ")}
    bare = say(strict_tools("llama3"), '{"name": "get_weather"')
    assert may_follow(bare) <= {*b",\n ", TOKENIZER.token_id("\n  ")}
    say(bare, ', "parameters": {"city": "Oslo"')
    assert ord("x") not in may_follow(bare)
    say(bare, "}}")
    assert len(may_follow(bare)) == N
    assert len(may_follow(say(strict_tools("llama3"), 'So: {"name": "get_weather"'))) == N
    # beyond the mark in one token, and wrong: the call is left to itself
    wrong = strict_tools()
    wrong._text = b"<tool_call"
    wrong._thinking = False
    wrong._bytes = lambda token: b">hello"
    wrong.accept(0)
    assert len(may_follow(wrong)) == N


@pytest.mark.parametrize("options", [{"opens_reasoning": True}, {}])
def test_a_thought_opens_no_call(options: dict[str, Any]) -> None:
    constraint = strict_tools(**options)
    say(constraint, "" if options else "\n<think>")
    say(constraint, "maybe <tool_call>{")
    assert len(may_follow(constraint)) == N
    say(constraint, "x" * 3000 + "</think> <tool_call>")
    assert len(may_follow(constraint)) < N


def test_a_long_text_before_a_call_is_not_kept() -> None:
    constraint = say(strict_tools(), "word " * 2000)
    assert len(constraint._text) < 2000
    say(constraint, "<tool_call>")
    assert len(may_follow(constraint)) < N
