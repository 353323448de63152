"""The control block of a thread team: byte offsets, a cache line each; and how its members sleep.  Written by `team`
and `walk`.

The epoch comes first: bumping it starts a job.  Then the number of sleepers, the stop word, and a timespec, the
longest sleep: a bound on what a lost wake-up could cost.
"""

from __future__ import annotations

import platform

MACHINE = platform.machine()
#: Linux; the numbers are the architecture's (x86-64 has its own table, newer ones share one)
SYS_FUTEX = 202 if MACHINE == "x86_64" else 98
WAIT_PRIVATE, WAKE_PRIVATE = 128, 129
SLEEPERS, STOP, TIMEOUT, CONTROL_BYTES = 64, 128, 192, 256
