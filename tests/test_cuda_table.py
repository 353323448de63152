"""docs/reference/cuda-kernels.md says what the real compiler makes of the CUDA kernels, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from tools import cuda_table
from tools.cuda_compile import TARGETS, Build, report
from tools.cuda_table import ROOT, Row, Section, Table

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN6matmul' for 'sm_80'
ptxas info    : Function properties for _ZN6matmul
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 47 registers, used 1 barriers,{shared} 424 bytes cmem[0]
"""
#: kernels that plans launch on devices: each has the instructions, and one like it is in the page but for sizes
LAUNCHED = r"""
import re, sys
from pantheon.accel.cpu import carried
from pantheon.accel.cuda import table
from pantheon.accel.cuda.parts import cut
from pantheon.accel.cuda.place import place
from pantheon.engine.load import plan_of
from pantheon.formats.gguf import open_gguf
from pantheon.plan.state_spec import KVType
from tools import cuda_table

listed = {re.sub(r"\d+", "#", name) for module in cuda_table.modules() for name in cuda_table.kernels_of(module)}
met = set()
for path in sys.argv[1:]:
    with open_gguf(path) as file:
        plan = plan_of(file)
        types = {m: carried.run_as(file.tensors[m.tensor].type.name) for m in plan.matrices()}
    for sm, kv_type in zip((70, 80, 90, 90), KVType):
        memory = place(cut(plan, ())[0], types, 1024, kv_type, sm).memory
        for launch in [*table.launches(plan.body, memory), *table.head(memory)]:
            for n in (1, 2, 5, 8, 16, 256):
                if all(launch.grid(n, 1024)):
                    kernel = launch.pick(n)
                    met.add(kernel.name)
                    assert kernel.least_sm <= sm, kernel.name
                    assert re.sub(r"\d+", "#", kernel.name) in listed, kernel.name
print(len(met))
"""
#: a module of one kernel, whose instructions are newer than the first target
ONE = Row("mma Q8_0", "32 x 8", True, {80: Build(90, 512, 0, 0), 90: Build(88, 512, 0, 0)})


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """A process without the simulator, which other tests switch on for this one."""
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.timeout(300)
def test_the_page_is_current_and_kernels_compile_to_what_it_says() -> None:
    """Sources, rows and a kernel of each module compiled again; a tight kernel spills nothing."""
    done = python("-m", "tools.cuda_table", "--check")
    assert done.returncode == 0, done.stderr


def test_every_file_that_makes_kernels_is_in_the_page() -> None:
    """By itself, or as a part of another module."""
    folder = ROOT / "pantheon" / "accel" / "cuda"
    makers = {path for path in folder.glob("*.py") if re.search(r"(?<!class )\bKernel\(", path.read_text())}
    covered = {path for module in cuda_table.modules() for path in cuda_table.sources(module)}
    assert makers and makers <= covered


def test_every_kernel_that_a_plan_launches_is_of_a_kind_that_the_page_shows() -> None:
    done = python("-c", LAUNCHED, *map(str, sorted((ROOT / "tests" / "data" / "models").glob("tiny-*.gguf"))))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80


def test_what_the_assembler_says_is_read() -> None:
    told = REPORT.format(stack=0, stores=0, loads=0, shared=" 1024 bytes smem,")
    assert report(told) == Build(47, 1024, 0, 0)
    told = REPORT.format(stack=48, stores=36, loads=12, shared="")
    assert report(told) == Build(47, 0, 48, 48)
    with pytest.raises(RuntimeError, match="says nothing"):
        report("ptxas fatal   : Unresolved extern function 'f'")


def test_a_page_is_read_as_it_was_written() -> None:
    plain = Row("add", "256 x 1", False, dict.fromkeys(TARGETS, Build(16, 0, 8, 0)))
    table = Table("ptxas 1.2", {"products": Section("abc1", (ONE, plain)), "embed": Section("abc2", ())})
    assert cuda_table.read(table.page()) == table
    assert "| `mma Q8_0` | 32 x 8  | yes   | – / 90 / 88 |" in table.page()


def test_tight_kernels_that_spill_and_blocks_that_can_not_run_are_named() -> None:
    bad = Build(255, 0, 0, 4)
    spilling = replace(ONE, builds={80: bad, 90: Build(90, 0, 16, 0)})
    table = Table("", {"products": Section("", (ONE, spilling, replace(ONE, tight=False, builds={90: bad})))})
    assert cuda_table.unfit(table) == [
        "products: mma Q8_0 on sm_80: 0 bytes of stack, 4 spilled",
        "products: mma Q8_0 on sm_90: 16 bytes of stack, 0 spilled",
    ]
    fat = Row("f", "512 x 1", False, {80: Build(128, 0, 0, 0), 90: Build(129, 0, 0, 0)})
    assert cuda_table.unfit(Table("", {"embed": Section("", (fat,))})) == [
        "embed: f on sm_90: a block needs 69632 registers of 65536"
    ]


def test_a_page_that_is_behind_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        name, threads, tight, least_sm = "mma Q8_0", (32, 8), True, 80

    monkeypatch.setattr(cuda_table, "modules", lambda: ["products"])
    monkeypatch.setattr(cuda_table, "digest", lambda module: "abc1")
    monkeypatch.setattr(cuda_table, "kernels_of", lambda module: {"mma Q8_0": Fake})

    def faults(*rows: Row, digest: str = "abc1", module: str = "products") -> list[str]:
        return cuda_table.stale(Table("", {module: Section(digest, rows)}).page())

    assert faults(ONE) == []
    assert faults(ONE, digest="abc0") == ["products: its sources have changed"]
    assert faults() == ["products: mma Q8_0 is only in the code"]
    assert faults(ONE, replace(ONE, name="old")) == ["products: old is only in the page"]
    assert faults(replace(ONE, tight=False)) == ["products: the row of mma Q8_0 is an old one"]
    assert faults(ONE, module="product") == ["products: not in the page", "product: in the page, but no module"]
    assert cuda_table.stale(Table("", {"products": Section("abc1", (ONE,))}).page() + "\n") != []


def test_a_digest_is_of_code_and_not_of_comments() -> None:
    source = 'def f(x):\n    """Doc."""\n    return x + 1\n'
    same = 'def f(x):\n    """Other words."""\n    # why\n    return (x\n            + 1)\n'
    assert cuda_table.code_of(source) == cuda_table.code_of(same)
    assert cuda_table.code_of(source) != cuda_table.code_of(source.replace("1", "2"))
