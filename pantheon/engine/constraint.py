"""Constrained decoding: a grammar that every answer token must fit, by llguidance.  Knows no HTTP and no models.

`make_constraint(tokenizer, spec)` gives a `Constraint` for the sampler.  The token table that llguidance needs is made
once per tokenizer; compiled grammars are kept and copied, since agents send the same tools every turn.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pantheon.engine import constraint_grammar as grammars
from pantheon.errors import BadRequest, PantheonError

if TYPE_CHECKING:
    from pantheon.text.tokenizer import Tokenizer

llguidance: Any = None
# on an odd platform without a wheel everything else still works
with contextlib.suppress(ImportError):
    llguidance = import_module("llguidance")

_KEPT_GRAMMARS = 32

# guards _tables and the `grammars` of every table; held while one is built, never while masks are computed
_lock = threading.Lock()
_tables: weakref.WeakKeyDictionary[Tokenizer, _Table] = weakref.WeakKeyDictionary()


def make_constraint(
    tokenizer: Tokenizer, spec: Mapping[str, Any], *, opens_reasoning: bool = False
) -> GrammarConstraint | None:
    """A constraint for one answer, or None when `spec` forces nothing.

    `spec` is a response_format ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}},
    {"type": "grammar", "syntax": "lark" | "regex", "grammar": …}) or {"type": "tools", "tools": […], "tool_choice": …,
    "parallel_tool_calls": …, "syntax": tool_syntax(template)}.  With `opens_reasoning` it begins after </think>.
    Raises BadRequest (response_format, tools or tool_choice) for what can not be enforced.
    """
    tools = spec.get("type") == "tools"
    param = "tool_choice" if tools else "response_format"

    def marker(text: str) -> str:
        token = tokenizer.token_id(text)
        return f"<[{token}]>" if token is not None and tokenizer.is_control(token) else grammars.quoted(text)

    grammar = grammars.tools_grammar(spec, marker) if tools else grammars.response_grammar(spec)
    if grammar is None:
        return None
    if llguidance is None:
        what = "a forced tool_choice" if tools else str(spec.get("type"))
        raise BadRequest(f"{what} can't be enforced: the package llguidance is not installed", param=param)
    if opens_reasoning:
        grammar = grammars.after_reasoning(grammar, marker)
    with _lock:
        table = _tables.get(tokenizer)
        if table is None:
            table = _tables[tokenizer] = _Table(tokenizer)
        matcher = table.matcher(grammar, param)
    return GrammarConstraint(matcher, table.n_vocab, table.eog_ids)


class GrammarConstraint:
    """One answer under one grammar; a `sampler.Constraint`.  Not thread-safe: one owner."""

    def __init__(self, matcher: Any, n_vocab: int, eog_ids: frozenset[int]) -> None:
        """`matcher` is an llguidance.LLMatcher of this answer's own."""
        self._matcher = matcher
        self._n_vocab = n_vocab
        self._eog_ids = eog_ids
        self._ended = False
        # one bit a token, in the 32-bit words that llguidance fills
        self._words = np.zeros((n_vocab + 31) // 32, np.int32)

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Set forbidden ids to -inf, in place; EOG tokens stay only where the grammar may end.

        Raises PantheonError when the grammar ran into a limit of the matcher.
        """
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        forbidden = np.unpackbits((~self._words).view(np.uint8), count=self._n_vocab, bitorder="little").view(np.bool_)
        np.putmask(logits[: self._n_vocab], forbidden[: len(logits)], -np.inf)
        logits[self._n_vocab :] = -np.inf

    def accept(self, token: int) -> None:
        """Move on by one token.  Raises PantheonError for a token that the grammar does not allow."""
        if token in self._eog_ids and self._matcher.is_accepting():
            self._ended = True
            return
        self._matcher.consume_token(token)
        self._check()

    @property
    def done(self) -> bool:
        """Only an EOG token could follow."""
        return self._ended or bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            fault = _first_line(self._matcher.get_error())
            raise PantheonError(f"the constraint on this answer failed: {fault}", code="constraint_failed")


class _Table:
    """llguidance's view of one tokenizer, and its compiled grammars, most recently used last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.eog_ids:
            raise BadRequest("constraints need a vocabulary with an end-of-generation token", param="response_format")
        self.n_vocab = tokenizer.n_vocab
        self.eog_ids = tokenizer.eog_ids
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer))
        self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=sorted(tokenizer.eog_ids))
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._grammars: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, grammar: str, param: str) -> Any:
        """A fresh matcher at the start of the grammar.  Raises BadRequest for a grammar that does not compile."""
        fresh = self._grammars.get(grammar)
        if fresh is None:
            fresh = self._compile(grammar, param)
            self._grammars[grammar] = fresh
            if len(self._grammars) > _KEPT_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(grammar)
        return fresh.deep_copy()

    def _compile(self, grammar: str, param: str) -> Any:
        try:
            fresh = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        except UnicodeEncodeError:
            raise BadRequest(f"{param}: the grammar is not valid Unicode", param=param) from None
        if not fresh.is_error() and not any(fresh.compute_bitmask()):
            raise BadRequest(f"{param}: nothing can satisfy this schema", param=param)
        if fresh.is_error():
            raise BadRequest(f"{param} can't be enforced: {_first_line(fresh.get_error())}", param=param)
        return fresh


class _Vocabulary:
    """The tokenizer in the shape that llguidance.TokenizerWrapper reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {i for i in range(tokenizer.n_vocab) if tokenizer.is_control(i)} | tokenizer.eog_ids
        self.eos_token_id = min(tokenizer.eog_ids)
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(special)
        self.tokens = [
            tokenizer.token_text(i).encode() if i in special else tokenizer.token_bytes(i)
            for i in range(tokenizer.n_vocab)
        ]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text, add_special=False)


def _first_line(fault: str) -> str:
    """llguidance appends parser states to its errors."""
    return " ".join(fault.split("<state>")[0].split())[:300]
