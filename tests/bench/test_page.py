"""docs/performance.md is what the benchmark prints, the only page that quotes speeds by hand; `make bench` runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_project import Sandbox
from tests.test_project import sandbox as sandbox  # the fixture
from tools import bench_compare

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"


def test_the_page_has_a_place_for_every_table_and_names_its_command() -> None:
    text = PAGE.read_text()
    made = bench_compare.put_blocks(text, dict.fromkeys(bench_compare.TABLES, "| here |"))
    assert made.count("| here |") == len(bench_compare.TABLES)
    for name in bench_compare.TABLES:
        assert f"--tables {name}" in text


def test_the_flags_that_the_page_uses_exist() -> None:
    commands = re.findall(r'^make bench ARGS="(.*)"', PAGE.read_text(), re.M)
    assert len(commands) >= len(bench_compare.TABLES)
    for words in commands:
        bench_compare.parser().parse_args(words.split())


@pytest.mark.parametrize(
    "page", [p for p in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if p != PAGE], ids=lambda p: p.name
)
def test_no_other_page_quotes_a_speed(page: Path) -> None:
    """But for the generated table of real models."""
    text = re.sub(r"<!-- measured -->.*<!-- measured end -->", "", page.read_text(), flags=re.S)
    assert not re.findall(r"\d+ ?(?:tok|tokens|t)(?:/s| per second| a second)", text)


def test_make_bench_installs_the_pinned_peer_once_and_then_compares(sandbox: Sandbox) -> None:
    assert "llama-cpp-python==" in (ROOT / "setup.cfg").read_text()
    done = sandbox.make("bench", "ARGS=--tables engine")
    assert done.returncode == 0, done.stderr
    calls = sandbox.calls()
    assert sum(call.endswith("-e .[bench]") for call in calls) == 1
    assert calls[-1] == "-m tools.bench_compare --tables engine"
    sandbox.make("bench")
    assert sandbox.calls() == ["-m tools.bench_compare"]


def test_make_bench_alone_needs_no_peer(sandbox: Sandbox) -> None:
    assert sandbox.make("bench-alone", "ARGS=-r 3").returncode == 0
    calls = sandbox.calls()
    assert calls[-2:] == ["tools/bench_tokenizer.py", "-m pantheon bench -r 3"]
    assert not any("[bench]" in call for call in calls)
