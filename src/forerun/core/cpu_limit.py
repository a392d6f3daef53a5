"""The cores that this process may use, by its affinity and its control group's quota (``docker --cpus``). Threads
beyond a quota spin until the kernel stops them all for the rest of a period."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOUNT = Path("/sys/fs/cgroup")

GROUPS = Path("/proc/self/cgroup")


def usable_cores(mount: Path = MOUNT, groups: Path = GROUPS) -> int:
    """Return how many cores this process may fully use, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(int(quota) for quota in _quotas(mount, groups))]))


def _quotas(mount: Path, groups: Path) -> Iterator[float]:
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
    """Parse a quota from time and period; yield nothing for ``max``, -1 or an unreadable file."""
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
