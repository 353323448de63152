"""What a device refuses names its die; nothing else is touched."""

from __future__ import annotations

import pytest

from pantheon.accel.cuda import faults
from pantheon.errors import BadRequest, PantheonError, Unavailable


class CudaAPIError(Exception):
    """As numba-cuda raises it on a device: the simulator has none."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class NvvmError(Exception):
    """The compiler's."""


CudaAPIError.__module__, NvvmError.__module__ = "numba.cuda.cudadrv.driver", "numba_cuda.numba.cuda.cudadrv.error"


@pytest.mark.parametrize("fault", [CudaAPIError(2, "CUDA_ERROR_OUT_OF_MEMORY"), MemoryError("no room")])
def test_a_full_die_is_507_and_named(fault: Exception) -> None:
    with pytest.raises(PantheonError, match="die 3: out of memory: .*(MEMORY|room)") as caught, faults.named([3]):
        raise fault
    assert (caught.value.status, caught.value.code, caught.value.param) == (507, "out_of_memory", "dies")


@pytest.mark.parametrize(
    "fault", [CudaAPIError(719, "CUDA_ERROR_LAUNCH_FAILED"), NvvmError("x")]
)
def test_a_lost_die_is_503_and_named(fault: Exception) -> None:
    with pytest.raises(Unavailable, match="dies 0, 1: the device failed: .*") as caught, faults.named([0, 1]):
        raise fault
    assert (caught.value.status, caught.value.code) == (503, "device_error") and caught.value.retry_after


@pytest.mark.parametrize("fault", [ValueError("cuda"), BadRequest("no"), KeyError(2)])
def test_other_faults_pass(fault: Exception) -> None:
    with pytest.raises(type(fault)) as caught, faults.named([0]):
        raise fault
    assert caught.value is fault
