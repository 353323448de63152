"""Compiled kernels: where they are kept, what keys them, that warm processes need no Numba, and what goes wrong."""

from __future__ import annotations

import fcntl
import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pantheon.accel.cpu import cores, kernels, objects, store, workers

ROOT = Path(__file__).resolve().parents[3]
ADD = ("pointwise", "add")


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=110
    )


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty store for this test alone; what this process has loaded stays loaded."""
    monkeypatch.setenv("PN_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "_addresses", {})
    store.folder.cache_clear()
    yield tmp_path
    store.folder.cache_clear()


def test_importing_the_executor_does_not_import_numba() -> None:
    done = _python("import sys, pantheon.accel.cpu.executor; print('numba' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


_ONE_KERNEL = """
import sys
from pantheon.accel.cpu import kernels
kernels.prepare([("pointwise", "add")])
print(kernels.resolve(("pointwise", "add")) > 0, {"numba", "llvmlite"} & set(sys.modules))
"""


def test_kernels_are_kept_under_the_flag_and_found_again(tmp_path: Path) -> None:
    """Two processes at once are fine; a later one writes nothing new; none of them imports Numba."""
    import concurrent.futures as cf

    with cf.ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: _python(_ONE_KERNEL, PN_KERNEL_CACHE=str(tmp_path)), range(2)))
    assert [r.stdout for r in runs] == ["True set()\n"] * 2, runs[0].stderr
    folders = list((tmp_path / "kernels").iterdir())
    assert [f.name for f in folders] == [store.source_hash()]
    place = folders[0] / store.cpu_key()
    assert sorted(p.name for p in place.iterdir()) == ["pointwise-add", workers.WIDTHS]
    kept = {p: p.stat().st_mtime_ns for p in place.iterdir()}
    assert _python(_ONE_KERNEL, PN_KERNEL_CACHE=str(tmp_path)).stdout == "True set()\n"
    assert {p: p.stat().st_mtime_ns for p in place.iterdir()} == kept


def test_without_workers_the_process_compiles_for_itself(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    kernels.prepare([ADD])
    assert store.read(store.name_of(ADD)) is None
    assert kernels.resolve(ADD) > 0
    assert kernels.tile_widths()[0] == 1


def test_a_worker_that_breaks_is_survived(own_store: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pantheon"):
        kernels.prepare([("pointwise", "no such kernel")])
    assert "kernel worker failed: KeyError" in caplog.text


def test_workers_that_end_are_survived(own_store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before the first kernel, or while they wait for the next load."""
    workers.end_idle()
    kernels.prepare([ADD])
    (waiting,) = workers._idle
    waiting.process.kill()
    waiting.process.wait()
    kernels.prepare([("pointwise", "gather")])
    assert store.read(store.name_of(("pointwise", "gather"))) is not None
    (another,) = workers._idle
    another.process.kill()  # too late to be seen by poll() for certain: then the question fails
    with caplog.at_level(logging.WARNING, logger="pantheon"):
        kernels.prepare([("pointwise", "silu")])
    assert kernels.resolve(("pointwise", "silu")) > 0
    workers.end_idle()
    assert workers._idle == []


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """A process that compiles and is killed leaves nobody behind: standard input ends."""
    code = _ONE_KERNEL + """
from pantheon.accel.cpu import workers
print(workers._idle[0].process.pid, flush=True)
input()
"""
    env = {**os.environ, "PN_KERNEL_CACHE": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "True set()\n"
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
    try:
        assert select.select([worker], [], [], 30)[0], "the worker outlived its parent"
    finally:
        os.close(worker)


def test_a_worker_ends_with_its_parent_in_the_middle_of_a_kernel(tmp_path: Path) -> None:
    """One kernel may take half a minute: a stopped server leaves no compiler behind."""
    code = """
import threading
from pantheon.accel.cpu import families, workers
def never(key):
    print("compiling", flush=True)
    threading.Event().wait()
families.compiled = never
workers.work()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        try:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write('["pointwise", "add"]\n')
            worker.stdin.flush()
            assert worker.stdout.readline() == "compiling\n"
            worker.stdin.close()
            worker.wait(20)
        finally:
            worker.kill()


def test_a_damaged_file_is_compiled_anew(own_store: Path) -> None:
    """A byte that changed on disk, or a file cut short, never runs."""
    kernels.prepare([ADD])
    path = store.file_of(store.name_of(ADD))
    sound = path.read_bytes()
    for broken in (sound[:-1], sound[:5], b"", sound[:700] + bytes([sound[700] ^ 1]) + sound[701:]):
        path.write_bytes(broken)
        assert store.read(path.name) is None
    kernels._addresses.clear()
    kernels.prepare([ADD])
    assert path.read_bytes() == sound


def test_objects_that_are_not_understood_are_refused(own_store: Path) -> None:
    kernels.prepare([ADD])
    sound = store.read(store.name_of(ADD))
    assert sound is not None and objects.load(sound) > 0
    other_machine = sound[:18] + b"\xb7\x00" + sound[20:]
    no_entry = sound.replace(b"cfunc.", b"cfunk.")
    unknown_symbol = sound.replace(b"PyErr_Clear\0", b"no_function\0")
    for bad in (b"", b"\x7fELF", sound[:63], sound[:900], other_machine, no_entry, unknown_symbol):
        with pytest.raises(objects.Rejected):
            objects.load(bad)


def test_no_kernel_is_made_of_what_the_hash_leaves_out() -> None:
    """Modules in store.HOST may change without a new compilation: nothing that compiles may import them."""
    code = """
import importlib, sys
from pantheon.accel.cpu import families
for module, _ in families.MAKERS.values():
    importlib.import_module("pantheon.accel.cpu." + module)
print(*(m for m in sys.modules if m.startswith("pantheon.")))
"""
    loaded = {name.rpartition(".")[2] for name in _python(code).stdout.split() if ".accel.cpu." in name}
    assert "matmul" in loaded and not loaded & store.HOST
    assert all((ROOT / f"pantheon/accel/cpu/{name}.py").exists() for name in store.HOST)


def test_the_compilers_settings_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for name in ("", "znver3"):
        monkeypatch.setenv("NUMBA_CPU_NAME", name)
        store.cpu_key.cache_clear()
        keys.add(store.cpu_key())
    monkeypatch.undo()
    store.cpu_key.cache_clear()
    assert len(keys | {store.cpu_key()}) == 3
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    store.cpu_key.cache_clear()
    assert store.cpu_key() not in keys, "kernels for the CPU are the same beside simulated CUDA dies"


def test_an_unwritable_folder_costs_one_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("PN_KERNEL_CACHE", str(blocked))
    store.folder.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="pantheon"):
            first, second = store.folder(), store.folder()
    finally:
        store.folder.cache_clear()
    assert first == second and first.is_dir() and blocked not in first.parents
    assert len([r for r in caplog.records if "kernel cache" in r.message]) == 1


def _folders(base: Path, ages: list[float], now: float) -> list[Path]:
    """One folder for each age in seconds."""
    made = []
    for i, age in enumerate(ages):
        path = base / f"{i:016x}"
        path.mkdir()
        (path / "in-use").touch()
        os.utime(path / "in-use", (now - age, now - age))
        made.append(path)
    return made


def test_old_folders_go_but_never_the_newest_nor_one_in_use(tmp_path: Path) -> None:
    """Three newest stay whatever their age; of the rest those of the last 30 days; a held one is left alone."""
    day, now = 86400.0, 1e9
    paths = _folders(tmp_path, [40 * day, 50 * day, 60 * day, 70 * day, 80 * day], now)
    other = tmp_path / "something-else"
    other.mkdir()
    held = os.open(paths[4] / "in-use", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_SH)
    try:
        assert store.prune(tmp_path, now) == [paths[3].name]
        assert [p.exists() for p in paths] == [True, True, True, False, True] and other.exists()
    finally:
        os.close(held)
    assert store.prune(tmp_path, now) == [paths[4].name]
    assert store.prune(tmp_path, now) == []
    recent = _folders(other, [1 * day] * 5, now)
    assert store.prune(other, now) == [] and all(p.exists() for p in recent)


def test_a_folder_that_is_removed_while_it_is_taken_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / ("0" * 16)
    path.mkdir()
    before = list(store._held)
    store.hold(path)
    try:
        handle = os.open(path / "in-use", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
    finally:
        for held in set(store._held) - set(before):
            os.close(held)
        store._held[:] = before


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
