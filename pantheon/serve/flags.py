"""The flags of `pantheon serve`: what there is, what they mean, and where each value in force comes from.

Turns words into values and refuses what makes no sense; starts nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pantheon import log, settings
from pantheon.engine.default_model import DISTRIBUTION, need_default_model
from pantheon.engine.embed import POOLINGS
from pantheon.engine.scripted import PREFIX as SCRIPT
from pantheon.errors import PantheonError
from pantheon.serve.context import LOOP_GUARD
from pantheon.serve.defaults import Defaults
from pantheon.serve.flag_words import die_numbers, json_object, model_name, not_empty, real, whole
from pantheon.serve.flags_batch import add_batch_flags
from pantheon.serve.flags_llama import add_llama_flags
from pantheon.serve.http_server import HttpConfig
from pantheon.serve.loading import ModelSpec, default_name
from pantheon.serve.registry import MR_MAX_MODELS
from pantheon.text.chat_template import ChatTemplate
from pantheon.text.template_names import NAMED

KV_TYPES = ("f32", "f16", "q8_0", "q4_0")
_THINKING: dict[str, dict[str, Any]] = {
    "on": {"enable_thinking": True}, "off": {"enable_thinking": False}, "auto": {},
}  # fmt: skip
LEVELS = ("debug", "info", "warning", "error")
_log = log.logger("serve")

# ---- the parser -------------------------------------------------------------------------------------------------


#: llama-server has one model, so that its name may stand in front of it
_EARLY = ("-a", "--alias")


class _ModelFlag(argparse.Action):
    """--model begins a model; --name and --dies belong to the one before them [M003]."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        models: list[dict[str, Any]] = list(namespace.models)
        if flag in _EARLY:
            # of several aliases the first is the name; with one model, the others find it as well
            values = values.split(",")[0].strip() or values
        if self.dest == "path":
            if models and "flag" in models[-1]:
                models[-1] = {**models[-1], "path": values}
                del models[-1]["flag"]
            elif models and models[-1]["path"] is None:
                early = " and ".join(f"--{key}" for key in models[-1] if key != "path")
                parser.error(f"{early} must stand behind the --model it belongs to")
            else:
                models.append({"path": values})
        elif not models:
            # before any --model they can only mean the default model
            models.append({"path": None, self.dest: values, **({"flag": flag} if flag in _EARLY else {})})
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
        description="Serve models over HTTP. /health answers at once and tells when they are loaded; Ctrl-C ends it. "
        "Command lines of llama-server are understood.",
        # --ctx must not be what --ctx-size is short for
        allow_abbrev=False,
    )
    parser.set_defaults(models=[], given=frozenset())
    for kind in (None, "store", "append", "store_true", "store_const"):
        parser.register("action", kind, _noting(parser._registry_get("action", kind)))
    add = parser.add_argument
    model = parser.add_argument_group("models (each --model may be followed by its own --name and --dies)")
    model.add_argument("-m", "--model", action=_ModelFlag, dest="path", type=not_empty, metavar="FILE", default=argparse.SUPPRESS, help=f"a GGUF file; may be repeated (default: the model of the installed {DISTRIBUTION})")  # fmt: skip # noqa: E501
    model.add_argument("-a", "--alias", "--name", action=_ModelFlag, dest="name", type=model_name, default=argparse.SUPPRESS, help="the id that requests use (default: the file's stem)")  # fmt: skip # noqa: E501
    model.add_argument("--dies", action=_ModelFlag, type=die_numbers, metavar="I,J", default=argparse.SUPPRESS, help="accelerators to place it on, as CUDA_VISIBLE_DEVICES numbers them (default: free ones that fit, the CPU without any)")  # fmt: skip # noqa: E501
    add("--executor", choices=("auto", "cpu", "cuda"), default="auto", help="who computes (default: auto, cuda for models on CUDA dies, else cpu)")  # fmt: skip # noqa: E501
    add("--no-model", action="store_true", help="start without a model; /admin/models/load brings them")
    add("--dry-run", action="store_true", help="print the configuration and what the models need, load nothing; exit code 1 when they do not fit")  # fmt: skip # noqa: E501
    add("--ctx", type=whole(2, 1 << 40), metavar="N", help="context length in tokens (default: the model's own, at most 8192)")  # fmt: skip # noqa: E501
    add("-c", "--ctx-size", type=whole(2, 1 << 40, none="0"), metavar="N", help="the same for all users together: with --parallel, each gets its part; 0 is the default")  # fmt: skip # noqa: E501
    add("-kvu", "--kv-unified", action="store_true", help="with --ctx-size: it holds for each user")
    add("-t", "--threads", type=whole(1, 1024, none="-1"), metavar="N", help="compute threads (default: one for each physical core)")  # fmt: skip # noqa: E501
    add("--kv-type", choices=KV_TYPES, help="number format of the KV cache")
    add("-ctk", "--cache-type-k", choices=KV_TYPES, help="the same, given for keys and for values")
    add("-ctv", "--cache-type-v", choices=KV_TYPES, help="see --cache-type-k")
    add("--model-root", action="append", default=[], metavar="DIR", help="folder that /admin/models/load may load from; may be repeated (default: the folders of the --model files)")  # fmt: skip # noqa: E501
    add("--strict-model", action="store_true", help="404 for a request that names another model, even if only one is loaded")  # fmt: skip # noqa: E501
    add("--port", type=whole(0, 65535), default=8201, help="port (default: 8201; 0 lets the system choose)")
    add("--host", default="127.0.0.1", type=not_empty, help="address to listen on, or several with commas (default: 127.0.0.1)")  # fmt: skip # noqa: E501
    add("--api-key", action="append", default=[], metavar="KEY", help="demand this key; may be repeated, or a list with commas")  # fmt: skip # noqa: E501
    add("--api-key-file", metavar="FILE", help="demand one of the keys in this file, one a line")
    add("--admin-key", metavar="KEY", help="demand this key on the admin routes, instead of loopback (default: PANTHEON_ADMIN_KEY)")  # fmt: skip # noqa: E501
    add("--allow-origin", "--cors-origins", action="append", default=[], metavar="URL", help="web origin whose pages may use the API, besides loopback ones; may be repeated, or a list with commas; * is every one")  # fmt: skip # noqa: E501
    add("--allowed-host", action="append", default=[], metavar="NAME", help="further Host name to answer to when bound to loopback; may be repeated")  # fmt: skip # noqa: E501
    add("--max-connections", type=whole(1, 65535), default=512, metavar="N", help="open connections at most (default: 512)")  # fmt: skip # noqa: E501
    add("--threads-http", type=whole(0, 1024, none="-1"), metavar="N", help="serve from a pool of N threads; 0 serves inline (default: a thread for each connection)")  # fmt: skip # noqa: E501
    add("-to", "--timeout", "--request-timeout", dest="request_timeout", type=whole(1, 86_400), default=3600, metavar="S", help="seconds that one answer may take (default: 3600)")  # fmt: skip # noqa: E501
    add("--pooling", choices=POOLINGS, default="mean", help="how embeddings are made of hidden states; none makes one for each token (default: mean)")  # fmt: skip # noqa: E501
    add("--loop-guard", type=whole(0, 1 << 20), default=LOOP_GUARD, metavar="N", help=f"end an answer without a token cap when its last N tokens repeat one cycle; 0 never does (default: {LOOP_GUARD})")  # fmt: skip # noqa: E501
    add("--ssl-cert", "--ssl-cert-file", metavar="FILE", help="serve TLS with this certificate (PEM)")
    add("--ssl-key", "--ssl-key-file", metavar="FILE", help="its key, when not in the same file")
    add("--no-metrics", action="store_true", help="no GET /metrics")
    add("--no-slots", action="store_true", help="no GET /slots")
    add("--log-level", choices=LEVELS, default="info", help="lines to log (default: info)")
    add("-v", "--verbose", "--log-verbose", dest="log_level", action="store_const", const="debug", help="the same as --log-level debug; replies to chats show the prompt that was read")  # fmt: skip # noqa: E501
    add("--log-format", choices=log.FORMATS, help="lines for people, or one JSON object a line (default: PN_LOG_FORMAT, or text)")  # fmt: skip # noqa: E501
    add("--log-jsonl", dest="log_format", action="store_const", const="json", help="the same as --log-format json")
    add("--chat-template", metavar="TEXT", help="Jinja source of a chat template to use instead of the models' own, or the name of one")  # fmt: skip # noqa: E501
    add("--chat-template-file", metavar="FILE", help="a file that holds it")
    add_batch_flags(parser)
    _add_defaults(parser)
    add_llama_flags(parser)


