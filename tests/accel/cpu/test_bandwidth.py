"""Read bandwidth: that every byte is read, and how large the buffer is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pantheon.accel.cpu import bandwidth
from pantheon.accel.cpu.arena import address


def test_the_kernel_reads_every_byte() -> None:
    """The sum of the floats: leaving one out would change it."""
    read = bandwidth.reader()
    data = np.zeros(3 * 4096 // 4, np.float32)
    rng = np.random.default_rng(1)
    for i in rng.integers(0, len(data), 200):
        data[:] = 0
        data[i] = 2.5
        assert read(address(data), data.nbytes) == 2.5
    data[:] = 1
    assert read(address(data), 4096) == 1024 and read(address(data), data.nbytes) == 3072


@pytest.mark.parametrize("threads", [1, 3])
def test_every_repetition_gives_a_rate(threads: int) -> None:
    rates = bandwidth.read_rates(threads, 8 << 20, repeats=3)
    assert len(rates) == 3 and all(rate > 0 for rate in rates)


def test_the_last_cache_is_the_largest_that_the_kernel_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PN_HOST_ROOT", str(tmp_path))
    assert bandwidth.last_cache_bytes() == 0
    for i, size in enumerate(("32K", "1024K", "36M", "unknown")):
        folder = tmp_path / "sys/devices/system/cpu/cpu0/cache" / f"index{i}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
    assert bandwidth.last_cache_bytes() == 36 << 20


def test_the_buffer_is_many_caches_large_within_bounds() -> None:
    assert bandwidth.buffer_bytes(0) == 256 << 20
    assert bandwidth.buffer_bytes(40 << 20) == 320 << 20
    assert bandwidth.buffer_bytes(1 << 30) == 1 << 30
