"""A fake executor whose next token depends on every row that lies in the slot: a wrong row, slot or position shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.executor import Columns
from pantheon.engine.generate import generate
from pantheon.engine.model import Model
from pantheon.engine.sampler import SamplingParams
from pantheon.engine.scripted import scripted_model

GREEDY = SamplingParams(temperature=0)
N_CTX = 200


class EchoState:
    """The tokens of each slot, by position; -1 is a row that nobody wrote."""

    def __init__(self, n_slots: int, n_ctx: int) -> None:
        self.n_slots, self.n_ctx = n_slots, n_ctx
        self.rows = np.full((n_slots, n_ctx), -1, np.int64)

    def reset(self, slot: int) -> None:
        self.rows[slot] = -1

    def truncate(self, slot: int, n: int) -> None:
        assert (self.rows[slot, :n] >= 0).all(), "kept rows that were never written"
        self.rows[slot, n:] = -1

    def copy_prefix(self, source: int, target: int, n: int, first: int = 0) -> None:
        assert (self.rows[source, :n] >= 0).all(), "copied rows that were never written"
        assert (self.rows[target, :first] == self.rows[source, :first]).all(), "other rows stand in front"
        self.rows[target, :n] = self.rows[source, :n]

    def nbytes(self) -> int:
        return int(self.rows.nbytes)


class EchoRunner:
    """An `accel.executor.Runner`.  `before` is called inside each forward; `fail` raises in the next one."""

    max_columns = 16

    def __init__(self, model: Model) -> None:
        self.plan, self.kv_type = model.plan, model.runner.kv_type
        self.n_vocab = model.n_vocab
        self.before: Callable[[Columns], None] = lambda columns: None
        self.fail: Exception | None = None
        self.seen: list[Columns] = []
        self.at_once = self.most_at_once = 0
        self._guard = threading.Lock()

    def new_state(self, n_slots: int, n_ctx: int) -> EchoState:
        return EchoState(n_slots, n_ctx)

    def forward(self, state: Any, columns: Columns) -> NDArray[np.float32]:
        with self._guard:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            self.before(columns)
            fault, self.fail = self.fail, None
            if fault is not None:
                raise fault
            return self._forward(state, columns)
        finally:
            with self._guard:
                self.at_once -= 1

    def _forward(self, state: EchoState, columns: Columns) -> NDArray[np.float32]:
        self.seen.append(columns)
        assert len(columns.tokens) <= self.max_columns
        columns.check(self.n_vocab, state.n_slots, state.n_ctx)
        logits = np.zeros((len(columns.wanted), self.n_vocab), np.float32)
        wanted = {int(column): row for row, column in enumerate(columns.wanted)}
        for column, (token, slot, position) in enumerate(
            zip(columns.tokens.tolist(), columns.slots.tolist(), columns.positions.tolist(), strict=True)
        ):
            assert position == 0 or state.rows[slot, position - 1] >= 0, f"slot {slot}: a hole in front of {position}"
            state.rows[slot, position] = token
            if column in wanted:
                logits[wanted[column]] = self._row(state.rows[slot, : position + 1])
        return logits

    def _row(self, history: NDArray[np.int64]) -> NDArray[np.float32]:
        value = 7
        for token in history.tolist():
            value = (value * 1_000_003 + int(token) + 1) % 2_147_483_647
        return np.random.Generator(np.random.PCG64(value)).random(self.n_vocab, np.float32) * 8

    def warm_up(self, progress: Any = None) -> None: ...

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


def echo_model(n_ctx: int = N_CTX) -> Model:
    """A model of ~270 tokens over an EchoRunner (`model.runner`)."""
    model = scripted_model({"pieces": ["a"], "n_ctx": n_ctx, "name": "echo"})
    model.runner = EchoRunner(model)
    return model


def alone(model: Model, ids: Sequence[int], params: SamplingParams = GREEDY, n: int = 8, **options: Any) -> list[int]:
    """The answer of the single-user loop, from an empty state of a model of its own."""
    options.setdefault("ignore_eog", True)
    model = _lonely(model.n_ctx)
    return [token.id for token in generate(model, model.new_state(1), ids, params, max_tokens=n, **options)]


@lru_cache
def _lonely(n_ctx: int) -> Model:
    return echo_model(n_ctx)
