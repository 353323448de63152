"""The table of CUDA kernels in docs/reference/cuda-kernels.md: what the real compiler makes of each, without a GPU.

    python -m tools.cuda_table [--all] [MODULE …]    compile what changed (or everything) and write the page
    python -m tools.cuda_table --check               is the page current?  compiles one kernel of each module again

Every module of pantheon/accel/cuda with a function `kernels()` is in it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pantheon.commands.bench import markdown
from tools import check_layers
from tools.cuda_compile import PACKAGE, TARGETS, Build, Compile, compilers, compilers_at_work, kernels_of, targets

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "cuda-kernels.md"
#: modules that change nothing of what is compiled
ASIDE = {"accel.cuda.kernel_store", "accel.cuda.simulator"}
#: registers of a multiprocessor, on each target
REGISTERS = 65536
HEAD = ("kernel", "threads", "tight", "registers", "shared", "stack", "spilled")
TITLE = """# CUDA kernels

What the compiler makes of each kernel of `pantheon/accel/cuda/`, without a GPU: `make cuda-table` writes this page, and
`tests/test_cuda_table.py` holds it to the code. [The CUDA executor](../architecture/cuda.md) says what they do.

`threads` is the shape of a block. Registers are those of a thread; shared memory, stack and spilled registers are in
bytes, shared memory of a block, the others of a thread. Three figures are those of sm_70, sm_80 and sm_90, one is that
of all of them; `–`: the kernel uses instructions that are newer. A `tight` kernel reads weights or the KV cache: it
may have neither stack nor spills."""


@dataclass(frozen=True)
class Row:
    """One kernel: its name, the shape of a block, whether it may not spill, and its builds by target."""

    name: str
    threads: str
    tight: bool
    builds: dict[int, Build]

    def cells(self) -> tuple[str, ...]:
        """As the page has them."""
        figures = (self._figure(what) for what in ("registers", "shared", "stack", "spilled"))
        return f"`{self.name}`", self.threads, "yes" if self.tight else "", *figures

    def _figure(self, what: str) -> str:
        values = [str(getattr(self.builds[sm], what)) if sm in self.builds else "–" for sm in TARGETS]
        return values[0] if len(set(values)) == 1 else " / ".join(values)


@dataclass(frozen=True)
class Section:
    """The kernels of one module and the digest of the sources that they came from."""

    digest: str
    rows: tuple[Row, ...]


@dataclass
class Table:
    """The page: section by module, and the compilers that made it."""

    compilers: str
    sections: dict[str, Section] = field(default_factory=dict)

    def page(self) -> str:
        """Markdown that `read` understands."""
        parts = [TITLE, f"Compiled with {self.compilers}."]
        for module, section in sorted(self.sections.items()):
            lines = markdown(HEAD, [row.cells() for row in section.rows], right={3, 4, 5, 6})
            parts += [f"## {module}", f"<!-- sources {section.digest} -->", "\n".join(lines)]
        return "\n\n".join(parts) + "\n"


def read(page: str) -> Table:
    """The table of a page; an empty one when it has none."""
    compilers = re.search(r"^Compiled with (.*)\.$", page, re.M)
    table = Table(compilers[1] if compilers else "")
    for part in re.split(r"^## ", page, flags=re.M)[1:]:
        digest = re.search(r"^<!-- sources (\w+) -->$", part, re.M)
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| `.*$", part, re.M)]
        table.sections[part.split("\n")[0]] = Section(digest[1] if digest else "", tuple(map(_row, rows)))
    return table


def _row(cells: Sequence[str]) -> Row:
    name, threads, tight, *figures = cells
    columns = [values if len(values) > 1 else values * len(TARGETS) for values in (f.split(" / ") for f in figures)]
    builds = {sm: Build(*map(int, of)) for sm, *of in zip(TARGETS, *columns, strict=True) if "–" not in of}
    return Row(name.strip("`"), threads, bool(tight), builds)


# ---- sources


def modules() -> list[str]:
    """Names of the kernel modules: those that define `kernels`."""
    folder = ROOT / Path(*PACKAGE.split("."))
    return [path.stem for path in sorted(folder.glob("*.py")) if re.search(r"^def kernels\(", path.read_text(), re.M)]


def sources(module: str) -> list[Path]:
    """The files that a kernel module is made of: itself and what it imports below pantheon/accel."""
    known = _tree()
    found, todo = set(), [f"{PACKAGE}.{module}".removeprefix("pantheon.")]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            imported = {one.target.removeprefix("pantheon.") for one in known[name].imports if not one.typing_only}
            todo += [one for one in imported - ASIDE if one in known and one.startswith("accel.")]
    return [known[name].path for name in sorted(found)]


@functools.cache
def _tree() -> dict[str, check_layers.Module]:
    return check_layers.read_tree(ROOT / "pantheon")


def digest(module: str) -> str:
    """Of the code of a module's sources; comments do not count."""
    texts = "".join(code_of(path.read_text()) for path in sources(module))
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


def code_of(source: str) -> str:
    """A text of a module's syntax tree without docstrings, the same in every version of Python."""

    def text(node: object) -> str:
        if isinstance(node, ast.AST):
            parts = (f"{name}={text(value)}" for name, value in ast.iter_fields(node) if value not in (None, []))
            return f"{type(node).__name__}({','.join(parts)})"
        if isinstance(node, list):
            return f"[{','.join(text(one) for one in node if not _is_text(one))}]"
        return repr(node)

    return text(ast.parse(source))


