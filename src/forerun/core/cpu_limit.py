"""How many cores this process may use: by its affinity, and by the quota of its control group (``docker --cpus``).

Threads beyond a quota do not share its time: each spins until the kernel stops all of them for the rest of a period.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOUNT = Path("/sys/fs/cgroup")
"""Where control groups are."""

GROUPS = Path("/proc/self/cgroup")
"""Names this process's control groups."""


def usable_cores(mount: Path = MOUNT, groups: Path = GROUPS) -> int:
    """Cores that this process may use at once, at least 1. A part of a core does not count.

    Args:
        mount, groups: files to read instead of the system's.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(int(quota) for quota in _quotas(mount, groups))]))


def _quotas(mount: Path, groups: Path) -> Iterator[float]:
    """The quotas, in cores, of this process's groups and of those above them."""
    for line in _text(groups).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        path = PurePosixPath(name.lstrip("/"))
        for group in (path, *path.parents):
            if controllers:
                quota, period = (_text(mount / "cpu" / group / f"cpu.cfs_{part}_us") for part in ("quota", "period"))
                yield from _quota(f"{quota} {period}")
            else:
                yield from _quota(_text(mount / group / "cpu.max"))


def _quota(text: str) -> Iterator[float]:
    """A quota that a file states as time and period; there is none for ``max``, for -1, or where it cannot be read."""
    try:
        time, period = map(float, text.split())
    except ValueError:
        return
    if time > 0 and period > 0:
        yield time / period


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except OSError:
        return ""
