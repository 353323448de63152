"""Tests on this machine's CUDA device: `make test-cuda` runs them; elsewhere they are skipped and say why."""

from __future__ import annotations

import pytest
from numba.core import config

from pantheon.accel.die import cuda_dies


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of kernels switch the simulator on for a whole process, as `make test` is one."""
    if not cuda_dies():
        pytest.skip("no CUDA device")
    if config.ENABLE_CUDASIM:
        pytest.skip("the simulator is on in this process: make test-cuda")
