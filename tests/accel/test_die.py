"""Which dies a process sees: virtual ones, CUDA through NVML, and none [M005, M006, M167, M171, M186, M228, M240]."""

from __future__ import annotations

import logging
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from pantheon.accel import die as dies
from pantheon.accel.die_manager import DieManager
from pantheon.errors import BadRequest
from pantheon.settings import SettingError

GIB = 1 << 30
UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PN_VIRTUAL_DIES", "PN_DIE_RESERVE_BYTES", "CUDA_VISIBLE_DEVICES", dies.SIMULATOR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    installed = ModuleType("numba_cuda")
    installed.__spec__ = ModuleSpec("numba_cuda", None)
    monkeypatch.setitem(sys.modules, "numba_cuda", installed)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("-1", []),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("1,1", []),
        ("GPU-cccc-3,GPU-aaaa", [2, 0]),
        ("GPU-aa", []),
        ("GPU-none,0", []),
        ("0,,1", [0]),
    ],
)
def test_visible_devices_as_cuda_reads_them_M171(visible: str | None, found: list[int]) -> None:
    assert dies.visible_devices(visible, UUIDS) == found


class FakeNvml(SimpleNamespace):
    """Three GPUs of 80 GiB; `free` can be changed."""

    def __init__(self, **more: Any) -> None:
        super().__init__(free=[79 * GIB] * 3, **more)

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> Any:
        return UUIDS[handle].encode() if handle == 0 else UUIDS[handle]

    def nvmlDeviceGetName(self, handle: int) -> Any:
        return b"NVIDIA H200" if handle == 0 else "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 * GIB, free=self.free[handle])


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_cuda_dies_are_numbered_behind_CUDA_VISIBLE_DEVICES_M005(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    manager = DieManager.discover()
    (info,) = manager.snapshot()
    assert (info.index, info.kind, info.uuid, info.name) == (0, "cuda", UUIDS[1], "NVIDIA H200")
    assert (info.total_bytes, info.budget_bytes, info.free_bytes) == (80 * GIB, 79 * GIB - GIB, 79 * GIB)
    with pytest.raises(BadRequest) as fault:
        manager.check([1])
    assert "CUDA_VISIBLE_DEVICES is '1'" in fault.value.message and fault.value.code == "no_such_die"


def test_cuda_dies_take_models_where_numba_cuda_is_installed_M240(nvml: FakeNvml) -> None:
    manager = DieManager.discover()
    assert manager.usable and manager.executor() == manager.executor((1,)) == "cuda" and manager.executor(()) == "cpu"
    assert manager.take("a", GIB, (2,)).dies == (2,) and manager.pick(GIB) == (0,)
    assert [info.usable for info in manager.snapshot()] == [True] * 3


@pytest.mark.parametrize(("executor", "why"), [("auto", r"pantheon-server\[cuda\]"), ("cpu", "--executor cpu")])
def test_a_cuda_die_that_is_not_used_is_listed_and_budgeted_only(
    executor: str, why: str, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    if executor == "auto":
        monkeypatch.setitem(sys.modules, "numba_cuda", None)
    manager = DieManager.discover(executor)
    assert len(manager) == 3 and not manager.usable and manager.executor() == manager.executor((0,)) == "cpu"
    with pytest.raises(BadRequest, match=why) as fault:
        manager.pick(1, (0,))
    assert fault.value.code == "die_not_supported" and "NVIDIA H200" in fault.value.message
    assert [info.usable for info in manager.snapshot()] == [False] * 3


def test_cuda_is_made_to_count_as_nvml_does_M005_M171(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    DieManager.discover("cpu")
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    with caplog.at_level(logging.WARNING, "pantheon.dies"):
        DieManager.discover()
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and "FASTEST_FIRST" in caplog.text


def test_only_cuda_dies_will_do_for_executor_cuda(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert DieManager.discover("cuda").executor() == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BadRequest, match="no CUDA device .*CUDA_VISIBLE_DEVICES is ''") as fault:
        DieManager.discover("cuda")
    assert fault.value.param == "executor" and "NVML" not in str(fault.value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with monkeypatch.context() as broken:
        broken.setattr(nvml, "nvmlInit", Mock(side_effect=OSError("Driver Not Loaded")))
        with pytest.raises(BadRequest, match=r"\(CUDA_VISIBLE_DEVICES is unset; NVML: Driver Not Loaded\)"):
            DieManager.discover("cuda")
    monkeypatch.setitem(sys.modules, "numba_cuda", None)
    with pytest.raises(BadRequest, match="numba-cuda is not installed"):
        DieManager.discover("cuda")
    monkeypatch.setenv("PN_VIRTUAL_DIES", "1GiB")
    with pytest.raises(BadRequest, match="NUMBA_ENABLE_CUDASIM=1"):
        DieManager.discover("cuda")
    monkeypatch.setenv(dies.SIMULATOR, "1")
    with pytest.raises(BadRequest, match="numba-cuda is not installed"):
        DieManager.discover("cuda")


def test_virtual_dies_are_cuda_dies_in_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PN_VIRTUAL_DIES", "2x64MiB")
    monkeypatch.setenv(dies.SIMULATOR, "1")
    found = DieManager.discover("cuda").snapshot()
    assert [(info.kind, info.name, info.uuid, info.usable) for info in found] == [
        ("cuda", f"simulated CUDA die {i}", f"SIMULATED-{i}", True) for i in range(2)
    ]
    assert {info.kind for info in DieManager.discover("cpu").snapshot()} == {"virtual"}
    monkeypatch.setenv(dies.SIMULATOR, "0")
    assert {info.kind for info in DieManager.discover().snapshot()} == {"virtual"}


def test_a_load_is_free_memory_until_it_is_there_X32(nvml: FakeNvml) -> None:
    manager = DieManager.discover()
    manager.take("a", 20 * GIB, (0,))
    assert manager.snapshot()[0].budget_bytes == 78 * GIB  # nothing moved yet
    nvml.free[0] = 59 * GIB
    manager.settle((0,), "a", [20 * GIB])
    manager.refresh()
    info = manager.snapshot()[0]
    assert (info.budget_bytes, info.charged_bytes, info.free_bytes) == (78 * GIB, 20 * GIB, 59 * GIB)
    nvml.free[0] = 49 * GIB  # somebody else took 10 GiB
    manager.refresh()
    assert manager.snapshot()[0].budget_bytes == 68 * GIB
    manager.unbind((0,), "a")
    assert manager.snapshot()[0].budget_bytes == 48 * GIB


def test_what_other_processes_take_is_seen_at_the_next_poll_X32(nvml: FakeNvml) -> None:
    manager = DieManager.discover()
    nvml.free[1] = 30 * GIB
    assert manager.snapshot()[1].free_bytes == 79 * GIB
    manager.refresh()
    info = manager.snapshot()[1]
    assert (info.free_bytes, info.budget_bytes) == (30 * GIB, 29 * GIB)
    nvml.free[1] = 80 * GIB
    manager.refresh()
    assert manager.snapshot()[1].budget_bytes == 79 * GIB  # never more than at boot [M186]


def test_the_die_reserve_is_a_flag_M167(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.free = [80 * GIB] * 3
    monkeypatch.setenv("PN_DIE_RESERVE_BYTES", "3GiB")
    assert DieManager.discover().snapshot()[0].budget_bytes == 77 * GIB


def test_a_driver_that_stops_answering_leaves_the_boot_budget(nvml: FakeNvml) -> None:
    manager = DieManager.discover()
    nvml.free = []
    manager.refresh()
    assert manager.snapshot()[0].budget_bytes == 79 * GIB


@pytest.mark.parametrize("broken", ["import", "init", "count"])
def test_no_nvml_is_no_die_and_no_noise_M228_M006(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError("libnvidia-ml.so.1: no such file")

    fake = None if broken == "import" else FakeNvml(**{"nvmlInit" if broken == "init" else "nvmlDeviceGetCount": fail})
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    manager = DieManager.discover()
    assert len(manager) == 0 and manager.snapshot() == ()
    with pytest.raises(BadRequest, match="this machine has none"):
        manager.check([0])


def test_virtual_dies_stand_before_cuda_ones_M240(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PN_VIRTUAL_DIES", "4x2GiB")
    found = DieManager.discover().snapshot()
    assert [info.kind for info in found] == ["virtual"] * 4
    assert {(info.total_bytes, info.budget_bytes, info.free_bytes) for info in found} == {(2 * GIB,) * 3}
    assert [info.uuid for info in found] == [f"VIRTUAL-{i}" for i in range(4)]


def test_a_reserve_that_is_set_holds_for_virtual_dies_too_M186(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PN_VIRTUAL_DIES", "2GiB,3GiB")
    monkeypatch.setenv("PN_DIE_RESERVE_BYTES", "1GiB")
    assert [info.budget_bytes for info in DieManager.discover().snapshot()] == [GIB, 2 * GIB]


@pytest.mark.parametrize(
    ("visible", "kept"), [("1", [1]), ("3,0", [3, 0]), ("", [0, 1, 2, 3]), ("GPU-1", [0, 1, 2, 3])]
)
def test_numbers_in_CUDA_VISIBLE_DEVICES_choose_virtual_dies_M005(
    visible: str, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PN_VIRTUAL_DIES", "4x1GiB")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [info.uuid for info in DieManager.discover().snapshot()] == [f"VIRTUAL-{i}" for i in kept]


def test_a_bad_value_names_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PN_VIRTUAL_DIES", "four")
    with pytest.raises(SettingError, match="PN_VIRTUAL_DIES"):
        DieManager.discover()
