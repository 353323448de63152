"""`pantheon serve`: start, signals, end.

Bind first, then load in the background, so that probes and harnesses see `loading` and not a refused connection
[X22].  SIGTERM and Ctrl-C end the server within five seconds, whatever it is doing; one that is registered with a
router first tells it, then finishes what it was asked.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pantheon import log, settings
from pantheon.accel.die_manager import DieManager
from pantheon.errors import PantheonError
from pantheon.mem import memwatch
from pantheon.progress import Progress
from pantheon.serve import flags
from pantheon.serve.api import build_router
from pantheon.serve.context import App
from pantheon.serve.die_feed import feed_dies
from pantheon.serve.dry_run import dry_run
from pantheon.serve.flags import add_serve_parser
from pantheon.serve.flags_batch import batch_config, users
from pantheon.serve.listeners import Listeners
from pantheon.serve.loading import LoadOptions, ModelSpec, StartUp, free
from pantheon.serve.registry import Registry
from pantheon.serve.router_client import RouterClient, registered
from pantheon.serve.router_client import check_settings as check_router

__all__ = ["add_serve_parser", "run_serve"]

STOP_S = 4.0
#: a router that was told to forget this server may have a request on its way
QUIET_S = 1.0
#: how long a thread that reads a long prompt may keep the GIL from one that has a token to send (Python's own: 5 ms)
SWITCH_S = 0.001
_NOTICE_S = 0.25
_log = log.logger("serve")



def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal.  Returns the exit code; raises PantheonError when the server can not start at all."""
    log.setup(args.log_level, flags.log_format(args), bounded=True)
    settings.check_all()
    config = flags.http_config(args)
    specs = flags.model_specs(args.models, args.no_model)
    app = _app(args, specs)
    rows = flags.configuration(args, app.model_roots)
    if args.dry_run:
        flags.warn_of_unknown()
        return dry_run(app, specs, rows)
    check_router(config.host.split(",")[0])
    flags.log_configuration(rows, args.without_effect)
    # SimpleQueue.put may be called from a signal handler, whatever the main thread is doing
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    _on_signals(events)
    sys.setswitchinterval(SWITCH_S)
    server = Listeners(build_router(app), config)
    start_up = StartUp(app.registry, specs, app.load_options)
    with _watching(app), registered(app.registry, server.urls[0], config.api_keys) as router:
        server.start()
        for url in server.urls:
            _log.info("listening %s", log.fields(url=url))
        start_up.start(lambda: events.put("loaded"), _reporter())
        code = _wait(events, start_up)
        if router is not None and code == 0:
            _part(app, server, router, events)
    _stop(app, server, start_up, code)
    return code


def _app(args: argparse.Namespace, specs: Sequence[ModelSpec]) -> App:
    dies = DieManager.discover(args.executor)
    for spec in specs:
        dies.check(spec.dies or ())
    options = LoadOptions(
        ctx=flags.context(args, users(args)), threads=args.threads, kv_type=flags.kv_type(args), executor=args.executor,
        template=flags.chat_template(args), watch=memwatch.from_settings(), batch=batch_config(args),
    )  # fmt: skip
    return App(
        registry=Registry(dies=dies),
        load_options=options,
        model_roots=flags.model_roots(args, specs),
        strict_model=args.strict_model,
        request_timeout_s=args.request_timeout,
        loop_guard=args.loop_guard,
        defaults=flags.defaults(args),
        metrics_view=not args.no_metrics,
        slots_view=not args.no_slots,
        pooling=args.pooling,
    )


@contextmanager
def _watching(app: App) -> Iterator[None]:
    """Watch the memory of the host and of the dies; where the host's can not be read, serve without [M199]."""
    watch = app.memwatch
    assert watch is not None
    try:
        watch.start()
    except PantheonError as fault:
        _log.warning("memory is not watched: loads and turns are admitted unseen %s", log.fields(why=fault.message))
        yield
        return
    feed_dies(watch, app.dies)
    try:
        yield
    finally:
        watch.stop()


def _part(app: App, server: Listeners, router: RouterClient, events: queue.SimpleQueue[str]) -> None:
    """Leave a router without losing what it still sends: tell it, then answer until nothing has come for a while.

    Ends early when a second signal comes.
    """
    app.draining.set()
    router.stop()
    until = time.monotonic() + settings.get("PANTHEON_DRAIN_S")
    _log.info("draining %s", log.fields(seconds=settings.get("PANTHEON_DRAIN_S")))
    quiet_since = time.monotonic()
    while (now := time.monotonic()) < until and events.empty():
        if app.metrics.value("requests_in_flight") or server.connections:
            quiet_since = now
        if now - quiet_since >= QUIET_S:
            return
        time.sleep(0.05)


def _wait(events: queue.SimpleQueue[str], start_up: StartUp) -> int:
    """Until a signal (0) or a model that can not be loaded (1)."""
    while True:
        try:
            event = events.get(timeout=_NOTICE_S)
        except queue.Empty:
            # the kernel may give a signal to any thread, which does not wake this one, where Python runs handlers
            continue
        if event != "loaded":
            _log.info("stopping %s", log.fields(signal=event))
            return 0
        if start_up.failure is not None:
            # the only line that must be seen, whatever the log level
            log.drain()
            print(f"pantheon: error: {' '.join(start_up.failure.split())}", file=sys.stderr, flush=True)
            return 1


def _stop(app: App, server: Listeners, start_up: StartUp, code: int) -> None:
    """End what runs; what does not end in time is left to the end of the process."""
    deadline = time.monotonic() + STOP_S
    server.stop(STOP_S)
    while (server.connections or start_up.running or app.jobs.running) and time.monotonic() < deadline:
        time.sleep(0.02)
    if server.connections or start_up.running or app.jobs.running:
        # a thread in compiled code can not be asked to end, and must not meet an interpreter that is being taken down
        _log.info("stopped %s", log.fields(unfinished=[t.name for t in threading.enumerate()][1:]))
        log.drain()
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)
    for entry in app.registry.all_entries():
        free(app.registry, entry)
    _log.info("stopped")


def _on_signals(events: queue.SimpleQueue[str]) -> None:
    def handle(number: int, frame: Any) -> None:
        events.put(signal.Signals(number).name)
        # a second one ends the process at once
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def _reporter() -> Callable[[str, str, int, int], None]:
    """Progress of the loads, one display a model."""
    displays: dict[str, Progress] = {}

    def report(name: str, stage: str, done: int, total: int) -> None:
        displays.setdefault(name, Progress(name)).update(stage, done, total)

    return report
