"""The one generation path: prompt -> context check -> prefill -> decode -> detokenizer -> emitter -> deltas [M079].

Streamed and whole answers, chats and plain completions all run through `Generation`, so that they can not differ.
The caller holds the entry's gen_lock.  Must not know HTTP or the shape of a reply.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pantheon.engine.constraint import make_constraint
from pantheon.engine.constraint_grammar import tool_syntax
from pantheon.engine.generate import Token, check_fits, generate, never
from pantheon.engine.prefix_cache import Warm
from pantheon.engine.sampler import Constraint, SamplingParams
from pantheon.errors import BadRequest
from pantheon.serve.chat_request import ChatRequest
from pantheon.serve.emitter import COMMON_TOOLS, LLAMA3_TOOLS, THINK, Emitter, Event, ToolFormat
from pantheon.serve.loop_guard import EVERY, is_loop
from pantheon.serve.tool_calls import parse_tool_block
from pantheon.text.cut import cut, steps
from pantheon.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from pantheon.accel.executor import RunnerState
    from pantheon.engine.model import Model
    from pantheon.text.prompt import Prompt


@dataclass(frozen=True)
class Job:
    """One answer to make, checked against the model: nothing is left to refuse.

    `limit` is the most tokens it may have, cut to the room in the context; `uncapped`: the request named none.
    `tools` are the offered functions, name -> parameter schema; `format` is how the model writes calls of them, None
    when it may not.  `dropped_tokens`: how much longer the prompt was before it was cut.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    limit: int
    stop: tuple[str, ...] = ()
    format: ToolFormat | None = None
    tools: dict[str, Any] = field(default_factory=dict)
    max_calls: int | None = None
    opens_reasoning: bool = False
    parse_reasoning: bool = True
    new_constraint: Callable[[], Constraint | None] = lambda: None
    ignore_eog: bool = False
    uncapped: bool = False
    dropped_tokens: int = 0

    def choice(self, index: int) -> Job:
        """The job of the index-th answer of several: a given seed counts up."""
        if index == 0 or self.params.seed is None:
            return self
        return replace(self, params=replace(self.params, seed=(self.params.seed + index) % (1 << 64)))


@dataclass(slots=True)
class Delta:
    """A piece of an answer.

    Channel "call": a call begins with a piece that has a `name` (and `call_id`), and goes on with nameless pieces of
    the same `index`, from 0.  `text` is a piece of its arguments, which joined are JSON unless the answer was cut.
    """

    channel: Literal["reasoning", "content", "call"]
    text: str
    index: int = 0
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Logprob:
    """What the model thought of one token: its bytes, its log-probability, the likeliest alternatives,
    and the ids of all these."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()
    id: int = -1
    top_ids: tuple[int, ...] = ()


class Step(NamedTuple):
    """What one token brought: deltas (none while text is held back), its log-probability when asked for, and its id,
    None for one that ends the answer."""

    deltas: list[Delta]
    logprob: Logprob | None = None
    token: int | None = None


@dataclass(frozen=True)
class Result:
    """How an answer ended [M054].  `completion_tokens` counts tokens whose text was delivered or consumed (by a stop
    string, a marker or a tool call); the end-of-generation token is none of them [M046].  `cached_tokens` of the prompt
    were not run again; `stop_word` is the stop string that was hit.  Times in ms."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int
    prompt_ms: float
    predicted_ms: float
    context_capped: bool = False
    dropped_tokens: int = 0
    looped: bool = False
    cached_tokens: int = 0
    stop_word: str | None = None

    @property
    def timings(self) -> dict[str, float]:
        """The figures that llama.cpp's clients read."""
        rate = 1000 * self.completion_tokens / self.predicted_ms if self.predicted_ms > 0 else 0.0
        return {
            "cache_n": self.cached_tokens,
            "prompt_n": self.prompt_tokens - self.cached_tokens,
            "prompt_ms": round(self.prompt_ms, 3),
            "predicted_n": self.completion_tokens,
            "predicted_ms": round(self.predicted_ms, 3),
            "predicted_per_second": round(rate, 3),
        }


