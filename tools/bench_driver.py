"""Two engines in turns: peers over pipes, rounds, ratios.  Knows no engine and prints nothing."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from pantheon.commands.bench_runs import Workload, spread

#: peers import `tools` from here
ROOT = Path(__file__).resolve().parent.parent
#: no request takes longer; loading with every kernel to compile, or a depth of many thousand tokens, are the longest
PATIENCE_S = 900.0
#: how long a side is given to fall asleep before the other is timed
SETTLE_S = 0.05


class PeerError(Exception):
    """A peer could not do what it was asked: one line that says why."""


class Peer:
    """A process that speaks the protocol of `bench_peer`."""

    def __init__(self, name: str, command: Sequence[str], *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self.about: dict[str, Any] = {"engine": name}
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        )
        try:
            self.about = self._answer()
        except PeerError:
            self.close()
            raise

    def prepare(self, workload: Workload) -> None:
        """Fill a state and warm up."""
        self._ask({"do": "prepare", "workload": asdict(workload)})

    def run(self) -> list[float]:
        """Seconds of the prompt, or of each step, of what was prepared."""
        steps = self._ask({"do": "run"})["steps"]
        return [float(seconds) for seconds in steps]

    def cpu_s(self) -> float:
        """CPU seconds that the process has used."""
        used = psutil.Process(self._process.pid).cpu_times()
        return float(used.user + used.system)

    def close(self) -> None:
        """End of input, then five seconds to leave; idempotent."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise PeerError(f"{self.about['engine']} has ended") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        alarm = threading.Timer(self._patience_s, self._process.kill)
        alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        try:
            answer = json.loads(line)
        except ValueError:
            raise PeerError(f"{self.about['engine']} ended or said {line!r:.80}") from None
        if "error" in answer:
            raise PeerError(f"{self.about['engine']}: {answer['error']}")
        return dict(answer)


@dataclass
class Quiet:
    """How quiet the machine was while a side was timed; both in cores, the largest of all turns."""

    others: float = 0.0
    waiting: float = 0.0

    def note(self, wall_s: float, machine_s: float, side_s: float, waiting_s: float) -> None:
        """One turn: CPU seconds of the whole machine, of the side that ran, and of the one that waited."""
        # /proc counts in hundredths of a second: a short turn says nothing
        if wall_s >= 0.2:
            self.others = max(self.others, (machine_s - side_s - waiting_s) / wall_s)
            self.waiting = max(self.waiting, waiting_s / wall_s)


def _machine_s() -> float:
    """CPU seconds that all processes of this machine have used, and that a hypervisor took away."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0))


def take_turns(
    sides: Sequence[Any], rounds: int, quiet: Quiet, work: Callable[[Any], Any], settle_s: float = SETTLE_S
) -> list[list[Any]]:
    """[[what work(side) gave, round by round] for each side]; A B A B, never two at once."""
    given: list[list[Any]] = [[] for _ in sides]
    for _ in range(rounds):
        for mine, side in zip(given, sides, strict=True):
            time.sleep(settle_s)
            waiting = [other for other in sides if other is not side]
            began, machine, own = time.perf_counter(), _machine_s(), side.cpu_s()
            idle = sum(other.cpu_s() for other in waiting)
            mine.append(work(side))
            wall = time.perf_counter() - began
            quiet.note(wall, _machine_s() - machine, side.cpu_s() - own, sum(o.cpu_s() for o in waiting) - idle)
    return given


@dataclass(frozen=True)
class Row:
    """One line of a table: ours and theirs round by round; `less` when a smaller value is the better one."""

    model: str
    what: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    less: bool = False

    @property
    def ratios(self) -> tuple[float, ...]:
        """How many times better we are, in each round: neighbours in time, so that a slow minute hits both."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return tuple(theirs / ours if self.less else ours / theirs for ours, theirs in pairs)

    def summary(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **asdict(self),
            "ours_spread": spread(self.ours),
            "theirs_spread": spread(self.theirs),
            "ratio": spread(self.ratios),
        }

    def cells(self) -> tuple[str, ...]:
        """model, what, ours, theirs, ratio, min, max."""
        ratio = (f"{v:.2f}" for v in (statistics.median(self.ratios), min(self.ratios), max(self.ratios)))
        return self.model, self.what, _cell(self.ours), _cell(self.theirs), *ratio


def _cell(values: Sequence[float]) -> str:
    """`343 (330–351)`: the median, then the range."""

    def short(value: float) -> str:
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

    return f"{short(statistics.median(values))} ({short(min(values))}–{short(max(values))})"


def compare_engines(
    model: str, ours: Peer, theirs: Peer, workloads: Sequence[Workload], rounds: int, quiet: Quiet
) -> Iterator[Row]:
    """Tokens per second of each workload."""
    for workload in workloads:
        for side in (ours, theirs):
            side.prepare(workload)
        given = take_turns((ours, theirs), rounds, quiet, lambda side: sum(side.run()))
        mine, other = (tuple(workload.tokens / seconds for seconds in side) for side in given)
        yield Row(model, f"{workload.name}, tokens/s", mine, other)


def compare_beside_burners(
    model: str, ours: Peer, theirs: Peer, n_steps: int, rounds: int, quiet: Quiet, burners: Sequence[int] = (1, 2)
) -> Iterator[Row]:
    """Median decode step, quiet and beside so many processes that each burn a core, and the slowdown."""
    sides = (ours, theirs)
    for side in sides:
        side.prepare(Workload("tg", n_steps))
    steps: dict[int, list[list[float]]] = {k: [[], []] for k in (0, *burners)}
    for _ in range(rounds):
        for k, both in steps.items():
            with burning(k):
                # neighbours are no noise here: only the quiet turns are watched
                watch = Quiet() if k else quiet
                turn = take_turns(sides, 1, watch, lambda side: 1e3 * statistics.median(side.run()))
            for mine, (value,) in zip(both, turn, strict=True):
                mine.append(value)
    for k, both in steps.items():
        beside = f"beside {k} busy process{'es' * (k > 1)}" if k else "on a quiet machine"
        yield Row(model, f"median decode step {beside}, ms", tuple(both[0]), tuple(both[1]), less=True)
        if k:
            ours_slow, theirs_slow = (
                tuple(b / q for b, q in zip(both[i], steps[0][i], strict=True)) for i in (0, 1)
            )
            yield Row(model, f"that step ÷ the quiet one, {k} busy", ours_slow, theirs_slow, less=True)


@contextmanager
def burning(n: int) -> Iterator[None]:
    """n processes that do nothing but use a core each."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    processes = [subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=os.path.sep) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
