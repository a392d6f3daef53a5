"""Measure the processor time of other processes. Times next to a busy process are not comparable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
BUSY = 0.15
"""Share of all processors' time used by others above which no ratio is reported. One busy process on two cores uses
0.5; an idle desktop uses a few hundredths."""


@dataclass(frozen=True)
class Load:
    """Processor time: cores used by this process and its children; share used by others, or None if unknown."""

    own: float
    others: float | None


class LoadMeter:
    """A meter of the load from its creation to ``stop``."""

    def __init__(self) -> None:
        self._begin, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def stop(self) -> Load:
        """Return the load since the meter was made."""
        seconds = max(time.perf_counter() - self._begin, 1e-9)
        own, busy = _own_seconds() - self._own, _busy_seconds()
        if busy is None or self._busy is None:
            return Load(own / seconds, None)
        others = (busy - self._busy - own) / seconds / (os.cpu_count() or 1)
        return Load(own / seconds, min(max(0.0, others), 1.0))


def fastest(candidates: list[int], run: Callable[[int], float], rounds: int = 3) -> int:
    """Return the candidate with the shortest time of several rounds."""
    times: dict[int, list[float]] = {each: [] for each in candidates}
    for _ in range(rounds):
        for each in candidates:
            times[each].append(run(each))
    return min(candidates, key=lambda each: min(times[each]))


def _busy_seconds() -> float | None:
    """Return the processor seconds used on this machine, including those of other virtual machines on it."""
    try:
        fields = [int(word) for word in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = fields
    return float(user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the processor seconds of this process and its children, ended or running."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system + sum(map(_seconds_of, _children()))


def _children() -> list[int]:
    found, waiting = list[int](), [os.getpid()]
    while waiting:
        tasks = (PROC / str(waiting.pop())).glob("task/*/children")
        new = [int(child) for task in tasks for child in _text(task).split()]
        found, waiting = found + new, waiting + new
    return found


def _seconds_of(process: int) -> float:
    words = _text(PROC / str(process) / "stat").rpartition(")")[2].split()
    return sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK") if len(words) > 12 else 0.0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the process has ended
        return ""