def prepare_chat(model: Model, request: ChatRequest, fit: Callable[[int, int | None], int] | None = None) -> Job:
    """Everything that can be refused is refused here.  Raises BadRequest: messages, context, schema, token ids.

    `fit(n_prompt, max_tokens)`: how long the prompt of a request that allows truncation may be now.
    """
    check_bias(request.params, model.n_vocab)
    offered = [] if request.tool_choice == "none" else list(request.tools)
    refuse_from = None if request.truncate else model.n_ctx
    prompt = model.prompt(request.messages, offered or None, refuse_from=refuse_from, **request.template_kwargs)
    whole = len(prompt.ids)
    if request.truncate and fit is not None:
        most = fit(whole, request.max_tokens)
        if most < whole:
            prompt = _cut_prompt(model, request, offered, prompt, most)
    limit = room(prompt.ids, model.n_ctx, request.max_tokens)
    syntax = tool_syntax(model.template.source)
    spec = _constraint_spec(request, offered, syntax)

    def new_constraint() -> Constraint | None:
        return make_constraint(model.tokenizer, spec, opens_reasoning=prompt.opens_reasoning) if spec else None

    new_constraint()
    # an answer that must be JSON of its own is no call
    may_call = bool(offered) and (spec is None or spec["type"] == "tools")
    return Job(
        prompt_ids=prompt.ids,
        params=request.params,
        limit=limit,
        stop=request.stop,
        format=(LLAMA3_TOOLS if syntax == "llama3" else COMMON_TOOLS) if may_call else None,
        tools={tool["function"]["name"]: tool["function"].get("parameters") for tool in offered},
        max_calls=None if request.parallel_tool_calls else 1,
        opens_reasoning=prompt.opens_reasoning,
        new_constraint=new_constraint,
        ignore_eog=request.ignore_eog,
        uncapped=request.max_tokens is None,
        dropped_tokens=whole - len(prompt.ids),
    )


def _cut_prompt(model: Model, request: ChatRequest, offered: list[dict[str, Any]], prompt: Prompt, most: int) -> Prompt:
    """The prompt without its oldest turns, as few as will do [X21].  Raises BadRequest when the last turn alone is too
    long."""
    low, high = 0, len(steps(request.messages))
    while low < high:
        middle = (low + high) // 2
        shorter = model.prompt(cut(request.messages, middle), offered or None, **request.template_kwargs)
        low, high = (low, middle) if len(shorter.ids) <= most else (middle + 1, high)
    shorter = model.prompt(cut(request.messages, low), offered or None, **request.template_kwargs)
    if len(shorter.ids) <= most:
        return shorter
    raise BadRequest(
        f"{len(prompt.ids)} tokens are too many, and so are the {len(shorter.ids)} of what can not be dropped (system, "
        f"tools and the last turn); there is room for {most}",
        code="context_length_exceeded", param="messages", n_prompt_tokens=len(prompt.ids), n_ctx=model.n_ctx,
        fit_tokens=most,
    )  # fmt: skip


def _constraint_spec(request: ChatRequest, offered: list[dict[str, Any]], syntax: str) -> dict[str, Any] | None:
    if request.tool_choice in ("required", "named"):
        named = {"type": "function", "function": {"name": request.tool_name}}
        return {
            "type": "tools",
            "tools": offered,
            "tool_choice": named if request.tool_choice == "named" else "required",
            "parallel_tool_calls": request.parallel_tool_calls,
            "syntax": syntax,
        }
    return request.response_format


def check_bias(params: SamplingParams, n_vocab: int) -> None:
    """Raise BadRequest for a logit_bias id that the model does not have [B11d]."""
    for token, _ in params.logit_bias:
        if token >= n_vocab:
            raise BadRequest(f"logit_bias: token {token} is outside the vocabulary of {n_vocab}", param="logit_bias")


def room(prompt_ids: Sequence[int], n_ctx: int, max_tokens: int | None, param: str = "messages") -> int:
    """The cap clamped to the room that the prompt leaves [B06e].  Raises BadRequest, param as given [B26]."""
    if not prompt_ids:
        raise BadRequest("the prompt is empty", param=param)
    try:
        check_fits(len(prompt_ids), n_ctx)
    except BadRequest as fault:
        fault.param = param
        raise
    left = n_ctx - len(prompt_ids)
    return left if max_tokens is None else min(left, max_tokens)


