"""This machine as a ``Device``: how fast it reads memory and multiplies, measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from benchmarks.capacity.devices import Device
from benchmarks.studies.memory_bandwidth import Reader

ROUNDS = 5
"""Times each is measured. The fastest counts, for what disturbs one only slows it."""
SIDE = 2048
"""Rows and columns of the matrices: large enough for full speed, and one product takes well under a second."""


def this_machine(dtype: torch.dtype, size: int | None = None, side: int = SIDE) -> Device:
    """This computer's processors, without other devices or a host. What a layer takes on top is not measured.

    Args:
        dtype: of the matrices that are multiplied.
        size: bytes of the buffer that is read; by default ``Reader``'s.
        side: rows and columns of the matrices.
    """
    reader = Reader(torch.device("cpu")) if size is None else Reader(torch.device("cpu"), size)
    a, b = (torch.ones(side, side, dtype=dtype) for _ in range(2))
    multiplied = _fastest(lambda: torch.mm(a, b))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bandwidth = reader.nbytes / _fastest(reader)
    return Device(memory, bandwidth, 2 * side**3 / multiplied, layer_seconds=0.0, reduction_seconds=0.0)


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS + 1):  # the first one is not warm
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])
