"""What a benchmark runs: tests, and the seconds of their forwards.  Knows no flags and prints nothing.

`make bench` times our side with the same code, so that its figures and those of `pantheon bench` are one thing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pantheon import seams
from pantheon.accel.executor import Columns
from pantheon.engine.generate import PREFILL_CHUNK

if TYPE_CHECKING:
    from pantheon.engine.model import Model


@dataclass(frozen=True)
class Workload:
    """`kind` "pp": a forward pass over n tokens of one sequence; "tg": n steps of `sequences` columns each.

    Both begin at position `depth`, which is filled beforehand and not timed.
    """

    kind: str
    n: int
    depth: int = 0
    sequences: int = 1

    @property
    def name(self) -> str:
        """`pp512`, `tg128`, `tg128 x8`, `tg128 @ 4096`."""
        width = f" x{self.sequences}" if self.sequences > 1 else ""
        return f"{self.kind}{self.n}{width}" + (f" @ {self.depth}" if self.depth else "")

    @property
    def tokens(self) -> int:
        """Tokens of one repetition, all sequences together."""
        return self.n * self.sequences


@dataclass(frozen=True)
class Result:
    """A test and the tokens per second of each repetition."""

    test: Workload
    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the repetitions."""
        return statistics.median(self.runs)

    def summary(self) -> dict[str, Any]:
        """JSON-ready, with min, median and max."""
        return {"test": self.test.name, **asdict(self.test), "runs": self.runs, **spread(self.runs)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Smallest, middle and largest."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def plan_tests(n_prompt: int, n_gen: int, depths: Sequence[int], sequences: Sequence[int]) -> list[Workload]:
    """Every prompt test, then every decode test; a length of 0 leaves its kind out."""
    prompts = [Workload("pp", n_prompt, depth) for depth in depths if n_prompt]
    return prompts + [Workload("tg", n_gen, depth, k) for k in sequences for depth in depths if n_gen]


def positions(tests: Sequence[Workload]) -> int:
    """The context that the tests need."""
    return max((test.depth + test.n for test in tests), default=0)


class Bench:
    """One test on one model: the state is filled to the test's depth, then `once` may run any number of times."""

    def __init__(self, model: Model, test: Workload, chunk: int | None = None) -> None:
        self.test, self._model = test, model
        self._chunk = min(chunk or PREFILL_CHUNK, model.runner.max_columns)
        self._state = model.new_state(test.sequences)
        for slot in range(test.sequences if test.depth else 0):
            self._prefill(slot, 0, test.depth)

    def once(self) -> list[float]:
        """Seconds of the whole prompt (pp), or of each step (tg); what is above `depth` is written over."""
        now = seams.SYSTEM_CLOCK.monotonic
        if not self.test.depth:
            for slot in range(self.test.sequences):
                self._state.reset(slot)
        started = now()
        if self.test.kind == "pp":
            self._prefill(0, self.test.depth, self.test.n)
            return [now() - started]
        seconds = []
        for columns in self._steps():
            self._model.rows(self._state, columns)
            ended = now()
            seconds.append(ended - started)
            started = ended
        return seconds

    def _token(self, slot: int, position: int) -> int:
        return token_at(slot, position, self._model.n_vocab)

    def _prefill(self, slot: int, first: int, n: int) -> None:
        """Forwards of so many columns; the last one gives logits, as a prompt's does."""
        for at in range(first, first + n, self._chunk):
            part = [self._token(slot, p) for p in range(at, min(at + self._chunk, first + n))]
            last = at + self._chunk >= first + n
            self._model.rows(self._state, Columns.of_slot(part, at, slot=slot, wanted="last" if last else "none"))

    def _steps(self) -> Iterator[Columns]:
        """One column of every sequence, all of them wanted."""
        k = self.test.sequences
        slots = np.arange(k, dtype=np.int32)
        for position in range(self.test.depth, self.test.depth + self.test.n):
            tokens = np.asarray([self._token(slot, position) for slot in range(k)], np.int32)
            yield Columns(tokens, slots, np.full(k, position, np.int32), slots)


def token_at(sequence: int, position: int, n_vocab: int) -> int:
    """The token that stands at a position: scattered over the vocabulary, the same in every run."""
    return (7919 * position + 104729 * sequence + 13) % n_vocab


def rate(test: Workload, seconds: Sequence[float]) -> float:
    """Tokens per second of one repetition, all sequences together."""
    return round(test.tokens / max(sum(seconds), 1e-9), 2)
