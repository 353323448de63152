"""`Run`: one answer in the making: its prompt, its sampler, its budget, and the tokens that nobody has read yet.

What it does with a row of logits equals `engine.generate.generate`, so that a neighbour never changes an answer [M108].
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.executor import Row
from pantheon.engine.generate import Token
from pantheon.engine.prefix_cache import Warm
from pantheon.engine.sampler import Constraint, Sampler, SamplingParams
from pantheon.sched.compaction import Decode, Prompt
from pantheon.sched.ring import Ring

if TYPE_CHECKING:
    from pantheon.engine.model import Model


class Run:
    """Owned by the holder of the turn; the fields below the line are guarded by mu."""

    def __init__(
        self,
        model: Model,
        mu: threading.Lock,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        limit: int,
        constraint: Constraint | None = None,
        ignore_eog: bool = False,
        lookahead: int | None = None,
    ) -> None:
        """limit: tokens that it may make.  lookahead: how many unread tokens keep it from being stepped; None: it
        runs on to its budget however slow the reader is.  Raises BadRequest (logit_bias)."""
        self.ids, self.limit = ids, limit
        self._sampler = Sampler(params, model.n_vocab, constraint, model.new_draw)
        self._sampler.prime(ids)
        self._constraint = constraint
        self._eog = frozenset() if ignore_eog else frozenset(model.tokenizer.eog_ids)
        self._logprobs = params.top_logprobs is not None
        #: where it sits, and every token whose rows lie there: the log that the next turn starts from [M130]
        self.warm = Warm(None, -1, 0, ())
        #: where the state is remembered while the prompt is read: of a recurrent one, that can not be cut anywhere
        self.stops: tuple[int, ...] = ()
        #: tokens sampled; the last of them, which is not in the state yet
        self.n, self.token = 0, -1
        # ---- guarded by mu
        self.ring: Ring[Token] = Ring(limit)
        self.lookahead = lookahead
        #: on mu: a token, progress or a fault for the owner
        self.cv = threading.Condition(mu)
        self.finished = self.cancelled = False
        self.fault: BaseException | None = None

    @property
    def wants_step(self) -> bool:
        """Whether the driver should go on with it, seen from this run alone."""
        if self.finished or self.cancelled or self.fault is not None:
            return False
        return self.lookahead is None or len(self.ring) < self.lookahead

    @property
    def reading(self) -> Prompt:
        """What of the prompt is still to be read."""
        return Prompt(self.warm.slot, self.ids, len(self.warm.held), self.stops)

    @property
    def next_column(self) -> Decode:
        """The last token, behind everything that is there."""
        return Decode(self.warm.slot, self.token, len(self.warm.held))

    def take(self, row: NDArray[np.float32] | Row) -> Token:
        """Sample the next token from a row of the last forward."""
        self.n += 1
        self.token = self._sampler.choose(row)
        self._sampler.accept(self.token)
        is_eog = self.token in self._eog
        done = self._constraint is not None and self._constraint.done
        is_last = is_eog or done or self.n == self.limit
        if self._logprobs:
            return Token(self.token, self.n, is_eog, is_last, *self._sampler.logprobs(row, self.token))
        return Token(self.token, self.n, is_eog, is_last)

    def check_integrity(self, bound: bool) -> None:
        """Raise AssertionError when the books contradict each other; bound: the prompt has been read."""
        self.ring.check_integrity()
        held, n = self.warm.held, len(self.ids)
        assert held[:n] == list(self.ids[: len(held)]), "the state holds another prompt"
        if self.fault is None:
            assert self.n == self.ring.written, f"{self.n} sampled, {self.ring.written} handed over"
            assert len(held) == n + self.n - 1 if bound else len(held) < n and not self.n, (len(held), n, self.n)
