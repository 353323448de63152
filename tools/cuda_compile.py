"""From Numba kernels to machine code without a GPU, and what `ptxas -v` says that takes.

A kernel becomes PTX by NVVM and machine code by ptxas, both from the pip packages that numba-cuda[cu12] brings.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGE = "pantheon.accel.cuda"
#: compute capabilities times ten: the oldest that CUDA 12's last toolkit compiles for, A100, H100
TARGETS = (70, 80, 90)
#: module, kernel, targets
Job = tuple[str, str, Sequence[int]]


@dataclass(frozen=True)
class Build:
    """What one kernel takes on one target: registers of a thread, bytes of the rest."""

    registers: int
    shared: int
    stack: int
    spilled: int

#: compiles jobs, in order
Compile = Callable[[Sequence[Job]], Iterator[dict[int, Build]]]


def ptxas() -> str:
    """Path of the assembler: the pip package's, else the one on the PATH.  Raises RuntimeError without."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*/bin/ptxas")):
            return str(path)
    found = shutil.which("ptxas")
    if found is None:
        raise RuntimeError("there is no ptxas here: pip install 'numba-cuda[cu12]'")
    return found


def compilers() -> str:
    """Every version that the figures depend on."""
    done = subprocess.run([ptxas(), "--version"], capture_output=True, text=True, check=True)
    release = re.search(r"V([\d.]+)", done.stdout)
    packages = ", ".join(f"{name} {version(name)}" for name in ("numba-cuda", "numba", "llvmlite"))
    return f"ptxas {release[1] if release else '?'}, {packages}, Python {'.'.join(platform.python_version_tuple()[:2])}"


@functools.cache
def kernels_of(module: str) -> dict[str, Any]:
    """The kernels of a module by name.  Raises ValueError when two have one name."""
    made = importlib.import_module(f"{PACKAGE}.{module}").kernels()
    by_name = {kernel.name: kernel for kernel in made}
    if len(by_name) != len(made):
        names = [kernel.name for kernel in made]
        raise ValueError(f"{module}: two kernels are called {next(n for n in names if names.count(n) > 1)!r}")
    return by_name


def assemble(ptx: str, sm: int) -> Build:
    """Machine code of a kernel for a target, and what it takes.  Raises RuntimeError when ptxas refuses it."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        words = [ptxas(), "-v", f"-arch=sm_{sm}", "-o", os.devnull, file.name]
        done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas, sm_{sm}: {done.stderr.strip() or done.stdout.strip()}")
    return report(done.stderr + done.stdout)


def report(text: str) -> Build:
    """What `ptxas -v` says of the one kernel of a file."""

    def number(pattern: str, default: str | None = None) -> int:
        found = re.findall(pattern, text)
        if not found and default is None:
            raise RuntimeError(f"ptxas says nothing of {pattern!r}: {text}")
        return sum(map(int, found or [default or "0"]))

    spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    registers, stack = number(r"Used (\d+) registers"), number(r"(\d+) bytes stack")
    return Build(registers, number(r"(\d+) bytes smem", "0"), stack, spilled)


def compile_one(job: Job) -> dict[int, Build]:
    """(module, kernel, targets), from Python to machine code, by target."""
    module, name, targets = job
    kernel = kernels_of(module)[name]
    try:
        return {sm: assemble(ptx, sm) for sm, ptx in ptx_of(kernel, targets).items()}
    except Exception as fault:
        raise RuntimeError(f"{module}: {name}: {fault}") from None


def ptx_of(kernel: Any, targets: Sequence[int]) -> dict[int, str]:
    """PTX by target.  Numba's front end, which takes most of the time and knows no target, runs once for all."""
    if len(targets) == 1:
        return {sm: kernel.ptx(sm) for sm in targets}
    from numba.cuda import compiler

    options = dict.fromkeys(("lineinfo", "device", "fastmath", "forceinline", "lto"), False)
    library, _ = compiler._compile_pyfunc_with_fixup(
        kernel.body, kernel.types, cc=divmod(min(targets), 10), abi="numba", debug=None, opt=None, abi_info=None,
        launch_bounds=kernel.bounds, **options,
    )  # fmt: skip
    return {sm: library.get_asm_strs(cc=divmod(sm, 10))[0] for sm in targets}


def targets(kernel: Any) -> list[int]:
    """Those that have the instructions of a kernel."""
    return [sm for sm in TARGETS if sm >= kernel.least_sm]


@contextmanager
def compilers_at_work() -> Iterator[Compile]:
    """A function that compiles jobs of `compile_one` in as many processes as there are cores, in order."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        yield lambda jobs: pool.imap(compile_one, jobs)
