"""`pantheon bench`: what it runs and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pantheon.cli import main
from pantheon.commands.bench import Result, measure, table
from pantheon.engine.scripted import scripted_model
from tests.cli.terminal import write_script


def test_json_has_every_repetition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", write_script(tmp_path, "x"), "-p", "64", "-n", "8", "-r", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    prompt, generation = report["results"]
    assert (prompt["test"], generation["test"]) == ("pp64", "tg8")
    for result in report["results"]:
        assert len(result["runs"]) == 3
        assert 0 < result["min"] <= result["median"] <= result["max"]


def test_a_test_of_length_0_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", write_script(tmp_path, "x"), "-p", "0", "-n", "4", "-r", "1"]) == 0
    out = capsys.readouterr().out
    assert "tg4" in out and "pp" not in out


def test_speed_is_tokens_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only forwards advance: 4 prefill chunks of 10 ms are 100 tokens, a decode step takes 5 ms."""

    class Ticks:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    ticks = Ticks()
    monkeypatch.setattr("pantheon.seams.SYSTEM_CLOCK", ticks)
    model = scripted_model({"pieces": ["x"], "prefill_ms": 10, "decode_ms": 5}, clock=ticks)
    prompt, generation = measure(model, 100, 21, 2, chunk=25)
    assert prompt.runs == pytest.approx((2500.0, 2500.0))
    assert generation.runs == pytest.approx((190.91, 190.91)), "the first of 21 steps has an empty context: prefill"


def test_a_context_too_small_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", write_script(tmp_path, "x"), "--ctx", "100", "-p", "512"])
    assert caught.value.code == 2 and "--ctx 100" in capsys.readouterr().err


def test_the_table_is_aligned_markdown() -> None:
    lines = table("model", "2", [Result("pp512", 512, (1.0, 3.0, 2.0)), Result("tg128", 128, (1234.5,))])
    assert len({len(line) for line in lines}) == 1
    assert [c.strip() for c in lines[2].strip("|").split("|")] == ["model", "2", "pp512", "1.00", "2.00", "3.00"]
    assert set(lines[1]) == set("|-:")
