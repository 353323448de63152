"""One sample of the host: /proc/meminfo, PSI, and the limits of our own cgroup, below a root that tests can replace.

Linux is read from files; elsewhere psutil gives total and available, and PSI and cgroup stay empty [M177, M178].  Must
not know levels or thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pantheon.errors import PantheonError

#: cgroup v1 writes "no limit" as the largest multiple of a page
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class HostSample:
    """Bytes and percent as read.  Cgroup fields are None where nothing limits us; of several nested limits the one
    with the least left counts."""

    total_bytes: int
    available_bytes: int
    psi_some_avg10: float = 0.0
    psi_full_avg10: float = 0.0
    cgroup_limit_bytes: int | None = None
    cgroup_high_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    cgroup_reclaimable_bytes: int = 0
    swap_total_bytes: int = 0
    swap_free_bytes: int = 0

    @property
    def cgroup_free_bytes(self) -> int:
        """What our cgroup may still take: limit less use, not counting caches that the kernel drops on demand."""
        if self.cgroup_limit_bytes is None or self.cgroup_used_bytes is None:
            return self.available_bytes
        used = max(0, self.cgroup_used_bytes - self.cgroup_reclaimable_bytes)
        return max(0, self.cgroup_limit_bytes - used)


@dataclass(frozen=True)
class _Limit:
    """What one cgroup on the way to ours allows."""

    limit: int
    high: int | None
    used: int
    reclaimable: int
    folder: Path

    @property
    def left(self) -> int:
        return self.limit - max(0, self.used - self.reclaimable)


def read_host(root: Path = Path("/")) -> HostSample:
    """One sample, about 1 ms [M179].  Raises PantheonError when the machine does not say how much memory it has."""
    meminfo = _read(root / "proc/meminfo")
    if meminfo is None:
        if root != Path("/"):
            raise PantheonError(f"{root / 'proc/meminfo'}: can not be read (PN_HOST_ROOT)", code="no_host_signals")
        return _other_system()
    sizes = _meminfo(meminfo)
    if sizes.get("MemTotal", 0) <= 0 or "MemAvailable" not in sizes:
        raise PantheonError(f"{root / 'proc/meminfo'}: no MemTotal and MemAvailable", code="no_host_signals")
    some, full = _psi(_read(root / "proc/pressure/memory"))
    bound = _cgroup(root)
    if bound is not None:
        own_some, own_full = _psi(_read(bound.folder / "memory.pressure"))
        some, full = max(some, own_some), max(full, own_full)
    return HostSample(
        total_bytes=sizes["MemTotal"],
        available_bytes=sizes["MemAvailable"],
        psi_some_avg10=some,
        psi_full_avg10=full,
        cgroup_limit_bytes=bound.limit if bound else None,
        cgroup_high_bytes=bound.high if bound else None,
        cgroup_used_bytes=bound.used if bound else None,
        cgroup_reclaimable_bytes=bound.reclaimable if bound else 0,
        swap_total_bytes=sizes.get("SwapTotal", 0),
        swap_free_bytes=sizes.get("SwapFree", 0),
    )


def _other_system() -> HostSample:
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return HostSample(memory.total, memory.available, swap_total_bytes=swap.total, swap_free_bytes=swap.free)


def _read(path: Path) -> str | None:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return None


def _meminfo(text: str) -> dict[str, int]:
    """`Name:   123 kB` lines as bytes."""
    sizes = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return sizes


def _psi(text: str | None) -> tuple[float, float]:
    """(some, full) avg10 in percent; 0 for what is not there."""
    found = {"some": 0.0, "full": 0.0}
    for line in (text or "").splitlines():
        words = line.split()
        if words and words[0] in found:
            found[words[0]] = next((_percent(w[6:]) for w in words[1:] if w.startswith("avg10=")), 0.0)
    return found["some"], found["full"]


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if value > 0 else 0.0


# ---- cgroups ----------------------------------------------------------------------------------------------------


def _cgroup(root: Path) -> _Limit | None:
    """The tightest limit between our cgroup and the root of its tree, v2 before v1; None when there is none."""
    ours = _read(root / "proc/self/cgroup") or ""
    rows = [line.split(":", 2) for line in ours.splitlines() if line.count(":") >= 2]
    trees = [("sys/fs/cgroup", path, _v2_limit) for _, controllers, path in rows if controllers == ""]
    trees += [("sys/fs/cgroup/memory", path, _v1_limit) for _, names, path in rows if "memory" in names.split(",")]
    limits = []
    for mount, path, read in trees:
        for folder in _ancestors(root / mount, path):
            found = read(folder)
            if found is not None:
                limits.append(found)
    return min(limits, key=lambda limit: limit.left, default=None)


def _ancestors(mount: Path, path: str) -> list[Path]:
    """Our cgroup's folder, its parents, and the mount itself, which in a container is our cgroup."""
    inside = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    return [mount.joinpath(*inside[:n]) for n in range(len(inside), -1, -1)]


def _v2_limit(folder: Path) -> _Limit | None:
    maximum, high, used = (_size(_read(folder / f"memory.{name}")) for name in ("max", "high", "current"))
    bounds = [bound for bound in (maximum, high) if bound is not None]
    if not bounds or used is None:
        return None
    return _Limit(min(bounds), high, used, _stat(_read(folder / "memory.stat"), "inactive_file"), folder)


def _v1_limit(folder: Path) -> _Limit | None:
    limit = _size(_read(folder / "memory.limit_in_bytes"))
    used = _size(_read(folder / "memory.usage_in_bytes"))
    if limit is None or used is None:
        return None
    return _Limit(limit, None, used, _stat(_read(folder / "memory.stat"), "total_inactive_file"), folder)


def _size(text: str | None) -> int | None:
    """A number of bytes; None for `max`, for what is not there and for v1's way of saying `max`."""
    word = (text or "").strip()
    return int(word) if word.isdigit() and int(word) < _NO_LIMIT else None


def _stat(text: str | None, name: str) -> int:
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0
