"""The side-by-side benchmark without llama.cpp: the protocol with a fake peer, turns, ratios, tables."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pantheon.commands.bench_runs import Workload
from tests.golden_data import model_path
from tools import bench_compare, bench_driver, bench_peer
from tools.bench_driver import Peer, PeerError, Quiet, Row, burning, compare_beside_burners, compare_engines, take_turns

#: a peer whose steps take argv[1] seconds; a workload of 13 tokens fails, one of 14 ends the process
FAKE = """
import json, sys
def say(**answer): print(json.dumps(answer), flush=True)
say(engine=sys.argv[2], version="1", threads=2)
n = 0
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "prepare":
        work = request["workload"]
        if work["n"] == 14: print("not JSON", flush=True); break
        n = work["n"] if work["kind"] == "tg" else 1
        say(**({"error": "thirteen"} if work["n"] == 13 else {}))
    else:
        say(steps=[float(sys.argv[1])] * n)
"""


ABOUT = {"engine": "fake", "version": "1", "threads": 2}


def fake(step_s: float, name: str = "fake", **options: Any) -> Peer:
    return Peer(name, [sys.executable, "-c", FAKE, str(step_s), name], **options)


@pytest.fixture
def sides() -> Iterator[tuple[Peer, Peer]]:
    """Ours takes 1 ms a step, theirs 3 ms."""
    with closing(fake(0.001, "ours")) as ours, closing(fake(0.003, "theirs")) as theirs:
        yield ours, theirs


# ---- the protocol, the driver's end ----------------------------------------------------------------------------------


def test_a_peer_says_what_it_is_prepares_and_runs(sides: tuple[Peer, Peer]) -> None:
    ours, _ = sides
    assert ours.about == {"engine": "ours", "version": "1", "threads": 2}
    ours.prepare(Workload("tg", 3))
    assert ours.run() == ours.run() == [0.001] * 3
    assert ours.cpu_s() >= 0


def test_a_failed_workload_is_one_error_and_the_peer_lives_on(sides: tuple[Peer, Peer]) -> None:
    ours, _ = sides
    with pytest.raises(PeerError, match="ours: thirteen"):
        ours.prepare(Workload("tg", 13))
    ours.prepare(Workload("pp", 5))
    assert ours.run() == [0.001]


def test_a_peer_that_ends_is_said_plainly(sides: tuple[Peer, Peer]) -> None:
    ours, _ = sides
    with pytest.raises(PeerError, match="ours ended or said 'not JSON"):
        ours.prepare(Workload("tg", 14))
    ours.close()
    with pytest.raises(PeerError, match="ours has ended"):
        ours.run()
    ours.close()


def test_a_peer_that_hangs_is_killed() -> None:
    with pytest.raises(PeerError, match="hangs ended or said ''"):
        Peer("hangs", [sys.executable, "-c", "import sys; sys.stdin.read()"], patience_s=0.2)


def test_a_peer_that_can_not_load_says_why() -> None:
    code = 'print(\'{"error": "no such file"}\')'
    with pytest.raises(PeerError, match="name: no such file"):
        Peer("name", [sys.executable, "-c", code])


# ---- the protocol, the peer's end ------------------------------------------------------------------------------------


class FakeEngine:
    """Records what it was asked."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def about(self) -> dict[str, Any]:
        return {"engine": "fake", "version": "1", "threads": 1}

    def prepare(self, workload: Workload) -> None:
        self.log.append(workload)
        if workload.n == 13:
            raise RuntimeError("thirteen")

    def run(self) -> list[float]:
        self.log.append("run")
        return [0.5, 0.25]


def served(*requests: Any) -> tuple[FakeEngine, list[dict[str, Any]]]:
    engine, out = FakeEngine(), io.StringIO()
    bench_peer.serve(engine, io.StringIO("".join(json.dumps(r) + "\n" for r in requests)), out)
    return engine, [json.loads(line) for line in out.getvalue().splitlines()]


def test_the_peer_warms_up_once_and_answers_every_line() -> None:
    work = {"kind": "tg", "n": 2, "depth": 7, "sequences": 3}
    engine, answers = served({"do": "prepare", "workload": work}, {"do": "run"})
    assert answers == [engine.about(), {}, {"steps": [0.5, 0.25]}]
    assert engine.log == [Workload("tg", 2, 7, 3), "run", "run"]


def test_the_peer_answers_faults_and_goes_on() -> None:
    _, answers = served({"do": "prepare", "workload": {"kind": "tg", "n": 13}}, {"do": "dance"}, {"do": "run"})
    assert answers[1] == {"error": "RuntimeError: thirteen"}
    assert "unknown request 'dance'" in answers[2]["error"] and "steps" in answers[3]


