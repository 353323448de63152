"""The command line: `pantheon serve | chat | generate | inspect | bench | perplexity | quantize`.

Exit codes: 0 done, 1 a refusal (one line on stderr says why), 2 bad flags, 130 Ctrl-C.  Never a traceback, unless
--debug asks for it.  The serving floor and the kernels are imported only by the command that needs them.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from pantheon import __version__, log, seams, settings
from pantheon.commands import common
from pantheon.errors import PantheonError

COMMANDS = ("chat", "generate", "inspect", "bench", "perplexity", "quantize")
SERVE_HELP = "serve models over the OpenAI chat API"


def build_parser(with_serve: bool) -> argparse.ArgumentParser:
    """The parser; the flags of `serve` are added only when they are needed, for they import the serving floor."""
    parser = argparse.ArgumentParser(
        prog="pantheon",
        description="Run GGUF language models: serve them over HTTP, talk to them, look into them.",
    )
    parser.add_argument("--version", action="version", version=f"pantheon {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of internal errors")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    if with_serve:
        import_module("pantheon.serve.command").add_serve_parser(subparsers)
    else:
        subparsers.add_parser("serve", help=SERVE_HELP)
    for name in COMMANDS:
        import_module(f"pantheon.commands.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.  Never raises, but for the SystemExit of --help and of bad flags."""
    _fill_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((w for w in words if not w.startswith("-")), "")
    parser = build_parser(with_serve=command == "serve")
    if not words:
        parser.exit(2, parser.format_help())
    args, rest = parser.parse_known_args(words)
    debug = args.debug
    try:
        _take_rest(parser, args, rest)
        settings.check_all()
        _arm_seams()
        if args.command == "serve":
            return int(import_module("pantheon.serve.command").run_serve(args))
        log.setup("warning")
        return int(import_module(f"pantheon.commands.{args.command}").run(args))
    except common.UsageError as fault:
        parser.exit(2, f"pantheon {args.command}: error: {fault}\n")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # whoever read our output is gone; keep the interpreter's last flush from complaining
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PantheonError as fault:
        common.say_error(fault)
        return 2 if isinstance(fault, settings.SettingError) else 1
    except Exception as fault:
        _say_internal(fault, debug)
    return 1


def _fill_standard_streams() -> None:
    """Put the null device where a parent closed stdin, stdout or stderr: a socket or a model file must not end up
    under those numbers, where everything that prints would write into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _arm_seams() -> None:
    try:
        seams.arm_from_settings()
    except ValueError as fault:
        raise settings.SettingError(f"PN_FAIL_AT: {fault}", param="PN_FAIL_AT") from None


def _take_rest(parser: argparse.ArgumentParser, args: argparse.Namespace, rest: list[str]) -> None:
    """argparse gives up on positional words that stand behind a flag; they join the others here."""
    words = [w for w in rest if not w.startswith("-") or w == "-"]
    if len(words) < len(rest) or (words and not hasattr(args, "words")):
        model = "; a model goes behind --model" if words and args.command == "serve" else ""
        raise common.UsageError(f"unrecognized arguments: {' '.join(rest)}{model} (see pantheon {args.command} --help)")
    if words:
        args.words = [*args.words, *words]


def _say_internal(fault: Exception, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    last = traceback.extract_tb(fault.__traceback__)[-1]
    where = f"{os.path.basename(last.filename)}:{last.lineno}"
    common.say_error(f"internal error: {type(fault).__name__}: {fault} ({where}; --debug shows more)")
