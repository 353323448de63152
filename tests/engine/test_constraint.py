"""Constrained decoding: whatever the logits, what comes out fits.  [B08, B09]"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pantheon.engine import constraint as module
from pantheon.engine.constraint import make_constraint
from pantheon.engine.constraint_grammar import tamed
from pantheon.engine.constraint_tools import TOOL_SYNTAXES
from pantheon.engine.load import load_model
from pantheon.errors import BadRequest, PantheonError
from tests.engine.constrained import TOKENIZER, N, run, valid
from tests.golden_data import model_path


def schemas(depth: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    leaf = st.sampled_from(
        [
            {"type": "string"},
            {"type": "string", "pattern": "^[a-c]{2,4}$"},
            {"type": "integer", "minimum": -3, "maximum": 12},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["red", "blå", 7, None]},
        ]
    )
    if depth == 0:
        return leaf
    inner = schemas(depth - 1)
    arrays = st.builds(
        lambda s, n: {"type": "array", "items": s, "minItems": n, "maxItems": n + 2}, inner, st.integers(0, 2)
    )
    unions = st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)
    return st.one_of(leaf, arrays, unions, objects(inner))


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(["a", "name", "größe", 'q"uote'])
    return st.builds(
        lambda props, closed, all_of_them: {
            "type": "object",
            "properties": props,
            "required": sorted(props)[: None if all_of_them else 1],
            "additionalProperties": not closed,
            "title": "ignored",
            "x-unknown": [1],
        },
        st.dictionaries(names, inner, min_size=1, max_size=3),
        st.booleans(),
        st.booleans(),
    )


@given(schema=objects(schemas()), seed=st.integers(0, 1 << 30))
@settings(max_examples=80, deadline=None)
def test_random_logits_under_a_schema_always_give_valid_json(schema: dict[str, Any], seed: int) -> None:
    """[B08c]"""
    spec = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    text, complete = run(spec, seed)
    if complete:
        assert valid(schema, json.loads(text)), (schema, text)
    else:
        assert text.startswith("{")


def test_most_random_answers_end() -> None:
    """The property test above is not vacuous: answers do complete."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    spec = {"type": "json_schema", "json_schema": {"schema": schema}}
    ends = [run(spec, seed)[1] for seed in range(10)]
    assert sum(ends) >= 8


@pytest.mark.parametrize("seed", range(8))
def test_json_object_gives_an_object(seed: int) -> None:
    """[B08b]"""
    text, complete = run({"type": "json_object"}, seed)
    if complete:
        assert isinstance(json.loads(text), dict)
    else:
        assert text.startswith("{")


def test_text_forces_nothing() -> None:
    """[B08a]"""
    assert make_constraint(TOKENIZER, {"type": "text"}) is None


def test_an_end_token_is_allowed_only_where_the_grammar_may_end() -> None:
    constraint = make_constraint(TOKENIZER, {"type": "grammar", "syntax": "regex", "grammar": "a|ab+"})
    assert constraint is not None

    def allowed() -> set[int]:
        logits = np.zeros(N + 10, np.float32)
        constraint.mask(logits)
        return set(np.flatnonzero(logits == 0).tolist())

    assert allowed() == {ord("a")}
    constraint.accept(ord("a"))
    assert allowed() == {ord("b"), 257, 258} and not constraint.done
    constraint.accept(ord("b"))
    assert allowed() == {ord("b"), 257, 258}
    constraint.accept(258)
    assert constraint.done


def test_done_as_soon_as_nothing_can_follow() -> None:
    constraint = make_constraint(TOKENIZER, {"type": "grammar", "syntax": "regex", "grammar": "ab"})
    assert constraint is not None
    constraint.accept(ord("a"))
    assert not constraint.done
    constraint.accept(ord("b"))
    assert constraint.done


