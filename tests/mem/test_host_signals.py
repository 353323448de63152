"""What is read of the host [M177, M178, M179]."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pantheon.errors import PantheonError
from pantheon.mem.host_signals import read_host
from tests.mem.fake_host import GIB, FakeHost


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path, 8 * GIB, 3 * GIB)


def test_m177_meminfo_and_pressure_are_read_from_below_the_root(host: FakeHost) -> None:
    host.psi(1.25, 0.5)
    found = read_host(host.root)
    assert (found.total_bytes, found.available_bytes) == (8 * GIB, 3 * GIB)
    assert (found.psi_some_avg10, found.psi_full_avg10) == (1.25, 0.5)
    assert (found.swap_total_bytes, found.swap_free_bytes) == (2048 << 10, 1024 << 10)
    assert found.cgroup_limit_bytes is found.cgroup_used_bytes is found.cgroup_high_bytes is None


def test_m177_a_kernel_without_psi_has_no_pressure(host: FakeHost) -> None:
    assert (read_host(host.root).psi_some_avg10, read_host(host.root).psi_full_avg10) == (0.0, 0.0)
    host.write("proc/pressure/memory", "some avg10=oops\nfull\n\nother avg10=5\n")
    assert (read_host(host.root).psi_some_avg10, read_host(host.root).psi_full_avg10) == (0.0, 0.0)


def test_m177_our_own_cgroup_limits_us_less_its_droppable_cache(host: FakeHost) -> None:
    host.cgroup("/user/job", max=2 * GIB, high="max", current=GIB, stat="anon 5\ninactive_file 1048576\n")
    found = read_host(host.root)
    assert (found.cgroup_limit_bytes, found.cgroup_used_bytes, found.cgroup_high_bytes) == (2 * GIB, GIB, None)
    assert found.cgroup_free_bytes == GIB + (1 << 20)


def test_m177_the_tightest_of_nested_cgroups_counts_and_high_is_a_limit_too(host: FakeHost) -> None:
    host.cgroup("/user/job", max=4 * GIB, high=3 * GIB, current=GIB)
    assert read_host(host.root).cgroup_limit_bytes == read_host(host.root).cgroup_high_bytes == 3 * GIB
    host.write("sys/fs/cgroup/user/memory.max", f"{5 * GIB}\n")
    host.write("sys/fs/cgroup/user/memory.current", f"{4 * GIB}\n")
    assert read_host(host.root).cgroup_limit_bytes == 5 * GIB


@pytest.mark.parametrize("path", ["/", "/../outside", "/not/mounted/here"])
def test_m177_inside_a_container_the_mount_itself_is_our_cgroup(host: FakeHost, path: str) -> None:
    host.cgroup("/", max=GIB, current=GIB // 2)
    host.write("proc/self/cgroup", f"12:cpu:/x\n0::{path}\n")
    assert read_host(host.root).cgroup_limit_bytes == GIB


def test_m177_no_limit_is_no_limit(host: FakeHost) -> None:
    host.cgroup("/job", max="max", high="max", current=GIB)
    assert read_host(host.root).cgroup_limit_bytes is None
    host.write("proc/self/cgroup", "4:memory:/job\n")
    host.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    host.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1\n")
    assert read_host(host.root).cgroup_limit_bytes is None


def test_cgroup_v1_limits_us_where_there_is_no_v2(host: FakeHost) -> None:
    host.write("proc/self/cgroup", "4:memory:/docker/abc\n0::/\n")
    host.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{GIB}\n")
    host.write("sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB // 4}\n")
    host.write("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 4096\n")
    found = read_host(host.root)
    assert (found.cgroup_limit_bytes, found.cgroup_free_bytes) == (GIB, GIB - GIB // 4 + 4096)


def test_m177_stalls_of_our_cgroup_count_beside_those_of_the_machine(host: FakeHost) -> None:
    host.psi(1, 0)
    host.cgroup("/job", max=GIB, current=1, pressure="some avg10=9.00 total=1\nfull avg10=3.50 total=1")
    found = read_host(host.root)
    assert (found.psi_some_avg10, found.psi_full_avg10) == (9.0, 3.5)


@pytest.mark.parametrize("text", ["", "MemTotal: 8 kB\n", "MemTotal: 0 kB\nMemAvailable: 0 kB\n", "MemTotal: x kB\n"])
def test_a_host_that_does_not_say_what_it_has_is_a_fault_that_names_the_file(host: FakeHost, text: str) -> None:
    host.write("proc/meminfo", text)
    with pytest.raises(PantheonError, match="meminfo"):
        read_host(host.root)


def test_a_root_without_meminfo_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(PantheonError, match="PN_HOST_ROOT"):
        read_host(tmp_path)


def test_m178_other_systems_ask_psutil_and_know_no_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        virtual_memory=lambda: SimpleNamespace(total=8 * GIB, available=2 * GIB),
        swap_memory=lambda: SimpleNamespace(total=7, free=5),
    )
    monkeypatch.setitem(sys.modules, "psutil", fake)
    monkeypatch.setattr("pantheon.mem.host_signals._read", lambda path: None)
    found = read_host(Path("/"))
    assert (found.total_bytes, found.available_bytes, found.swap_free_bytes) == (8 * GIB, 2 * GIB, 5)
    assert (found.psi_some_avg10, found.psi_full_avg10, found.cgroup_limit_bytes) == (0.0, 0.0, None)


def test_m179_a_sample_of_this_machine_reads_a_handful_of_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what keeps a look at about a millisecond."""
    from pantheon.mem import host_signals

    reads: list[int] = []
    real = host_signals._read

    def counting(path: Path) -> str | None:
        text = real(path)
        reads.append(len(text or ""))
        return text

    monkeypatch.setattr(host_signals, "_read", counting)
    found = read_host()
    assert 0 < found.available_bytes <= found.total_bytes
    assert len(reads) <= 40 and sum(reads) < 64 << 10
