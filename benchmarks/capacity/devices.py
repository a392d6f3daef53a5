"""What fits on some devices, and the least time of a pass over one token of each row.

A pass reads every weight and each row's keys and values once, at the memory's bandwidth. With tensor parallelism over g
devices (Megatron's), each has 1/g of the weights, and the keys and values of its heads; a KV head that devices share is
on each of them. After the attention and the network of each layer, 2 (g - 1) / g of the tokens' hidden states go over
the link, in both directions at once. Keys and values that do not fit stay in the host's memory, and each pass streams
them while it computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.capacity.shapes import ModelShape

GIB = 1024**3
LAYER_SECONDS = 10 * 2e-6
"""Ten kernels, and 2 us between the last read of one and the first of the next, with CUDA graphs; assumed."""
REDUCTION_SECONDS = 10e-6  # an all-reduce of nothing between devices of one host; assumed
RESERVE = 2.0 * GIB  # bytes of each device for its runtime, activations and what a pass writes between


@dataclass(frozen=True)
class Device:
    """One device and its host, by the maker's data: bytes, and bytes a second.

    Attributes:
        link: to the other devices, and from them at the same time.
        host_link: from the host's memory, of which devices may use ``host_memory`` together.
        layer_seconds, reduction_seconds: of a layer and an all-reduce, besides what they read and send.
    """

    memory: float
    bandwidth: float
    link: float
    host_link: float
    host_memory: float = 1024.0 * GIB
    layer_seconds: float = LAYER_SECONDS
    reduction_seconds: float = REDUCTION_SECONDS


PCIE4, PCIE5 = 31.5e9, 63e9  # bytes a second in one direction over 16 lanes
DEVICES = {
    "a100-80gb": Device(80 * GIB, 2.039e12, 300e9, PCIE4),
    "h100": Device(80 * GIB, 3.35e12, 450e9, PCIE5),
    "h200": Device(141 * GIB, 4.8e12, 450e9, PCIE5),
    "rtx-4090": Device(24 * GIB, 1.008e12, PCIE4, PCIE4),
}
"""The makers' data sheets for SXM forms and the RTX 4090, in bfloat16 without sparsity. Links are per direction, half
of what a sheet states. A sheet's GB of memory are GiB."""


@dataclass(frozen=True)
class Machine:
    """Equal devices that run one model together, by tensor parallelism."""

    device: Device
    devices: int = 1

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError if devices do not divide the heads, or neither of devices and KV heads the other."""
        g, heads = self.devices, shape.kv_heads
        if shape.heads % g or (heads % g and g % heads):
            raise ValueError(f"devices is {g}, which does not divide {shape.heads} heads on {heads} KV heads evenly")

    def kv_share(self, shape: ModelShape) -> float:
        """Return the share of all keys and values on each device."""
        return max(1 / self.devices, 1 / shape.kv_heads)


@dataclass(frozen=True)
class Fit:
    """Bytes of each device's keys and values in its memory (``kept``) and in the host's (``streamed``); whether the
    model runs at all, and what fits, in words."""

    kept: float
    streamed: float
    possible: bool
    words: str


def kv_bytes(shape: ModelShape, context: int, rows: int = 1) -> float:
    return shape.token_kv_bytes * context * rows


def fit(shape: ModelShape, machine: Machine, context: int, rows: int = 1) -> Fit:
    """Return what fits after ``context`` tokens of each row."""
    machine.check(shape)
    device, held = machine.device, kv_bytes(shape, context, rows) * machine.kv_share(shape)
    room = device.memory - RESERVE - shape.stored_bytes / machine.devices
    kept = min(held, max(0.0, room))
    streamed = held - kept
    away = streamed * machine.devices
    if room < 0:
        return Fit(kept, streamed, False, f"no: the weights need {devices_needed(shape, device)} devices")
    if away > device.host_memory:
        return Fit(kept, streamed, False, f"no: {away / 1e9:,.0f} GB more than devices and host hold")
    words = f"{100 * streamed / held:.0f} % of KV in host memory" if streamed else "yes"
    return Fit(kept, streamed, True, words)


def devices_needed(shape: ModelShape, device: Device) -> int | str:
    """Return the least number of devices that holds the weights and splits the heads."""
    counts = (g for g in range(1, shape.heads + 1) if not shape.heads % g)
    return next((g for g in counts if shape.stored_bytes / g <= device.memory - RESERVE), "larger")


def least_seconds(shape: ModelShape, machine: Machine, context: int, rows: int, found: Fit) -> float:
    """Return the least seconds of a pass over one token of each row; streamed bytes are also written and read here."""
    device, g = machine.device, machine.devices
    held = kv_bytes(shape, context, rows) * machine.kv_share(shape)
    reading = (shape.pass_bytes / g + held + found.streamed) / device.bandwidth
    sent = 2 * (g - 1) / g * rows * shape.hidden * shape.weight_bytes
    reduction = device.reduction_seconds + sent / device.link if g > 1 else 0.0
    fixed = shape.layers * (device.layer_seconds + 2 * reduction)
    return max(reading, found.streamed / device.host_link) + fixed
