"""What a model takes on some devices: bytes, what fits, and the least time of its passes.

A pass over n tokens of R rows reads every weight once and each row's keys and values once. Its linear layers and its
attention come one after another, and each takes

    max(bytes / bandwidth, operations / operations a second)

With tensor parallelism over g devices (Megatron's: heads and the network's columns are split), each device has 1/g of
the weights, and the keys and values of its heads. A KV head that several devices share is on each of them. After the
attention and after the network of each layer, g devices sum what they have: 2 (g - 1) / g of the tokens' hidden states
go over the link, in both directions at once.

Keys and values that do not fit stay in the host's memory. Each pass streams them over each device's own host link,
while it computes; so it takes the longer of both times. What is streamed is written to the device's memory first, and
read there. A pass over a retrieval cache streams nothing: that cache is on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.capacity.devices import GIB, Device
from benchmarks.capacity.shapes import ModelShape

RESERVE = 2.0 * GIB
"""Bytes of each device for its runtime, activations and what a pass writes between."""


@dataclass(frozen=True)
class Machine:
    """Equal devices that run one model together.

    Attributes:
        kv_memory: bytes of each device for keys and values; by default all that the weights leave.

    Raises:
        ValueError: for a value out of range, or several devices without a link.
    """

    device: Device
    devices: int = 1
    kv_memory: float | None = None

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"devices is {self.devices}; it must be at least 1")
        if self.devices > 1 and self.device.link is None:
            raise ValueError(f"devices is {self.devices}, and they have no link; state its bandwidth")
        if self.kv_memory is not None and not 0 <= self.kv_memory < math.inf:
            raise ValueError(f"kv_memory is {self.kv_memory}; it must be at least 0 and finite")

    def check(self, shape: ModelShape) -> None:
        """Refuse a shape that cannot be split.

        Raises:
            ValueError: if devices do not divide its heads, or neither of devices and KV heads divides the other.
        """
        g, heads = self.devices, shape.kv_heads
        if shape.heads % g or (heads % g and g % heads):
            raise ValueError(f"devices is {g}, which does not divide {shape.heads} heads on {heads} KV heads evenly")

    def kv_share(self, shape: ModelShape) -> float:
        """The part of all keys and values that each device holds and reads."""
        return max(1 / self.devices, 1 / shape.kv_heads)


@dataclass(frozen=True)
class Fit:
    """What lies where.

    Attributes:
        weights: bytes of each device.
        kept: bytes of keys and values of each device, in its memory.
        streamed: bytes of keys and values of each device that are in the host's memory.
        weights_fit: whether the weights do.
        host_fits: whether the host holds what is streamed.
    """

    weights: float
    kept: float
    streamed: float
    weights_fit: bool
    host_fits: bool

    @property
    def possible(self) -> bool:
        """Whether the model runs at all."""
        return self.weights_fit and self.host_fits

    @property
    def offloaded(self) -> float:
        """The part of keys and values that is streamed."""
        return self.streamed / (self.kept + self.streamed) if self.streamed else 0.0


def kv_bytes(shape: ModelShape, context: int, rows: int = 1) -> float:
    """Bytes of the keys and values of so many rows."""
    return shape.token_kv_bytes * context * rows


def fit(shape: ModelShape, machine: Machine, context: int, rows: int = 1, extra: float = 0.0) -> Fit:
    """What lies where.

    Args:
        context: tokens of each row.
        extra: bytes of each device that drafting takes.
    """
    machine.check(shape)
    device, weights = machine.device, shape.stored_bytes / machine.devices
    left = device.memory - RESERVE - weights - extra
    room = max(0.0, left if machine.kv_memory is None else min(left, machine.kv_memory))
    wanted = kv_bytes(shape, context, rows) * machine.kv_share(shape)
    kept = min(wanted, room)
    streamed = wanted - kept
    host = 0.0 if device.host_link is None else device.host_memory
    return Fit(weights, kept, streamed, left >= 0, streamed * machine.devices <= host)


def devices_needed(shape: ModelShape, device: Device) -> int:
    """The least devices whose memory holds the weights, of those numbers that its heads are split by.

    Raises:
        ValueError: if no number of them does.
    """
    for count in (g for g in range(1, shape.heads + 1) if not shape.heads % g):
        if shape.stored_bytes / count <= device.memory - RESERVE:
            return count
    raise ValueError(f"{shape.heads} devices of {device.memory / GIB:.0f} GiB do not hold the weights")


@dataclass(frozen=True)
class Pass:
    """A forward pass.

    Attributes:
        tokens: of each row.
        looked_at: tokens whose keys and values each row reads.
        rows: of the batch.
        index: bytes that each row reads to find these; they are split like keys and values.
        streamed: bytes that each device takes from the host's memory.
    """

    tokens: int
    looked_at: float
    rows: int = 1
    index: float = 0.0
    streamed: float = 0.0


def pass_seconds(shape: ModelShape, machine: Machine, one: Pass) -> float:
    """The least time that a pass takes."""
    device, g = machine.device, machine.devices
    scored, read = one.rows * one.tokens, one.rows * one.looked_at
    attended = machine.kv_share(shape) * (read * shape.token_kv_bytes + one.rows * one.index) + one.streamed
    linear = _longer(device, shape.pass_bytes / g, scored * shape.linear_operations / g)
    attention = _longer(device, attended, one.tokens * read * shape.pair_operations / g)
    streaming = one.streamed / device.host_link if device.host_link else 0.0
    fixed = shape.layers * (device.layer_seconds + 2 * _reduction(shape, machine, scored))
    return max(linear + attention, streaming) + fixed


def _longer(device: Device, read: float, operations: float) -> float:
    return max(read / device.bandwidth, operations / device.operations)


def _reduction(shape: ModelShape, machine: Machine, tokens: int) -> float:
    """Seconds of an all-reduce of these tokens' hidden states."""
    g, link = machine.devices, machine.device.link
    if g == 1 or link is None:
        return 0.0
    sent = 2 * (g - 1) / g * tokens * shape.hidden * shape.weight_bytes
    return machine.device.reduction_seconds + sent / link
