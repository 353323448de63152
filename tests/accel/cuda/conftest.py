"""These tests run kernels in Numba's simulator; tests of real compilation start processes of their own.

With NUMBA_ENABLE_CUDASIM=0 (`make test-cuda`) they run on this machine's device.
"""

from __future__ import annotations

import os

from numba.core import config

# before anything imports numba.cuda: it decides for the whole process
config.ENABLE_CUDASIM = int(os.environ.get("NUMBA_ENABLE_CUDASIM", "1"))