def test_a_token_against_the_grammar_is_one_clear_error() -> None:
    constraint = make_constraint(TOKENIZER, {"type": "json_object"})
    assert constraint is not None
    with pytest.raises(PantheonError, match="constraint on this answer failed") as caught:
        constraint.accept(ord("x"))
    assert caught.value.code == "constraint_failed" and "<state>" not in caught.value.message
    with pytest.raises(PantheonError):
        constraint.mask(np.zeros(N, np.float32))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense", "$ref": "#/definitions/missing"},
        {"$ref": "http://example.com/schema"},
        {"type": "string", "pattern": "^(?=x)"},
        {"type": "string", "pattern": "("},
        {"enum": []},
        {"type": "object", "properties": 7},
        False,
        17,
        "text",
        [],
        None,
    ],
)
def test_what_can_not_be_enforced_is_refused_by_name(schema: Any) -> None:
    """[B08d] and the next ordinary request still works."""
    with pytest.raises(BadRequest) as caught:
        make_constraint(TOKENIZER, {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert caught.value.param == "response_format"
    assert "\n" not in caught.value.message and len(caught.value.message) < 400
    assert make_constraint(TOKENIZER, {"type": "json_object"}) is not None


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "yaml"},
        {},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": []},
        {"type": "grammar"},
        {"type": "grammar", "grammar": "start: nope"},
        {"type": "grammar", "grammar": "x", "syntax": "bnf"},
    ],
)
def test_malformed_formats_name_the_field(spec: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        make_constraint(TOKENIZER, spec)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "keyword",
    [
        {"uniqueItems": True, "type": "array"}, {"not": {"type": "string"}}, {"if": {}, "then": {}}, {"$comment": "x"},
        {"type": "string", "format": "shoe-size"}, {"examples": []}, {"x-order": 1}, {"oneOf": [{"type": "null"}, {}]},
        {"x-guidance": {"lenient": False}, "not": {}}, {"dependentRequired": {}}, {},
    ],
)  # fmt: skip
def test_unknown_keywords_never_refuse(keyword: dict[str, Any]) -> None:
    assert make_constraint(TOKENIZER, {"type": "json_schema", "json_schema": {"schema": keyword}}) is not None


def test_a_schema_may_be_left_out_or_be_true() -> None:
    for inner in ({}, {"schema": True}):
        assert make_constraint(TOKENIZER, {"type": "json_schema", "json_schema": inner}) is not None


