"""Floor 0: log lines are one greppable line each [M016]."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator

import pytest

from pantheon import log

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@pytest.fixture
def quiet_again() -> Iterator[None]:
    """Put the loggers back as an import leaves them."""
    root = logging.getLogger("pantheon")
    kept = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = kept[0], kept[2]
    root.setLevel(kept[1])


def test_a_line_has_stamp_level_area_words_and_fields(quiet_again: None, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup()
    log.logger("serve").info("listening %s", log.fields(url="http://127.0.0.1:8201"))
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(STAMP + r" INFO +serve +listening url=http://127\.0\.0\.1:8201\n", err)


def test_setup_twice_prints_once_and_honours_the_level(quiet_again: None, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup()
    log.setup("warning")
    log.logger("load").info("hidden")
    log.logger("load").warning("shown")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["shown"]


def test_an_exception_is_printed_below_its_line(quiet_again: None, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup()
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        log.logger("engine").exception("a bug of ours")
    err = capsys.readouterr().err
    assert "a bug of ours\nTraceback" in err and err.rstrip().endswith("RuntimeError: broken")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (1.23456, "1.235"),
        (7, "7"),
        (True, "True"),
        ("plain/path.gguf", "plain/path.gguf"),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("", '""'),
        ("two\nlines", '"two\\nlines"'),
        ("esc\x1b[31m", '"esc\\u001b[31m"'),
    ],
)
def test_a_value_can_not_break_the_line_or_the_pairing(value: object, word: str) -> None:
    assert log.fields(k=value) == f"k={word}"
    if word.startswith('"'):
        assert json.loads(word) == value


def test_fields_keep_their_order_and_leave_none_out() -> None:
    assert log.fields(b=1, a=None, c="x") == "b=1 c=x"


# ---- JSON -----------------------------------------------------------------------------------------------------------


def test_a_json_line_has_the_fields_as_keys(quiet_again: None, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(form="json")
    log.logger("serve").info("listening %s", log.fields(url="http://x", level=3, none=None))
    log.logger("http").info("%s %s", "GET", "/", extra=log.structured("request", id="r", none=None, tokens=[1]))
    log.logger("serve").info("for people", extra=log.TEXT_ONLY)
    log.logger("http").warning("100%% of %s", "it")
    one, two, three = map(json.loads, capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one.pop("time"))
    assert one == {"level": "info", "area": "serve", "event": "listening", "url": "http://x", "level_": 3}
    assert (two["event"], two["id"], two["tokens"]) == ("request", "r", [1]) and "none" not in two
    assert three["event"] == "100% of it"


def test_a_traceback_is_one_json_line(quiet_again: None, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(form="json")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        log.logger("engine").exception("a bug of ours %s", log.fields(id=1))
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["traceback"].endswith("RuntimeError: broken")


# ---- a reader that sleeps -------------------------------------------------------------------------------------------


def test_a_pipe_that_nobody_reads_stops_no_writer_and_the_loss_is_counted_and_told() -> None:
    mine, theirs = os.pipe()
    writer = log.LineWriter(theirs, 200_000, notice=lambda lost: f"lost {lost}")
    line = "x" * 999
    try:
        for _ in range(600):
            # more than the pipe and the queue hold: this would never return
            writer.write(line)
        assert 100 < writer.dropped < 600
        assert not writer.drain(0.01)
        got, told = b"", 0
        # in one notice, or in several when the writer came to run meanwhile
        while not got.endswith(b"\n") or got.count(b"x" * 999 + b"\n") + told < 600:
            got += os.read(mine, 1 << 16)
            told = sum(int(n) for n in re.findall(rb"^lost (\d+)\n", got, re.MULTILINE))
        assert told == writer.dropped and got.count(b"x" * 999 + b"\n") == 600 - writer.dropped
        writer.write("after")
        assert writer.drain(10) and os.read(mine, 1 << 16) == b"after\n"
    finally:
        os.close(mine)
    writer.write("nobody is there any more")
    assert writer.drain(10)
    os.close(theirs)
