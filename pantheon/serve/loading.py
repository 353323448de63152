"""Loading models into the registry and freeing them: at start and at run time; one code path.

A load has four phases, and the registry serves on through all of them: reserve the name and a place; find out what the
model takes, admit it and bind dies; move the weights, one load at a time; publish.  Whatever fails gives back all that
was taken [M057-M062, M204].  Must not know HTTP.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pantheon import log, seams
from pantheon.accel.die_manager import DieManager
from pantheon.accel.executor import RunnerState
from pantheon.engine.admit import prepare_smaller_kv
from pantheon.engine.load import load_model, on_dies
from pantheon.engine.model import Model
from pantheon.engine.prefix_cache import SLOTS, PrefixCache
from pantheon.engine.scripted import PREFIX as SCRIPT
from pantheon.errors import BadRequest, ModelFileError, PantheonError
from pantheon.mem.memwatch import MemWatch
from pantheon.sched.scheduler import Scheduler
from pantheon.sched.shared import SchedConfig
from pantheon.seams import SYSTEM_CLOCK
from pantheon.serve.placing import Placed, look_again, place
from pantheon.serve.registry import Entry, Registry

_log = log.logger("load")

#: report(name, stage, done, total)
Report = Callable[[str, str, int, int], None]


@dataclass(frozen=True)
class ModelSpec:
    """One model to load: a GGUF path or `script:FILE.json`, its name, and the dies it is placed on: () for the CPU,
    None to have them chosen."""

    path: str
    name: str
    dies: tuple[int, ...] | None = None
    ctx: int | None = None


@dataclass(frozen=True)
class LoadOptions:
    """What holds for every load of a server.  `executor`: "auto" is what the dies of a model ask for, "cuda" takes
    CUDA dies only.  `template`: of chats, instead of the models' own.  `watch`: the memory that loads are admitted
    against; None for none.  `batch`: how several users share a model; None for one at a time [M117]."""

    ctx: int | None = None
    threads: int | None = None
    kv_type: str | None = None
    executor: str = "auto"
    template: str | None = None
    watch: MemWatch | None = None
    batch: SchedConfig | None = None

    @property
    def users(self) -> int:
        """Answers that one model makes at a time."""
        return self.batch.users if self.batch is not None else 1

    def executor_of(self, manager: DieManager, dies: Sequence[int] | None) -> str:
        """What runs a model on these dies; None: on those that will be chosen.  Raises BadRequest for the CPU where
        only CUDA dies may be taken."""
        found = manager.executor(dies) if self.executor in ("auto", "cuda") else self.executor
        if self.executor == "cuda" and found != "cuda":
            raise BadRequest(
                "dies: an empty list asks for the CPU, and this server was started with --executor cuda", param="dies"
            )
        return found


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
    """Load into a place that is reserved already.  Raises PantheonError after giving back place, dies and memory."""
    began = SYSTEM_CLOCK.monotonic()

    def progress(stage: str, done: int, total: int) -> None:
        entry.report(stage, done, total)
        if report is not None:
            report(spec.name, stage, done, total)

    model: Model | None = None
    state: RunnerState | None = None
    cache: PrefixCache | None = None
    sched: Scheduler | None = None
    try:
        with _naming(spec.path):
            placed = place(registry, entry, spec, options)
            with registry.upload_lock:
                look_again(spec.path, placed.need, options)
                model = _upload(registry, entry, spec, options, placed, progress)
                state = _new_state(model, placed, options.users)
                _settle(registry, entry, placed, state)
            cache = _new_cache(registry, entry, placed, state, options)
            if options.batch is not None:
                seams.hit("scheduler")
                sched = Scheduler(model, state, cache, options.batch)
            seams.hit("publish")
        # what a model is made of lives long: a collection that looks at every vocabulary stops all threads for 70 ms
        gc.freeze()
        registry.publish(entry, model, state, cache, sched)
    except BaseException:
        if sched is not None:
            sched.close()
        close_state(state)
        state = cache = sched = None
        if model is not None:
            model.close()
            model = None
        registry.dies.unbind(entry.dies, entry.name)
        registry.withdraw(entry)
        give_back()
        raise
    _log.info(
        "ready %s",
        log.fields(
            model=spec.name, ctx=model.n_ctx, dies=list(entry.dies) or None,
            load_s=SYSTEM_CLOCK.monotonic() - began, architecture=model.architecture,
        ),
    )  # fmt: skip


# ---- phases ---------------------------------------------------------------------------------------------------------


def _upload(
    registry: Registry, entry: Entry, spec: ModelSpec, options: LoadOptions, placed: Placed,
    progress: Callable[[str, int, int], None],
) -> Model:  # fmt: skip
    """Move the weights.  The caller holds upload_lock [M060, M145]."""
    model = load_model(
        spec.path,
        ctx=spec.ctx or options.ctx,
        executor=placed.need.executor,
        threads=registry.dies.threads(entry.dies, options.threads),
        kv_type=options.kv_type,
        template=options.template,
        progress=progress,
        dies=entry.dies,
        cuts=placed.need.cuts(placed.shares),
    )
    if options.watch is not None:
        prepare_smaller_kv(model, progress)
    return model


def _new_state(model: Model, placed: Placed, users: int) -> RunnerState:
    """A slot for each user and some for idle conversations; as many as users, when there is no room for more."""
    seams.hit("state")
    most = max(users, placed.most_slots)
    with on_dies(placed.need.executor, placed.taken.dies):
        for n_slots in dict.fromkeys((min(most, users - 1 + SLOTS), min(most, users + 1))):
            with contextlib.suppress(MemoryError, OSError):
                return model.new_state(n_slots)
        return model.new_state(users)


def _settle(registry: Registry, entry: Entry, placed: Placed, state: RunnerState) -> None:
    """The memory is taken: a CUDA die's is, for every slot, so that all of them are charged."""
    charges = placed.charges(state.n_slots)
    registry.dies.settle(entry.dies, entry.name, charges)
    registry.place(entry, entry.dies, sum(charges))


