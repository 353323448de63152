"""Where compiled kernels are kept: a folder for each version of the kernel sources, in it one for each CPU.

A file is a SHA-256 digest and what it covers, written under another name first, so that a torn or damaged file is
never run.  Whoever uses a folder holds a shared lock on it; old folders that nobody holds are removed.  Imports no
Numba; knows nothing about plans and machine code.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from pantheon import settings

log = logging.getLogger("pantheon.cpu")

#: modules of this package that kernels are not made of: no kernel module imports them
HOST = frozenset(
    "bandwidth carried cores drawing executor kernels objects pack runner sizes store table team workers".split()
)  # fmt: skip
#: folders that stay: the newest ones, and all that were used lately
KEEP_NEWEST, KEEP_SECONDS = 3, 30 * 86400
_LOCK = "in-use"
#: settings of Numba that do not change the code it makes for a CPU
_NO_CODE = re.compile("CACHE|CUDA")


@lru_cache(maxsize=1)
def source_hash() -> str:
    """A digest of every source that kernels are made of and of the compiler's versions."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numba", "llvmlite")]
    digest = hashlib.sha256(" ".join([*versions, sys.version]).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in HOST:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def cpu_key() -> str:
    """A digest of what this processor can do and of every setting of the compiler that changes its code."""
    lines = [platform.machine(), platform.system()]
    lines += [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NUMBA_") and not _NO_CODE.search(k)]
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU", "Features")
    with contextlib.suppress(OSError):  # the true one, whatever PN_HOST_ROOT says: the code runs here
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        lines += [line for line in first.splitlines() if line.startswith(wanted)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _writable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


@lru_cache(maxsize=1)
def folder() -> Path:
    """Where this process keeps compiled kernels; a temporary folder when the chosen one can not be written."""
    chosen = settings.get("PN_KERNEL_CACHE")
    base = (Path(chosen) if chosen else Path(os.path.expanduser("~/.cache/pantheon"))) / "kernels"
    wanted = base / source_hash()
    if _writable(wanted):
        hold(wanted)
        with contextlib.suppress(OSError):
            prune(base)
        return wanted
    spare = Path(tempfile.mkdtemp(prefix="pantheon-kernels-"))
    atexit.register(shutil.rmtree, spare, ignore_errors=True)
    log.warning("kernel cache not writable path=%s using=%s", wanted, spare)
    return spare


def use(path: str) -> None:
    """Take this folder from now on: a worker writes where its parent reads."""
    global folder
    chosen = Path(path)
    folder = lru_cache(maxsize=1)(lambda: chosen)


# --- one file ------------------------------------------------------------------------------------------------------
def name_of(key: tuple[str | int | bool, ...]) -> str:
    """A kernel's file name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", "-".join(map(str, key)))


def file_of(name: str) -> Path:
    """The place of one kernel of this CPU."""
    return folder() / cpu_key() / name


def read(name: str) -> bytes | None:
    """What was written under this name; None when there is nothing, or nothing sound."""
    try:
        data = file_of(name).read_bytes()
    except OSError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def write(name: str, data: bytes) -> None:
    """Keep `data`; a full disk costs a log line, not the kernel."""
    path = file_of(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, spare = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(spare, path)
        except BaseException:
            os.unlink(spare)
            raise
    except OSError as fault:
        log.warning("kernel not kept path=%s fault=%s", path, fault)


# --- old folders ---------------------------------------------------------------------------------------------------
#: descriptors of the folders that this process holds
_held: list[int] = []


def hold(path: Path) -> None:
    """Mark a folder as used now, and keep others from removing it for as long as this process lives."""
    with contextlib.suppress(OSError):  # a file system without locks: nothing is ever removed there
        while True:
            handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(handle, fcntl.LOCK_SH)
            try:
                same = os.stat(path / _LOCK).st_ino == os.fstat(handle).st_ino
            except FileNotFoundError:
                same = False
            if same:
                break
            os.close(handle)  # removed while we waited: make it anew
            path.mkdir(parents=True, exist_ok=True)
        os.utime(path / _LOCK)
        _held.append(handle)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether nobody holds the folder; true only while the block runs."""
    handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def _last_use(path: Path) -> float:
    """When a process last took the folder."""
    try:
        return os.stat(path / _LOCK).st_mtime
    except OSError:
        return path.stat().st_mtime


def prune(base: Path, now: float | None = None) -> list[str]:
    """Remove folders of other versions, except the newest, those used lately and those in use.  Returns names."""
    now = time.time() if now is None else now
    found = [p for p in base.iterdir() if re.fullmatch("[0-9a-f]{16}", p.name) and p.is_dir()]
    gone = []
    for path in sorted(found, key=_last_use, reverse=True)[KEEP_NEWEST:]:
        if now - _last_use(path) < KEEP_SECONDS:
            continue
        with _alone(path) as free:
            if free:
                shutil.rmtree(path, ignore_errors=True)
                gone.append(path.name)
    return gone