def test_our_engine_behind_the_real_peer_process() -> None:
    """The program itself on a tiny model: the version line, one step time a token, a longer context on demand."""
    command = [sys.executable, "-m", "tools.bench_peer", "pantheon", str(model_path("tiny-llama.Q4_0")), "1"]
    with closing(Peer("ours", command)) as peer:
        assert peer.about["engine"] == "pantheon" and peer.about["threads"] == 1
        peer.prepare(Workload("tg", 3, 2, 2))
        assert len(peer.run()) == 3
        peer.prepare(Workload("pp", 8, 1020))
        assert len(peer.run()) == 1


def test_a_model_that_can_not_be_loaded_is_one_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.bench_peer", "pantheon", str(tmp_path / "nothing.gguf"), "1"]
    with closing(Peer("ours", command)) as peer, pytest.raises(PeerError, match="pantheon: .*nothing.gguf"):
        peer.prepare(Workload("tg", 3))


# ---- turns and ratios ------------------------------------------------------------------------------------------------


class Side:
    """Notes its turns in a shared list."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def cpu_s(self) -> float:
        return 0.0

    def run(self) -> str:
        self._log.append(self.name)
        return f"{self.name}{len(self._log)}"


def test_sides_take_turns_and_keep_their_own_results() -> None:
    log: list[str] = []
    given = take_turns([Side("a", log), Side("b", log)], 3, Quiet(), lambda side: side.run(), settle_s=0)
    assert log == ["a", "b"] * 3
    assert given == [["a1", "a3", "a5"], ["b2", "b4", "b6"]]


def test_what_disturbed_a_turn_is_the_worst_of_all_and_short_turns_say_nothing() -> None:
    quiet = Quiet()
    quiet.note(wall_s=2.0, machine_s=4.5, side_s=4.0, waiting_s=0.1)
    quiet.note(wall_s=1.0, machine_s=2.0, side_s=2.0, waiting_s=0.0)
    quiet.note(wall_s=0.1, machine_s=5.0, side_s=0.0, waiting_s=1.0)
    assert quiet.others == pytest.approx(0.2) and quiet.waiting == pytest.approx(0.05)


def test_speeds_are_ours_over_theirs_and_times_theirs_over_ours() -> None:
    speed = Row("m", "tg", (300.0, 400.0, 310.0), (100.0, 160.0, 155.0))
    assert speed.ratios == (3.0, 2.5, 2.0)
    assert speed.cells() == ("m", "tg", "310 (300–400)", "155 (100–160)", "2.50", "2.00", "3.00")
    time = Row("m", "ms", (2.0, 4.0), (8.0, 8.0), less=True)
    assert time.ratios == (4.0, 2.0) and time.summary()["ratio"] == {"min": 2.0, "median": 3.0, "max": 4.0}


@given(st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6)), min_size=1, max_size=9))
def test_exchanging_the_sides_inverts_every_ratio(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    for less in (False, True):
        there, back = Row("", "", ours, theirs, less).ratios, Row("", "", theirs, ours, less).ratios
        assert there == pytest.approx([1 / ratio for ratio in back])


def test_engines_are_compared_in_tokens_per_second(sides: tuple[Peer, Peer]) -> None:
    work = [Workload("pp", 10), Workload("tg", 4), Workload("tg", 4, 100, 8)]
    rows = list(compare_engines("m", *sides, work, 2, Quiet()))
    assert [row.what for row in rows] == ["pp10, tokens/s", "tg4, tokens/s", "tg4 x8 @ 100, tokens/s"]
    assert [row.ours[0] for row in rows] == pytest.approx([10_000, 1000, 8000])
    assert all(row.ratios == pytest.approx((3.0, 3.0)) for row in rows)


def test_slowdowns_are_busy_over_quiet_and_less_is_better(
    sides: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the fakes do not slow down; the number of burners of each turn is noted."""
    started: list[int] = []

    class NoBurner:
        def __init__(self, n: int) -> None:
            started.append(n)

        def __enter__(self) -> None: ...

        def __exit__(self, *fault: object) -> None: ...

    monkeypatch.setattr(bench_driver, "burning", NoBurner)
    rows = list(compare_beside_burners("m", *sides, 3, 2, Quiet()))
    assert started == [0, 1, 2] * 2
    assert [row.what for row in rows] == [
        "median decode step on a quiet machine, ms",
        "median decode step beside 1 busy process, ms",
        "that step ÷ the quiet one, 1 busy",
        "median decode step beside 2 busy processes, ms",
        "that step ÷ the quiet one, 2 busy",
    ]
    assert rows[0].ours == pytest.approx((1.0, 1.0)) and rows[0].theirs == pytest.approx((3.0, 3.0))
    assert rows[2].ours == rows[2].theirs == (1.0, 1.0) and all(row.less for row in rows)


