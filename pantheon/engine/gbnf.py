"""GBNF, the grammars of llama.cpp, as Lark grammars in llguidance's dialect, by llguidance's own translator."""

from __future__ import annotations

from pantheon.errors import BadRequest

#: the translator takes time with the square of the number of rules
MAX_CHARS = 32 << 10


def to_lark(text: str) -> str:
    """The grammar in Lark.  Raises BadRequest (grammar) for what is no GBNF; whether it compiles is found later."""
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:
        raise BadRequest("grammar: can't be enforced without the package llguidance", param="grammar") from None
    if len(text) > MAX_CHARS:
        raise BadRequest(f"grammar: at most {MAX_CHARS} characters, not {len(text)}", param="grammar")
    try:
        lark: str = gbnf_to_lark(text)
    except RecursionError:
        raise BadRequest("grammar: nests too deeply", param="grammar") from None
    except Exception as fault:  # it has errors of its own, and trips over some grammars
        raise BadRequest(f"grammar: is not GBNF: {str(fault)[:200]}", param="grammar") from None
    return lark
