"""Every block of the documentation that is marked `run` works, against a real server [M245].

A block is marked in its info string: ```sh run, ```python run.  `8201` becomes the port of the test's server, and
`model.gguf` is the model that it serves, in the block's working folder; the server may load a `tiny.gguf`.  A ```json
block right behind shows the answer: its members and their types are those of the real one, `"…"` stands for others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.golden_data import model_path, smollm2_path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: loading, with every kernel to compile
START_LIMIT_S = 600


@dataclass(frozen=True)
class Block:
    """One marked block: where it stands, its language and text, and the answer that the page shows, if it does."""

    page: str
    line: int
    language: str
    text: str
    answer: str | None


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(sh|python) run\n(.*?)^```$(?:\n```json\n(.*?)^```$)?", text, re.M | re.S):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2], match[3]))
    return found


BLOCKS = blocks()


def differences(shown: object, real: object, at: str = "$") -> list[str]:
    """What of a real answer does not look like the one that a page shows."""
    if isinstance(shown, dict) and isinstance(real, dict):
        missing, more = shown.keys() - real.keys() - {"…"}, real.keys() - shown.keys()
        found = [f"{at}.{key}: is not there" for key in missing]
        found += [f"{at}.{key}: is not shown" for key in more if "…" not in shown]
        both = shown.keys() & real.keys()
        return found + [d for key in both for d in differences(shown[key], real[key], f"{at}.{key}")]
    if isinstance(shown, list) and isinstance(real, list):
        return [d for i, item in enumerate(real) for d in differences(shown[0] if shown else None, item, f"{at}[{i}]")]
    kinds = (int, float) if type(shown) is float else (type(shown),)
    return [] if type(real) in kinds else [f"{at}: shown {shown!r}, is {real!r}"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as fault:
        return fault.code, fault.read().decode()


@pytest.fixture(scope="module")
def model() -> Path:
    """SmolLM2 where it is installed, as `make test` does; else a tiny model, which chats nonsense."""
    return smollm2_path() or model_path("tiny-llama.Q4_0")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of `pantheon serve`, started the way a user does; SIGTERM ends it within 5 s."""
    port = free_port()
    root = tmp_path_factory.mktemp("models")
    shutil.copy(model_path("tiny-llama.Q4_0"), root / "tiny.gguf")
    words = ["--port", str(port), "--model-root", str(root)]
    words += [] if smollm2_path() else ["--model", str(model)]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "pantheon", "serve", *words], stderr=out, cwd=ROOT)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                if get(f"http://127.0.0.1:{port}/health")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_the_first_screen_of_the_readme_is_what_a_visitor_needs() -> None:
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    wanted = ("make serve", "make test", "curl http://127.0.0.1:8201/v1/chat/completions", "from openai import OpenAI")
    assert [text for text in wanted if text not in first] == []
    assert [(b.page, b.language) for b in BLOCKS].count(("README.md", "sh")) >= 1
    assert [(b.page, b.language) for b in BLOCKS].count(("README.md", "python")) >= 1


def test_what_a_page_shows_is_compared_with_what_comes() -> None:
    shown = {"n": 1, "x": 1.5, "list": [{"a": "…"}], "…": "…"}
    assert differences(shown, {"n": 7, "x": 1, "list": [{"a": "b"}, {"a": "c"}], "more": 1}) == []
    found = differences(shown, {"n": None, "x": "", "list": [{"a": "b"}, {"b": "c"}]})
    assert sorted(found) == [
        "$.list[1].a: is not there", "$.list[1].b: is not shown", "$.n: shown 1, is None", "$.x: shown 1.5, is ''",
    ]  # fmt: skip


@pytest.mark.timeout(START_LIMIT_S + 120)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b.page}:{b.line}")
def test_m245_the_block_runs(block: Block, server: int, model: Path, tmp_path: Path) -> None:
    text = block.text.replace("8201", str(server))
    (tmp_path / "model.gguf").symlink_to(model)
    # `pantheon`, `python` and `make` of this environment, whatever the caller's PATH is
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("python", "python3"):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "pantheon").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pantheon "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    if "curl" in text and shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["sh", "-euc", text] if block.language == "sh" else [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.strip(), "the block printed nothing"
    if block.answer is not None:
        assert differences(json.loads(block.answer), json.loads(done.stdout)) == []
    if text.startswith("curl") and "/v1/chat/completions " in text and '"stream"' not in text:
        message = json.loads(done.stdout)["choices"][0]["message"]
        assert message["content"] or message.get("tool_calls") or not smollm2_path(), done.stdout


def test_the_served_default_model_has_the_id_that_the_readme_uses(server: int) -> None:
    if smollm2_path():
        (listed,) = json.loads(get(f"http://127.0.0.1:{server}/v1/models")[1])["data"]
        assert f'model="{listed["id"]}"' in (ROOT / "README.md").read_text()
