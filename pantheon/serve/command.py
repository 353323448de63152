"""`pantheon serve`: flags, start, signals, end.

Bind first, then load in the background, so that probes and harnesses see `loading` and not a refused connection
[X22].  SIGTERM and Ctrl-C end the server within five seconds, whatever it is doing.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pantheon import log, settings
from pantheon.engine.default_model import DISTRIBUTION, need_default_model
from pantheon.engine.scripted import PREFIX as SCRIPT
from pantheon.errors import PantheonError
from pantheon.progress import Progress
from pantheon.serve.admin import MR_MAX_NAME
from pantheon.serve.api import build_router
from pantheon.serve.context import LOOP_GUARD, App
from pantheon.serve.http_server import HttpConfig, PantheonServer
from pantheon.serve.loading import LoadOptions, ModelSpec, StartUp, default_name
from pantheon.serve.registry import MR_MAX_MODELS

STOP_S = 4.0
_NOTICE_S = 0.25
LEVELS = ("debug", "info", "warning", "error")
_log = log.logger("serve")


# ---- flags ------------------------------------------------------------------------------------------------------


class _ModelFlag(argparse.Action):
    """--model begins a model; --name and --dies belong to the one before them [M003]."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        models: list[dict[str, Any]] = list(namespace.models)
        if self.dest == "path":
            if models and models[-1]["path"] is None:
                early = " and ".join(f"--{key}" for key in models[-1] if key != "path")
                parser.error(f"{early} must stand behind the --model it belongs to")
            models.append({"path": values})
        elif not models:
            # before any --model they can only mean the default model
            models.append({"path": None, self.dest: values})
        elif self.dest in models[-1]:
            parser.error(f"{flag} is given twice for one --model")
        else:
            models[-1] = {**models[-1], self.dest: values}
        namespace.models = models


def add_serve_parser(subparsers: Any) -> None:
    """The parser of `serve`."""
    parser = subparsers.add_parser(
        "serve",
        usage="pantheon serve [--model FILE [--name NAME]]... [flags]",
        help="serve models over the OpenAI chat API",
        description="Serve models over HTTP. /health answers at once and tells when they are loaded; Ctrl-C ends it.",
    )
    parser.set_defaults(models=[])
    add = parser.add_argument
    model = parser.add_argument_group("models (each --model may be followed by its own --name and --dies)")
    model.add_argument("--model", action=_ModelFlag, dest="path", type=_not_empty, metavar="FILE", default=argparse.SUPPRESS, help=f"a GGUF file; may be repeated (default: the model of the installed {DISTRIBUTION})")  # fmt: skip # noqa: E501
    model.add_argument("--name", action=_ModelFlag, type=_name, default=argparse.SUPPRESS, help="the id that requests use (default: the file's stem)")  # fmt: skip # noqa: E501
    model.add_argument("--dies", action=_ModelFlag, type=_dies, metavar="I,J", default=argparse.SUPPRESS, help="accelerators to place it on, as CUDA_VISIBLE_DEVICES numbers them (default: the CPU)")  # fmt: skip # noqa: E501
    add("--ctx", type=_whole(2, 1 << 24), metavar="N", help="context length in tokens (default: the model's own, at most 8192)")  # fmt: skip # noqa: E501
    add("--threads", type=_whole(1, 1024), metavar="N", help="compute threads (default: one for each physical core)")
    add("--kv-type", choices=("f32", "f16"), help="number format of the KV cache")
    add("--model-root", action="append", default=[], metavar="DIR", help="folder that /admin/models/load may load from; may be repeated (default: the folders of the --model files)")  # fmt: skip # noqa: E501
    add("--strict-model", action="store_true", help="404 for a request that names another model, even if only one is loaded")  # fmt: skip # noqa: E501
    add("--port", type=_whole(0, 65535), default=8201, help="port (default: 8201; 0 lets the system choose)")
    add("--host", default="127.0.0.1", type=_not_empty, help="address to listen on (default: 127.0.0.1)")
    add("--api-key", action="append", default=[], metavar="KEY", help="demand this key; may be repeated")
    add("--api-key-file", metavar="FILE", help="demand one of the keys in this file, one a line")
    add("--allow-origin", action="append", default=[], metavar="URL", help="web origin whose pages may use the API, besides loopback ones; may be repeated")  # fmt: skip # noqa: E501
    add("--allowed-host", action="append", default=[], metavar="NAME", help="further Host name to answer to when bound to loopback; may be repeated")  # fmt: skip # noqa: E501
    add("--max-connections", type=_whole(1, 65535), default=512, metavar="N", help="open connections at most (default: 512)")  # fmt: skip # noqa: E501
    add("--threads-http", type=_whole(0, 1024), metavar="N", help="serve from a pool of N threads; 0 serves inline (default: a thread for each connection)")  # fmt: skip # noqa: E501
    add("--request-timeout", type=_whole(1, 86_400), default=3600, metavar="S", help="seconds that one answer may take (default: 3600)")  # fmt: skip # noqa: E501
    add("--loop-guard", type=_whole(0, 1 << 20), default=LOOP_GUARD, metavar="N", help=f"end an answer without a token cap when its last N tokens repeat one cycle; 0 never does (default: {LOOP_GUARD})")  # fmt: skip # noqa: E501
    add("--ssl-cert", metavar="FILE", help="serve TLS with this certificate (PEM)")
    add("--ssl-key", metavar="FILE", help="its key, when not in the same file")
    add("--log-level", choices=LEVELS, default="info", help="lines to log (default: info)")


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def _name(text: str) -> str:
    if not text or len(text) > MR_MAX_NAME or not text.isprintable():
        raise argparse.ArgumentTypeError(f"a name has 1 to {MR_MAX_NAME} printable characters")
    return text


