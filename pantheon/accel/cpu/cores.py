"""How many threads are worth having: physical cores that this process may use, within its cgroup's quota."""

from __future__ import annotations

import os
from pathlib import Path

from pantheon import settings


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _quota(root: Path) -> float | None:
    """CPUs that the cgroup grants, None without a limit."""
    v2 = _read(root / "sys/fs/cgroup/cpu.max").split()
    if len(v2) == 2 and v2[0].isdigit() and v2[1].isdigit() and int(v2[1]):
        return int(v2[0]) / int(v2[1])
    quota = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(period):
        return int(quota) / int(period)
    return None


def usable_cores() -> int:
    """At least 1; hyper-threads of one core count once."""
    root = Path(settings.get("PN_HOST_ROOT"))
    cpus = os.sched_getaffinity(0)
    topology = root / "sys/devices/system/cpu"
    cores = {_read(topology / f"cpu{c}" / "topology/thread_siblings_list") or str(c) for c in cpus}
    quota = _quota(root)
    return max(1, len(cores) if quota is None else min(len(cores), round(quota)))
