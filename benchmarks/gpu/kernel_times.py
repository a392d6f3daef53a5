"""Times of the kernels of a pass, and of the gaps between them, from the profiler's events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from forerun.bench.machine import Row


class KernelEvent(NamedTuple):
    """A kernel's name, and when it ran, in microseconds."""

    name: str
    start: float
    end: float


def kernel_events(work: Callable[[], Any], device: torch.device) -> list[KernelEvent]:
    """What one call runs on the device, in order; on a CPU the operations that torch calls."""
    on_gpu = device.type == "cuda"
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    events = [
        KernelEvent(event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == kind
    ]
    return sorted(events, key=lambda event: event.start)


def kernel_rows(events: Sequence[KernelEvent]) -> list[Row]:
    """Of each kernel how often it ran, its mean time, and the mean gap before it; in the order of their whole time."""
    times, gaps = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for event in events:
        times[event.name].append(event.end - event.start)
    for before, after in pairwise(events):
        gaps[after.name].append(max(0.0, after.start - before.end))
    rows = [
        {"kernel": name[:48], "calls": len(each), "microseconds": sum(each) / len(each),
         "gap": sum(gaps[name]) / max(1, len(gaps[name]))}
        for name, each in times.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["calls"] * row["microseconds"])
