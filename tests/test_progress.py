"""The progress display: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

import pytest

from pantheon.progress import Progress, describe
from tests.fakes import FakeClock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_at_the_ends_and_now_and_then() -> None:
    out, clock = io.StringIO(), FakeClock()
    progress = Progress("m", out, clock)
    for done in range(11):
        progress.update("weights", done, 10)
        clock.advance(1.0)
    progress.update("kernels", 0, 2)
    progress.update("kernels", 2, 2)
    progress.update("kernels", 2, 2)
    progress.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "m weights 30% (3/10)" and lines[-1] == "m kernels 100% (2/2)"
    assert [line.split()[2] for line in lines] == ["30%", "80%", "100%", "0%", "100%"]
    assert "\r" not in out.getvalue()


def test_a_short_wait_leaves_no_trace_in_a_log() -> None:
    out, clock = io.StringIO(), FakeClock()
    progress = Progress("m", out, clock)
    for stage in ("weights", "kernels"):
        for done in (1, 2):
            progress.update(stage, done, 2)
            clock.advance(0.7)
    progress.close()
    assert out.getvalue() == ""
    progress.update("weights", 1, 2)
    clock.advance(3.0)
    progress.update("weights", 1, 2)
    assert out.getvalue() == "m weights 50% (1/2)\n", "a stage that lasts is told of, though its begin was not"


def test_a_terminal_gets_one_line_that_is_redrawn() -> None:
    out, clock = Terminal(), FakeClock()
    progress = Progress("m", out, clock)
    for done in range(101):
        progress.update("weights", done << 20, 100 << 20)
        clock.advance(0.05)
    progress.close()
    text = out.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n")
    assert 30 <= text.count("\r") <= 55, "at most ten times a second"
    assert "[" in text and "100% (100/100 MiB)" in text


def test_a_stage_that_did_not_end_leaves_its_line_whole() -> None:
    out = Terminal()
    progress = Progress("", out, FakeClock())
    progress.update("a", 1, 4)
    progress.update("b", 1, 4)
    progress.close()
    progress.close()
    assert out.getvalue().count("\n") == 2


def test_describe() -> None:
    assert describe("m", "weights", 1, 4) == "m weights 25% (1/4)"
    assert describe("", "tensors", 0, 0) == "tensors"
    assert describe("m", "weights", 3 << 20, 2 << 20) == "m weights 100% (3/2 MiB)"


@pytest.mark.parametrize("out", [None, "closed", "broken"])
def test_a_stream_that_is_gone_never_ends_the_load(out: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    stream = None if out is None else Broken()
    monkeypatch.setattr("sys.stderr", stream)
    progress = Progress("m")
    if stream is not None and out == "closed":
        stream.close()
    progress.update("weights", 0, 10)
    progress.update("weights", 10, 10)
    progress.close()
