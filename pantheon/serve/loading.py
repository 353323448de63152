"""Loading models into the registry: at start in the background, at run time for the admin API; one code path.

Must not know HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pantheon import log
from pantheon.accel.executor import RunnerState
from pantheon.engine.load import load_model
from pantheon.engine.model import Model
from pantheon.engine.scripted import PREFIX as SCRIPT
from pantheon.errors import ModelFileError, PantheonError
from pantheon.seams import SYSTEM_CLOCK
from pantheon.serve.registry import Entry, Registry

_log = log.logger("load")

#: report(name, stage, done, total)
Report = Callable[[str, str, int, int], None]


@dataclass(frozen=True)
class ModelSpec:
    """One model to load: a GGUF path or `script:FILE.json`, its name, and the dies it is placed on (none: CPU)."""

    path: str
    name: str
    dies: tuple[int, ...] = ()
    ctx: int | None = None


@dataclass(frozen=True)
class LoadOptions:
    """What holds for every load of a server."""

    ctx: int | None = None
    threads: int | None = None
    kv_type: str | None = None
    executor: str = "cpu"


def default_name(path: str) -> str:
    """The name a model is served under when none is given: the file's stem."""
    return Path(path.removeprefix(SCRIPT)).stem or path


def load_spec(registry: Registry, spec: ModelSpec, options: LoadOptions, report: Report | None = None) -> Entry:
    """Reserve, load and publish one model.  Raises PantheonError; then nothing stays behind."""
    entry = registry.reserve(spec.name, spec.path, spec.dies)
    load_reserved(registry, entry, spec, options, report)
    return entry


def load_reserved(
    registry: Registry, entry: Entry, spec: ModelSpec, options: LoadOptions, report: Report | None = None
) -> None:
    """Load into a place that is reserved already.  Raises PantheonError after giving the place back."""
    began = SYSTEM_CLOCK.monotonic()

    def progress(stage: str, done: int, total: int) -> None:
        entry.report(stage, done, total)
        if report is not None:
            report(spec.name, stage, done, total)

    try:
        with registry.upload_lock:
            model, state = _load(spec, options, progress)
        registry.publish(entry, model, state)
    except BaseException:
        registry.withdraw(entry)
        raise
    _log.info(
        "ready %s",
        log.fields(
            model=spec.name, ctx=model.n_ctx, load_s=SYSTEM_CLOCK.monotonic() - began, architecture=model.architecture
        ),
    )


def _load(
    spec: ModelSpec, options: LoadOptions, progress: Callable[[str, int, int], None]
) -> tuple[Model, RunnerState]:
    """The model and its one conversation; what the system refuses becomes a fault that names the file."""
    model = None
    try:
        model = load_model(
            spec.path,
            ctx=spec.ctx or options.ctx,
            executor=options.executor,
            threads=options.threads,
            kv_type=options.kv_type,
            progress=progress,
        )
        return model, model.new_state()
    except FileNotFoundError:
        raise ModelFileError(spec.path, "there is no such file", status=404, code="file_not_found") from None
    except OSError as fault:
        raise ModelFileError(spec.path, fault.strerror or "can not be read", code="file_unreadable") from fault
    except MemoryError as fault:
        if model is not None:
            model.close()
        raise ModelFileError(spec.path, "not enough memory to load it", status=507, code="out_of_memory") from fault


class StartUp:
    """Loads the models of the command line, one after the other, in a thread of its own [X22]."""

    def __init__(self, registry: Registry, specs: Sequence[ModelSpec], options: LoadOptions) -> None:
        """Reserves every name at once.  Raises PantheonError for a duplicate or too many."""
        self._registry = registry
        self._options = options
        self._todo = [(registry.reserve(spec.name, spec.path, spec.dies), spec) for spec in specs]
        self._thread = threading.Thread(target=self._run, name="load-models", daemon=True)
        self.failure: str | None = None

    def start(self, done: Callable[[], None], report: Report | None = None) -> None:
        """Load in the background; `done` is called from there once, after the last model or the first failure."""
        self._done, self._report = done, report
        self._thread.start()

    @property
    def running(self) -> bool:
        """A load is under way."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            for entry, spec in self._todo:
                load_reserved(self._registry, entry, spec, self._options, self._report)
        except PantheonError as fault:
            self.failure = fault.message
        except Exception as fault:
            _log.debug("load failed", exc_info=True)
            self.failure = f"{spec.path}: {type(fault).__name__}: {fault}"
        finally:
            self._done()
