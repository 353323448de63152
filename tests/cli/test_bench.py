"""`pantheon bench`: what it runs, what it prints, and the maths of the roof."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pantheon.cli import main
from pantheon.commands.bench import markdown, measure, table, whole_list
from pantheon.commands.bench_runs import Result, Workload, plan_tests, positions, rate
from pantheon.commands.roofline import Memory, Roof, bytes_per_token, kv_read_bytes, roof
from pantheon.engine.load import load_model
from pantheon.engine.scripted import scripted_model
from pantheon.plan.state_spec import KVSpec, KVType, StateSpec
from tests.cli.terminal import write_script
from tests.golden_data import model_path

TINY = str(model_path("tiny-llama.Q4_0"))


class Ticks:
    """A clock that only the scripted model's sleeps advance."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    clock = Ticks()
    monkeypatch.setattr("pantheon.seams.SYSTEM_CLOCK", clock)
    return clock


# ---- what runs -------------------------------------------------------------------------------------------------------


def test_every_depth_and_every_number_of_sequences_has_a_row() -> None:
    tests = plan_tests(512, 128, [0, 4096], [1, 8])
    assert [t.name for t in tests] == [
        "pp512", "pp512 @ 4096", "tg128", "tg128 @ 4096", "tg128 x8", "tg128 x8 @ 4096",
    ]  # fmt: skip
    assert positions(tests) == 4608
    assert [t.kind for t in plan_tests(0, 4, [0], [2])] == ["tg"]
    assert plan_tests(0, 0, [0, 5], [1, 2]) == [] and positions([]) == 0


def test_speed_is_tokens_over_time(ticks: Ticks) -> None:
    """4 prefill chunks of 10 ms are 100 tokens, a decode step takes 5 ms."""
    model = scripted_model({"pieces": ["x"], "prefill_ms": 10, "decode_ms": 5}, clock=ticks)
    prompt, generation = measure(model, [Workload("pp", 100), Workload("tg", 21)], 2, chunk=25)
    assert prompt.runs == pytest.approx((2500.0, 2500.0))
    assert generation.runs == pytest.approx((190.91, 190.91)), "the first of 21 steps has an empty context: prefill"


def test_a_batch_counts_the_tokens_of_all_sequences_and_depth_costs_no_time(ticks: Ticks) -> None:
    model = scripted_model({"pieces": ["x"], "prefill_ms": 10, "decode_ms": 5}, clock=ticks)
    (batched,) = measure(model, [Workload("tg", 10, 30, 4)], 3)
    assert batched.runs == pytest.approx((800.0,) * 3), "10 steps of 5 ms, 4 tokens each"


def test_every_sequence_decodes_from_the_depth_on_in_one_forward() -> None:
    """The columns that reach the runner: depth first, slot by slot, then one column of each slot."""
    with load_model(TINY, executor="reference", ctx=16) as model:
        seen = []
        forward = model.runner.forward

        def spy(state, columns):  # type: ignore[no-untyped-def]
            seen.append((columns.slots.tolist(), columns.positions.tolist(), columns.wanted.tolist()))
            return forward(state, columns)

        model.runner.forward = spy  # type: ignore[method-assign]
        measure(model, [Workload("tg", 2, 3, 2)], 1)
    fill = [([slot] * 3, [0, 1, 2], [2]) for slot in (0, 1)]
    steps = [([0, 1], [at, at], [0, 1]) for at in (3, 4)]
    assert seen == fill + steps + steps, "filled once, then the run that is not counted and the one that is"


def test_a_repetition_is_never_infinitely_fast() -> None:
    assert rate(Workload("pp", 4), [0.0]) == pytest.approx(4e9)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_json_has_every_repetition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", write_script(tmp_path, "x"), "-p", "64", "-n", "8", "-r", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    prompt, generation = report["results"]
    assert (prompt["test"], generation["test"]) == ("pp64", "tg8")
    for result in report["results"]:
        assert len(result["runs"]) == 3 and result["roof"] is None
        assert 0 < result["min"] <= result["median"] <= result["max"]
    assert report["threads"] is None and report["memory"] is None, "a scripted model has neither"