def test_burners_end_with_the_block() -> None:
    import psutil

    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children()}

    before = children()
    with pytest.raises(KeyError), burning(2):
        assert len(children() - before) == 2
        raise KeyError
    assert children() <= before


# ---- the command -----------------------------------------------------------------------------------------------------


def test_rows_of_the_engine_table() -> None:
    args = bench_compare.parser().parse_args([])
    assert [w.name for w in bench_compare.workloads(args)] == ["pp512", "tg128", "tg128 x8", "tg128 @ 4096"]
    args = bench_compare.parser().parse_args("-p 0 -n 16 --batch 2 -d 5,9".split())
    assert [w.name for w in bench_compare.workloads(args)] == ["tg16 x2", "tg16 @ 5", "tg16 @ 9"]


@pytest.mark.parametrize("words", [["--tables", "engine,gpu"], ["--rounds", "0"], ["-n", "1"]])
def test_flags_that_make_no_sense_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench_compare.parser().parse_args(words)
    assert caught.value.code == 2 and words[0] in capsys.readouterr().err


def test_the_report_is_markdown_with_its_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.setattr(bench_compare, "peers", lambda stack, *_: tuple(
        stack.enter_context(closing(fake(s, name))) for s, name in ((0.001, "pantheon"), (0.004, "llama.cpp"))
    ))  # fmt: skip
    args = bench_compare.parser().parse_args("--tables engine,http --rounds 2 -n 2 -d 0".split())
    report = bench_compare.Report(args, 2)
    report.run(["folder/model.Q4_1.gguf"])
    text = report.markdown()
    assert "pantheon 1, llama.cpp 1" in text and "rounds: 2" in text and "2 threads each" in text
    assert "http: skipped, there is no llama-server" in text and "### Engine alone" in text
    assert "### Through HTTP" not in text, "an empty table is no table"
    rows = [line for line in text.splitlines() if line.startswith("| model.Q4_1")]
    assert [row.split("|")[2].strip() for row in rows] == ["pp512, tokens/s", "tg2, tokens/s", "tg2 x8, tokens/s"]
    assert all(row.split("|")[5].strip() == "4.00" for row in rows)
    document = report.json()
    row = document["tables"]["engine"]["rows"][1]
    assert row["ratio"]["median"] == pytest.approx(4.0) and len(row["ours"]) == 2 and json.dumps(document)


def test_a_run_that_is_interrupted_prints_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(old := "<!-- bench engine -->\n<!-- bench end -->\n")

    def rows(*_: Any) -> Iterator[Row]:
        yield Row("m", "tg2, tokens/s", (3.0,), (1.0,))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_compare, "peers", lambda *_: (argparse.Namespace(about=ABOUT),) * 2)
    monkeypatch.setattr(bench_compare, "compare_engines", rows)
    monkeypatch.setattr(bench_compare.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["bench", str(page), "--tables", "engine", "--write", str(page)])
    assert bench_compare.main() == 130
    out = capsys.readouterr()
    assert "| m " in out.out and "interrupted" in out.out and "others used up to" in out.err
    assert page.read_text() == old


def test_tables_go_to_their_places_in_a_page_and_nowhere_else() -> None:
    page = "a\n<!-- bench engine -->\nold\n<!-- bench end -->\nb\n<!-- bench http -->\n<!-- bench end -->\nc\n"
    made = bench_compare.put_blocks(page, {"http": "| H |", "engine": "| E |"})
    assert "old" not in made and made.index("| E |") < made.index("\nb\n") < made.index("| H |") < made.index("\nc\n")
    assert bench_compare.put_blocks(made, {"engine": "| E |"}) == made, "again is the same"
    with pytest.raises(PeerError, match="no <!-- bench busy -->"):
        bench_compare.put_blocks(page, {"busy": ""})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tables", "http", "no-such-file.gguf"], "no-such-file.gguf: no such file"),
        (["--tables", "engine", str(model_path("tiny-llama.Q4_0"))], "`make bench` installs llama-cpp-python"),
    ],
)
def test_what_is_missing_is_one_line(words: list[str], message: str) -> None:
    code = (
        "import importlib.util, sys; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'llama_cpp' else find(name, *a)\n"
        "from tools.bench_compare import main; sys.exit(main())"
    )
    root = Path(bench_compare.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=root, capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_chosen_names_the_choices() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'x' is none of a, b"):
        bench_compare.chosen(("a", "b"))("a,x")
