"""`pantheon bench`: tokens per second of reading a prompt (pp) and of generating (tg), from an empty context."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pantheon import seams
from pantheon.commands import common

if TYPE_CHECKING:
    from pantheon.engine.model import Model


@dataclass(frozen=True)
class Result:
    """One test: `n` tokens, `runs` the tokens per second of each repetition."""

    test: str
    n: int
    runs: tuple[float, ...]

    def summary(self) -> dict[str, Any]:
        """JSON-ready, with min, median and max."""
        spread = {"min": min(self.runs), "median": statistics.median(self.runs), "max": max(self.runs)}
        return {**asdict(self), **spread}


def add_parser(subparsers: Any) -> None:
    """`pantheon bench [MODEL] …`."""
    parser = subparsers.add_parser(
        "bench",
        usage="pantheon bench [MODEL] [flags]",
        help="measure tokens per second",
        description="Measure tokens per second of reading a prompt (pp) and of generating (tg).",
    )
    common.add_model_flags(parser, default_ctx="what the test needs")
    parser.add_argument("-p", "--n-prompt", type=common.whole(0), default=512, metavar="N", help="prompt tokens; 0 skips (default: 512)")  # fmt: skip # noqa: E501
    parser.add_argument("-n", "--n-gen", type=common.whole(0), default=128, metavar="N", help="generated tokens; 0 skips (default: 128)")  # fmt: skip # noqa: E501
    parser.add_argument("-r", "--reps", type=common.whole(1), default=5, metavar="N", help="repetitions (default: 5)")
    parser.add_argument("--chunk", type=common.whole(1), metavar="N", help="columns of one prefill forward (default: 128, as the server does)")  # fmt: skip # noqa: E501
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Load, warm up, measure, print."""
    longest = max(args.n_prompt, args.n_gen)
    if longest == 0:
        raise common.UsageError("nothing to measure: -p and -n are both 0")
    if args.ctx is not None and args.ctx < longest:
        raise common.UsageError(f"--ctx {args.ctx} is too small for {longest} tokens")
    args.ctx = args.ctx or max(longest, 2)
    path = common.pick_model(args.words)
    with common.load(args, path) as model:
        results = measure(model, args.n_prompt, args.n_gen, args.reps, args.chunk)
        size_bytes = model.memory().get("weights", 0)
        if args.json:
            report = {
                "model": model.name,
                "architecture": model.architecture,
                "weights_bytes": size_bytes,
                "executor": args.executor,
                "threads": args.threads,
                "results": [result.summary() for result in results],
            }
            print(json.dumps(report))
        else:
            threads = "auto" if args.threads is None else str(args.threads)
            print("\n".join(table(f"{model.name} ({common.human_bytes(size_bytes)})", threads, results)))
    return 0


def measure(model: Model, n_prompt: int, n_gen: int, reps: int, chunk: int | None = None) -> list[Result]:
    """Run the tests; each repetition begins from an empty context, after one run that is not counted."""
    from pantheon.engine.generate import PREFILL_CHUNK

    state = model.new_state()
    ids = [(7919 * i + 13) % model.n_vocab for i in range(max(n_prompt, n_gen))]
    step = min(chunk or PREFILL_CHUNK, model.runner.max_columns)
    tests = [("pp", n_prompt, step), ("tg", n_gen, 1)]
    results = []
    for name, n, columns in tests:
        if n:
            runs = _repeat(lambda n=n, columns=columns: _forwards(model, state, ids[:n], columns), reps)  # type: ignore[misc]
            results.append(Result(f"{name}{n}", n, tuple(round(n / seconds, 2) for seconds in runs)))
    return results


def _forwards(model: Model, state: Any, ids: Sequence[int], columns: int) -> None:
    """Run `ids` through slot 0 in forwards of so many columns; the last of each gives logits, as decoding does."""
    from pantheon.accel.executor import Columns

    state.reset(0)
    for first in range(0, len(ids), columns):
        part = ids[first : first + columns]
        last = columns == 1 or first + columns >= len(ids)
        model.forward(state, Columns.of_slot(part, first, wanted="last" if last else "none"))


def _repeat(work: Callable[[], None], reps: int) -> list[float]:
    """Seconds of each repetition; never 0."""
    now = seams.SYSTEM_CLOCK.monotonic
    work()
    seconds = []
    for _ in range(reps):
        started = now()
        work()
        seconds.append(max(now() - started, 1e-9))
        if sys.stderr.isatty():
            print(".", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return seconds


def table(model: str, threads: str, results: Sequence[Result]) -> list[str]:
    """A table that reads as text and as Markdown."""
    head = ("model", "threads", "test", "t/s min", "median", "max")
    rows = [
        (model, threads, r.test, *(f"{v:.2f}" for v in (min(r.runs), statistics.median(r.runs), max(r.runs))))
        for r in results
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    right = {1, 3, 4, 5}

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i in right else "-") for i, w in enumerate(widths)) + "|"
    return [line(head), rule, *(line(row) for row in rows)]
