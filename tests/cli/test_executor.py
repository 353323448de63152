"""`--executor` of the commands: which one computes, on which dies."""

from __future__ import annotations

import argparse

import pytest

from pantheon.accel.die import SIMULATOR
from pantheon.accel.die_manager import DieManager
from pantheon.cli import main
from pantheon.commands import common
from pantheon.engine.footprint import footprint
from pantheon.errors import PantheonError
from tests.golden_data import model_path

TINY = str(model_path("tiny-llama-k.Q4_K_M"))
NEED = footprint(TINY, ctx=64, executor="cuda")


def chosen(executor: str) -> tuple[str, dict[str, object]]:
    return common.choose_executor(argparse.Namespace(executor=executor, ctx=64, kv_type=None), TINY)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pantheon.accel.die.cuda_dies", lambda fault: [])
    for name in ("PN_VIRTUAL_DIES", "CUDA_VISIBLE_DEVICES", SIMULATOR):
        monkeypatch.delenv(name, raising=False)


def dies(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    monkeypatch.setenv("PN_VIRTUAL_DIES", ",".join(map(str, sizes)))
    monkeypatch.setenv(SIMULATOR, "1")


def test_without_a_cuda_die_the_cpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("auto") == chosen("cpu") == ("cpu", {})
    monkeypatch.setenv("PN_VIRTUAL_DIES", "2x1GiB")
    assert chosen("auto") == ("cpu", {})
    monkeypatch.setattr(DieManager, "discover", None)
    assert chosen("reference") == ("reference", {}), "nobody looks for dies"


def test_cuda_dies_that_fit_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    dies(monkeypatch, 1024, 1 << 30)
    assert chosen("auto") == chosen("cuda") == ("cuda", {"dies": (1,), "cuts": ()})
    room = NEED.total_bytes - NEED.parts["weights"] // 4
    dies(monkeypatch, room, 1024, room)
    name, on = chosen("auto")
    assert name == "cuda" and on["dies"] == (0, 2) and len(on["cuts"]) == 1  # type: ignore[arg-type]
    dies(monkeypatch, 1024)
    with pytest.raises(PantheonError) as fault:
        chosen("auto")
    assert fault.value.status == 507 and chosen("cpu") == ("cpu", {})


def test_cuda_without_a_cuda_die_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", TINY, "x", "--executor", "cuda", "--ctx", "64"]) == 1
    assert "--executor cuda: there is no CUDA device (CUDA_VISIBLE_DEVICES is unset" in capsys.readouterr().err
