"""Which layers of a text's keys and values lie where: decided before anything is made, so that it can be asked, too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.kv.cache import KVShape
from forerun.kv.offloaded import BUFFERS
from forerun.kv.shared_prefix import ALIGNMENT

TIERS = ("device", "host", "file")
"""The tiers, in the order in which they are filled."""


@dataclass(frozen=True)
class KVMemory:
    """How much memory all full caches of an engine may take.

    Attributes:
        device: bytes on the device that computes.
        host: bytes of the host's memory for what does not fit there; None for no limit.
        folder: where files are made for what does not fit in either; None for no files.
        bandwidth: bytes a second between the device and the rest, to try out what a slower link would do; on a CPU.
        file: bytes of all files in the folder together; None for as many as the disk has.

    Raises:
        ValueError: for a value out of range.
    """

    device: int
    host: int | None = None
    folder: str | Path | None = None
    bandwidth: float | None = None
    file: int | None = None

    def __post_init__(self) -> None:
        for name in TIERS:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value} bytes; it must be 0 or more")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"the bandwidth is {self.bandwidth} bytes a second; it must be more than 0")

    @property
    def limits(self) -> dict[str, float]:
        """Bytes by tier; infinity for a tier without a limit."""
        file = 0.0 if self.folder is None else _or_all(self.file)
        return {"device": float(self.device), "host": _or_all(self.host), "file": file}


class NoRoomError(MemoryError):
    """A cache fits nowhere."""


@dataclass(frozen=True)
class Placement:
    """Where a text's keys and values lie.

    Attributes:
        tokens: that there is room for.
        whole: whether all of it is on the device, as a cache that is not offloaded.
        layers: by tier, if it is offloaded.
        nbytes: by tier; on the device with the buffers.
    """

    tokens: int
    whole: bool
    layers: Mapping[str, Sequence[int]]
    nbytes: Mapping[str, int]


def least(shape: KVShape, tokens: int) -> int:
    """Bytes on the device without which a text of so many tokens cannot be offloaded: of its largest layer, twice."""
    return BUFFERS * max(each.nbytes for each in shape.layers.values()) * _rounded(tokens)


def layer_bytes(shape: KVShape, tokens: int) -> dict[int, int]:
    """Bytes of each layer of an offloaded text."""
    return {layer: each.nbytes * _rounded(tokens) for layer, each in shape.layers.items()}


def place(
    memory: KVMemory, taken: Mapping[str, int], shape: KVShape, tokens: int, needed: int = 0, wanted: int = 0
) -> Placement:
    """Where a text of so many tokens goes.

    Args:
        memory: all that there is.
        taken: bytes of it, by tier.
        shape: of a token's keys and values.
        tokens: of the text at its longest, drafts included.
        needed: bytes that have to be left on the device.
        wanted: bytes more that are to be left there if the text can go elsewhere. Its buffers may take of them.

    Raises:
        NoRoomError: if it fits nowhere; with the numbers.
    """
    left = memory.device - taken["device"] - needed
    for spare in dict.fromkeys((wanted, 0)):
        if shape.nbytes * tokens <= left - spare:
            return Placement(tokens, True, {}, {"device": shape.nbytes * tokens, "host": 0, "file": 0})
        if least(shape, tokens) > left:
            break
        found = _offloaded(memory, taken, shape, tokens, left - spare)
        if found is not None:
            return found
    raise NoRoomError(_why(memory, taken, shape, tokens, left))


def _offloaded(memory: KVMemory, taken: Mapping[str, int], shape: KVShape, tokens: int, left: int) -> Placement | None:
    """As many layers on the device as fit in what is left, the others in the tiers below; None if these are full."""
    sizes = layer_bytes(shape, tokens)
    buffers, limits = least(shape, tokens), memory.limits
    stay = _fitting(sizes, list(sizes), left - buffers)
    away = [layer for layer in sizes if layer not in stay]
    host = _fitting(sizes, away, limits["host"] - taken["host"])
    layers = {"device": stay, "host": host, "file": away[len(host) :]}
    nbytes = {tier: sum(sizes[layer] for layer in layers[tier]) for tier in TIERS}
    if nbytes["file"] and nbytes["file"] > limits["file"] - taken["file"]:
        return None
    return Placement(_rounded(tokens), False, layers, nbytes | {"device": nbytes["device"] + buffers})


def _why(memory: KVMemory, taken: Mapping[str, int], shape: KVShape, tokens: int, left: int) -> str:
    """Why a text fits nowhere."""
    buffers, sizes = least(shape, tokens), layer_bytes(shape, tokens)
    if buffers > left:
        return (
            f"a text of {tokens:,} tokens needs {buffers:,} bytes on the device, for two of its "
            f"layers; {max(0, left):,} of {memory.device:,} are free"
        )
    stay = _fitting(sizes, list(sizes), left - buffers)
    beside = sum(size for layer, size in sizes.items() if layer not in stay)
    told = f"a text of {tokens:,} tokens needs {beside:,} bytes beside the device"
    host = memory.host or 0
    found = f"{max(0, host - taken['host']):,} of {host:,} are free"
    if memory.folder is None:
        return f"{told}; {found}, and no folder is given for a file"
    file = memory.file or 0
    return f"{told}; {found} in the host's memory, and {max(0, file - taken['file']):,} of {file:,} in files"


def _fitting(sizes: Mapping[int, int], layers: Sequence[int], left: float) -> list[int]:
    """The first layers that fit in what is left."""
    found: list[int] = []
    for layer in layers:
        left -= sizes[layer]
        if left < 0:
            break
        found.append(layer)
    return found


def _rounded(tokens: int) -> int:
    return math.ceil(tokens / ALIGNMENT) * ALIGNMENT


def _or_all(limit: int | None) -> float:
    return math.inf if limit is None else float(limit)
