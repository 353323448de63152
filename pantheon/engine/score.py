"""How likely a model thinks a text is: the log-probability of each token of a prompt after those before it.

Reads the text in small chunks, since every token's logits are needed; works in a slot that the caller owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from pantheon.accel.executor import Columns, RunnerState
from pantheon.engine.generate import never
from pantheon.engine.sampler import Sampler, SamplingParams
from pantheon.errors import BadRequest, Cancelled

if TYPE_CHECKING:
    from pantheon.engine.model import Model

#: columns of one forward: as many rows of logits as an executor computes at once
CHUNK = 32

#: (log-probability, likeliest alternatives as (id, log-probability)) of one token
Score = tuple[float, tuple[tuple[int, float], ...]]


def score(
    model: Model,
    state: RunnerState,
    ids: Sequence[int],
    top: int = 0,
    *,
    slot: int = 0,
    cancelled: Callable[[], bool] = never,
    turn: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Score]:
    """A Score for each token but the first, of which nothing is said.

    `turn` is held for each forward.  `cancelled` is asked before each: then Cancelled is raised.  Raises BadRequest for
    more tokens than the context has room for.
    """
    if len(ids) > state.n_ctx:
        raise BadRequest(f"{len(ids)} tokens do not fit a context of {state.n_ctx}", param="prompt")
    sampler = Sampler(SamplingParams(top_logprobs=top), model.n_vocab)
    state.reset(slot)
    n_vocab = min(model.n_vocab, model.tokenizer.n_vocab)
    for first in range(0, len(ids) - 1, CHUNK):
        if cancelled():
            raise Cancelled("cancelled while scoring the prompt")
        part = ids[first : min(first + CHUNK, len(ids) - 1)]
        with turn():
            rows = model.forward(state, Columns.of_slot(part, first, slot=slot, wanted="all"))
        for row, token in zip(rows, ids[first + 1 :], strict=False):
            row[n_vocab:] = float("-inf")
            value, others = sampler.logprobs(row, token)
            assert value is not None
            yield value, others