def test_hostile_schemas_are_refused_or_taken_in_bounded_time() -> None:
    started = time.monotonic()
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        nested = {"type": "array", "items": nested}
    for schema in (
        nested,
        {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
        {"type": "string", "minLength": 10**9},
        {"enum": [str(i) for i in range(5000)]},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}},
    ):
        try:
            make_constraint(TOKENIZER, {"type": "json_schema", "json_schema": {"schema": schema}})
        except BadRequest as fault:
            assert fault.param == "response_format"
    assert time.monotonic() - started < 20


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(["object", "string", "x", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "enum", "pattern", "anyOf", "$ref", "required", "minLength", "ü"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(schema=JSON, name=st.text(max_size=5), choice=JSON)
@settings(max_examples=60, deadline=None)
def test_any_json_is_taken_or_refused_by_name(schema: Any, name: str, choice: Any) -> None:
    """No input of a request may come out as an internal error."""
    tool = {"type": "function", "function": {"name": name, "parameters": schema}}
    for spec in (
        {"type": "json_schema", "json_schema": {"schema": schema}},
        {"type": "json_schema", "json_schema": schema},
        {"type": schema},
        {"type": "grammar", "syntax": "regex", "grammar": name},
        *({"type": "tools", "tools": [tool], "tool_choice": "required", "syntax": s} for s in TOOL_SYNTAXES),
        *({"type": "openings", "tools": [_strict(tool)], "syntax": s} for s in TOOL_SYNTAXES),
        {"type": "tools", "tools": [tool], "tool_choice": choice},
        {"type": "tools", "tools": [tool], "response_format": {"type": "json_object"}},
        {"type": "tools", "tools": schema, "tool_choice": "required"},
    ):
        try:
            make_constraint(TOKENIZER, spec)
        except BadRequest as fault:
            assert fault.param and "\n" not in fault.message


def _strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


def test_a_schema_nested_without_end_is_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"items": nested}
    with pytest.raises(BadRequest, match="too deeply"):
        make_constraint(TOKENIZER, {"type": "json_schema", "json_schema": {"schema": nested}})


def test_blanks_are_bounded() -> None:
    """A model that loves blanks still comes to its answer: after a blank only the next token of the JSON is left."""
    constraint = make_constraint(TOKENIZER, {"type": "json_object"})
    assert constraint is not None
    for byte in b"{ ":
        constraint.accept(byte)
    logits = np.zeros(N, np.float32)
    constraint.mask(logits)
    assert logits[ord(" ")] == -np.inf and logits[ord("\n")] == -np.inf and logits[ord('"')] == 0


def test_open_integers_end() -> None:
    """Digits stop at what a JSON reader can hold, at any depth; a property that is called "type" is no type."""
    part = {"type": "integer"}
    schema = {"type": "object", "properties": {"type": part, "a": {"anyOf": [{"type": "array", "items": part}]}}}
    got = tamed(schema)
    assert got["properties"]["type"]["maximum"] == 2**53 - 1
    assert got["properties"]["a"]["anyOf"][0]["items"]["minimum"] == 1 - 2**53
    assert part == {"type": "integer"}, "the caller's schema is left alone"
    assert tamed({"type": "integer", "minimum": 3}) == {"type": "integer", "minimum": 3}
    constraint = make_constraint(TOKENIZER, {"type": "json_schema", "json_schema": {"schema": part}})
    assert constraint is not None
    for byte in b"9007199254740991":
        assert not constraint.done
        constraint.accept(byte)
    assert constraint.done


def test_numbers_between_bounds_end() -> None:
    schema = {"type": "number", "minimum": 0, "maximum": 2.5}
    constraint = make_constraint(TOKENIZER, {"type": "json_schema", "json_schema": {"schema": schema}})
    assert constraint is not None
    for byte in b"1.123456789":
        assert not constraint.done
        constraint.accept(byte)
    assert constraint.done
    # what is not bounded may be written with an exponent
    assert tamed({"type": "number", "minimum": 0}) == {"type": "number", "minimum": 0}
    assert tamed({**schema, "multipleOf": 0.5}) == {**schema, "multipleOf": 0.5}


def test_two_answers_of_one_grammar_do_not_share_their_place() -> None:
    first = make_constraint(TOKENIZER, {"type": "json_object"})
    assert first is not None
    first.accept(ord("{"))
    second = make_constraint(TOKENIZER, {"type": "json_object"})
    assert second is not None
    second.accept(ord("{"))
    first.accept(ord("}"))
    assert first.done and not second.done


def test_compiled_grammars_are_bounded() -> None:
    for i in range(module._KEPT_GRAMMARS + 8):
        make_constraint(TOKENIZER, {"type": "grammar", "syntax": "regex", "grammar": f"a{{{i + 1}}}"})
    assert len(module._tables[TOKENIZER]._grammars) == module._KEPT_GRAMMARS


def test_without_llguidance_the_request_is_refused_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "llguidance", None)
    with pytest.raises(BadRequest, match=r"json_schema can't be enforced.*llguidance") as caught:
        make_constraint(TOKENIZER, {"type": "json_schema", "json_schema": {"schema": {}}})
    assert caught.value.param == "response_format"
    assert make_constraint(TOKENIZER, {"type": "text"}) is None


def test_a_real_model_under_a_schema_writes_what_fits() -> None:
    """[B08c] Through tokenizer, generate loop and sampler of a model whose weights are noise."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Köln"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["city", "n"],
        "additionalProperties": False,
    }
    spec = {"type": "json_schema", "json_schema": {"schema": schema}}
    with load_model(model_path("tiny-llama.F32"), executor="reference", ctx=64) as model:
        for seed in range(4):
            constraint = make_constraint(model.tokenizer, spec)
            pieces = model.generate("x", constraint=constraint, seed=seed, max_tokens=60)
            value = json.loads("".join(piece.text for piece in pieces))
            assert valid(schema, value)


def test_an_object_that_lists_its_properties_has_no_others() -> None:
    """A small model goes on inventing properties; a schema that says how it is extended is left as it is."""
    listed = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert tamed(listed)["additionalProperties"] is False
    assert tamed({"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": listed}})["$defs"]["x"] != listed
    left = [
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**listed, "required": ["a", "b"]},
        {**listed, "additionalProperties": {"type": "null"}},
        {**listed, "patternProperties": {"^x": {}}},
        {**listed, "anyOf": [{"required": ["b"]}]},
        {"allOf": [listed, {"properties": {"b": {"type": "null"}}}]},
    ]
    assert [tamed(schema) for schema in left] == left
    constraint = make_constraint(TOKENIZER, {"type": "json_schema", "json_schema": {"schema": listed}})
    assert constraint is not None
    for byte in b'{"a": "b"':
        constraint.accept(byte)
    logits = np.zeros(N, np.float32)
    constraint.mask(logits)
    assert logits[ord(",")] == -np.inf and logits[ord("}")] == 0