class Generation:
    """One run of a job.  Iterate over its steps once; then `result` is set.

    Raises Cancelled out of the iteration when `cancelled` says yes; leaving the iteration early ends the run.
    """

    def __init__(
        self,
        model: Model,
        state: RunnerState,
        job: Job,
        *,
        cancelled: Callable[[], bool] = never,
        on_prefill: Callable[[int, int], None] | None = None,
        loop_guard: int = 0,
        warm: Warm | None = None,
    ) -> None:
        """`loop_guard`: end an answer whose last so many tokens repeat one cycle (0: never).  `warm`: where in the
        state it runs and what lies there (default: slot 0, nothing)."""
        self._warm = Warm(None, 0, 0, ()) if warm is None else warm
        self.result: Result | None = None
        self.tokens = 0
        self._model, self._state, self._job = model, state, job
        self._cancelled, self._on_prefill = cancelled, on_prefill
        self._tokenizer = model.tokenizer
        self._detokenizer = Detokenizer(model.tokenizer)
        self._emitter = Emitter(
            job.stop,
            starts_in_reasoning=job.opens_reasoning,
            parse_reasoning=job.parse_reasoning,
            tools=job.format,
        )
        self._markers = _markers(job)
        self._calls = 0
        self._loop_guard, self._ids, self._looped = loop_guard, list[int](), False

    def __iter__(self) -> Iterator[Step]:
        job = self._job
        began = first = time.perf_counter()
        run = generate(
            self._model,
            self._state,
            job.prompt_ids,
            job.params,
            max_tokens=job.limit,
            slot=self._warm.slot,
            reused=self._warm.reused,
            held=self._warm.held,
            cancelled=self._cancelled,
            on_prefill=self._on_prefill,
            constraint=job.new_constraint(),
            ignore_eog=job.ignore_eog,
        )
        reason: Literal["stop", "length"] | None = None
        for token in run:
            if token.n == 1:
                first = time.perf_counter()
            last = token.is_last or self._loops(token)
            step = self._take(token, last)
            reason = self._end(token, last)
            if reason is not None:
                # before the last step goes out, so that its reader may already ask
                self._finish(reason, began, first)
            yield step
            if reason is not None:
                return

    def _loops(self, token: Token) -> bool:
        if self._loop_guard:
            self._ids.append(token.id)
            self._looped = token.n % EVERY == 0 and is_loop(self._ids, self._loop_guard)
        return self._looped

    def _take(self, token: Token, last: bool) -> Step:
        """One token's deltas; with the last one, all that was held back."""
        self.tokens += not token.is_eog
        events = [] if token.is_eog else self._emitter.feed(self._text(token.id))
        if last:
            events = [*events, *self._emitter.feed(self._detokenizer.flush()), *self._emitter.finish()]
        deltas = [delta for event in events for delta in self._deltas(event)]
        return Step(deltas) if token.is_eog else Step(deltas, self._logprob(token), token.id)

    def _text(self, token: int) -> str:
        """What a token adds to the text: a marker that is a control token must be seen by the emitter."""
        if self._tokenizer.is_control(token) and (text := self._tokenizer.token_text(token)) in self._markers:
            return self._detokenizer.flush() + text
        return self._detokenizer.push(token)

    def _deltas(self, event: Event) -> Iterator[Delta]:
        if event.channel != "tool":
            yield Delta(event.channel, event.text)
            return
        # a bare JSON object may be anything: only the name of a tool makes it a call
        names = set(self._job.tools) if event.text.lstrip().startswith("{") else None
        calls, leftover = parse_tool_block(event.text, names, self._job.tools)
        for call in calls:
            if self._job.max_calls is None or self._calls < self._job.max_calls:
                yield Delta("call", call.arguments, self._calls, f"call_{secrets.token_hex(12)}", call.name)
                self._calls += 1
        if leftover:
            yield Delta("content", leftover)

    def _end(self, token: Token, last: bool) -> Literal["stop", "length"] | None:
        """Whether, and why, the answer ends with this token."""
        if self._emitter.stopped is not None:
            return "stop"
        if self._job.max_calls is not None and self._calls >= self._job.max_calls:
            return "stop"
        if not last:
            return None
        if self._looped:
            return "length"
        # a constraint that is complete ends the run below the limit
        return "stop" if token.is_eog or token.n < self._job.limit else "length"

    def _finish(self, reason: Literal["stop", "length"], began: float, first: float) -> None:
        self.result = Result(
            finish_reason="tool_calls" if self._calls and reason == "stop" else reason,
            prompt_tokens=len(self._job.prompt_ids),
            completion_tokens=self.tokens,
            prompt_ms=1000 * (first - began),
            predicted_ms=1000 * (time.perf_counter() - first),
            context_capped=self._job.dropped_tokens > 0,
            dropped_tokens=self._job.dropped_tokens,
            looped=self._looped,
            cached_tokens=self._warm.reused,
            stop_word=self._emitter.stopped,
        )

    def _logprob(self, token: Token) -> Logprob | None:
        if token.logprob is None:
            return None
        top = tuple((self._bytes(other), value) for other, value in token.top)
        ids = tuple(other for other, _ in token.top)
        return Logprob(self._bytes(token.id), token.logprob, top, token.id, ids)

    def _bytes(self, token: int) -> bytes:
        # a model may have more rows than its tokenizer has texts
        return self._tokenizer.token_bytes(token, special=True) if token < self._tokenizer.n_vocab else b""


def _markers(job: Job) -> frozenset[str]:
    found = {THINK, "</think>"} if job.parse_reasoning else set()
    for opening, closing_marker in job.format.blocks if job.format else ():
        found |= {opening, closing_marker or opening}
    return frozenset(found)
