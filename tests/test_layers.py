"""tools/check_layers.py on small made-up trees, and on Pantheon itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "check_layers.py"
Tree = Callable[[dict[str, str]], tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path) -> Tree:
    """Write files of a package `pantheon` and run the tool on it: (exit status, output)."""

    def write_and_check(files: dict[str, str]) -> tuple[int, str]:
        folder = tmp_path / "pantheon"
        for name, text in {"__init__.py": "", **files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        done = subprocess.run([sys.executable, TOOL, folder], capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout

    return write_and_check


def test_pantheon_itself_stands_on_its_floors() -> None:
    done = subprocess.run([sys.executable, TOOL], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_downward_imports_of_every_kind_pass(run: Tree) -> None:
    status, out = run(
        {
            "errors.py": "import json\n",
            "formats/__init__.py": "",
            "formats/gguf.py": "from pantheon.errors import Fault\nfrom .quant import table\nimport numpy as np\n",
            "formats/quant.py": "from pantheon import errors\n",
            "serve/routes.py": "from pantheon.formats import gguf\nimport pantheon.errors\nfrom . import sse\n",
            "serve/sse.py": "",
            "cli.py": "from pantheon.commands import chat\nfrom pantheon import __version__\n",
            "commands/chat.py": "",
        }
    )
    assert (status, out.startswith("layers: ")) == (0, True), out


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"plan/a.py": "from pantheon.engine.model import Model"}, "a.py:1: floor 2 (plan) imports pantheon.engine"),
        ({"plan/a.py": "import pantheon.serve.sse"}, "floor 2 (plan) imports pantheon.serve.sse from floor 6"),
        ({"plan/a.py": "from pantheon import serve", "serve/__init__.py": ""}, "imports pantheon.serve from floor 6"),
        ({"plan/a.py": "from ..serve import sse", "serve/sse.py": ""}, "imports pantheon.serve.sse from floor 6"),
        ({"errors.py": "def f():\n    from pantheon.text import bpe"}, "errors.py:2: floor 0 (errors) imports"),
        ({"errors.py": "if TYPE_CHECKING:\n    from pantheon.text import bpe"}, "floor 0 (errors) imports"),
        ({"models/a.py": "from pantheon.accel.executor import Columns"}, "models and accel are neighbours"),
        ({"accel/a.py": "from pantheon.models.llama import plan"}, "accel and models are neighbours"),
        ({"text/a.py": "from pantheon.formats.gguf import open_gguf"}, "text and formats are neighbours on floor 1"),
        ({"mem/a.py": "from pantheon.text import bpe"}, "mem and text are neighbours"),
        ({"serve/a.py": "from pantheon.cli import main"}, "floor 6 (serve) imports pantheon.cli from floor 7"),
        ({"engine/a.py": "import pantheon"}, "imports pantheon itself"),
        ({"engine/a.py": "from pantheon import load"}, "imports pantheon.load, which has no floor"),
        ({"extra/a.py": ""}, "extra has no floor"),
        ({"extra.py": ""}, "extra has no floor"),
        ({"engine/a.py": "from pantheon.extra import x"}, "imports pantheon.extra, which has no floor"),
        ({"__init__.py": "from pantheon.engine.load import load"}, "may import pantheon.engine.load inside a function"),
        ({"text/a.py": "from numba import njit"}, "numba belongs in accel.cpu"),
        ({"accel/a.py": "import numba.cuda"}, "numba.cuda belongs in accel.cpu"),
        ({"accel/cpux/a.py": "import numba"}, "numba belongs in accel.cpu"),
        ({"plan/a.py": "x = 1\n" * 451}, "a.py: 451 lines"),
    ],
)
def test_each_breach_is_an_error_with_its_place(run: Tree, files: dict[str, str], fault: str) -> None:
    status, out = run(files)
    assert status == 1 and fault in out, out
    assert len(out.splitlines()) == 1, out


def test_the_package_may_import_anything_lazily_and_the_ground_floor_at_once(run: Tree) -> None:
    body = "from pantheon.errors import Fault\ndef load():\n    from pantheon.engine.load import load\n"
    assert run({"__init__.py": body, "errors.py": "", "engine/load.py": ""})[0] == 0


def test_kernels_may_use_numba(run: Tree) -> None:
    assert run({"accel/cpu/a.py": "import numba\n", "accel/cuda/b.py": "from numba import cuda\n"})[0] == 0


def test_a_long_file_is_a_warning_before_it_is_an_error(run: Tree) -> None:
    status, out = run({"plan/a.py": "x = 1\n" * 401})
    assert status == 0 and "warning: pantheon/plan/a.py: 401 lines" in out
    assert "warning" not in run({"plan/a.py": "x = 1\n" * 400})[1]


def test_circles_are_found_even_when_lazy_and_named_once(run: Tree) -> None:
    status, out = run(
        {
            "engine/a.py": "from pantheon.engine.b import x\n",
            "engine/b.py": "from pantheon.engine import c\n",
            "engine/c.py": "def f():\n    from pantheon.engine import a\n",
            "engine/d.py": "from pantheon.engine import a\n",
        }
    )
    assert status == 1
    assert out == "error: import circle: engine.a -> engine.b -> engine.c -> engine.a\n"


def test_a_circle_for_the_type_checker_only_is_none(run: Tree) -> None:
    files = {"engine/a.py": "from pantheon.engine import b\n"}
    files["engine/b.py"] = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pantheon.engine import a\n"
    assert run(files)[0] == 0