def _dies(text: str) -> tuple[int, ...]:
    try:
        dies = tuple(int(part) for part in text.split(","))
    except ValueError:
        dies = (-1,)
    if min(dies) < 0 or len(set(dies)) < len(dies):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different die numbers such as 0,1")
    return dies


# ---- what the flags mean ----------------------------------------------------------------------------------------


def model_specs(models: Sequence[dict[str, Any]]) -> list[ModelSpec]:
    """The models to load; without any, the default one.  Raises PantheonError for what can not be placed or named."""
    specs = []
    for model in models or [{"path": None}]:
        path = model["path"]
        if path is None:
            path = str(need_default_model())
            _log.info("no --model given, using the model of %s %s", DISTRIBUTION, log.fields(file=path))
        if dies := model.get("dies"):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            among = "this machine has none" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
            raise PantheonError(f"--dies: there is no die {dies[0]} ({among}); leave --dies out to use the CPU")
        specs.append(ModelSpec(path, model.get("name") or default_name(path)))
    names = [spec.name for spec in specs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise PantheonError(f"two models are named {twice[0]!r}; tell them apart with --name")
    if len(specs) > MR_MAX_MODELS:
        raise PantheonError(f"{len(specs)} models; at most {MR_MAX_MODELS} can be loaded")
    return specs


def model_roots(args: argparse.Namespace, specs: Sequence[ModelSpec]) -> tuple[Path, ...]:
    """The folders that the admin API may load from.  Raises PantheonError for one that is none."""
    for root in args.model_root:
        if not Path(root).is_dir():
            raise PantheonError(f"--model-root {root}: is not a folder")
    given = [Path(root) for root in args.model_root]
    folders = given or [Path(spec.path.removeprefix(SCRIPT)).parent for spec in specs]
    return tuple(dict.fromkeys(folder.resolve() for folder in folders))


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The keys of --api-key and --api-key-file.  Raises PantheonError for a file that can not be read or holds none."""
    keys = list(args.api_key)
    if args.api_key_file is not None:
        try:
            lines = Path(args.api_key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            why = getattr(fault, "strerror", None) or "is not UTF-8 text"
            raise PantheonError(f"--api-key-file {args.api_key_file}: {why}") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise PantheonError(f"--api-key-file {args.api_key_file}: holds no key")
        keys += found
    if "" in keys:
        raise PantheonError("--api-key: a key must not be empty")
    return tuple(keys)


def http_config(args: argparse.Namespace) -> HttpConfig:
    """The listening side as the flags want it."""
    return HttpConfig(
        host=args.host,
        port=args.port,
        max_connections=args.max_connections,
        threads=args.threads_http,
        tls_cert=args.ssl_cert,
        tls_key=args.ssl_key,
        api_keys=api_keys(args),
        allowed_hosts=tuple(args.allowed_host),
        allowed_origins=tuple(args.allow_origin),
    )


# ---- running ----------------------------------------------------------------------------------------------------


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal.  Returns the exit code; raises PantheonError when the server can not start at all."""
    log.setup(args.log_level)
    changed = settings.check_all()
    if changed:
        _log.info("settings %s", log.fields(**changed))
    specs = model_specs(args.models)
    options = LoadOptions(ctx=args.ctx, threads=args.threads, kv_type=args.kv_type)
    app = App(
        load_options=options,
        model_roots=model_roots(args, specs),
        strict_model=args.strict_model,
        request_timeout_s=args.request_timeout,
        loop_guard=args.loop_guard,
    )
    # SimpleQueue.put may be called from a signal handler, whatever the main thread is doing
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    _on_signals(events)
    server = PantheonServer(build_router(app), http_config(args))
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