def _add_defaults(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what requests get that do not say it").add_argument
    add("--temp", "--temperature", dest="temp", type=real(0, 2), metavar="T", help="temperature; 0 is greedy (default: 1)")  # fmt: skip # noqa: E501
    add("--top-k", type=whole(-1, 1 << 31), metavar="K", help="keep the K likeliest tokens; 0 is off (default: 40)")
    add("--top-p", type=real(0, 1), metavar="P", help="keep the likeliest tokens up to mass P (default: 0.95)")
    add("--min-p", type=real(0, 1), metavar="P", help="drop tokens below P times the best (default: 0.1)")
    add("--repeat-penalty", type=real(0.01, 100), metavar="R", help="make recent tokens less likely; 1 is off (default: 1)")  # fmt: skip # noqa: E501
    add("--repeat-last-n", type=whole(-1, 1 << 30), metavar="N", help="how many tokens are recent (default: 64)")
    add("--presence-penalty", type=real(-2, 2), metavar="R", help="taken off the logits of tokens that came up (default: 0)")  # fmt: skip # noqa: E501
    add("--frequency-penalty", type=real(-2, 2), metavar="R", help="the same for each time (default: 0)")
    add("--chat-template-kwargs", type=json_object, metavar="JSON", help="variables of the chat template")
    add("-rea", "--reasoning", choices=("on", "off", "auto"), help="enable_thinking of the chat template (default: auto, what the template does)")  # fmt: skip # noqa: E501
    add("--reasoning-format", choices=("auto", "deepseek", "deepseek-legacy"), help="reasoning goes out as reasoning_content, whichever is said")  # fmt: skip # noqa: E501
    add("-s", "--seed", type=whole(0, (1 << 64) - 1, none="-1"), metavar="N", help="the same seed gives the same answers (default: random)")  # fmt: skip # noqa: E501
    add("-n", "--predict", "--n-predict", dest="n_predict", type=whole(1, 1 << 40, none="-1", also="-2"), metavar="N", help="end an answer after N tokens (default: when the context is full)")  # fmt: skip # noqa: E501


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
    keys = [key.strip() for given in args.api_key for key in given.split(",")]
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
        allowed_origins=tuple(origin.strip() for given in args.allow_origin for origin in given.split(",")),
    )


