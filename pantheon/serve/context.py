"""What the handlers of one server share."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from pathlib import Path

from pantheon.accel.die_manager import DieManager
from pantheon.engine.embed import Pooling
from pantheon.mem.memwatch import MemWatch
from pantheon.seams import SYSTEM_CLOCK, Clock
from pantheon.serve.defaults import Defaults
from pantheon.serve.flight import Flights
from pantheon.serve.load_jobs import LoadJobs
from pantheon.serve.loading import LoadOptions
from pantheon.serve.memory import MemoryKeeper
from pantheon.serve.metrics import Metrics
from pantheon.serve.registry import Registry

#: Long enough for tables and rulers, short enough to matter: some seconds of a small model on a laptop.
LOOP_GUARD = 512


@dataclass
class App:
    """Set up once by the command, then only read; what changes is inside registry and metrics.

    `model_roots` confine the paths that the admin API loads; `request_timeout_s` is the wall limit of one
    generation [X34]; `loop_guard` ends uncapped answers whose last so many tokens repeat one cycle; `early_head_s` is
    how long a stream waits for its first token before its headers go out alone; `draining` is set once a router has
    been told that this server goes: it still answers, but no longer says that it is well; `defaults` fill in what
    requests leave open; `metrics_view` and `slots_view` say whether GET /metrics and GET /slots are there;
    `pooling` is how embeddings are made of hidden states.
    """

    registry: Registry = field(default_factory=Registry)
    metrics: Metrics = field(default_factory=Metrics)
    jobs: LoadJobs = field(default_factory=LoadJobs)
    load_options: LoadOptions = field(default_factory=LoadOptions)
    model_roots: tuple[Path, ...] = ()
    strict_model: bool = False
    pooling: Pooling = "mean"
    defaults: Defaults = field(default_factory=Defaults)
    request_timeout_s: float = 3600.0
    loop_guard: int = LOOP_GUARD
    early_head_s: float = 0.5
    metrics_view: bool = True
    slots_view: bool = True
    draining: threading.Event = field(default_factory=threading.Event)
    clock: Clock = SYSTEM_CLOCK
    #: made from the others; a copy of an App shares it
    memory: MemoryKeeper = None  # type: ignore[assignment]
    flights: Flights = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.flights is None:
            self.flights = Flights(self.metrics)
        if self.memory is None:
            self.memory = MemoryKeeper(self.registry, self.load_options.watch, self.clock)

    @property
    def dies(self) -> DieManager:
        """The dies that models are placed on."""
        return self.registry.dies

    @property
    def memwatch(self) -> MemWatch | None:
        """What watches the memory of host and dies; None when nothing does."""
        return self.load_options.watch


def new_id(prefix: str) -> str:
    """`prefix-` and 128 random bits: unique across restarts [X05]."""
    return f"{prefix}-{secrets.token_hex(16)}"
