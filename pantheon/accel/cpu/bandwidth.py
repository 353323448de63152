"""How fast this machine reads memory with so many threads: the bound of decoding.  Knows no model.

Reading is what counts: a decode step streams the weights through the cores and writes next to nothing.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pantheon import settings
from pantheon.accel.cpu import kernels
from pantheon.accel.cpu.arena import HUGE, Arena, round_up

#: the buffer is so many last-level caches large, within bounds
_CACHES, _LEAST, _MOST = 8, 256 << 20, 1 << 30
_PAGE = 4096


def last_cache_bytes() -> int:
    """Size of the largest cache that the first core sees; 0 when the system does not say."""
    folder = Path(settings.get("PN_HOST_ROOT")) / "sys/devices/system/cpu/cpu0/cache"
    largest = 0
    for size in folder.glob("index*/size"):
        try:
            text = size.read_text().strip()
        except OSError:
            continue
        number, unit = text.rstrip("KMG"), text[-1:]
        if number.isdigit():
            largest = max(largest, int(number) << {"K": 10, "M": 20, "G": 30}.get(unit, 0))
    return largest


def buffer_bytes(last_cache: int) -> int:
    """A size that a cache of last_cache bytes does not help with."""
    return round_up(min(max(_CACHES * last_cache, _LEAST), _MOST), HUGE)


def reader() -> Callable[[int, int], float]:
    """read(address, nbytes): the sum of the float32 there, read at the memory's speed; a multiple of 256 bytes."""
    kernels.prepare([("read",)])
    return kernels.function(("read",), ctypes.c_int64, ctypes.c_int64, result=ctypes.c_float)


def read_rates(threads: int, nbytes: int, repeats: int = 5) -> list[float]:
    """Bytes per second of `threads` threads that read one buffer together, on huge pages as weights are."""
    read, arena = reader(), Arena(nbytes, huge=True)
    arena.take(nbytes).fill(1)
    part = nbytes // threads // _PAGE * _PAGE
    rates = []
    for _ in range(repeats + 1):
        gate = threading.Barrier(threads + 1)

        def work(first: int, gate: threading.Barrier = gate) -> None:
            gate.wait()
            read(first, part)
            gate.wait()

        members = [
            threading.Thread(target=work, args=(arena.address + i * part,), name=f"pantheon-read-{i}", daemon=True)
            for i in range(threads)
        ]
        for member in members:
            member.start()
        gate.wait()
        started = time.perf_counter()
        gate.wait()
        rates.append(part * threads / max(time.perf_counter() - started, 1e-9))
        for member in members:
            member.join()
    return rates[1:]
