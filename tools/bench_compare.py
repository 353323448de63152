"""Side by side with llama.cpp: the tables of docs/performance.md, on this machine.

    python -m tools.bench_compare [MODEL.gguf …] [--tables engine,http,batch,mixed,busy] [--rounds N]

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pantheon.commands.bench import markdown, whole_list
from pantheon.commands.bench_runs import Workload
from pantheon.commands.common import whole
from tools.bench_batch import compare_crowds, our_crowd_server, their_crowd_server
from tools.bench_driver import Peer, PeerError, Quiet, Row, compare_beside_burners, compare_engines
from tools.bench_http import Server, compare_servers, find_llama_server, our_server, their_server, version_of
from tools.bench_peer import our_version

TABLES = ("engine", "http", "batch", "mixed", "busy")
TITLES = {
    "engine": "Engine alone",
    "http": "Through HTTP, one stream",
    "batch": "Eight at a time",
    "mixed": "Prompts in the forwards of those who decode, and in turns of their own",
    "busy": "Beside busy neighbours",
}
#: the head of the columns
SIDES = {"http": ("pantheon", "llama-server"), "batch": ("pantheon", "llama-server"), "mixed": ("mixed", "in turns")}
ENGINES = ("pantheon", "llama.cpp")


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
    flags.add_argument("--tables", type=chosen(TABLES), default=list(TABLES), metavar="T,…", help=f"which tables: {', '.join(TABLES)} (default: all)")  # fmt: skip # noqa: E501
    flags.add_argument("--rounds", type=whole(1), default=5, metavar="N", help="turns of each side (default: 5)")
    flags.add_argument("--threads", type=whole(1), metavar="N", help="threads of each side (default: one for each physical core)")  # fmt: skip # noqa: E501
    flags.add_argument("-p", "--n-prompt", type=whole(0), default=512, metavar="N", help="prompt tokens; 0 skips (default: 512)")  # fmt: skip # noqa: E501
    flags.add_argument("-n", "--n-gen", type=whole(2), default=128, metavar="N", help="generated tokens (default: 128)")
    flags.add_argument("--batch", type=whole_list(1), default=[1, 8], metavar="K,…", help="sequences decoded in one forward (default: 1,8)")  # fmt: skip # noqa: E501
    flags.add_argument("-d", "--depth", type=whole_list(0), default=[0, 4096], metavar="N,…", help="positions to decode at, one sequence (default: 0,4096)")  # fmt: skip # noqa: E501
    flags.add_argument("--users", type=whole(2), default=8, metavar="K", help="streams at a time (default: 8)")
    flags.add_argument("--join", type=whole(0), default=8000, metavar="N", help="tokens of the prompt that joins decoders; 0 skips (default: 8000)")  # fmt: skip # noqa: E501
    flags.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server for the tables http and batch (default: $LLAMA_SERVER; without one they are skipped)")  # fmt: skip # noqa: E501
    flags.add_argument("--write", metavar="PAGE", help="also put the tables into their places in this Markdown page")
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
    ours, theirs = (stack.enter_context(closing(Peer(name, [*words, name, model, str(threads)]))) for name in ENGINES)
    return ours, theirs


@dataclass
class Table:
    """One table as it grows: rows, versions met, how quiet it was."""

    title: str
    sides: tuple[str, str]
    rows: list[Row] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    quiet: Quiet = field(default_factory=Quiet)

    def markdown(self, rounds: int, threads: int) -> str:
        """The rows and what they depend on."""
        head = ("model", "what", *self.sides, "ratio", "min", "max")
        lines = markdown(head, [row.cells() for row in self.rows], right={2, 3, 4, 5, 6})
        return "\n".join([*lines, "", *self.conditions(rounds, threads)])

    def conditions(self, rounds: int, threads: int) -> list[str]:
        """Markdown list items."""
        return [
            f"- {datetime.date.today()}; {cpu_name()}, {threads} threads each; Linux {platform.release()}, "
            f"Python {platform.python_version()}",
            "- " + ", ".join(f"{engine} {version}" for engine, version in self.versions.items()),
            f"- rounds: {rounds}, in turns; median (min–max); ratio: how many times better {self.sides[0]} is, "
            "round by round",
            f"- while a side was timed, other processes used at most {self.quiet.others:.2f} cores, and the side that "
            f"waited {self.quiet.waiting:.2f}",
        ]


class Report:
    """All tables of a run."""

    def __init__(self, args: argparse.Namespace, threads: int) -> None:
        self.args, self.threads = args, threads
        self.tables: dict[str, Table] = {}
        self.notes: list[str] = []

    def run(self, models: Sequence[str]) -> None:
        """Measure every table on every model."""
        for name in self.args.tables:
            table = Table(TITLES[name], SIDES.get(name, ENGINES))
            table.versions["pantheon"] = our_version()
            for path in models:
                for row in getattr(self, f"_{name}")(table, path, Path(path).stem):
                    table.rows.append(row)
                    # a table that was begun is shown, whatever ends the run
                    self.tables[name] = table
                    cells = " | ".join(row.cells()[2:])
                    others = f"others used up to {table.quiet.others:.2f} cores"
                    print(f"{row.model}: {row.what}: {cells} ({others})", file=sys.stderr, flush=True)

    def _engine(self, table: Table, path: str, model: str) -> Iterator[Row]:
        with ExitStack() as stack:
            sides = self._peers(stack, table, path)
            yield from compare_engines(model, *sides, workloads(self.args), self.args.rounds, table.quiet)

    def _busy(self, table: Table, path: str, model: str) -> Iterator[Row]:
        with ExitStack() as stack:
            sides = self._peers(stack, table, path)
            steps = max(8, self.args.n_gen // 4)
            yield from compare_beside_burners(model, *sides, steps, self.args.rounds, table.quiet)

    def _http(self, table: Table, path: str, model: str) -> Iterator[Row]:
        program = self._llama_server("http", table)
        if program is None:
            return
        with ExitStack() as stack:
            ours = stack.enter_context(closing(our_server(path, self.threads)))
            theirs = stack.enter_context(closing(their_server(program, path, self.threads)))
            yield from compare_servers(model, ours, theirs, self.args.n_gen, self.args.rounds, table.quiet)

    def _batch(self, table: Table, path: str, model: str) -> Iterator[Row]:
        program, k = self._llama_server("batch", table), self.args.users
        if program is None:
            return
        with ExitStack() as stack:
            ours = stack.enter_context(closing(our_crowd_server(path, self.threads, k)))
            theirs = stack.enter_context(closing(their_crowd_server(program, path, self.threads, k)))
            yield from self._crowds(model, ours, theirs, table)

    def _mixed(self, table: Table, path: str, model: str) -> Iterator[Row]:
        with ExitStack() as stack:
            on, off = (
                stack.enter_context(closing(our_crowd_server(path, self.threads, self.args.users, mixed)))
                for mixed in (True, False)
            )
            yield from self._crowds(model, on, off, table)

    def _crowds(self, model: str, ours: Server, theirs: Server, table: Table) -> Iterator[Row]:
        args = self.args
        return compare_crowds(model, ours, theirs, args.users, args.n_gen, args.join, args.rounds, table.quiet)

    def _llama_server(self, name: str, table: Table) -> str | None:
        program = find_llama_server(self.args.llama_server)
        if program is None:
            self.notes.append(f"{name}: skipped, there is no llama-server (--llama-server PATH or LLAMA_SERVER)")
            self.notes = list(dict.fromkeys(self.notes))
        else:
            table.versions["llama-server"] = version_of(program)
        return program

    def _peers(self, stack: ExitStack, table: Table, path: str) -> tuple[Peer, Peer]:
        ours, theirs = peers(stack, path, self.threads)
        table.versions |= {side.about["engine"]: side.about["version"] for side in (ours, theirs)}
        return ours, theirs

    def blocks(self) -> dict[str, str]:
        """Table name -> Markdown."""
        return {name: table.markdown(self.args.rounds, self.threads) for name, table in self.tables.items()}

    def markdown(self) -> str:
        """Every table under its title, then what was left out."""
        parts = [f"### {self.tables[name].title}\n\n{block}" for name, block in self.blocks().items()]
        return "\n\n".join([*parts, *self.notes])

    def json(self) -> dict[str, Any]:
        """The same, with every round."""
        return {
            "threads": self.threads,
            "rounds": self.args.rounds,
            "notes": self.notes,
            "tables": {
                name: {
                    "versions": table.versions,
                    "others_cores": table.quiet.others,
                    "waiting_cores": table.quiet.waiting,
                    "rows": [row.summary() for row in table.rows],
                }
                for name, table in self.tables.items()
            },
        }


def put_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """The page with the text between `<!-- bench NAME -->` and `<!-- bench end -->` replaced.  Raises PeerError for a
    table that the page has no place for."""
    for name, block in blocks.items():
        start, end = f"<!-- bench {name} -->", "<!-- bench end -->"
        before, found, rest = page.partition(start)
        if not found or end not in rest:
            raise PeerError(f"the page has no {start} … {end}")
        page = f"{before}{start}\n\n{block}\n\n{end}{rest.partition(end)[2]}"
    return page


def cpu_name() -> str:
    """The processor's name as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> int:
    """Measure and print; 1 when there is nothing to compare with, 130 when Ctrl-C cut it short."""
    from pantheon.accel.cpu.cores import usable_cores
    from pantheon.engine.default_model import need_default_model
    from pantheon.errors import PantheonError

    args = parser().parse_args()
    try:
        models = [str(Path(path).absolute()) for path in args.models] or [str(need_default_model())]
        if set(args.tables) & {"engine", "busy"} and importlib.util.find_spec("llama_cpp") is None:
            raise PeerError("there is no llama_cpp here; `make bench` installs llama-cpp-python")
        for path in filter(lambda path: not Path(path).is_file(), [*models, *([args.write] if args.write else [])]):
            raise PeerError(f"{path}: no such file")
        if args.write:  # a page without places is found out before minutes are spent
            put_blocks(Path(args.write).read_text("utf-8"), dict.fromkeys(args.tables, ""))
        report, code = Report(args, args.threads or usable_cores()), 0
        try:
            report.run(models)
        except KeyboardInterrupt:
            code, args.write = 130, None
            report.notes.append("interrupted: rows are missing")
        if args.write:
            page = Path(args.write)
            page.write_text(put_blocks(page.read_text("utf-8"), report.blocks()), "utf-8")
    except (PeerError, PantheonError) as fault:
        print(f"bench: {fault}", file=sys.stderr)
        return 1
    print(json.dumps(report.json()) if args.json else report.markdown())
    return code


if __name__ == "__main__":
    sys.exit(main())
