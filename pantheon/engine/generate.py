"""The generate loop: prefill a prompt in chunks, then sample and decode until a stop condition or a cancel.

Works on one slot of a state that the caller owns; the caller holds the right to run forwards (gen_lock or a turn).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pantheon import seams, settings
from pantheon.accel.executor import Columns, Row, RunnerState
from pantheon.engine.sampler import Constraint, Sampler, SamplingParams
from pantheon.errors import BadRequest, Cancelled

if TYPE_CHECKING:
    from pantheon.engine.model import Model

#: Columns of one prefill chunk: long enough to fill the kernels, short enough to cancel or yield in time [M113].
PREFILL_CHUNK = 128


class Token(NamedTuple):
    """One sampled token: `n` counts from 1, `is_last` says that the loop ends with it; logprob and top are filled when
    the parameters asked for them."""

    id: int
    n: int
    is_eog: bool
    is_last: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def never() -> bool:
    """The `cancelled` of a caller who waits."""
    return False


def check_fits(n_prompt: int, n_ctx: int) -> None:
    """Raise `context_length_exceeded` unless the prompt leaves room for one token [M051, B26]."""
    if n_prompt >= n_ctx:
        raise BadRequest(
            f"This model's maximum context length is {n_ctx} tokens. However, your messages resulted in "
            f"{n_prompt} tokens. Please reduce the length of the messages.",
            code="context_length_exceeded",
            param="messages",
            n_prompt_tokens=n_prompt,
            n_ctx=n_ctx,
        )


def generate(
    model: Model,
    state: RunnerState,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    slot: int = 0,
    reused: int = 0,
    held: list[int] | None = None,
    cancelled: Callable[[], bool] = never,
    on_prefill: Callable[[int, int], None] | None = None,
    constraint: Constraint | None = None,
    ignore_eog: bool = False,
    chunk: int = PREFILL_CHUNK,
) -> Generator[Token, None, None]:
    """Yield every sampled token, an end-of-generation token included and last.

    Stops at an EOG token, after max_tokens, when the context is full or when the constraint is complete.
    `cancelled` is asked before each prefill chunk and each decode step; Cancelled is raised when it says yes.
    `on_prefill(done, total)` is called before the first and after each chunk.  The first `reused` tokens of the prompt
    lie in the slot already and are not run again; `held` is told each token that has got there.  Raises BadRequest for
    an empty prompt or one that leaves no room.
    """
    if not prompt_ids:
        raise BadRequest("the prompt is empty: this model adds no begin token", param="prompt")
    check_fits(len(prompt_ids), state.n_ctx)
    sampler = Sampler(params, model.n_vocab, constraint, model.new_draw)
    sampler.prime(prompt_ids)
    if reused:
        state.truncate(slot, reused)
    else:
        state.reset(slot)
    held = [] if held is None else held
    row = _prefill(model, state, prompt_ids, slot, reused, held, cancelled, on_prefill, chunk)
    limit = min(max_tokens, state.n_ctx - len(prompt_ids))
    step = Columns.of_slot([0], 0, slot=slot)
    out = np.empty((1, model.n_vocab), np.float32)
    own_row = out[0]
    slow_s = settings.get("PN_SLOW_DECODE_MS") / 1000
    for n in range(1, limit + 1):
        token = sampler.choose(row)
        sampler.accept(token)
        is_eog = token in model.tokenizer.eog_ids and not ignore_eog
        is_last = is_eog or n == limit or (constraint is not None and constraint.done)
        if params.top_logprobs is None:
            yield Token(token, n, is_eog, is_last)
        else:
            yield Token(token, n, is_eog, is_last, *sampler.logprobs(row, token))
        if is_last:
            return
        if slow_s:
            seams.SYSTEM_CLOCK.sleep(slow_s)
        if cancelled():
            raise Cancelled("cancelled while decoding")
        step.tokens[0], step.positions[0] = token, len(prompt_ids) + n - 1
        rows = model.rows(state, step, out)
        row = own_row if rows is out else rows[0]
        held.append(token)


def checkpoints(prompt_ids: Sequence[int], eog_ids: Collection[int]) -> tuple[int, ...]:
    """Where a state that can not be cut anywhere is remembered while a prompt is read: behind its last whole message,
    which the next turn begins with whatever its template makes of the answer, and before its last token, for the same
    question again."""
    total = len(prompt_ids)
    last = next((n for n in range(total - 1, 0, -1) if prompt_ids[n - 1] in eog_ids), total - 1)
    return tuple(sorted({last, total - 1} - {0}))


def _prefill(
    model: Model,
    state: RunnerState,
    prompt_ids: Sequence[int],
    slot: int,
    reused: int,
    held: list[int],
    cancelled: Callable[[], bool],
    on_prefill: Callable[[int, int], None] | None,
    chunk: int,
) -> NDArray[np.float32] | Row:
    """Run the prompt through the model, but for what is there; the logits of its last token."""
    total = len(prompt_ids)
    chunk = max(1, min(chunk, model.runner.max_columns))
    stops = () if getattr(state, "can_truncate", True) else checkpoints(prompt_ids, model.tokenizer.eog_ids)
    if on_prefill:
        on_prefill(reused, total)
    first = reused
    while first < total:
        if cancelled():
            raise Cancelled("cancelled while reading the prompt")
        end = min([first + chunk, total, *(stop for stop in stops if stop > first)])
        part = Columns.of_slot(prompt_ids[first:end], first, slot=slot, wanted="last" if end == total else "none")
        rows = model.rows(state, part)
        held += prompt_ids[first:end]
        if end in stops:
            state.checkpoint(slot, end)  # type: ignore[attr-defined]
        first = end
        if on_prefill:
            on_prefill(end, total)
    return rows[0]
