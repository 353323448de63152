"""What a die is, and which ones this process sees: CUDA devices through NVML, or virtual dies on the CPU.

A die is one accelerator under its place in CUDA_VISIBLE_DEVICES, or a virtual one (`PN_VIRTUAL_DIES=4x2GiB`): a share
of the CPU with a byte budget, so that placement, replicas and budgets run for real where there is no GPU.  In Numba's
CUDA simulator (NUMBA_ENABLE_CUDASIM=1) virtual dies are CUDA ones that are simulated.  Must not know models; imports
nothing of CUDA.  Sources: CUDA programming guide, "CUDA environment variables"; NVML API reference; M005, M186, M240.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pantheon import log, settings

Kind = Literal["cuda", "virtual"]
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
SIMULATOR = "NUMBA_ENABLE_CUDASIM"
_log = log.logger("dies")


@dataclass(frozen=True)
class DieInfo:
    """One die at one moment.

    `index` counts as --dies does; `budget_bytes` is what models may be charged in all; `charged_bytes` is what the
    resident one was charged, and `cache_bytes` its warm conversations beyond that.  `free_bytes` is what the device
    itself reports (CUDA) or what is left of it (virtual).  `usable`: whether models can be placed on it.
    """

    index: int
    kind: Kind
    name: str
    total_bytes: int
    budget_bytes: int
    free_bytes: int
    charged_bytes: int
    model: str | None
    uuid: str = ""
    cache_bytes: int = 0
    usable: bool = True


@dataclass
class Die:
    """A die as the manager keeps it.  `free_now` asks the device for its free bytes: None when it can not say, or for
    a virtual die, which has nobody else on it.  `fault`: why no model can be placed on it, "" when one can."""

    kind: Kind
    name: str
    uuid: str
    total_bytes: int
    reserve_bytes: int
    free_now: Callable[[], int | None] = field(default=lambda: None, repr=False)
    fault: str = ""


def discover(executor: str = "auto") -> list[Die]:
    """The dies in the order that --dies counts them.

    Virtual ones when PN_VIRTUAL_DIES is set, else CUDA devices; none is normal.  executor: "cpu" leaves CUDA devices
    alone: they are listed, and no model is placed there.  Raises SettingError for a bad flag, and nothing for a missing
    or broken NVML, which is logged.
    """
    sizes = settings.get("PN_VIRTUAL_DIES")
    if sizes is not None:
        return virtual_dies(sizes, simulated=executor != "cpu" and simulator() and not cuda_missing())
    return cuda_dies("the CPU was asked for (--executor cpu)" if executor == "cpu" else cuda_missing())


def cuda_missing() -> str:
    """What this installation lacks to run models on CUDA dies, "" when nothing.  Looks for it and imports nothing."""
    if importlib.util.find_spec("numba_cuda") is None:
        return 'numba-cuda is not installed (pip install "numba-cuda[cu12]", the extra pantheon-server[cuda])'
    return ""


def nvml_fault() -> str:
    """What keeps NVML from answering, in its words ("Driver Not Loaded"); "" when it answers."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        nvml.nvmlDeviceGetCount()
    except Exception as error:
        return str(error)
    return ""


def simulator() -> bool:
    """Whether Numba will run CUDA kernels in its simulator."""
    return os.environ.get(SIMULATOR, "").strip() not in ("", "0")


def virtual_dies(sizes: Sequence[int], simulated: bool = False) -> list[Die]:
    """One die a size, chosen and ordered by CUDA_VISIBLE_DEVICES when that is a list of numbers; simulated: CUDA dies.

    The sizes are budgets already: nobody else uses a virtual die, so the reserve is kept free only when it is set.
    """
    reserve = settings.get("PN_DIE_RESERVE_BYTES") if settings.given("PN_DIE_RESERVE_BYTES") else 0
    kind: Kind = "cuda" if simulated else "virtual"
    what, uuid = ("simulated CUDA die", "SIMULATED") if simulated else ("virtual die", "VIRTUAL")
    dies = [Die(kind, f"{what} {i}", f"{uuid}-{i}", size, reserve) for i, size in enumerate(sizes)]
    visible = os.environ.get(VISIBLE, "")
    if not all(part.strip().isdigit() for part in visible.split(",")):
        return dies
    return [dies[i] for i in visible_devices(visible, [die.uuid for die in dies])]


def visible_devices(value: str | None, uuids: Sequence[str]) -> list[int]:
    """Physical indices of the devices that a value of CUDA_VISIBLE_DEVICES shows, in its order; None shows all.

    As CUDA reads it: numbers or unique beginnings of UUIDs; the first entry that is neither, or is given twice, hides
    itself and all behind it.
    """
    if value is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for part in (item.strip() for item in value.split(",")):
        if part.isdigit():
            match = [int(part)] if int(part) < len(uuids) else []
        else:
            match = [i for i, uuid in enumerate(uuids) if part and uuid.startswith(part)]
        if len(match) != 1:
            break
        if match[0] in found:
            # CUDA shows no device at all when one is listed twice
            return []
        found += match
    return found


def cuda_dies(fault: str = "") -> list[Die]:
    """The visible CUDA devices, in NVML's order (that of the PCI bus); empty without NVML, a driver or a device.

    fault: why no model can be placed on any of them.
    """
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        chosen = visible_devices(os.environ.get(VISIBLE), uuids)
        dies = [_cuda_die(nvml, handles[i], uuids[i], fault) for i in chosen]
    except Exception as error:  # not installed, no driver, a driver of another version: a machine without GPUs
        _log.debug("no CUDA dies %s", log.fields(reason=f"{type(error).__name__}: {error}"))
        return []
    if dies and not fault:
        count_by_bus()
    return dies


def count_by_bus() -> None:
    """Make CUDA, whose driver has not started yet, count devices as NVML does and not by their speed [M005, M171]."""
    if os.environ.get(ORDER, "PCI_BUS_ID") != "PCI_BUS_ID":
        _log.warning("devices are counted by PCI bus %s", log.fields(instead_of=os.environ[ORDER]))
    os.environ[ORDER] = "PCI_BUS_ID"


def _cuda_die(nvml: Any, handle: Any, uuid: str, fault: str) -> Die:
    def free_now() -> int | None:
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
        except Exception as error:
            _log.debug("NVML does not answer %s", log.fields(die=uuid, reason=str(error)))
            return None

    total = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    name = _text(nvml.nvmlDeviceGetName(handle))
    return Die("cuda", name, uuid, total, settings.get("PN_DIE_RESERVE_BYTES"), free_now, fault)


def _text(value: str | bytes) -> str:
    """Old versions of pynvml answer in bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
