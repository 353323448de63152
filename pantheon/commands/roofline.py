"""The roof over decoding: bytes that a token moves, against what the memory of this machine or its die delivers.

A decode step reads every weight once, whatever the number of sequences, and each sequence's keys and values up to its
position.  When nothing else costs time, tokens per second are read bandwidth / bytes per token: that is the roof.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pantheon.commands.bench_runs import Result, Workload, spread
from pantheon.plan.state_spec import KVType, StateSpec

if TYPE_CHECKING:
    from pantheon.engine.model import Model


#: bytes that a die copies to find out how fast it does; no cache is nearly as large
_DIE_BUFFER_BYTES = 1 << 30


@dataclass(frozen=True)
class Memory:
    """Measured bytes per second, one figure for each repetition: of `threads` threads that read a buffer of
    buffer_bytes, or of a die that copies half of one to the other half; of a copy, bytes read and written count."""

    rates: tuple[float, ...]
    threads: int
    buffer_bytes: int
    what: str = "read"

    @property
    def bytes_per_s(self) -> float:
        """The fastest repetition: a roof is what can be reached."""
        return max(self.rates)

    def summary(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "what": self.what,
            "threads": self.threads,
            "buffer_bytes": self.buffer_bytes,
            "runs": self.rates,
            **spread(self.rates),
        }


def measure_memory(runner: Any) -> Memory | None:
    """Read a buffer that no cache holds, or let the die copy one: about half a second.  None for a runner that has
    neither threads nor a die."""
    if hasattr(runner, "copy_rates"):
        return Memory(tuple(runner.copy_rates(_DIE_BUFFER_BYTES)), 1, _DIE_BUFFER_BYTES, "copy")
    threads: int | None = getattr(runner, "threads", None)
    if threads is None:
        return None
    from pantheon.accel.cpu import bandwidth

    nbytes = bandwidth.buffer_bytes(bandwidth.last_cache_bytes())
    return Memory(tuple(bandwidth.read_rates(threads, nbytes)), threads, nbytes)


def kv_read_bytes(state: StateSpec, kv_type: KVType, n_positions: int) -> int:
    """Bytes of keys and values that one column reads when it sees n_positions, its own included."""
    total = 0
    for layer in state.kv:
        seen = min(n_positions, layer.window) if layer.window else n_positions
        total += seen * StateSpec((layer,)).bytes_per_token(kv_type)
    return total


def bytes_per_token(test: Workload, step_bytes: int, state: StateSpec, kv_type: KVType) -> float:
    """Weights, shared by the sequences, and one sequence's KV, averaged over the steps of a decode test."""
    steps = range(test.depth, test.depth + test.n)
    kv = statistics.fmean(kv_read_bytes(state, kv_type, position + 1) for position in steps)
    return step_bytes / test.sequences + kv


@dataclass(frozen=True)
class Roof:
    """What one decode result is measured against."""

    bytes_per_token: float
    tokens_per_s: float
    fraction: float


def roof(result: Result, step_bytes: int, state: StateSpec, kv_type: KVType, memory: Memory) -> Roof | None:
    """The roof over a result's median; None for a prompt test, which arithmetic bounds."""
    if result.test.kind != "tg":
        return None
    moved = bytes_per_token(result.test, step_bytes, state, kv_type)
    most = memory.bytes_per_s / moved
    return Roof(round(moved), round(most, 2), round(result.median / most, 4))


def step_bytes(model: Model) -> int:
    """Bytes of weights that one decode step reads; 0 when the executor does not say."""
    count = getattr(model.runner, "step_bytes", None)
    return count() if count is not None else 0
