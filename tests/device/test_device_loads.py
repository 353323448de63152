"""Loads on this machine's GPU: what was predicted is what is taken, within 5 %, and all of it comes back
[M142, M196, M240, X07, X32].  Figures are NVML's; nobody else may load or unload on the device meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pantheon.accel.die import cuda_dies, cuda_missing, simulator
from pantheon.accel.die_manager import DieManager
from pantheon.errors import PantheonError
from pantheon.serve import loading
from pantheon.serve.loading import LoadOptions, ModelSpec, load_spec
from pantheon.serve.registry import Registry
from tools.make_tiny_gguf import LlamaShape, write_tiny_llama

MIB = 1 << 20
#: what the driver keeps beside our arrays: code of kernels, allocations rounded up to 2 MiB
SLACK = 64 * MIB
OPTIONS = LoadOptions(ctx=4096, executor="cuda")
WHY = cuda_missing() or ("the simulator is on" if simulator() else "" if cuda_dies() else "no CUDA device")
pytestmark = [pytest.mark.skipif(bool(WHY), reason=WHY), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of some 100 MiB, whose conversations are larger still."""
    shape = LlamaShape(layers=6, width=1024, heads=16, kv_heads=16, ff=4096, ctx=8192, type_name="Q8_0")
    return str(write_tiny_llama(tmp_path_factory.mktemp("models") / "m.gguf", shape))


@pytest.fixture(scope="module")
def registry(model: str) -> Iterator[Registry]:
    """The dies of this machine, the first of which has had a model, so that context and kernels are there."""
    made = Registry(dies=DieManager.discover("cuda"))
    load_spec(made, ModelSpec(model, "first", (0,)), OPTIONS)
    loading.unload(made, "first")
    yield made
    for entry in made.all_entries():
        loading.unload(made, entry.name)


def free(registry: Registry) -> int:
    registry.dies.refresh()
    return registry.dies.snapshot()[0].free_bytes


def test_a_load_takes_what_it_is_charged_and_gives_it_back(registry: Registry, model: str) -> None:
    before = free(registry)
    entry = load_spec(registry, ModelSpec(model, "m", (0,)), OPTIONS)
    taken, die = before - free(registry), registry.dies.snapshot()[0]
    assert entry.vram_bytes == die.charged_bytes > 500 * MIB
    assert abs(taken - die.charged_bytes) <= die.charged_bytes * 5 // 100 + SLACK
    assert entry.model is not None and list(entry.model.generate([1, 2, 3], max_tokens=8, temperature=0))
    assert before - free(registry) <= taken + SLACK, "an answer takes nothing more"
    loading.unload(registry, "m")
    assert before - free(registry) <= SLACK


def test_loads_that_come_and_go_leave_nothing(registry: Registry, model: str) -> None:
    before = free(registry)
    for _ in range(5):
        load_spec(registry, ModelSpec(model, "m", (0,)), OPTIONS)
        loading.unload(registry, "m")
    assert before - free(registry) <= SLACK


def test_what_does_not_fit_is_507_and_takes_nothing(registry: Registry, model: str) -> None:
    before = free(registry)
    with pytest.raises(PantheonError) as fault:
        load_spec(registry, ModelSpec(model, "m", (0,), ctx=1 << 30), OPTIONS)
    assert fault.value.status == 507 and fault.value.extra["largest_ctx"] > 4096
    assert before - free(registry) <= SLACK
    registry.check_integrity()


def test_the_die_is_the_device_that_cuda_means_M005(registry: Registry) -> None:
    from numba import cuda

    assert [str(device.uuid) for device in cuda.gpus] == [info.uuid for info in registry.dies.snapshot()]
