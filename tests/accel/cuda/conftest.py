"""These tests run kernels in Numba's simulator; tests of real compilation start processes of their own."""

from __future__ import annotations

from numba.core import config

# before anything imports numba.cuda: it decides for the whole process
config.ENABLE_CUDASIM = 1
