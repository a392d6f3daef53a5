"""Devices that a model runs on, by what their makers state: memory, bandwidths, operations.

Those are peaks. Nobody reaches them, so times computed from them are the least that is possible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 1024**3
LAUNCHES = 10
"""Kernels of a layer: two norms, three for the attention's inputs, attention, its output, and three for the network."""
LAUNCH = 2e-6
"""Seconds between the last read of a kernel and the first of the next one, with CUDA graphs; an assumption."""
REDUCTION = 10e-6
"""Seconds of an all-reduce of nothing between devices of one host; an assumption."""


@dataclass(frozen=True)
class Device:
    """One device, and its host.

    Attributes:
        memory: bytes.
        bandwidth: bytes of memory it reads a second.
        operations: dense operations a second in the weights' type; a multiplication and an addition are two.
        link: bytes a second that it sends to the other devices, and receives at the same time; None if it has none.
        host_link: bytes a second from the host's memory; None if keys and values cannot lie there.
        host_memory: bytes of the host that devices may use together.
        layer_seconds: what a layer takes on top, whatever it reads.
        reduction_seconds: what an all-reduce takes on top.

    Raises:
        ValueError: for a value that is not positive and finite; latencies may be 0.
    """

    memory: float
    bandwidth: float
    operations: float
    link: float | None = None
    host_link: float | None = None
    host_memory: float = 0.0
    layer_seconds: float = LAUNCHES * LAUNCH
    reduction_seconds: float = REDUCTION

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "operations", "link", "host_link"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0 and finite")
        for name in ("host_memory", "layer_seconds", "reduction_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0 and finite")


HOST = 1024 * GIB
"""Bytes of a server's host memory, where nothing else is stated."""
PCIE4, PCIE5 = 31.5e9, 63e9
"""Bytes a second in one direction over 16 lanes."""

DEVICES = {
    "a100-80gb": Device(80 * GIB, 2.039e12, 312e12, 300e9, PCIE4, HOST),
    "h100": Device(80 * GIB, 3.35e12, 989e12, 450e9, PCIE5, HOST),
    "h200": Device(141 * GIB, 4.8e12, 989e12, 450e9, PCIE5, HOST),
    "rtx-4090": Device(24 * GIB, 1.008e12, 165e12, PCIE4, PCIE4, HOST),
}
"""The SXM forms of A100, H100 and H200, and the RTX 4090: the makers' data sheets, in bfloat16 without sparsity. Links
are per direction, half of what a sheet states for both. A sheet's GB of memory are GiB."""

CPU = "cpu"
"""This machine: its numbers are measured when they are asked for."""


def device_named(name: str) -> Device:
    """One of ``DEVICES``.

    Raises:
        ValueError: for another name.
    """
    if name not in DEVICES:
        raise ValueError(f"a device is {name!r}; known are {', '.join(DEVICES)} and {CPU}")
    return DEVICES[name]
