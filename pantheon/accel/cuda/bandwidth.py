"""How fast a die copies within its own memory: what decoding is held against.  Knows no model."""

from __future__ import annotations

import time

import numpy as np

from pantheon.accel.cuda.context import Device

#: copies between two looks at the clock, so that the host's part of one does not count
_COPIES = 8


def copy_rates(device: Device, nbytes: int, repeats: int = 5) -> list[float]:
    """Bytes per second of copying the first half of a buffer of nbytes to the second, one figure for each repetition;
    every byte is read once and written once, and both count.  Raises MemoryError when the die has no room for it."""
    half = nbytes // 8
    buffer, rates = device.array(2 * half, np.int32), []
    for _ in range(repeats + 1):
        device.synchronize()
        started = time.perf_counter()
        for _ in range(_COPIES):
            device.copy(buffer, 0, half, half)
        device.synchronize()
        rates.append(_COPIES * 8 * half / (time.perf_counter() - started))
    del buffer
    device.give_back()
    return rates[1:]
