"""These tests run kernels in Numba's simulator; tests of real compilation start processes of their own.

With NUMBA_ENABLE_CUDASIM=0 (`make test-cuda`) they run on this machine's device, and are skipped where there is none.
"""

from __future__ import annotations

import os

import pytest
from numba.core import config

from pantheon.accel.die import cuda_dies

# before anything imports numba.cuda: it decides for the whole process
config.ENABLE_CUDASIM = int(os.environ.get("NUMBA_ENABLE_CUDASIM", "1"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without a device each would fail at its first array."""
    if not config.ENABLE_CUDASIM and not cuda_dies():
        pytest.skip("no CUDA device")
