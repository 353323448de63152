"""`--parallel` and the flags of the batch scheduler: what each does, which words are none [M083-M086, X09, X30]."""

from __future__ import annotations

from typing import Any

import pytest

from pantheon import cli, settings
from pantheon.cli import build_parser
from pantheon.errors import PantheonError
from pantheon.sched.shared import SchedConfig
from pantheon.serve.command import run_serve
from pantheon.serve.flags_batch import batch_config, users


def config(*words: str) -> SchedConfig | None:
    return batch_config(build_parser(True).parse_args(["serve", *words]))


def test_off_by_default_M117_M155() -> None:
    assert config() is None


@pytest.mark.parametrize(
    ("words", "env", "slots"),
    [
        ((), "1", 8), ((), "8", 8), ((), "on", 8), ((), "4", 4), ((), "16", 16), ((), "0", 0),
        (("--parallel", "4"), None, 4), (("-np", "16"), None, 16), (("--parallel", "1"), None, 1),
        (("--parallel", "0"), "8", 0), (("--parallel", "2"), "8", 2), (("-np", "-1"), "3", 3),
    ],
)  # fmt: skip
def test_how_many_at_a_time_M083_M084_M085_M155_X09_X30(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], env: str | None, slots: int
) -> None:
    if env is not None:
        monkeypatch.setenv("QWEN35_BATCH_SLOTS", env)
    found = config(*words)
    assert (found.users if found else 0) == slots
    assert users(build_parser(True).parse_args(["serve", *words])) == slots


@pytest.mark.parametrize(
    ("name", "value", "field", "becomes"),
    [
        ("BS_QUEUE_DEPTH", "4", "queue_depth", 4),  # M099, M159
        ("PN_QUEUE_WAIT_S", "2.5", "wait_s", 2.5),
        ("PN_BS_MIXED", "0", "mixed", False),
        ("QWEN35_BS_DRIVER_SAMPLE", "0", "lockstep", True),  # M112, M156
        ("QWEN35_BS_PREFILL_BATCH", "0", "chunk", 1),  # M114, M157
        ("QWEN35_BS_PREFILL_CHUNK", "64", "chunk", 64),  # M158
        ("QWEN35_BS_STATS", "1", "stats", True),  # M103, M160
    ],
)
def test_every_setting_has_its_effect_M156_M157_M158_M159_M160(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, field: str, becomes: Any
) -> None:
    before = config("--parallel", "8")
    assert before is not None and getattr(before, field) != becomes
    monkeypatch.setenv(name, value)
    assert getattr(config("--parallel", "8"), field) == becomes


def test_flags_win_over_the_environment_M099(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BS_QUEUE_DEPTH", "4")
    monkeypatch.setenv("PN_QUEUE_WAIT_S", "4")
    found = config("--parallel", "8", "--queue-depth", "0", "--queue-wait", "1.5")
    assert found is not None and (found.queue_depth, found.wait_s) == (0, 1.5)
    assert config("--parallel", "8") == SchedConfig(queue_depth=4, wait_s=4.0)


@pytest.mark.parametrize(
    "words",
    [
        ("--parallel", "abc"), ("--parallel", "65"), ("--parallel", "1.5"), ("--queue-depth", "-1"),
        ("--queue-wait", "0"), ("--queue-wait", "nan"),
    ],
)  # fmt: skip
def test_other_words_exit_2_X09_X30(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        build_parser(True).parse_args(["serve", *words])
    assert left.value.code == 2 and words[0] in capsys.readouterr().err


def test_a_bad_setting_stops_the_start_X09(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_BATCH_SLOTS", "abc")
    with pytest.raises(PantheonError, match=r"QWEN35_BATCH_SLOTS=abc: .*1 \(on: 8 slots\)"):
        run_serve(build_parser(True).parse_args(["serve", "--no-model"]))
    assert cli.main(["serve", "--no-model"]) == 2


def test_defaults_are_those_of_the_table() -> None:
    assert SchedConfig().queue_depth == settings.get("BS_QUEUE_DEPTH") == 32
    assert SchedConfig().wait_s == settings.get("PN_QUEUE_WAIT_S") == 30
    assert SchedConfig().chunk == settings.get("QWEN35_BS_PREFILL_CHUNK") == 128
    assert SchedConfig().mixed == bool(settings.get("PN_BS_MIXED"))
