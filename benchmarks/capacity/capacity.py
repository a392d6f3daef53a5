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

from dataclasses import dataclass

from benchmarks.capacity.shapes import ModelShape

GIB = 1024**3
LAYER_SECONDS = 10 * 2e-6
"""Ten kernels of a layer, and 2 us between the last read of one and the first of the next, with CUDA graphs;
assumed."""
REDUCTION_SECONDS = 10e-6
"""An all-reduce of nothing between devices of one host; assumed."""
RESERVE = 2.0 * GIB
"""Bytes of each device for its runtime, activations and what a pass writes between."""


@dataclass(frozen=True)
class Device:
    """One device, and its host, by what its maker states.

    Attributes:
        memory: bytes.
        bandwidth: bytes of memory it reads a second.
        operations: dense operations a second in the weights' type; a multiplication and an addition are two.
        link: bytes a second that it sends to the other devices, and receives at the same time.
        host_link: bytes a second from the host's memory.
        host_memory: bytes of the host that devices may use together.
        layer_seconds: what a layer takes on top, whatever it reads.
        reduction_seconds: what an all-reduce takes on top.
    """

    memory: float
    bandwidth: float
    operations: float
    link: float
    host_link: float
    host_memory: float = 1024.0 * GIB
    layer_seconds: float = LAYER_SECONDS
    reduction_seconds: float = REDUCTION_SECONDS


PCIE4, PCIE5 = 31.5e9, 63e9
"""Bytes a second in one direction over 16 lanes."""
DEVICES = {
    "a100-80gb": Device(80 * GIB, 2.039e12, 312e12, 300e9, PCIE4),
    "h100": Device(80 * GIB, 3.35e12, 989e12, 450e9, PCIE5),
    "h200": Device(141 * GIB, 4.8e12, 989e12, 450e9, PCIE5),
    "rtx-4090": Device(24 * GIB, 1.008e12, 165e12, PCIE4, PCIE4),
}
"""The SXM forms of A100, H100 and H200, and the RTX 4090: the makers' data sheets, in bfloat16 without sparsity. Links
are per direction, half of what a sheet states for both. A sheet's GB of memory are GiB."""


@dataclass(frozen=True)
class Machine:
    """Equal devices that run one model together.

    Attributes:
        kv_memory: bytes of each device for keys and values; by default all that the weights leave.
    """

    device: Device
    devices: int = 1
    kv_memory: float | None = None

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
    return Fit(weights, kept, streamed, left >= 0, streamed * machine.devices <= device.host_memory)


def devices_needed(shape: ModelShape, device: Device) -> int | str:
    """The least devices whose memory holds the weights, of those numbers that its heads are split by."""
    counts = (g for g in range(1, shape.heads + 1) if not shape.heads % g)
    return next((g for g in counts if shape.stored_bytes / g <= device.memory - RESERVE), "larger")


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
    fixed = shape.layers * (device.layer_seconds + 2 * _reduction(shape, machine, scored))
    return max(linear + attention, one.streamed / device.host_link) + fixed


def _longer(device: Device, read: float, operations: float) -> float:
    return max(read / device.bandwidth, operations / device.operations)


def _reduction(shape: ModelShape, machine: Machine, tokens: int) -> float:
    """Seconds of an all-reduce of these tokens' hidden states."""
    g = machine.devices
    if g == 1:
        return 0.0
    sent = 2 * (g - 1) / g * tokens * shape.hidden * shape.weight_bytes
    return machine.device.reduction_seconds + sent / machine.device.link
