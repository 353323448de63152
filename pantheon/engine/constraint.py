"""Constrained decoding: a grammar that every answer token must fit, by llguidance.  Knows no HTTP and no models.

`make_constraint(tokenizer, spec)` gives a `Constraint` for the sampler.  The token table that llguidance needs is made
once per tokenizer; compiled grammars are kept and copied, since agents send the same tools every turn.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib import import_module
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pantheon.engine import constraint_grammar as grammars
from pantheon.engine.constraint_lazy import LazyConstraint
from pantheon.engine.constraint_thought import ThoughtBudget
from pantheon.engine.constraint_tools import openings, tools_grammar
from pantheon.engine.sampler import Constraint
from pantheon.errors import BadRequest, PantheonError

if TYPE_CHECKING:
    from pantheon.text.tokenizer import Tokenizer

T = TypeVar("T")

llguidance: Any = None
# on an odd platform without a wheel everything else still works
with contextlib.suppress(ImportError):
    llguidance = import_module("llguidance")

_KEPT_GRAMMARS = 64


class _Aside:
    """Two threads that compute masks; daemons, since a mask that nobody waits for must not keep the process."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        #: guards _started
        self._lock = threading.Lock()
        self._started = False

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if not self._started:
                self._started = True
                for i in range(2):
                    threading.Thread(target=self._work, name=f"grammar-{i}", daemon=True).start()
        self._jobs.put((future, job))
        return future

    def _work(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(job())
            except Exception as fault:  # goes to whoever asks for the mask
                future.set_exception(fault)
            # a mask is not kept until the next one comes
            del future, job


_masks = _Aside()

# guards _tables; held while one is built, never while grammars are compiled or masks computed
_lock = threading.Lock()
_tables: weakref.WeakKeyDictionary[Tokenizer, _Table] = weakref.WeakKeyDictionary()


def make_constraint(
    tokenizer: Tokenizer,
    spec: Mapping[str, Any],
    *,
    opens_reasoning: bool = False,
    thought: tuple[str, str] = ("<think>", "</think>"),
) -> Constraint | None:
    """A constraint for one answer, or None when `spec` forces nothing.

    `spec` is a response_format ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}},
    {"type": "grammar", "syntax": "lark" | "regex", "grammar": …}), {"type": "tools", "tools": […], "tool_choice": …,
    "parallel_tool_calls": …, "response_format": …, "syntax": tool_syntax(template)} for answers that must be calls (or
    of that format), or {"type": "openings", "tools": […], "syntax": …} for calls that the model may begin itself.
    With `opens_reasoning` it begins after the thought, whose tags are `thought`.
    Raises BadRequest (response_format, tools or tool_choice) for what can not be enforced.
    """
    kind = spec.get("type")
    tools = kind in ("tools", "openings")
    param = "tools" if kind == "openings" else "tool_choice" if tools else "response_format"

    def marker(text: str) -> str:
        token = tokenizer.token_id(text)
        return f"<[{token}]>" if token is not None and tokenizer.is_control(token) else grammars.quoted(text)

    if kind == "openings":
        found = openings(spec, marker)
        _require(bool(found), "a strict tool", param)
        return _lazy(tokenizer, found, opens_reasoning, thought) if found else None
    grammar = tools_grammar(spec, marker) if tools else grammars.response_grammar(spec)
    if grammar is None:
        return None
    _require(True, "a forced tool_choice" if tools else str(kind), param)
    if opens_reasoning:
        grammar = grammars.after_reasoning(grammar, marker, thought[1])
    table = _table(tokenizer)
    return GrammarConstraint(table.matcher(grammar, param), table.n_vocab, table.eog_ids)


def _require(needed: bool, what: str, param: str) -> None:
    if needed and llguidance is None:
        raise BadRequest(f"{what} can't be enforced: the package llguidance is not installed", param=param)


def _table(tokenizer: Tokenizer) -> _Table:
    with _lock:
        table = _tables.get(tokenizer)
        if table is None:
            table = _tables[tokenizer] = _Table(tokenizer)
        return table


def _lazy(
    tokenizer: Tokenizer, found: list[tuple[re.Pattern[bytes], str]], opens_reasoning: bool, thought: tuple[str, str]
) -> LazyConstraint:
    table = _table(tokenizer)

    def of(grammar: str) -> Callable[[bytes], GrammarConstraint | None]:
        # compiled now: a schema that can't be enforced is refused before the first token
        table.matcher(grammar, "tools")

        def begin(beyond: bytes) -> GrammarConstraint | None:
            matcher = table.matcher(grammar, "tools")
            ids = table.encode(beyond) if beyond else []
            # a model that went wrong within the token that opened the call can't be called back
            fits = not ids or matcher.validate_tokens(ids) == len(ids)
            if not fits or not matcher.consume_tokens(ids):
                return None
            return GrammarConstraint(matcher, table.n_vocab, table.eog_ids)

        return begin

    return LazyConstraint(
        [(pattern, of(grammar)) for pattern, grammar in found],
        _token_bytes(tokenizer),
        thought=_tags(thought),
        opens_reasoning=opens_reasoning,
    )


def thought_budget(
    tokenizer: Tokenizer,
    budget: int,
    inner: Constraint | None,
    *,
    opens_reasoning: bool,
    thought: tuple[str, str] = ("<think>", "</think>"),
) -> Constraint:
    """`inner`, with a thought of at most `budget` tokens."""
    closing = tokenizer.encode(thought[1], add_special=False, parse_special=True)
    return ThoughtBudget(
        budget, closing, _token_bytes(tokenizer), thought=_tags(thought), opens_reasoning=opens_reasoning, inner=inner
    )


def _token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """What a token adds to the text; a model may have more rows than its tokenizer has texts."""
    return lambda token: tokenizer.token_bytes(token, special=True) if token < tokenizer.n_vocab else b""


def _tags(thought: tuple[str, str]) -> tuple[bytes, bytes]:
    return thought[0].strip().encode(), thought[1].encode()


class _Mask(NamedTuple):
    """What may come next: a bit for each id as llguidance gives them, in 32-bit words, and [n_vocab] what may not."""

    allowed: NDArray[np.int32]
    forbidden: NDArray[np.bool_]


class GrammarConstraint:
    """One answer under one grammar; a `sampler.Constraint`.  Not thread-safe: one owner.

    The mask of the next token is computed on a thread of its own as soon as a token is accepted, while the model's next
    forward runs: the engine lets go of the interpreter for that.
    """

    def __init__(self, matcher: Any, n_vocab: int, eog_ids: frozenset[int]) -> None:
        """`matcher` is an llguidance.LLMatcher of this answer's own."""
        self._matcher = matcher
        self._n_vocab = n_vocab
        self._eog_ids = eog_ids
        self._done = bool(matcher.is_stopped())
        self._next: Future[_Mask] | None = None

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Set forbidden ids to -inf, in place; EOG tokens stay only where the grammar may end.

        Raises PantheonError when the grammar ran into a limit of the matcher.
        """
        forbidden = self._take().forbidden
        np.putmask(logits[: self._n_vocab], forbidden[: len(logits)], -np.inf)
        logits[self._n_vocab :] = -np.inf

    def allowed(self) -> NDArray[np.int32]:
        """As `mask`, in bits.  Raises as that does."""
        return self._take().allowed

    def accept(self, token: int) -> None:
        """Move on by one token.  Raises PantheonError for a token that the grammar does not allow."""
        if self._next is not None:
            self._next.result()
            self._next = None
        if token in self._eog_ids and self._matcher.is_accepting():
            self._done = True
            return
        self._matcher.consume_token(token)
        self._check()
        self._done = bool(self._matcher.is_stopped())
        if not self._done:
            self._next = _masks.submit(self._compute)

    @property
    def done(self) -> bool:
        """Only an EOG token could follow."""
        return self._done

    def _take(self) -> _Mask:
        """The mask of the next token: computed by now, or here."""
        coming, self._next = self._next, None
        mask = self._compute() if coming is None else coming.result()
        self._check()
        return mask

    def _compute(self) -> _Mask:
        words = np.zeros((self._n_vocab + 31) // 32, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits((~words).view(np.uint8), count=self._n_vocab, bitorder="little")
        return _Mask(words, bits.view(np.bool_))

    def _check(self) -> None:
        if self._matcher.is_error():
            fault = _first_line(self._matcher.get_error())
            # the request asked for more than the engine's limits allow
            raise PantheonError(
                f"the constraint on this answer failed: {fault}",
                status=400, type="invalid_request_error", code="constraint_failed",
            )  # fmt: skip


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
        #: guards _grammars; not held while one is compiled, so that a large one keeps nobody waiting
        self._kept = threading.Lock()
        self._grammars: OrderedDict[str, Any] = OrderedDict()

    def encode(self, text: bytes) -> list[int]:
        """Ids for bytes of any kind."""
        return list(self._tokenizer.tokenize_bytes(text))

    def matcher(self, grammar: str, param: str) -> Any:
        """A fresh matcher at the start of the grammar.  Raises BadRequest for a grammar that does not compile."""
        with self._kept:
            fresh = self._grammars.get(grammar)
        if fresh is None:
            fresh = self._compile(grammar, param)
        with self._kept:
            self._grammars[grammar] = fresh
            self._grammars.move_to_end(grammar)
            if len(self._grammars) > _KEPT_GRAMMARS:
                self._grammars.popitem(last=False)
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
    """What is wrong, in one line: llguidance puts a place in our grammar in front, the grammar and states behind."""
    text = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", fault.split("<state>")[0].strip())
    # the listing of the grammar: lines that begin with their number
    text = re.split(r"\n\s*\d+ \| ", text, maxsplit=1)[0]
    if "NoExtensionBias" in text:
        return "it refers to itself and nothing else"
    return " ".join(text.split())[:300]
