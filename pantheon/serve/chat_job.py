"""What a chat asks of a model: the request checked against it, as a `Job` that nothing is left to refuse in.

Must not know HTTP, the shape of a reply or how tokens are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pantheon.engine.constraint import make_constraint, thought_budget
from pantheon.engine.constraint_tools import is_strict, tool_syntax
from pantheon.engine.generate import check_fits
from pantheon.engine.sampler import Constraint, SamplingParams
from pantheon.errors import BadRequest
from pantheon.serve.call_formats import ToolFormat, tool_format
from pantheon.serve.chat_request import ChatRequest
from pantheon.serve.constraint_fields import constraint_names
from pantheon.serve.emitter import THOUGHT, thought_tags
from pantheon.serve.translated import named_as
from pantheon.text.cut import cut, steps

if TYPE_CHECKING:
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
    thought: tuple[str, str] = THOUGHT
    new_constraint: Callable[[], Constraint | None] = lambda: None
    ignore_eog: bool = False
    uncapped: bool = False
    dropped_tokens: int = 0

    @property
    def markers(self) -> frozenset[str]:
        """Control tokens whose text the emitter must see."""
        thought = self.thought if self.parse_reasoning else ()
        tags = frozenset(tag.removesuffix("thought\n") for tag in thought)
        return tags | (self.format.control_texts if self.format is not None else frozenset())

    def choice(self, index: int) -> Job:
        """The job of the index-th answer of several: a given seed counts up."""
        if index == 0 or self.params.seed is None:
            return self
        return replace(self, params=replace(self.params, seed=(self.params.seed + index) % (1 << 64)))


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
    source = model.template.source
    thought = thought_tags(source)
    spec = _constraint_spec(request, offered, tool_syntax(source))

    def new_constraint() -> Constraint | None:
        opens = prompt.opens_reasoning
        inner = make_constraint(model.tokenizer, spec, opens_reasoning=opens, thought=thought) if spec else None
        if request.thinking_budget is None:
            return inner
        return thought_budget(model.tokenizer, request.thinking_budget, inner, opens_reasoning=opens, thought=thought)

    with named_as(constraint_names(request.response_format)):
        new_constraint()
    return Job(
        prompt_ids=prompt.ids,
        params=request.params,
        limit=limit,
        stop=request.stop,
        format=tool_format(source) if offered else None,
        tools={tool["function"]["name"]: tool["function"].get("parameters") for tool in offered},
        max_calls=None if request.parallel_tool_calls else 1,
        opens_reasoning=prompt.opens_reasoning,
        parse_reasoning=request.parse_reasoning,
        thought=thought,
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
    """What make_constraint must hold the answer to: a forced call, a format (or a call), or strict tools."""
    spec = {"tools": offered, "syntax": syntax, "parallel_tool_calls": request.parallel_tool_calls}
    if request.tool_choice in ("required", "named"):
        named = {"type": "function", "function": {"name": request.tool_name}}
        choice: Any = named if request.tool_choice == "named" else "required"
        return {**spec, "type": "tools", "tool_choice": choice}
    if request.response_format is None:
        strict = any(map(is_strict, offered))
        return {**spec, "type": "openings"} if strict else None
    if offered:
        return {**spec, "type": "tools", "response_format": request.response_format}
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
