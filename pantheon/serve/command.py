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
from collections.abc import Callable
from typing import Any

from pantheon import log, settings
from pantheon.progress import Progress
from pantheon.serve.api import build_router
from pantheon.serve.context import App
from pantheon.serve.dry_run import dry_run
from pantheon.serve.flags import (
    add_serve_parser,
    configuration,
    http_config,
    log_configuration,
    model_roots,
    model_specs,
)
from pantheon.serve.http_server import PantheonServer
from pantheon.serve.loading import LoadOptions, StartUp

__all__ = ["add_serve_parser", "run_serve"]

STOP_S = 4.0
_NOTICE_S = 0.25
_log = log.logger("serve")



def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal.  Returns the exit code; raises PantheonError when the server can not start at all."""
    log.setup(args.log_level)
    settings.check_all()
    specs = model_specs(args.models, args.no_model)
    options = LoadOptions(ctx=args.ctx, threads=args.threads, kv_type=args.kv_type)
    app = App(
        load_options=options,
        model_roots=model_roots(args, specs),
        strict_model=args.strict_model,
        request_timeout_s=args.request_timeout,
        loop_guard=args.loop_guard,
    )
    config = http_config(args)
    rows = configuration(args)
    if args.dry_run:
        return dry_run(app, specs, rows)
    log_configuration(rows)
    # SimpleQueue.put may be called from a signal handler, whatever the main thread is doing
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    _on_signals(events)
    server = PantheonServer(build_router(app), config)
    start_up = StartUp(app.registry, specs, options)
    server.start()
    _log.info("listening %s", log.fields(url=server.url))
    start_up.start(lambda: events.put("loaded"), _reporter())
    code = _wait(events, start_up)
    _stop(app, server, start_up, code)
    return code


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
            print(f"pantheon: error: {' '.join(start_up.failure.split())}", file=sys.stderr, flush=True)
            return 1


def _stop(app: App, server: PantheonServer, start_up: StartUp, code: int) -> None:
    """End what runs; what does not end in time is left to the end of the process."""
    deadline = time.monotonic() + STOP_S
    server.stop(STOP_S)
    while (server.connections or start_up.running) and time.monotonic() < deadline:
        time.sleep(0.02)
    if server.connections or start_up.running:
        # a thread in compiled code can not be asked to end, and must not meet an interpreter that is being taken down
        _log.info("stopped %s", log.fields(unfinished=[t.name for t in threading.enumerate()][1:]))
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)
    for entry in app.registry.all_entries():
        if entry.model is not None:
            entry.model.close()
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