def context(args: argparse.Namespace, users: int = 1) -> int | None:
    """The context of one user, None for the default.  Raises PantheonError for two that contradict each other."""
    total: int | None = args.ctx_size
    if total is None:
        found: int | None = args.ctx
        return found
    if args.ctx is not None:
        raise PantheonError("--ctx-size: stands against --ctx")
    each = total if args.kv_unified else total // max(1, users)
    if each < 2:
        raise PantheonError(f"--ctx-size {total}: leaves nothing for each of {users} users")
    return each


def kv_type(args: argparse.Namespace) -> str | None:
    """The number format of keys and values, None for the default.  Raises PantheonError for two of them."""
    given = {args.kv_type, args.cache_type_k, args.cache_type_v} - {None}
    if args.cache_type_k != args.cache_type_v and args.kv_type is None and len(given) == 1:
        missing = "--cache-type-v" if args.cache_type_v is None else "--cache-type-k"
        raise PantheonError(f"{missing}: keys and values have one format here; give it for both")
    if len(given) > 1:
        raise PantheonError(f"--cache-type-k, --cache-type-v: one format for both, not {' and '.join(sorted(given))}")
    return next(iter(given), None)


def defaults(args: argparse.Namespace) -> Defaults:
    """What requests get that do not say it."""
    return Defaults(
        temperature=args.temp,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repeat_penalty=args.repeat_penalty,
        repeat_last_n=args.repeat_last_n,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        n_predict=args.n_predict,
        verbose=True if args.log_level == "debug" else None,
        template_kwargs={**_THINKING[args.reasoning or "auto"], **(args.chat_template_kwargs or {})},
    )


def chat_template(args: argparse.Namespace) -> str | None:
    """The template of chats, None for the models' own.  Raises PantheonError for one that does not compile."""
    source: str | None = args.chat_template
    flag = "--chat-template"
    if args.chat_template_file is not None:
        if source is not None:
            raise PantheonError("--chat-template-file: stands against --chat-template")
        flag, source = f"--chat-template-file {args.chat_template_file}", _text_of(args.chat_template_file)
    if source is None or source in NAMED:
        return source and NAMED[source]
    if "{" not in source:
        raise PantheonError(
            f"{flag}: {source[:80]!r} is no Jinja source; the templates known by name are {', '.join(NAMED)}"
        )
    try:
        ChatTemplate(source)
    except PantheonError as fault:
        raise PantheonError(f"{flag}: {fault.message}", code=fault.code) from None
    return source


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        why = getattr(fault, "strerror", None) or "is not UTF-8 text"
        raise PantheonError(f"--chat-template-file {path}: {why}") from None


def log_format(args: argparse.Namespace) -> str:
    """--log-format, else PN_LOG_FORMAT."""
    found: str = args.log_format or settings.get("PN_LOG_FORMAT")
    return found


# ---- the configuration in force [X09] ---------------------------------------------------------------------------

_NOT_SETTINGS = {"command", "debug", "given", "models", "dry_run", "version", "without_effect"}
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


def log_configuration(rows: Sequence[Row], without_effect: Sequence[str] = ()) -> None:
    """One line for each origin, and a warning for each name that looks like a flag of ours and is none."""
    for origin in ("flag", "env", "default"):
        found: dict[str, str] = {}
        for name, value, where in rows:
            if where == origin:
                key = name.removeprefix("--")
                found[key] = f"{found[key]}; {value}" if key in found else value
        if found:
            _log.info("config %s", log.fields(origin=origin, **found))
    if without_effect:
        _log.info("flags that change nothing here %s", log.fields(flags=" ".join(dict.fromkeys(without_effect))))
    warn_of_unknown()


def warn_of_unknown() -> None:
    """A warning for each environment variable that looks like a flag of ours and is none."""
    for name, meant in settings.unknown_names():
        hint = f"; did you mean {meant}?" if meant else ""
        _log.warning("unknown environment flag %s%s", name, hint)