def _new_cache(
    registry: Registry, entry: Entry, placed: Placed, state: RunnerState, options: LoadOptions
) -> PrefixCache | None:
    """The warm conversations of an entry; without one, every prompt is read in full [M062, M132]."""
    try:
        seams.hit("cache")
        need = placed.need
        if need.on_die:
            charged = state.n_slots * state.n_ctx
            return PrefixCache(state, token_bytes=need.token_bytes, users=options.users, charged=charged)
        idle = placed.idle_tokens(options)
        return PrefixCache(state, max_idle=idle, token_bytes=need.token_bytes, users=options.users)
    except Exception as fault:
        _log.warning("no prefix cache %s", log.fields(model=entry.name, reason=f"{type(fault).__name__}: {fault}"))
        return None


def close_state(state: RunnerState | None) -> None:
    """Give the memory of a state back where it does not go with its last reference."""
    close = getattr(state, "close", None)
    if close is not None:
        close()


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """What the system refuses becomes a fault that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise ModelFileError(path, "there is no such file", status=404, code="file_not_found") from None
    except OSError as fault:
        raise ModelFileError(path, fault.strerror or "can not be read", code="file_unreadable") from fault
    except MemoryError as fault:
        raise ModelFileError(path, "not enough memory to load it", status=507, code="out_of_memory") from fault


# ---- freeing --------------------------------------------------------------------------------------------------------


def unload(
    registry: Registry,
    name: str,
    *,
    timeout_s: float = 30.0,
    force: bool = False,
    slot: int | None = None,
    dies: Sequence[int] | None = None,
) -> list[Entry]:
    """Unload a model, or one replica of it, and give its memory back; arguments and errors as in Registry.unload."""
    gone = registry.unload(name, timeout_s=timeout_s, force=force, slot=slot, dies=dies)
    for entry in gone:
        free(registry, entry)
    give_back()
    _log.info("unloaded %s", log.fields(model=name, slots=[entry.index for entry in gone]))
    return gone


def free(registry: Registry, entry: Entry) -> None:
    """Free a detached entry, in this order: prefix cache, scheduler, die binding, state, model [M069].

    A step that fails is logged and does not keep the others from running.
    """

    def cache() -> None:
        if entry.prefix_cache is not None:
            entry.prefix_cache.close()
        entry.prefix_cache = None

    def scheduler() -> None:
        if entry.sched is not None:
            entry.sched.close()
        entry.sched = None

    def binding() -> None:
        registry.dies.unbind(entry.dies, entry.name)

    def state() -> None:
        close_state(entry.state)
        entry.state = None

    def model() -> None:
        if entry.model is not None:
            entry.model.close()
        entry.model = None

    for step in (cache, scheduler, binding, state, model):
        try:
            step()
        except Exception:
            _log.exception("can not free %s", log.fields(model=entry.name, part=step.__name__))


def give_back() -> None:
    """Let the system have the pages of what was freed.

    Models leave no circles behind (test_loading.py), so that no full garbage collection is needed: it would stop every
    thread for as long as it takes to look at all vocabularies.
    """
    with contextlib.suppress(OSError, AttributeError):
        # glibc keeps freed memory for itself until it is told
        ctypes.CDLL(None).malloc_trim(0)


# ---- the start ------------------------------------------------------------------------------------------------------


class StartUp:
    """Loads the models of the command line, one after the other, in a thread of its own [X22]."""

    def __init__(self, registry: Registry, specs: Sequence[ModelSpec], options: LoadOptions) -> None:
        """Reserves every name, and every die that is named, at once.  Raises PantheonError for a duplicate, for too
        many and for dies that are not there or taken."""
        self._registry = registry
        self._options = options
        self._todo = [(registry.reserve(spec.name, spec.path, spec.dies), spec) for spec in specs]
        for _, spec in self._todo:
            registry.dies.hold(spec.dies or (), spec.name)
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