def _is_text(node: object) -> bool:
    """A statement that is a string: a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def make(module: str, compile_jobs: Compile) -> Section:
    """The section of a module, compiled now."""
    kernels = kernels_of(module).values()
    jobs = [(module, kernel.name, targets(kernel)) for kernel in kernels]
    rows = []
    for kernel, builds in zip(kernels, compile_jobs(jobs), strict=True):
        rows.append(Row(kernel.name, " x ".join(map(str, kernel.threads)), kernel.tight, builds))
        if sys.stderr.isatty():
            print(f"\r{module}: {len(rows)} of {len(jobs)}", end="\n" * (len(rows) == len(jobs)), file=sys.stderr)
    return Section(digest(module), tuple(rows))


# ---- the page against the code


def write(only: Sequence[str], everything: bool) -> list[str]:
    """Compile what changed, of these modules or of all, and write the page, module by module; returns what is wrong
    with the kernels."""
    old, names = read(PAGE.read_text() if PAGE.exists() else ""), modules()
    table = Table(compilers())
    if not everything and old.compilers == table.compilers:
        table.sections = {name: old.sections[name] for name in names if name in old.sections}
    with compilers_at_work() as compile_jobs:
        for name in only or names:
            section = table.sections.get(name)
            if section is None or section.digest != digest(name):
                table.sections[name] = make(name, compile_jobs)
                PAGE.write_text(table.page())
    PAGE.write_text(table.page())
    return unfit(table)


def unfit(table: Table) -> list[str]:
    """Tight kernels that spill or have a stack, and any whose block has more than the registers of a multiprocessor."""
    faults = []
    built = [(m, row, sm) for m, section in table.sections.items() for row in section.rows for sm in row.builds]
    for module, row, sm in built:
        build, where = row.builds[sm], f"{module}: {row.name} on sm_{sm}"
        if row.tight and (build.stack or build.spilled):
            faults.append(f"{where}: {build.stack} bytes of stack, {build.spilled} spilled")
        # registers are handed out by eights
        needed = math.prod(map(int, row.threads.split(" x "))) * -(-build.registers // 8) * 8
        if needed > REGISTERS:
            faults.append(f"{where}: a block needs {needed} registers of {REGISTERS}")
    return faults


def stale(page: str) -> list[str]:
    """Where a page is not what `write` would make of the sources; nothing is compiled."""
    table, names = read(page), modules()
    faults = [f"{name}: not in the page" for name in names if name not in table.sections]
    faults += [f"{name}: in the page, but no module" for name in table.sections if name not in names]
    for name in set(names) & set(table.sections):
        section = table.sections[name]
        if section.digest != digest(name):
            faults.append(f"{name}: its sources have changed")
        faults += differences(name, section)
    return faults or ([] if table.page() == page else ["the page was edited by hand"])


def differences(module: str, section: Section) -> list[str]:
    """Rows that do not describe the kernels of a module."""
    kernels, rows = kernels_of(module), {row.name: row for row in section.rows}
    faults = [f"{module}: {name} is only in {where}" for where, names in (
        ("the page", rows.keys() - kernels.keys()), ("the code", kernels.keys() - rows.keys()),
    ) for name in sorted(names)]  # fmt: skip
    for name in rows.keys() & kernels.keys():
        if rows[name].tight != kernels[name].tight or list(rows[name].builds) != targets(kernels[name]):
            faults.append(f"{module}: the row of {name} is an old one")
    return faults


def sample(table: Table) -> list[str]:
    """Compile one kernel of each module again, the one with the most registers: with the page's compilers it takes
    what the page says, and with any a tight one spills nothing."""
    picked = {module: max(section.rows, key=_most) for module, section in table.sections.items() if section.rows}
    jobs = [(module, row.name, [_worst(row)]) for module, row in picked.items()]
    again = Table(compilers())
    with compilers_at_work() as compile_jobs:
        for (module, name, (sm,)), builds in zip(jobs, compile_jobs(jobs), strict=True):
            row = picked[module]
            again.sections[module] = Section("", (replace(row, builds=builds),))
            if builds[sm] != row.builds[sm] and again.compilers == table.compilers:
                return [f"{module}: {name} on sm_{sm} takes {builds[sm]}, the page says {row.builds[sm]}"]
    return unfit(again)


def _worst(row: Row) -> int:
    """The target where a kernel takes the most registers."""
    return max(row.builds, key=lambda sm: row.builds[sm].registers)


def _most(row: Row) -> int:
    return row.builds[_worst(row)].registers


def main() -> int:
    """1 when something is wrong."""
    flags = argparse.ArgumentParser(prog="cuda_table", description=__doc__.split("\n")[0])
    flags.add_argument("modules", nargs="*", metavar="MODULE", help="only these (default: every one)")
    flags.add_argument("--all", action="store_true", help="compile everything, changed or not")
    flags.add_argument("--check", action="store_true", help="write nothing: compare the page with the code")
    args = flags.parse_args()
    if args.check:
        page = PAGE.read_text()
        faults = stale(page) or unfit(read(page)) or sample(read(page))
    else:
        faults = write(args.modules, args.all)
        print(f"{PAGE.relative_to(ROOT)} is written")
    for fault in faults:
        print(fault, file=sys.stderr)
    if args.check and faults:
        print("make cuda-table writes the page anew", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
