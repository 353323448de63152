"""Schemas of hostile size are refused by name before anything is spent on them; limits met later are a 400, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pantheon.engine.constraint import make_constraint
from pantheon.engine.constraint_limits import MAX_OPTIONAL, check_size
from pantheon.errors import BadRequest, PantheonError
from tests.engine.constrained import TOKENIZER, N


def constraint(schema: Any) -> Any:
    return make_constraint(TOKENIZER, {"type": "json_schema", "json_schema": {"schema": schema}})


def optional(n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(n)}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (optional(5000), "optional properties"),
        ({"anyOf": [optional(MAX_OPTIONAL) for _ in range(9)]}, "too large"),
        ({"enum": [f"v{i}" for i in range(60_000)]}, "too large"),
        ({"type": "string", "pattern": "a" * 700_000}, "too large"),
        ({"type": "integer", "multipleOf": 999_983}, "multipleOf"),
        ({"type": "number", "multipleOf": 1e300}, "multipleOf"),
        ({"type": "number", "multipleOf": 0.123457}, "multipleOf"),
    ],
)
def test_what_would_cost_too_much_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as caught:
        constraint(schema)
    assert caught.value.param == "response_format" and len(caught.value.message) < 300


@pytest.mark.parametrize("kind", ["tools", "openings"])
def test_the_tools_of_a_request_are_measured_together(kind: str) -> None:
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "strict": True, "parameters": optional(MAX_OPTIONAL)}}
        for i in range(9)
    ]
    with pytest.raises(BadRequest, match="too large") as caught:
        make_constraint(TOKENIZER, {"type": kind, "tools": tools, "tool_choice": "required"})
    assert caught.value.param == "tools"


def test_ordinary_sizes_are_not() -> None:
    assert constraint(optional(120)) is not None
    assert constraint({"type": "number", "multipleOf": 0.25}) is not None


def test_a_limit_that_is_met_while_decoding_is_a_400() -> None:
    made = constraint({"type": "string", "pattern": "^((((a{1,100}){1,100}){1,100}){1,100})$"})
    with pytest.raises(PantheonError) as caught:
        for _ in range(400):
            made.mask(np.zeros(N, np.float32))
            made.accept(ord('"') if not _ else ord("a"))
    assert (caught.value.status, caught.value.code) == (400, "constraint_failed")


@pytest.mark.parametrize(("name", "value"), [("minimum", 10**20), ("exclusiveMaximum", -(10**20))])
def test_bounds_beyond_64_bits_are_refused(name: str, value: int) -> None:
    """The engine would cut them to 64 bits, and an answer would not fit its schema."""
    with pytest.raises(BadRequest, match="beyond 64 bits") as caught:
        check_size({"type": "object", "properties": {"n": {"type": "integer", name: value}}}, "tools")
    assert caught.value.param == "tools"
    check_size({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "tools")
