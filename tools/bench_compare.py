"""Side by side with llama.cpp: the tables of docs/performance.md, on this machine.

    python -m tools.bench_compare [MODEL.gguf …] [--tables engine,http,busy] [--rounds N]

Both sides load the same file once, each in a process of its own, and take turns (A B A B); a ratio is that of two
neighbouring turns.  Prints Markdown.  `make bench` installs llama-cpp-python first and then runs this.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from pantheon.commands.bench import markdown, whole_list
from pantheon.commands.bench_runs import Workload
from pantheon.commands.common import whole
from tools.bench_driver import Peer, PeerError, Quiet, Row, compare_beside_burners, compare_engines
from tools.bench_http import compare_servers, find_llama_server, our_server, their_server

TABLES = ("engine", "http", "busy")
TITLES = {
    "engine": "Engine alone",
    "http": "Through HTTP, one stream",
    "busy": "Beside busy neighbours",
}


def chosen(names: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: some of the names, with commas between."""

    def parse(text: str) -> list[str]:
        given = text.split(",")
        for name in given:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
        return given

    return parse


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(
        prog="bench_compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("models", nargs="*", metavar="MODEL", help="GGUF files (default: SmolLM2)")
    flags.add_argument("--tables", type=chosen(TABLES), default=list(TABLES), metavar="T,…", help="which tables: engine, http, busy (default: all)")  # fmt: skip # noqa: E501
    flags.add_argument("--rounds", type=whole(1), default=5, metavar="N", help="turns of each side (default: 5)")
    flags.add_argument("--threads", type=whole(1), metavar="N", help="threads of each side (default: one for each physical core)")  # fmt: skip # noqa: E501
    flags.add_argument("-p", "--n-prompt", type=whole(0), default=512, metavar="N", help="prompt tokens; 0 skips (default: 512)")  # fmt: skip # noqa: E501
    flags.add_argument("-n", "--n-gen", type=whole(2), default=128, metavar="N", help="generated tokens (default: 128)")
    flags.add_argument("--batch", type=whole_list(1), default=[1, 8], metavar="K,…", help="sequences decoded in one forward (default: 1,8)")  # fmt: skip # noqa: E501
    flags.add_argument("-d", "--depth", type=whole_list(0), default=[0, 4096], metavar="N,…", help="positions to decode at, one sequence (default: 0,4096)")  # fmt: skip # noqa: E501
    flags.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server for the http table (default: $LLAMA_SERVER; without one it is skipped)")  # fmt: skip # noqa: E501
    flags.add_argument("--json", action="store_true", help="print JSON")
    return flags


def workloads(args: argparse.Namespace) -> list[Workload]:
    """The rows of the engine table."""
    prompt = [Workload("pp", args.n_prompt)] if args.n_prompt else []
    batched = [Workload("tg", args.n_gen, 0, k) for k in args.batch]
    return prompt + batched + [Workload("tg", args.n_gen, depth) for depth in args.depth if depth]


def peers(stack: ExitStack, model: str, threads: int) -> tuple[Peer, Peer]:
    """Ours and theirs, loaded."""
    words = [sys.executable, "-m", "tools.bench_peer"]
    ours, theirs = (stack.enter_context(closing(Peer([*words, name, model, str(threads)]))) for name in ENGINES)
    return ours, theirs


ENGINES = ("pantheon", "llama.cpp")


class Report:
    """The tables as they grow: rows of each, what was skipped, the versions met and how quiet it was."""

    def __init__(self, args: argparse.Namespace, threads: int) -> None:
        self.args, self.threads = args, threads
        self.rows: dict[str, list[Row]] = {}
        self.notes: list[str] = []
        self.versions: dict[str, str] = {}
        self.quiet = Quiet()

    def run(self, models: Sequence[str]) -> None:
        """Measure every table on every model."""
        for table in self.args.tables:
            for path in models:
                for row in getattr(self, f"_{table}")(path, Path(path).stem):
                    self.rows.setdefault(table, []).append(row)
                    print(f"{row.model}: {row.what}: {' | '.join(row.cells()[2:])}", file=sys.stderr, flush=True)

    def _engine(self, path: str, name: str) -> Iterator[Row]:
        with ExitStack() as stack:
            sides = self._met(*peers(stack, path, self.threads))
            yield from compare_engines(name, *sides, workloads(self.args), self.args.rounds, self.quiet)

    def _busy(self, path: str, name: str) -> Iterator[Row]:
        with ExitStack() as stack:
            sides = self._met(*peers(stack, path, self.threads))
            yield from compare_beside_burners(name, *sides, self.args.n_gen, self.args.rounds, self.quiet)

    def _http(self, path: str, name: str) -> Iterator[Row]:
        program = find_llama_server(self.args.llama_server)
        if program is None:
            note = "http: skipped, there is no llama-server (--llama-server PATH or LLAMA_SERVER; not in the wheel)"
            self.notes += [note] if note not in self.notes else []
            return
        with ExitStack() as stack:
            ours = stack.enter_context(closing(our_server(path, self.threads)))
            theirs = stack.enter_context(closing(their_server(program, path, self.threads)))
            yield from compare_servers(name, ours, theirs, self.args.n_gen, self.args.rounds, self.quiet)

    def _met(self, *sides: Peer) -> tuple[Peer, ...]:
        self.versions |= {side.about["engine"]: side.about["version"] for side in sides}
        return sides

    def conditions(self) -> list[str]:
        """What the figures depend on, as Markdown list items."""
        versions = ", ".join(f"{engine} {version}" for engine, version in self.versions.items())
        return [
            f"- {datetime.date.today()}, {cpu_name()}, {self.threads} threads each, Linux {platform.release()}, "
            f"Python {platform.python_version()}",
            *([f"- {versions}"] if versions else []),
            f"- {self.args.rounds} rounds in turns; median (min–max); ratio: how many times better pantheon is, "
            "round by round",
            f"- while a side was timed, other processes used at most {self.quiet.others:.2f} cores and the side that "
            f"waited {self.quiet.waiting:.2f}",
            *(f"- {note}" for note in self.notes),
        ]

    def markdown(self) -> str:
        """Every table with its conditions."""
        parts = ["\n".join(self.conditions())]
        for table, rows in self.rows.items():
            theirs = "llama-server" if table == "http" else "llama.cpp"
            head = ("model", "what", "pantheon", theirs, "ratio", "min", "max")
            lines = markdown(head, [row.cells() for row in rows], right={2, 3, 4, 5, 6})
            parts.append(f"### {TITLES[table]}\n\n" + "\n".join(lines))
        return "\n\n".join(parts)

    def json(self) -> dict[str, Any]:
        """The same, with every round."""
        return {
            "conditions": self.conditions(),
            "versions": self.versions,
            "threads": self.threads,
            "others_cores": self.quiet.others,
            "waiting_cores": self.quiet.waiting,
            "tables": {table: [row.summary() for row in rows] for table, rows in self.rows.items()},
        }


def cpu_name() -> str:
    """The processor's name as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> int:
    """Measure and print; 1 when there is nothing to compare with."""
    from pantheon.accel.cpu.cores import usable_cores
    from pantheon.engine.default_model import need_default_model
    from pantheon.errors import PantheonError

    args = parser().parse_args()
    try:
        models = args.models or [str(need_default_model())]
        if set(args.tables) & {"engine", "busy"} and importlib.util.find_spec("llama_cpp") is None:
            raise PeerError("there is no llama_cpp here; `make bench` installs llama-cpp-python")
        for path in models:
            if not Path(path).is_file():
                raise PeerError(f"{path}: no such file")
        report = Report(args, args.threads or usable_cores())
        report.run(models)
    except (PeerError, PantheonError) as fault:
        print(f"bench: {fault}", file=sys.stderr)
        return 1
    print(json.dumps(report.json()) if args.json else report.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
