"""What the time between a stream's chunks consists of, from the times of the server's steps."""

from __future__ import annotations

import resource
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

PARTS = ("computing", "waiting in steps", "between steps", "delivery")
"""Of a gap between chunks: processor time of the decoding thread in steps; the rest of these steps, when it waits for a
processor or a lock; the time without a step; and the change in the time from the step's end until the chunk arrives."""
SLOWEST = 0.01
"""The share of gaps whose parts are reported."""

Step = tuple[float, float, float, int, int]


class StepTimes:
    """The times of an engine's steps: beginning, end, processor seconds, waits for locks, preemptions."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._watching = False

    def take(self) -> list[Step]:
        """Return the steps of this process since the last call; the first call starts recording."""
        if not self._watching:
            self._watching = True
            self._watch()
        taken, self._steps = self._steps, []
        return taken

    def _watch(self) -> None:
        from forerun.engine.batch import Batch

        step = Batch.step

        def timed(batch: Batch, *args: Any) -> Any:
            began, cpu, before = time.perf_counter(), time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD)
            try:
                return step(batch, *args)
            finally:
                used, after = time.thread_time() - cpu, resource.getrusage(resource.RUSAGE_THREAD)
                waits, preemptions = after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw
                # the clock last: a busy computer takes the processor away at a system call such as those above
                self._steps.append((began, time.perf_counter(), used, waits, preemptions))

        Batch.step = timed  # type: ignore[method-assign, assignment]


def gap_parts(chunks: Sequence[float], steps: Sequence[Step]) -> list[dict[str, float]]:
    """Return the parts of each time between chunks, which add up to it (``PARTS``), and what happened in its steps."""
    ends, found = [step[1] for step in steps], []
    for before, after in pairwise(chunks):
        first, last = bisect_right(ends, before), bisect_right(ends, after)
        if not first:
            continue
        inside = steps[first:last]
        computing, stepping = sum(step[2] for step in inside), sum(step[1] - step[0] for step in inside)
        span = ends[last - 1] - ends[first - 1]
        parts = computing, stepping - computing, span - stepping, after - before - span
        counts = {"steps": len(inside), "waits": sum(step[3] for step in inside)}
        counts["preemptions"] = sum(step[4] for step in inside)
        found.append({"seconds": after - before, **dict(zip(PARTS, parts, strict=True)), **counts})
    return found


def slowest(streams: Sequence[Sequence[float]], steps: Sequence[Step]) -> dict[str, float]:
    """Return the mean parts of the slowest gaps of streams, which are given by the times of their chunks."""
    gaps = sorted((gap for chunks in streams for gap in gap_parts(chunks, steps)), key=lambda gap: gap["seconds"])
    last = gaps[-max(1, round(SLOWEST * len(gaps))) :]
    return {name: sum(gap[name] for gap in last) / len(last) for name in (last[0] if last else ())}