def test_the_cpu_executor_says_its_threads_and_its_roof(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", TINY, "-p", "8", "-n", "4", "-d", "0,6", "--batch", "1,2", "-r", "2", "--threads", "2"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["threads"] == report["memory"]["threads"] == 2 and report["memory"]["what"] == "read"
    roofs = {result["test"]: result["roof"] for result in report["results"]}
    assert roofs["pp8"] is None and roofs["pp8 @ 6"] is None
    assert roofs["tg4"]["bytes_per_token"] < roofs["tg4 @ 6"]["bytes_per_token"]
    assert roofs["tg4 x2"]["bytes_per_token"] < roofs["tg4"]["bytes_per_token"] <= report["weights_bytes"] * 1.5
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "roof: memory reads" in out and "auto" not in out
    assert {line.count("|") for line in out.splitlines() if "|" in line} == {9}


def test_a_test_of_length_0_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", write_script(tmp_path, "x"), "-p", "0", "-n", "4", "-r", "1"]) == 0
    out = capsys.readouterr().out
    assert "tg4" in out and "pp" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ctx", "100", "-p", "512"], "--ctx 100 is too small for 512 tokens"),
        (["--ctx", "600", "-d", "100"], "--ctx 600 is too small for 612 tokens"),
        (["-p", "0", "-n", "0"], "-p and -n are both 0"),
        (["--batch", "1,0"], "'0' is not a whole number from 1 up"),
        (["--depth", "0,many"], "'many' is not a whole number from 0 up"),
    ],
)
def test_flags_that_make_no_sense_are_usage_errors(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", write_script(tmp_path, "x"), *words])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_lists_keep_their_order_and_lose_repeats() -> None:
    assert whole_list(0)("8,0,8,2") == [8, 0, 2]


# ---- the roof --------------------------------------------------------------------------------------------------------

#: 2 heads of 4 + 4 values in F16: 32 bytes a position, in one full layer and one that sees 10 positions
STATE = StateSpec((KVSpec(2, 4, 4), KVSpec(2, 4, 4, window=10)))


def test_a_window_bounds_what_a_step_reads() -> None:
    assert [kv_read_bytes(STATE, KVType.F16, n) for n in (1, 10, 100)] == [64, 640, 32 * 110]
    assert kv_read_bytes(STATE, KVType.F32, 1) == 128


def test_sequences_share_the_weights_and_each_reads_its_own_kv() -> None:
    full = StateSpec((KVSpec(2, 4, 4),))
    assert bytes_per_token(Workload("tg", 1, 0), 1000, full, KVType.F16) == 1032
    assert bytes_per_token(Workload("tg", 3, 100), 1000, full, KVType.F16) == 1000 + 32 * 102, "middle step"
    assert bytes_per_token(Workload("tg", 1, 99, 4), 1000, full, KVType.F16) == 250 + 3200


def test_the_roof_is_bandwidth_over_bytes_and_the_median_reaches_a_fraction_of_it() -> None:
    memory = Memory((9e3, 10_320.0, 8e3), 2, 1 << 28)
    result = Result(Workload("tg", 1), (4.0, 5.0, 20.0))
    assert roof(result, 1000, StateSpec((KVSpec(2, 4, 4),)), KVType.F16, memory) == Roof(1032, 10.0, 0.5)
    assert roof(Result(Workload("pp", 1), (5.0,)), 1000, STATE, KVType.F16, memory) is None


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_is_aligned_markdown() -> None:
    results = [Result(Workload("pp", 512), (1.0, 3.0, 2.0)), Result(Workload("tg", 128), (1234.5,))]
    lines = table("model", 2, results, [None, Roof(96_400_000, 2000.0, 0.617)])
    assert len({len(line) for line in lines}) == 1
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines[2:]]
    assert rows[0] == ["model", "2", "pp512", "1.00", "2.00", "3.00", "", ""]
    assert rows[1][2:] == ["tg128", "1234.50", "1234.50", "1234.50", "96.4", "62 %"]
    assert set(lines[1]) == set("|-:")


def test_an_executor_without_threads_of_its_own_shows_a_dash() -> None:
    assert "| -" in table("model", None, [Result(Workload("tg", 1), (1.0,))], [None])[2].replace("       -", " -")


def test_short_columns_still_have_room_for_a_rule() -> None:
    assert markdown(("a", "b"), [("1", "2")], right={1}) == ["| a   |   b |", "|-----|----:|", "| 1   |   2 |"]
