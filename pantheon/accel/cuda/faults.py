"""What a device refuses becomes a fault that names the die: 507 when its memory is full, 503 for all else.

Imports no Numba: faults are told by where their class comes from.  Source: CUDA driver API, CUresult.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pantheon.errors import PantheonError, Unavailable

#: CUDA_ERROR_OUT_OF_MEMORY
_OUT_OF_MEMORY = 2
_PACKAGES = ("numba.cuda", "numba_cuda", "cuda")
#: a device that was lost comes back by hand, if it does
_RETRY_S = 60


class DeviceFault(RuntimeError):
    """What the driver answers to a call that Numba does not make for us."""


@contextmanager
def named(dies: Sequence[int]) -> Iterator[None]:
    """Around work on dies, as --dies counts them.

    Raises PantheonError 507 `out_of_memory` or Unavailable `device_error`; lets everything pass that is no fault of a
    device.
    """
    try:
        yield
    except MemoryError as fault:
        raise _full(dies, str(fault)) from fault
    except Exception as fault:
        if not _of_a_device(fault):
            raise
        if getattr(fault, "code", None) == _OUT_OF_MEMORY:
            raise _full(dies, str(fault)) from fault
        raise Unavailable(
            f"{_where(dies)}: the device failed: {_text(fault)}", code="device_error", retry_after=_RETRY_S
        ) from fault


def _of_a_device(fault: Exception) -> bool:
    if isinstance(fault, DeviceFault):
        return True
    module = type(fault).__module__
    return any(module == package or module.startswith(f"{package}.") for package in _PACKAGES)


def _full(dies: Sequence[int], text: str) -> PantheonError:
    return PantheonError(
        f"{_where(dies)}: out of memory" + (f": {text}" if text else ""),
        status=507, type="invalid_request_error", code="out_of_memory", param="dies",
    )  # fmt: skip


def _where(dies: Sequence[int]) -> str:
    return ("die " if len(dies) == 1 else "dies ") + ", ".join(map(str, dies))


def _text(fault: Exception) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split()).rstrip(' :')}"
