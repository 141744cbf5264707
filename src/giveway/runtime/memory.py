"""How much memory this machine could give; needs no tensor library."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int | None:
    """Main memory that an allocation could take now, bytes; None: the system does not say.

    The least of what the system and what the limit of a container leave.
    """
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = meminfo.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        # Cached file pages count as used there, although the system gives them up for an allocation.
        statistics = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        found.append(max(0, int(text) - int(used.read_text()) + int(statistics.get("inactive_file", 0))))
    return min(found, default=None)
