"""The flags of `pantheon serve`: what there is, what they mean, and where each value in force comes from.

Turns words into values and refuses what makes no sense; starts nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pantheon import log, settings
from pantheon.engine.default_model import DISTRIBUTION, need_default_model
from pantheon.engine.scripted import PREFIX as SCRIPT
from pantheon.errors import PantheonError
from pantheon.serve.admin import MR_MAX_NAME
from pantheon.serve.context import LOOP_GUARD
from pantheon.serve.http_server import HttpConfig
from pantheon.serve.loading import ModelSpec, default_name
from pantheon.serve.registry import MR_MAX_MODELS

LEVELS = ("debug", "info", "warning", "error")
_log = log.logger("serve")

# ---- the parser -------------------------------------------------------------------------------------------------


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


def _noting(base: type[argparse.Action]) -> type[argparse.Action]:
    """The same action, which also notes in `given` that the flag was on the command line."""

    class Noting(base):  # type: ignore[misc,valid-type]
        def __call__(
            self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
        ) -> None:
            super().__call__(parser, namespace, values, flag)
            namespace.given = {*namespace.given, self.dest}

    return Noting


def add_serve_parser(subparsers: Any) -> None:
    """The parser of `serve`."""
    parser = subparsers.add_parser(
        "serve",
        usage="pantheon serve [--model FILE [--name NAME]]... [flags]",
        help="serve models over the OpenAI chat API",
        description="Serve models over HTTP. /health answers at once and tells when they are loaded; Ctrl-C ends it.",
    )
    parser.set_defaults(models=[], given=frozenset())
    for kind in (None, "store", "append", "store_true"):
        parser.register("action", kind, _noting(parser._registry_get("action", kind)))
    add = parser.add_argument
    model = parser.add_argument_group("models (each --model may be followed by its own --name and --dies)")
    model.add_argument("--model", action=_ModelFlag, dest="path", type=_not_empty, metavar="FILE", default=argparse.SUPPRESS, help=f"a GGUF file; may be repeated (default: the model of the installed {DISTRIBUTION})")  # fmt: skip # noqa: E501
    model.add_argument("--name", action=_ModelFlag, type=_name, default=argparse.SUPPRESS, help="the id that requests use (default: the file's stem)")  # fmt: skip # noqa: E501
    model.add_argument("--dies", action=_ModelFlag, type=_dies, metavar="I,J", default=argparse.SUPPRESS, help="accelerators to place it on, as CUDA_VISIBLE_DEVICES numbers them (default: the CPU)")  # fmt: skip # noqa: E501
    add("--no-model", action="store_true", help="start without a model; /admin/models/load brings them")
    add("--dry-run", action="store_true", help="print the configuration and what the models need, load nothing; exit code 1 when they do not fit")  # fmt: skip # noqa: E501
    add("--ctx", type=_whole(2, 1 << 40), metavar="N", help="context length in tokens (default: the model's own, at most 8192)")  # fmt: skip # noqa: E501
    add("--threads", type=_whole(1, 1024), metavar="N", help="compute threads (default: one for each physical core)")
    add("--kv-type", choices=("f32", "f16", "q8_0"), help="number format of the KV cache")
    add("--model-root", action="append", default=[], metavar="DIR", help="folder that /admin/models/load may load from; may be repeated (default: the folders of the --model files)")  # fmt: skip # noqa: E501
    add("--strict-model", action="store_true", help="404 for a request that names another model, even if only one is loaded")  # fmt: skip # noqa: E501
    add("--port", type=_whole(0, 65535), default=8201, help="port (default: 8201; 0 lets the system choose)")
    add("--host", default="127.0.0.1", type=_not_empty, help="address to listen on (default: 127.0.0.1)")
    add("--api-key", action="append", default=[], metavar="KEY", help="demand this key; may be repeated")
    add("--api-key-file", metavar="FILE", help="demand one of the keys in this file, one a line")
    add("--admin-key", metavar="KEY", help="demand this key on the admin routes, instead of loopback (default: PANTHEON_ADMIN_KEY)")  # fmt: skip # noqa: E501
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


def model_specs(models: Sequence[dict[str, Any]], empty: bool = False) -> list[ModelSpec]:
    """The models to load; without any, the default one, or none with `empty` [M148].

    Raises PantheonError for what can not be placed or named.
    """
    if empty and models:
        raise PantheonError("--no-model: stands against the --model, --name or --dies beside it")
    specs = []
    for model in models if models or empty else [{"path": None}]:
        path = model["path"]
        if path is None:
            path = str(need_default_model())
            _log.info("no --model given, using the model of %s %s", DISTRIBUTION, log.fields(file=path))
        specs.append(ModelSpec(path, model.get("name") or default_name(path), dies=model.get("dies")))
    _check_names(specs)
    if len(specs) > MR_MAX_MODELS:
        raise PantheonError(f"{len(specs)} models; at most {MR_MAX_MODELS} can be loaded")
    return specs


def _check_names(specs: Sequence[ModelSpec]) -> None:
    """One name twice is one model on two dies, which must be named [M004, K11]."""
    by_name: dict[str, list[ModelSpec]] = {}
    for spec in specs:
        by_name.setdefault(spec.name, []).append(spec)
    for name, same in by_name.items():
        dies = [die for spec in same for die in spec.dies or ()]
        if len(same) > 1 and not (all(spec.dies for spec in same) and len(set(dies)) == len(dies)):
            raise PantheonError(
                f"two models are named {name!r}; tell them apart with --name, or place replicas on different --dies"
            )


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


def admin_key(args: argparse.Namespace, keys: Sequence[str]) -> str | None:
    """The key of the admin routes: --admin-key, else PANTHEON_ADMIN_KEY.  Raises PantheonError for one that is none."""
    found: str | None = settings.get("PANTHEON_ADMIN_KEY") if args.admin_key is None else args.admin_key
    name = "PANTHEON_ADMIN_KEY" if args.admin_key is None else "--admin-key"
    if found == "":
        raise PantheonError(f"{name}: a key must not be empty")
    if found is not None and found in keys:
        raise PantheonError(f"{name}: is also an API key; whoever may chat could then load and unload models")
    return found


def http_config(args: argparse.Namespace) -> HttpConfig:
    """The listening side as the flags want it."""
    keys = api_keys(args)
    return HttpConfig(
        host=args.host,
        port=args.port,
        max_connections=args.max_connections,
        threads=args.threads_http,
        tls_cert=args.ssl_cert,
        tls_key=args.ssl_key,
        api_keys=keys,
        admin_key=admin_key(args, keys),
        allowed_hosts=tuple(args.allowed_host),
        allowed_origins=tuple(args.allow_origin),
    )


# ---- the configuration in force [X09] ---------------------------------------------------------------------------

_NOT_SETTINGS = {"command", "debug", "given", "models", "dry_run", "version"}
_SECRET_FLAGS = {"api_key", "admin_key"}

Row = tuple[str, str, str]


def configuration(args: argparse.Namespace, roots: Sequence[Path] = ()) -> list[Row]:
    """(name, value, origin) of everything that decides how this server runs; origin: flag, env or default.

    roots: the model folders in force.
    """
    rows: list[Row] = []
    for dest in sorted(vars(args)):
        if dest not in _NOT_SETTINGS:
            value, origin = _flag_value(args, dest)
            if dest == "model_root":
                value = _shown([str(root) for root in roots])
            rows.append(("--" + dest.replace("_", "-"), value, origin))
    for model in args.models:
        words = [model["path"] or "-", *(f"--{key} {_shown(model[key])}" for key in ("name", "dies") if key in model)]
        rows.append(("--model", " ".join(words), "flag"))
    return rows + [(name, _shown(value), origin) for name, value, origin in settings.origins()]


def _flag_value(args: argparse.Namespace, dest: str) -> tuple[str, str]:
    value, origin = getattr(args, dest), "flag" if dest in args.given else "default"
    if dest == "admin_key" and value is None and settings.get("PANTHEON_ADMIN_KEY") is not None:
        value, origin = "set", "env"
    return ("set" if dest in _SECRET_FLAGS and value else _shown(value)), origin


def _shown(value: Any) -> str:
    if value is None or value == [] or value == "":
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as aligned lines."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        yield f"{name:{widths[0]}}  {value:{min(widths[1], 40)}}  {origin}"


def log_configuration(rows: Sequence[Row]) -> None:
    """One line for each origin, and a warning for each name that looks like a flag of ours and is none."""
    for origin in ("flag", "env", "default"):
        found: dict[str, str] = {}
        for name, value, where in rows:
            if where == origin:
                key = name.removeprefix("--")
                found[key] = f"{found[key]}; {value}" if key in found else value
        if found:
            _log.info("config %s", log.fields(origin=origin, **found))
    for name, meant in settings.unknown_names():
        hint = f"; did you mean {meant}?" if meant else ""
        _log.warning("unknown environment flag %s%s", name, hint)
