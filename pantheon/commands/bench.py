"""`pantheon bench`: tokens per second of reading a prompt (pp) and of generating (tg), and how near the roof is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pantheon.commands import common

if TYPE_CHECKING:
    from pantheon.commands.bench_runs import Result, Workload
    from pantheon.commands.roofline import Memory, Roof
    from pantheon.engine.model import Model


def whole_list(low: int) -> Callable[[str], list[int]]:
    """An argparse type: whole numbers from `low` up with commas between, each once."""

    def parse(text: str) -> list[int]:
        return list(dict.fromkeys(common.whole(low)(part) for part in text.split(",")))

    return parse


def add_parser(subparsers: Any) -> None:
    """`pantheon bench [MODEL] …`."""
    parser = subparsers.add_parser(
        "bench",
        usage="pantheon bench [MODEL] [flags]",
        help="measure tokens per second",
        description="Measure tokens per second of reading a prompt (pp) and of generating (tg), without sampling.",
    )
    common.add_model_flags(parser, default_ctx="what the tests need")
    parser.add_argument("-p", "--n-prompt", type=common.whole(0), default=512, metavar="N", help="prompt tokens; 0 skips (default: 512)")  # fmt: skip # noqa: E501
    parser.add_argument("-n", "--n-gen", type=common.whole(0), default=128, metavar="N", help="generated tokens; 0 skips (default: 128)")  # fmt: skip # noqa: E501
    parser.add_argument("-d", "--depth", type=whole_list(0), default=[0], metavar="N,…", help="tokens that are in the context before a test (default: 0)")  # fmt: skip # noqa: E501
    parser.add_argument("--batch", type=whole_list(1), default=[1], metavar="K,…", help="generate K sequences in one forward; t/s of all together (default: 1)")  # fmt: skip # noqa: E501
    parser.add_argument("-r", "--reps", type=common.whole(1), default=5, metavar="N", help="repetitions (default: 5)")
    parser.add_argument("--chunk", type=common.whole(1), metavar="N", help="columns of one prefill forward (default: 128, as the server does)")  # fmt: skip # noqa: E501
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Load, warm up, measure, print."""
    from pantheon.commands import bench_runs

    tests = bench_runs.plan_tests(args.n_prompt, args.n_gen, args.depth, args.batch)
    if not tests:
        raise common.UsageError("nothing to measure: -p and -n are both 0")
    longest = bench_runs.positions(tests)
    if args.ctx is not None and args.ctx < longest:
        raise common.UsageError(f"--ctx {args.ctx} is too small for {longest} tokens")
    args.ctx = args.ctx or max(longest, 2)
    with common.load(args, common.pick_model(args.words)) as model:
        results = measure(model, tests, args.reps, args.chunk)
        memory, roofs = _roofs(model, results)
        if args.json:
            print(json.dumps(report(model, args.executor, results, memory, roofs)))
        else:
            label = f"{model.name} ({common.human_bytes(model.memory().get('weights', 0))})"
            print("\n".join(table(label, threads_of(model), results, roofs)))
            if memory is not None:
                print(f"\n{roofline(model, memory)}")
    return 0


def threads_of(model: Model) -> int | None:
    """The threads that compute; None when the executor has none of its own."""
    threads: int | None = getattr(model.runner, "threads", None)
    return threads


def measure(model: Model, tests: Sequence[Workload], reps: int, chunk: int | None = None) -> list[Result]:
    """Run the tests; each after one run that is not counted."""
    from pantheon.commands.bench_runs import Bench, Result, rate

    results = []
    for test in tests:
        bench = Bench(model, test, chunk)
        bench.once()
        runs = [rate(test, bench.once()) for _ in _dots(reps)]
        results.append(Result(test, tuple(runs)))
    return results


def _dots(n: int) -> Iterator[int]:
    """range(n), with a dot for each on a terminal."""
    for i in range(n):
        yield i
        if sys.stderr.isatty():
            print(".", end="\n" if i == n - 1 else "", file=sys.stderr, flush=True)


def _roofs(model: Model, results: Sequence[Result]) -> tuple[Memory | None, list[Roof | None]]:
    """Measure memory when there is a decode test and the executor says what it reads."""
    from pantheon.commands import roofline

    step = roofline.step_bytes(model)
    memory = roofline.measure_memory(model.runner) if step and any(r.test.kind == "tg" for r in results) else None
    if memory is None:
        return None, [None] * len(results)
    state, kv_type = model.plan.state, model.runner.kv_type
    return memory, [roofline.roof(result, step, state, kv_type, memory) for result in results]


def report(
    model: Model, executor: str, results: Sequence[Result], memory: Memory | None, roofs: Sequence[Roof | None]
) -> dict[str, Any]:
    """The JSON document."""
    from dataclasses import asdict

    rows = [
        {**result.summary(), "roof": asdict(over) if over else None}
        for result, over in zip(results, roofs, strict=True)
    ]
    return {
        "model": model.name,
        "architecture": model.architecture,
        "weights_bytes": model.memory().get("weights", 0),
        "executor": executor,
        "threads": threads_of(model),
        "kv_type": model.runner.kv_type.value,
        "memory": memory.summary() if memory else None,
        "results": rows,
    }


def roofline(model: Model, memory: Memory) -> str:
    """One line under the table: what `of roof` means."""
    from pantheon.commands.roofline import kv_read_bytes, step_bytes

    kv = kv_read_bytes(model.plan.state, model.runner.kv_type, 1)
    rate = f"{memory.bytes_per_s / 1e9:.1f} GB/s" + (f" with {memory.threads} threads" if memory.threads > 1 else "")
    who = "memory reads" if memory.what == "read" else "the die copies"
    return (
        f"roof: {who} {rate} (best of {len(memory.rates)} over {common.human_bytes(memory.buffer_bytes)}); "
        f"a step reads {step_bytes(model) / 1e6:.1f} MB of weights and {kv / 1e3:.1f} kB of KV a position."
    )


def table(model: str, threads: int | None, results: Sequence[Result], roofs: Sequence[Roof | None]) -> list[str]:
    """A table that reads as text and as Markdown."""
    head = ("model", "threads", "test", "t/s min", "median", "max", "MB/token", "of roof")
    rows = []
    for result, over in zip(results, roofs, strict=True):
        speeds = (f"{v:.2f}" for v in (min(result.runs), result.median, max(result.runs)))
        bound = (f"{over.bytes_per_token / 1e6:.1f}", f"{100 * over.fraction:.0f} %") if over else ("", "")
        rows.append((model, "-" if threads is None else str(threads), result.test.name, *speeds, *bound))
    return markdown(head, rows, right={1, 3, 4, 5, 6, 7})


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """Lines of an aligned Markdown table; columns in `right` are numbers."""
    widths = [max(3, *(len(row[i]) for row in [head, *rows])) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i in right else "-") for i, w in enumerate(widths)) + "|"
    return [line(head), rule, *(line(row) for row in rows)]
