"""Speed of the cpu executor: tokens per second on a GGUF file, time by phase, and every product kernel alone.

    python tools/bench_cpu.py MODEL.gguf [--threads 1,2] [--profile]
    python tools/bench_cpu.py --kernels [Q4_1 Q6_K …]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from pantheon.accel.cpu.executor import CpuExecutor
from pantheon.accel.cpu.file_blocks import FILE_BLOCK
from pantheon.accel.cpu.layouts import FLOATS, KINDS
from pantheon.accel.cpu.runner import CpuRunner
from pantheon.accel.executor import Columns, RawTensor
from pantheon.engine.load import GGUFWeights, plan_of
from pantheon.formats.gguf import open_gguf
from pantheon.plan.buffers import Matrix
from pantheon.plan.builder import PlanBuilder
from pantheon.plan.ops import Embed, MatMul
from pantheon.plan.state_spec import KVType, StateSpec

PROMPT, CHUNK = 512, 128


def median_s(work: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


@contextmanager
def model(path: str, threads: int) -> Iterator[CpuRunner]:
    """A runner of the file, with its load and warm-up times printed."""
    with open_gguf(path) as file:
        plan = plan_of(file)
        start = time.perf_counter()
        runner = CpuExecutor(threads).load(plan, GGUFWeights(file), n_ctx=2048, kv_type=KVType.F16)
        loaded = time.perf_counter()
        runner.warm_up()
        print(f"threads {threads}: load {loaded - start:.2f} s, kernels {time.perf_counter() - loaded:.2f} s")
        try:
            yield runner
        finally:
            runner.close()


def prefill(runner: CpuRunner) -> float:
    """Tokens per second over a prompt of PROMPT tokens in chunks of CHUNK."""
    state = runner.new_state(1, 2048)
    tokens = np.arange(PROMPT) * 7919 % runner.plan.n_vocab

    def work() -> None:
        for i in range(0, PROMPT, CHUNK):
            runner.forward(state, Columns.of_slot(tokens[i : i + CHUNK].tolist(), i, wanted="last"))

    return PROMPT / median_s(work, 3)


def decode(runner: CpuRunner, slots: int, position: int) -> float:
    """Tokens per second of all slots together, at a position."""
    state = runner.new_state(slots, 2048)
    every = np.arange(slots, dtype=np.int32)
    columns = Columns(every + 5, every, np.full(slots, position, np.int32), every)
    return slots / median_s(lambda: runner.forward(state, columns), 40)


def bench_model(path: str, threads: list[int], profile: bool) -> None:
    """Prefill and decode for each thread count; time by phase on one thread."""
    for n in threads:
        with model(path, n) as runner:
            at = [f"{position}: {decode(runner, 1, position):.0f}" for position in (64, 1024, 2000)]
            batched = [f"{slots}: {decode(runner, slots, 64):.0f}" for slots in (2, 4, 8)]
            print(f"  prefill {prefill(runner):.0f} tok/s; decode by position {', '.join(at)}; "
                  f"by slots {', '.join(batched)} tok/s")  # fmt: skip
    if profile:
        with model(path, 1) as runner:
            for n, position in ((1, 256), (CHUNK, 256)):
                print_profile(runner, n, position)


def print_profile(runner: CpuRunner, n: int, position: int) -> None:
    """Time by kind of phase of one forward of n columns."""
    total: dict[str, float] = {}
    columns = Columns.of_slot(list(range(n)), position)
    for what, seconds in runner.profile(runner.new_state(1, 2048), columns):
        total[what] = total.get(what, 0.0) + seconds
    whole = sum(total.values())
    print(f"{n} columns from {position}: {whole * 1e3:.2f} ms")
    for what, seconds in sorted(total.items(), key=lambda item: -item[1]):
        print(f"  {100 * seconds / whole:5.1f} %  {seconds * 1e3:8.3f} ms  {what}")


class _One:
    """A source of a small F32 table and one matrix of random blocks."""

    def __init__(self, type_name: str, rows: int, cols: int) -> None:
        values, nbytes = FILE_BLOCK[type_name]
        data = np.random.default_rng(0).integers(0, 60, rows * cols // values * nbytes, dtype=np.uint8)
        self._tensors = {
            "table": RawTensor("table", "F32", (rows, cols), np.ones(rows * cols, np.float32).view(np.uint8)),
            "w": RawTensor("w", type_name, (rows, cols), data),
        }

    def tensor(self, name: str) -> RawTensor:
        return self._tensors[name]

    def release(self, name: str) -> None:
        pass


def kernel_times(type_name: str, rows: int, cols: int, widths: tuple[int, ...]) -> tuple[float, list[float]]:
    """(packed bytes, seconds of the product for each number of columns) on one thread."""
    build = PlanBuilder()
    x = build.buffer("x", cols)
    build.add(Embed(Matrix("table", rows, cols), x))
    head_in = build.begin_head(x)
    logits = build.buffer("logits", rows)
    build.add(MatMul(Matrix("w", rows, cols), head_in, logits))
    plan = build.finish("kernel", rows, 256, logits, StateSpec(()))
    runner = CpuExecutor(1).load(plan, _One(type_name, rows, cols), n_ctx=256, kv_type=KVType.F16)
    state = runner.new_state(1, 256)
    times = [runner.profile(state, Columns.of_slot([0] * n, 0, wanted="all"), 9)[-1][1] for n in widths]
    nbytes = runner.memory()["weights"] - rows * cols * 4
    runner.close()
    return nbytes, times


def bench_kernels(names: list[str]) -> None:
    """GB/s of weights for one column, out of memory and out of the cache; GMAC/s for 4 and 64 columns."""
    print(f"{'type':8} {'GB/s memory':>12} {'GB/s cache':>11} {'GMAC/s 1':>9} {'2':>6} {'4':>6} {'64':>6}")
    for name in names or [*KINDS, *FLOATS]:
        big, (slow,) = kernel_times(name, 32768, 2048, (1,))
        small, times = kernel_times(name, 512, 1024, (1, 2, 4, 64))
        rates = [512 * 1024 * n / t / 1e9 for n, t in zip((1, 2, 4, 64), times, strict=True)]
        cells = " ".join(f"{r:6.1f}" for r in rates[1:])
        print(f"{name:8} {big / slow / 1e9:12.1f} {small / times[0] / 1e9:11.1f} {rates[0]:9.1f} {cells}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="a model file, or weight types with --kernels")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    if args.kernels:
        bench_kernels(args.names)
    elif len(args.names) == 1:
        bench_model(args.names[0], [int(n) for n in args.threads.split(",")], args.profile)
    else:
        parser.error("name one model file")


if __name__ == "__main__":
    main()
