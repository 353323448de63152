"""GBNF grammars, as llama.cpp's clients send them."""

from __future__ import annotations

import pytest

from pantheon.engine.constraint import make_constraint
from pantheon.engine.gbnf import MAX_CHARS, to_lark
from pantheon.engine.scripted import scripted_model
from pantheon.errors import BadRequest


def forced(grammar: str, most: int = 20) -> str:
    """What greedy decoding of a model without a will of its own writes under a grammar."""
    model = scripted_model({"pieces": ["x"]})
    spec = {"type": "grammar", "syntax": "lark", "grammar": to_lark(grammar)}
    options = {"constraint": make_constraint(model.tokenizer, spec), "temperature": 0}
    return "".join(piece.text for piece in model.generate("a", max_tokens=most, **options))


def test_a_grammar_holds_an_answer() -> None:
    assert forced('root ::= "a"{5,5}') == "aaaaa"
    assert forced('root ::= word " " word\nword ::= "yes" # twice') == "yes yes"


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= this is (not valid GBNF",
        'word ::= "a"',
        "root ::= nothing",
        'root ::= "\\',
        "root ::= " + "(" * 5000,
        "x" * (MAX_CHARS + 1),
    ],
)
def test_what_is_none_is_refused_by_name(grammar: str) -> None:
    with pytest.raises(BadRequest) as fault:
        to_lark(grammar)
    assert fault.value.param == "grammar"
