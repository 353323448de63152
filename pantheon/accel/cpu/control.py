"""The control block of a thread team: byte offsets, a cache line each.  Written by `team` and `walk`.

The epoch comes first: bumping it starts a job.  Then the number of sleepers, the stop word, and a timespec, the
longest sleep: a bound on what a lost wake-up could cost.
"""

from __future__ import annotations

SLEEPERS, STOP, TIMEOUT, CONTROL_BYTES = 64, 128, 192, 256
