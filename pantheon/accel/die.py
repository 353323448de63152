"""What a die is, and which ones this process sees: CUDA devices through NVML, or virtual dies on the CPU.

A die is one accelerator under its place in CUDA_VISIBLE_DEVICES, or a virtual one (`PN_VIRTUAL_DIES=4x2GiB`): a share
of the CPU with a byte budget, so that placement, replicas and budgets run for real where there is no GPU.  Must not
know models.  Sources: CUDA programming guide, "CUDA environment variables"; NVML API reference; M005, M186, M240.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pantheon import log, settings

Kind = Literal["cuda", "virtual"]
VISIBLE = "CUDA_VISIBLE_DEVICES"
_log = log.logger("dies")


@dataclass(frozen=True)
class DieInfo:
    """One die at one moment.

    `index` counts as --dies does; `budget_bytes` is what models may be charged in all; `charged_bytes` is what the
    resident one was charged, and `cache_bytes` its warm conversations beyond that.  `free_bytes` is what the device
    itself reports (CUDA) or what is left of it (virtual).
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

    @property
    def usable(self) -> bool:
        """Whether this version can run a model on it."""
        return self.kind == "virtual"


@dataclass
class Die:
    """A die as the manager keeps it.  `free_now` asks the device for its free bytes: None when it can not say, or for
    a virtual die, which has nobody else on it."""

    kind: Kind
    name: str
    uuid: str
    total_bytes: int
    reserve_bytes: int
    free_now: Callable[[], int | None] = field(default=lambda: None, repr=False)


def discover() -> list[Die]:
    """The dies in the order that --dies counts them.

    Virtual ones when PN_VIRTUAL_DIES is set, else CUDA devices; none is normal.  Raises SettingError for a bad flag,
    and nothing for a missing or broken NVML, which is logged.
    """
    sizes = settings.get("PN_VIRTUAL_DIES")
    if sizes is not None:
        return virtual_dies(sizes)
    return cuda_dies()


def virtual_dies(sizes: Sequence[int]) -> list[Die]:
    """One die a size, chosen and ordered by CUDA_VISIBLE_DEVICES when that is a list of numbers.

    The sizes are budgets already: nobody else uses a virtual die, so the reserve is kept free only when it is set.
    """
    reserve = settings.get("PN_DIE_RESERVE_BYTES") if settings.given("PN_DIE_RESERVE_BYTES") else 0
    dies = [Die("virtual", f"virtual die {i}", f"VIRTUAL-{i}", size, reserve) for i, size in enumerate(sizes)]
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


def cuda_dies() -> list[Die]:
    """The visible CUDA devices, in NVML's order (that of the PCI bus); empty without NVML, a driver or a device."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        chosen = visible_devices(os.environ.get(VISIBLE), uuids)
        return [_cuda_die(nvml, handles[i], uuids[i]) for i in chosen]
    except Exception as fault:  # not installed, no driver, a driver of another version: a machine without GPUs
        _log.debug("no CUDA dies %s", log.fields(reason=f"{type(fault).__name__}: {fault}"))
        return []


def _cuda_die(nvml: Any, handle: Any, uuid: str) -> Die:
    def free_now() -> int | None:
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
        except Exception as fault:
            _log.debug("NVML does not answer %s", log.fields(die=uuid, reason=str(fault)))
            return None

    total = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    name = _text(nvml.nvmlDeviceGetName(handle))
    return Die("cuda", name, uuid, total, settings.get("PN_DIE_RESERVE_BYTES"), free_now)


def _text(value: str | bytes) -> str:
    """Old versions of pynvml answer in bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
