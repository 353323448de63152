"""tools/: bringing a fleet up, and the files that run a server as a service [M016, M147, issue point 7]."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pantheon import settings
from pantheon.accel.die import virtual_dies
from pantheon.accel.die_manager import DieManager
from pantheon.cli import build_parser
from pantheon.serve.api import build_router
from pantheon.serve.context import App
from pantheon.serve.http_server import HttpConfig, PantheonServer
from pantheon.serve.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "tools" / "deploy.sh"
MIB = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[App, str]]:
    (tmp_path / "a.json").write_text(json.dumps({"pieces": ["a"]}))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    models = ROOT / "tests" / "data" / "models"
    (tmp_path / "tiny.gguf").write_bytes((models / "tiny-llama.Q4_0.gguf").read_bytes())
    app = App(Registry(dies=DieManager(virtual_dies([16 * MIB] * 3))), model_roots=(tmp_path,))
    running = PantheonServer(build_router(app), HttpConfig(port=0, admin_key="sesame"))
    running.start(0.01)
    yield app, running.url
    running.stop(1.0)


def deploy(url: str, fleet: str, key: str = "sesame", flags: tuple[str, ...] = ()) -> tuple[int, list[str], str]:
    """(exit code, lines on stdout, stderr)."""
    done = subprocess.run(
        ["sh", str(DEPLOY), "-u", url, *flags, "-"],
        input=fleet, capture_output=True, text=True, timeout=100, env={**os.environ, "PANTHEON_ADMIN_KEY": key},
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), done.stderr


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@needs_curl
def test_a_fleet_comes_up_one_after_the_other_M147(server: tuple[App, str]) -> None:
    app, url = server
    fleet = "# ours\n\nfirst script:a.json 0\norg/two  script:a.json 1 64\nfirst script:a.json 2"
    code, lines, errors = deploy(url, fleet)
    assert code == 0, errors
    assert lines == [
        "deploy: first loads", "deploy: first is ready", "deploy: org/two loads", "deploy: org/two is ready",
        "deploy: first loads", "deploy: first is ready", f"deploy: 3 instances are up at {url}",
    ]  # fmt: skip
    placed = [(entry.name, entry.dies) for entry in app.registry.all_entries()]
    assert placed == [("first", (0,)), ("org/two", (1,)), ("first", (2,))]
    # again: what is there stays
    code, lines, _ = deploy(url, "first script:a.json\n")
    assert code == 0 and lines[0] == "deploy: first is there already"
    assert len(app.registry.all_entries()) == 3


@needs_curl
def test_what_came_up_before_a_refused_model_stays_M147(server: tuple[App, str]) -> None:
    """And what stands after it is not tried."""
    app, url = server
    code, lines, errors = deploy(url, "good script:a.json\nbad nope.gguf\nlater script:a.json\n")
    assert code == 1 and lines == ["deploy: good loads", "deploy: good is ready"] and "bad: refused" in errors
    assert [entry.name for entry in app.registry.all_entries()] == ["good"]


@needs_curl
@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("bad cut.gguf", ["bad: refused", "cut.gguf"]),
        ("bad ../secret.gguf", ["bad: refused", "--model-root"]),
        ("bad script:a.json 9", ["bad: refused", "die 9"]),
        ("bad tiny.gguf 0 4000000", ["bad: refused", "would fit"]),
        ("bad script:a.json x", ["bad: bad line"]),
        ("bad", ["bad: bad line"]),
        ("bad script:a.json - - more", ["bad: bad line"]),
    ],
)
def test_a_refused_model_is_named_in_one_line_M147(server: tuple[App, str], line: str, parts: list[str]) -> None:
    app, url = server
    code, lines, errors = deploy(url, line)
    assert code == 1 and lines == []
    assert all(part in errors for part in ["deploy: error: ", *parts]) and errors.count("\n") == 1, errors
    assert app.registry.all_entries() == []


@needs_curl
def test_a_load_that_fails_later_is_named_M147(server: tuple[App, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr("pantheon.serve.loading.load_model", full)
    code, lines, errors = deploy(server[1], "big script:a.json\n")
    assert code == 1 and lines == ["deploy: big loads"] and "big: refused: " in errors and "not enough memory" in errors


@needs_curl
def test_memory_must_settle_before_the_next_one_M147(
    server: tuple[App, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, url = server
    view = app.memory.view
    monkeypatch.setattr(app.memory, "view", lambda: {**view(), "level": "TIGHT"})
    code, _, errors = deploy(url, "a script:a.json\nb script:a.json\n", flags=("-s", "1"))
    assert code == 1 and "a: memory is still TIGHT after 1 s" in errors
    assert [entry.name for entry in app.registry.all_entries()] == ["a"]
    levels = iter(["CRITICAL", "TIGHT", "WATCH", "TIGHT"])
    monkeypatch.setattr(app.memory, "view", lambda: {**view(), "level": next(levels, "OK")})
    code, lines, errors = deploy(url, "b script:a.json\n")
    assert code == 0 and lines[1] == "deploy: b is ready", errors
    assert next(levels, None) is None


@needs_curl
def test_no_server_or_no_key(server: tuple[App, str], tmp_path: Path) -> None:
    _, url = server
    code, _, errors = deploy(url, "a script:a.json\n", key="")
    assert code == 1 and "401" in errors and "admin key" in errors
    code, _, errors = deploy("http://127.0.0.1:1", "a script:a.json\n")
    assert code == 1 and "no admin API at http://127.0.0.1:1" in errors
    done = subprocess.run(["sh", str(DEPLOY)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "tools/deploy.sh [-u URL]" in done.stderr
    words = ["sh", str(DEPLOY), "-u", url, str(tmp_path / "no")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and "can not read" in done.stderr


def commands(text: str) -> list[list[str]]:
    """Every `pantheon serve …` of a file, as words."""
    found = re.findall(r"pantheon serve ([^\n\"]*)", text.replace("\\\n", " "))
    return [line.split() for line in found]


def test_the_service_starts_with_flags_that_exist() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    path = ROOT / "tools" / "systemd" / "pantheon.service"
    unit.read(path)
    parser = build_parser(with_serve=True)
    for words in commands(path.read_text()):
        args = parser.parse_args(["serve", *words])
        assert args.no_model and args.model_root == ["/var/lib/pantheon/models"]
    drain = settings.SETTINGS["PANTHEON_DRAIN_S"].default
    assert float(unit["Service"]["TimeoutStopSec"]) >= drain + 5
    assert unit["Service"]["RestartPreventExitStatus"] == "1 2"
    named = set(re.findall(r"\b(?:PN|PANTHEON|QWEN35)_[A-Z_0-9]+", path.read_text())) - {"PN_"}
    assert named <= set(settings.SETTINGS)


def test_the_image_copies_what_exists_and_starts_with_flags_that_exist() -> None:
    text = (ROOT / "tools" / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.*)$", text, re.M):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists(), name
    words = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.M)[1])  # type: ignore[index]
    args = build_parser(with_serve=True).parse_args([*words[1:], "--no-model", "--model-root", "/models"])
    assert args.command == "serve" and args.host == "0.0.0.0" and args.port == 8201
    assert "EXPOSE 8201" in text and "USER pantheon" in text
