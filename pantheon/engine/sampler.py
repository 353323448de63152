"""From one row of logits to one token.  One `Sampler` per request: it owns its random state and its penalty window,
so its choices never depend on neighbours.  Knows no models, no text and no requests.

The order is fixed:

    logit_bias -> repeat_penalty -> presence and frequency penalty -> constraint mask
    -> temperature 0: the best logit, lowest id on ties
    -> top_k -> top_p -> min_p -> temperature -> draw

- repeat_penalty looks at the last repeat_last_n tokens of prompt and output (llama.cpp); presence and frequency
  penalties count output tokens only (OpenAI, vLLM).
- top_p is measured on what top_k left, before temperature; every filter keeps at least the best token.
- Log-probabilities are those of the model: log-softmax of the unmodified row, whatever the parameters (OpenAI).
- NaN or +inf in a row is a fault of the model or a kernel and is refused, never drawn from; -inf is a legal "never".

A row may be an array or an `accel.executor.Row`, which stays on its die: `sampler_rows` makes the same choices there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pantheon import seams
from pantheon.accel.executor import Row
from pantheon.engine import sampler_filters as filters
from pantheon.engine import sampler_rows
from pantheon.errors import BadRequest, PantheonError

#: What OpenAI answers for a token that the model itself would never produce; JSON has no -Infinity.
LEAST_LOGPROB = -9999.0


class Constraint(Protocol):
    """What limits the next token to a grammar.  `Sampler.accept` passes the chosen tokens on."""

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Set every forbidden id of a float32 [n_vocab] row to -inf, in place."""
        ...

    def allowed(self) -> NDArray[np.int32] | None:
        """The same as bits, for a row on a die: id i may come if bit i % 32 of word i // 32 is set.  None: every id
        may; a single one is chosen whatever its logit."""
        ...

    def accept(self, token: int) -> None:
        """Move on by one token."""
        ...

    @property
    def done(self) -> bool:
        """Nothing can follow: the output is complete."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens.  Raises BadRequest naming the field that is out of range.

    top_k <= 0, top_p 1, min_p 0, repeat_penalty 1 and repeat_last_n 0 switch that step off; repeat_last_n -1 means
    everything.  The defaults are OpenAI's temperature, with a min_p that keeps small models out of loops (SmolLM2-135M
    was still talking after 400 tokens in 1 of 60 greetings, against 4 of 24 at temperature 0.8 and min_p 0.05).
    logit_bias is added to the logits of (id, bias) pairs.  seed None: fresh entropy for every sampler.
    top_logprobs None: no log-probabilities, 0: only the chosen token's, n: also the n most likely tokens; of the model,
    or with `post_sampling` those that the token was drawn with, whose others are left out.
    """

    temperature: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.1
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None
    post_sampling: bool = False

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, math.inf)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repeat_penalty", self.repeat_penalty, 0.0, math.inf)
        if self.repeat_penalty == 0:
            raise BadRequest("repeat_penalty must be greater than 0", param="repeat_penalty")
        _within("repeat_last_n", self.repeat_last_n, -1, math.inf)
        _within("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _within("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        _within("top_logprobs", self.top_logprobs or 0, 0, math.inf)
        for token, bias in self.logit_bias:
            if not math.isfinite(bias):
                raise BadRequest(f"logit_bias of token {token} must be a finite number", param="logit_bias")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        limits = f"from {low:g} to {high:g}" if math.isfinite(high) else f"from {low:g} up"
        span = limits if math.isfinite(low) else "finite"
        raise BadRequest(f"{name} must be a number {span}, not {value:g}", param=name)


class NewDraw(Protocol):
    """Makes a function that draws: float32 [n_vocab] logits and a point in [0, 1) -> the id that the module's order
    chooses, -1 for a row that is refused.  None for parameters that it does not serve."""

    def __call__(
        self, top_k: int, top_p: float, min_p: float, temperature: float
    ) -> Callable[[NDArray[np.float32], float], int] | None: ...


class Sampled(NamedTuple):
    """A chosen token; `logprob` and `top` (id, logprob), most likely first, are filled when asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class _History:
    """Tokens in order, in one growing array, so that a window is a view."""

    def __init__(self) -> None:
        self._ids = np.empty(256, np.int64)
        self._n = 0

    def extend(self, ids: Sequence[int]) -> None:
        end = self._n + len(ids)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids[: self._n], np.empty(max(end, 2 * len(self._ids)), np.int64)])
        self._ids[self._n : end] = ids
        self._n = end

    def last(self, n: int) -> NDArray[np.int64]:
        """The last n ids; all of them for -1."""
        first = 0 if n < 0 else max(0, self._n - n)
        return self._ids[first : self._n]


class Sampler:
    """Chooses the tokens of one request: `prime(prompt)`, then `sample` and `accept` for each token.

    The same params (with a seed), prompt and rows give the same tokens, in any company.  Not thread-safe: one owner.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        constraint: Constraint | None = None,
        new_draw: NewDraw | None = None,
    ) -> None:
        """`new_draw`: an executor's own way to draw; the choices are the same.  Raises BadRequest (logit_bias) for a
        token id outside the vocabulary."""
        self.params = params
        self.n_vocab = n_vocab
        self.constraint = constraint
        seed = None if params.seed is None else params.seed & (2**64 - 1)
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._points: list[float] = []
        self._bias_ids, self._biases = _bias_arrays(params.logit_bias, n_vocab)
        self._repeats = params.repeat_penalty != 1.0 and params.repeat_last_n != 0
        self._counting = bool(params.presence_penalty or params.frequency_penalty)
        self._history = _History()
        self._counts: dict[int, int] = {}
        self._edits = bool(len(self._bias_ids)) or self._repeats or self._counting or constraint is not None
        self._scratch = np.empty(n_vocab, np.float32) if self._edits else None
        p = params
        self._kernel = new_draw(p.top_k, p.top_p, p.min_p, p.temperature) if new_draw else None
        #: of a row on a die: what the last token was chosen from, or the only one that could be
        self._seen: Row | int = -1

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Begin an answer to this prompt: the repeat window starts with it, the output counts are empty."""
        self._counts.clear()
        self._history = _History()
        if self._repeats:
            n = self.params.repeat_last_n
            self._history.extend(prompt_ids if n < 0 else prompt_ids[-n:])

    def accept(self, token: int) -> None:
        """The token joins the output: penalties and the constraint move on."""
        if self._repeats:
            self._history.extend((token,))
        if self._counting:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self.constraint is not None:
            self.constraint.accept(token)

    def sample(self, logits: NDArray[np.float32] | Row) -> Sampled:
        """`choose`, with the log-probabilities that the parameters ask for."""
        token = self.choose(logits)
        return Sampled(token, *self.logprobs(logits, token))

    def choose(self, logits: NDArray[np.float32] | Row) -> int:
        """Choose a token from [n_vocab] logits, which are only read.  Does not accept it.

        Raises PantheonError when the row holds NaN or +inf, or when nothing is left to choose from.
        """
        seams.hit("sample")
        if not isinstance(logits, np.ndarray):
            return self._choose_there(logits)
        if logits.shape != (self.n_vocab,):
            raise ValueError(f"logits of shape {logits.shape}, expected ({self.n_vocab},)")
        row = self._edited(logits) if self._edits else logits
        if self._kernel is not None:
            token = self._kernel(row, self._point())
            if token >= 0:
                return token
        best = int(row.argmax())
        _check_best(float(row[best]))
        return best if self.params.temperature == 0 else self._draw(row, float(row[best]), self._point())

    def _point(self) -> float:
        """The next random number in [0, 1); made many at a time, since code that ran long ago is slow to come back."""
        if not self._points:
            self._points = self._random.random(64).tolist()[::-1]
        return self._points.pop()

    def _edited(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of the row with bias, penalties and mask applied."""
        row = self._scratch
        assert row is not None
        np.copyto(row, logits)
        p = self.params
        if len(self._bias_ids):
            row[self._bias_ids] += self._biases
        if self._repeats:
            filters.penalise_repeats(row, self._history.last(p.repeat_last_n), p.repeat_penalty)
        if self._counts:
            filters.subtract_counts(row, self._counts, p.presence_penalty, p.frequency_penalty)
        if self.constraint is not None:
            # checked before the mask: it could hide the NaN that tells of a broken forward
            _check_best(float(row.max()))
            self.constraint.mask(row)
        return row

    def _choose_there(self, row: Row) -> int:
        """`choose` for a row that stays on its die."""
        if row.n_vocab != self.n_vocab:
            raise ValueError(f"a row of {row.n_vocab} logits, expected {self.n_vocab}")
        self._seen = self._edited_there(row) if self._edits else row
        if isinstance(self._seen, int):
            if self.params.temperature != 0:
                self._point()  # the next token has the next point, however this one was chosen
            return self._seen
        ids, values = self._seen.top(1)
        _check_best(float(values[0]) if len(values) else -math.inf)
        if self.params.temperature == 0:
            return int(ids[0])
        return sampler_rows.support(self._seen, self.params, self.n_vocab).draw(self._point())

    def _edited_there(self, row: Row) -> Row | int:
        """The row with bias, penalties and mask applied, or the one token that the mask leaves."""
        p = self.params
        window = self._history.last(p.repeat_last_n) if self._repeats else self._history.last(0)
        bias = self._bias_ids, self._biases
        changes = sampler_rows.changes(
            bias, window, p.repeat_penalty, self._counts, p.presence_penalty, p.frequency_penalty
        )
        allowed = None
        if self.constraint is not None:
            # checked before the mask: it could hide the NaN that tells of a broken forward
            values = row.top(1)[1]
            _check_best(float(values[0]) if len(values) else -math.inf)
            allowed = self.constraint.allowed()
            if allowed is not None and int(np.bitwise_count(allowed.view(np.uint32)).sum()) == 1:
                word = int(allowed.nonzero()[0][0])
                return 32 * word + int(allowed.view(np.uint32)[word]).bit_length() - 1
        return row if changes is None and allowed is None else row.edited(changes, allowed)

    def _draw(self, row: NDArray[np.float32], best: float, point: float) -> int:
        ids, reached = self._candidates(row, best)
        # scaled by the last sum, so that the index stays inside but for rounding
        place = int(reached.searchsorted(point * reached[-1], side="right"))
        return int(ids[min(place, len(ids) - 1)])

    def _candidates(self, row: NDArray[np.float32], best: float) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The ids that may be drawn, and the sums of their masses up to each."""
        p = self.params
        floor = filters.min_p_floor(best, p.min_p)
        # a top_k beyond the vocabulary is off, unless there is so little to sort that one order serves all
        if 0 < p.top_k < max(self.n_vocab, 1024):
            ids = filters.top_ids(row, p.top_k)
            values = row[ids]
            reached = filters.masses(values, best, 1.0).cumsum()
            size = filters.nucleus_size(reached, p.top_p * reached[-1]) if p.top_p < 1 else len(ids)
            size = min(size, int(np.count_nonzero(values >= floor)))
            ids, values, reached = ids[:size], values[:size], reached[:size]
        else:
            if p.top_p < 1:
                ids = filters.nucleus_ids(row, best, p.top_p, floor)
            else:
                ids = (row >= floor if floor > -math.inf else row > floor).nonzero()[0]
            values = row[ids]
            reached = filters.masses(values, best, 1.0).cumsum()
        if p.temperature != 1.0:
            reached = filters.masses(values, best, p.temperature).cumsum()
        return ids, reached

    def logprobs(
        self, logits: NDArray[np.float32] | Row, token: int
    ) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        """The log-probabilities that the parameters ask for, of a token chosen from these logits and of the best."""
        n = self.params.top_logprobs
        if n is None:
            return None, ()
        if not isinstance(logits, np.ndarray):
            return self._logprobs_there(logits, token, n)
        if self.params.post_sampling:
            return self._drawn(logits, token, n)
        norm = filters.log_normaliser(logits)
        top = filters.top_ids(logits, min(n, self.n_vocab)) if n else ()
        return _logprob(logits[token], norm), tuple((int(i), _logprob(logits[i], norm)) for i in top)

    def _logprobs_there(self, row: Row, token: int, n: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """`logprobs` for a row that stays on its die."""
        if not self.params.post_sampling:
            norm = float(row.top(1)[1][0]) + math.log(row.total)
            best = zip(*row.top(min(n, self.n_vocab)), strict=True) if n else ()
            return _logprob(row.value(token), norm), tuple((int(i), _logprob(x, norm)) for i, x in best)
        if isinstance(self._seen, int) or self.params.temperature == 0:
            return 0.0, ((token, 0.0),) if n else ()
        own, told = sampler_rows.support(self._seen, self.params, self.n_vocab).told(token, n)
        return (math.log(own) if own > 0 else LEAST_LOGPROB), tuple((i, math.log(x)) for i, x in told if x > 0)

    def _drawn(self, logits: NDArray[np.float32], token: int, n: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """What the token was drawn with; the row as `choose` left it."""
        row = logits if self._scratch is None else self._scratch
        best = int(row.argmax())
        if self.params.temperature == 0:
            return 0.0, ((best, 0.0),) if n else ()
        ids, reached = self._candidates(row, float(row[best]))
        masses = np.diff(reached, prepend=0.0) / reached[-1]
        order = np.argsort(-masses, kind="stable")[:n]
        top = tuple((int(ids[i]), math.log(masses[i])) for i in order if masses[i] > 0)
        own = float(masses[ids == token].sum())
        return (math.log(own) if own > 0 else LEAST_LOGPROB), top


def _logprob(logit: float, normaliser: float) -> float:
    return max(LEAST_LOGPROB, min(0.0, float(logit) - normaliser))


def _check_best(best: float) -> None:
    """`best` is the maximum of a row; NumPy's maximum carries NaN through."""
    if math.isnan(best) or best == math.inf:
        raise PantheonError(
            f"the model produced a logit of {best}: its weights or a kernel are at fault", code="bad_logits"
        )
    if best == -math.inf:
        raise PantheonError("no token is left to choose from: every logit is -inf", code="no_token_left")


def _bias_arrays(bias: tuple[tuple[int, float], ...], n_vocab: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids and biases; several biases of one id add up."""
    total: dict[int, float] = {}
    for token, value in bias:
        if not 0 <= token < n_vocab:
            raise BadRequest(f"logit_bias: no token {token} in a vocabulary of {n_vocab}", param="logit_bias")
        total[token] = total.get(token, 0.0) + value
    return np.fromiter(total.keys(), np.int64, len(total)), np.fromiter(total.values(), np.float32, len(total))
