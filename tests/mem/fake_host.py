"""A folder that stands for /: meminfo, PSI and cgroup files that tests write to squeeze a server."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30


class FakeHost:
    """Writes what `PN_HOST_ROOT` points at."""

    def __init__(self, root: Path, total_bytes: int = 64 * GIB, available_bytes: int | None = None) -> None:
        self.root, self.total_bytes = root, total_bytes
        self.available(total_bytes if available_bytes is None else available_bytes)

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # the watcher may look at any moment: it must never see half a file
        half = target.with_name(target.name + ".new")
        half.write_text(text)
        half.replace(target)

    def available(self, nbytes: int) -> None:
        """MemAvailable; whole KiB, as the kernel writes it."""
        self.write(
            "proc/meminfo",
            f"MemTotal:       {self.total_bytes >> 10} kB\nMemFree:  1 kB\nMemAvailable:   {nbytes >> 10} kB\n"
            "SwapTotal:      2048 kB\nSwapFree:       1024 kB\nHugePages_Total:  0\n",
        )

    def psi(self, some: float, full: float) -> None:
        rows = (
            f"{name} avg10={value:.2f} avg60=0.00 avg300=0.00 total=0\n"
            for name, value in (("some", some), ("full", full))
        )
        self.write("proc/pressure/memory", "".join(rows))

    def cgroup(self, path: str = "/", **files: object) -> None:
        """v2: `cgroup("/a/b", max=…, high="max", current=…, stat="inactive_file 1")`; we are in that cgroup."""
        self.write("proc/self/cgroup", f"0::{path}\n")
        for name, value in files.items():
            self.write(f"sys/fs/cgroup{path.rstrip('/')}/memory.{name}", f"{value}\n")
