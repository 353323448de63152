"""The kernel cache: where it lies, what keys it, and what happens when it can not be written."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pantheon.accel.cpu import cache, cores

ROOT = Path(__file__).resolve().parents[3]


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=110
    )


def test_importing_the_executor_does_not_import_numba() -> None:
    done = _python("import sys, pantheon.accel.cpu.executor; print('numba' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


_ONE_KERNEL = "from pantheon.accel.cpu import pointwise; pointwise.kernel('add'); print('ok')"


def test_kernels_are_kept_under_the_flag_and_found_again(tmp_path: Path) -> None:
    """Two processes at once are fine; a later one writes nothing new."""
    import concurrent.futures as cf

    with cf.ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: _python(_ONE_KERNEL, PN_KERNEL_CACHE=str(tmp_path)), range(2)))
    assert [r.stdout for r in runs] == ["ok\n"] * 2, runs[0].stderr
    folders = list((tmp_path / "kernels").iterdir())
    assert [f.name for f in folders] == [cache.source_hash()]
    kept = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.nbc")}
    assert kept
    assert _python(_ONE_KERNEL, PN_KERNEL_CACHE=str(tmp_path)).stdout == "ok\n"
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.nbc")} == kept


def test_an_unwritable_folder_costs_one_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("PN_KERNEL_CACHE", str(blocked))
    cache.folder.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="pantheon"):
            first, second = cache.folder(), cache.folder()
    finally:
        cache.folder.cache_clear()
    assert first == second and first.is_dir() and blocked not in first.parents
    assert len([r for r in caplog.records if "kernel cache" in r.message]) == 1


def test_threads_follow_cores_and_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hyper-threads of a core count once; a cgroup quota caps; never below one."""
    monkeypatch.setenv("PN_HOST_ROOT", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert cores.usable_cores() == 4
    for cpu in range(4):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert cores.usable_cores() == 2
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    for quota, expected in (("max 100000", 2), ("100000 100000", 1), ("20000 100000", 1), ("800000 100000", 2)):
        (cgroup / "cpu.max").write_text(quota)
        assert cores.usable_cores() == expected
