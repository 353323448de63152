"""`Model`: a loaded model.  Read-only after load; conversations live in states."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pantheon import seams, settings
from pantheon.accel.executor import Columns, Row, Runner, RunnerState
from pantheon.engine.generate import check_fits, generate
from pantheon.engine.sampler import NewDraw, SamplingParams
from pantheon.errors import BadRequest, Unavailable
from pantheon.plan.builder import Plan
from pantheon.plan.state_spec import KVType
from pantheon.text.detokenizer import Detokenizer
from pantheon.text.messages import normalise
from pantheon.text.prefill import split_prefill
from pantheon.text.prompt import Prompt, build_prompt
from pantheon.text.stable_prefix import stable
from pantheon.text.template_context import template_context
from pantheon.text.tokenizer import Tokenizer


class Template(Protocol):
    """What a chat template offers (text.chat_template.ChatTemplate, or one that could not be compiled)."""

    source: str
    name: str

    def render(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any) -> str: ...


class Piece(NamedTuple):
    """One generated token: the text that it completes ("" while a character is incomplete), and its id."""

    text: str
    id: int


class Model:
    """One model on one executor.  Safe to use from several threads: forwards take turns, each with its own state."""

    def __init__(
        self,
        *,
        name: str,
        path: Path | None,
        architecture: str,
        plan: Plan,
        runner: Runner,
        tokenizer: Tokenizer,
        template: Any,
        n_ctx: int,
        new_draw: NewDraw | None = None,
    ) -> None:
        self.name, self.path, self.architecture = name, path, architecture
        self.plan, self.runner = plan, runner
        self.tokenizer, self.template = tokenizer, template
        self.n_ctx, self.n_vocab = n_ctx, plan.n_vocab
        #: how the samplers of this model draw when they can; None: in NumPy
        self.new_draw = new_draw
        #: a forward whose rows stay on the die, where the runner has one
        self._forward_rows = getattr(runner, "forward_rows", None)
        if self._forward_rows is not None:
            runner.n_tokens = tokenizer.n_vocab  # type: ignore[attr-defined]
        # the turn: guards the runner, so that one forward is in flight; held for one forward, never while sampling
        self._turn = threading.Lock()
        self._closed = False

    def new_state(self, n_slots: int = 1, kv_type: KVType | None = None) -> RunnerState:
        """A state for n_slots conversations of up to n_ctx positions; kv_type: one of `kv_types`, default the first."""
        if kv_type is None or kv_type is self.runner.kv_type:
            return self.runner.new_state(n_slots, self.n_ctx)
        state: RunnerState = self.runner.new_state(n_slots, self.n_ctx, kv_type)  # type: ignore[call-arg]
        return state

    @property
    def kv_types(self) -> tuple[KVType, ...]:
        """The formats that a state may keep its KV rows in, the configured one first."""
        own = self.runner.kv_type
        others = KVType if hasattr(self.runner, "variant") else ()
        return (own, *(other for other in others if other is not own))

    def forward(
        self, state: RunnerState, columns: Columns, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """One forward under the turn: float32 [n_wanted, n_vocab], the caller's own copy; in `out` when given, which
        spares the page faults of fresh memory."""
        with self._turn:
            self._check_open()
            logits = self.runner.forward(state, columns)
            if out is None:
                return logits.copy()
            np.copyto(out, logits)
            return out

    def rows(
        self, state: RunnerState, columns: Columns, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32] | Sequence[Row]:
        """One forward under the turn: a row to sample from for each wanted column.  As `forward` gives them, with -inf
        for ids that are no tokens; or where rows stay on the die, those, valid until the state's next forward."""
        if self._forward_rows is None:
            logits = self.forward(state, columns, out)
            if self.tokenizer.n_vocab < self.n_vocab:  # what fills the output matrix up is no token
                logits[:, self.tokenizer.n_vocab :] = -np.inf
            return logits
        with self._turn:
            self._check_open()
            rows: Sequence[Row] = self._forward_rows(state, columns)
            return rows

    def hidden(self, state: RunnerState, columns: Columns) -> NDArray[np.float32]:
        """One forward under the turn: float32 [n_wanted, width], the wanted columns behind the last norm."""
        with self._turn:
            self._check_open()
            return self.runner.hidden(state, columns)

    def _check_open(self) -> None:
        """Before a forward, with the turn held."""
        if self._closed:
            raise Unavailable(f"model {self.name} is closed", code="model_closed")
        seams.hit("forward")

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text; control markers in it stay text unless parse_special."""
        return self.tokenizer.tokenize(text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of token ids; control tokens print nothing unless special."""
        return self.tokenizer.detokenize(self._check_ids(ids), special)

    def logits(self, ids: Sequence[int], chunk: int | None = None) -> NDArray[np.float32]:
        """float32 [len(ids), n_vocab]: row p predicts token p + 1.  `chunk`: columns of one forward."""
        ids = self._check_ids(ids)
        if len(ids) > self.n_ctx:
            raise BadRequest(f"{len(ids)} tokens do not fit a context of {self.n_ctx}", param="ids")
        state = self.runner.new_state(1, max(1, len(ids)))
        rows = np.empty((len(ids), self.n_vocab), np.float32)
        step = max(1, min(chunk or self.runner.max_columns, self.runner.max_columns))
        for first in range(0, len(ids), step):
            part = ids[first : first + step]
            rows[first : first + len(part)] = self.forward(state, Columns.of_slot(part, first, wanted="all"))
        return rows

    def generate(
        self,
        prompt: str | bytes | Sequence[int],
        *,
        max_tokens: int | None = None,
        parse_special: bool = False,
        **options: Any,
    ) -> Iterator[Piece]:
        """Continue a text or token ids.  options: `ignore_eog`, `constraint`, and the fields of SamplingParams.

        Yields a Piece a token; the texts joined are the answer.  Ends at an end-of-generation token, after max_tokens
        or when the context is full.
        """
        if isinstance(prompt, str | bytes):
            ids = self.tokenizer.encode(prompt, parse_special=parse_special)
        else:
            ids = self._check_ids(prompt, "prompt")
        check_fits(len(ids), self.n_ctx)
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 0):
            raise BadRequest(f"max_tokens must be a whole number from 0 up, not {max_tokens!r:.40}", param="max_tokens")
        loop = {key: options.pop(key) for key in ("ignore_eog", "constraint", "chunk") if key in options}
        limit = self.n_ctx if max_tokens is None else max_tokens
        detokenizer = Detokenizer(self.tokenizer)
        params = SamplingParams(**options)
        for token in generate(self, self.new_state(), ids, params, max_tokens=limit, **loop):
            text = "" if token.is_eog else detokenizer.push(token.id)
            yield Piece(text + detokenizer.flush() if token.is_last else text, token.id)

    def chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None, **options: Any,
    ) -> Iterator[Piece]:  # fmt: skip
        """Answer a conversation through the model's chat template; options as for `generate`."""
        return self.generate(self.prompt(messages, tools, **dict(template_kwargs or {})).ids, **options)

    def prompt(
        self,
        messages: Any,
        tools: list[dict[str, Any]] | None = None,
        refuse_from: int | None = None,
        continue_final: bool = False,
        **template_kwargs: Any,
    ) -> Prompt:
        """What this model reads for a conversation.  Raises BadRequest naming messages[i]…, or with the template's own
        words when it refuses; `refuse_from`: see `build_prompt`.  `continue_final`: a last message of the assistant is
        how its answer begins.  Volatile lines are kept out [PN_STABLE_PREFIX]."""
        messages = stable(messages, settings.get("PN_STABLE_PREFIX"))
        messages, prefill = split_prefill(messages) if continue_final else (messages, "")
        template_kwargs = template_context(self.template.source, tools) | template_kwargs
        ready = normalise(messages, self.template, tools, **template_kwargs)
        return build_prompt(
            self.tokenizer, self.template, ready, tools, refuse_from=refuse_from, prefill=prefill, **template_kwargs
        )

    def memory(self) -> dict[str, int]:
        """Bytes by part; `kv_per_token` is what one more position costs."""
        return {**self.runner.memory(), "kv_per_token": self.plan.state.bytes_per_token(self.runner.kv_type)}

    def close(self) -> None:
        """Wait for the forward in flight, then give threads and memory back; idempotent."""
        with self._turn:
            if not self._closed:
                self._closed = True
                self.runner.close()

    def _check_ids(self, ids: Sequence[int], param: str = "ids") -> list[int]:
        """The ids (a list, a tuple, a 1-D array) as plain whole numbers within the vocabulary."""
        try:
            plain = [operator.index(i) for i in ids]
        except TypeError:
            raise BadRequest(f"{param}: expects token ids, a flat sequence of whole numbers", param=param) from None
        bad = next((i for i in plain if not 0 <= i < self.n_vocab), None)
        if bad is not None:
            raise BadRequest(f"token id {bad} is outside the vocabulary of {self.n_vocab}", param=param)
        return plain

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
