"""Where the keys and values of full caches lie: on the device, in the host's memory, and in a file.

The device is filled first. A cache that does not fit in what is left of it is offloaded (``offloaded.py``): as many
layers as fit stay on the device, and the others go to the host's memory, or to a file if that is full too.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from forerun.caches.base import KVShape
from forerun.caches.beginning import ALIGNMENT, Kind, Layout
from forerun.caches.full import FullCache
from forerun.caches.link import Link
from forerun.caches.offloaded import BUFFERS, OffloadedCache
from forerun.caches.rows import Rows


@dataclass(frozen=True)
class KVMemory:
    """How much memory all full caches of an engine may take.

    Attributes:
        device: bytes on the device that computes.
        host: bytes of the host's memory for what does not fit there; None for no limit.
        folder: where files are made for what does not fit in either; None for no files.
        bandwidth: bytes a second between the device and the rest, to try out what a slower link would do; on a CPU.

    Raises:
        ValueError: for a value out of range.
    """

    device: int
    host: int | None = None
    folder: str | Path | None = None
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        for name in ("device", "host"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value} bytes; it must be 0 or more")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"the bandwidth is {self.bandwidth} bytes a second; it must be more than 0")


class NoRoomError(MemoryError):
    """A cache fits nowhere."""


def least(shape: KVShape, tokens: int) -> int:
    """Bytes on the device without which a text of so many tokens cannot be offloaded: of its largest layer, twice."""
    return BUFFERS * max(each.nbytes for each in shape.layers.values()) * _rounded(tokens)


class Tiers:
    """Makes full caches within a ``KVMemory``. What a cache takes is free again when it is gone.

    Args:
        memory: the limits, or bytes on the device.
        device: that computes.
        shape: of a token's keys and values.
        dtype: of them.
    """

    def __init__(self, memory: KVMemory | int, device: torch.device, shape: KVShape, dtype: torch.dtype) -> None:
        self.memory = memory if isinstance(memory, KVMemory) else KVMemory(memory)
        self.shape, self.dtype = shape, dtype
        self.link = Link(device, self.memory.bandwidth)
        self.taken = {"device": 0, "host": 0, "file": 0}
        """Bytes by tier."""
        self._expected: list[int] = []

    def expect(self, texts: Sequence[int]) -> None:
        """Tell of the next caches, in order, by their tokens: each leaves the others what they need on the device."""
        self._expected = [min(self.shape.nbytes * tokens, least(self.shape, tokens)) for tokens in texts]

    def cache(self, tokens: int) -> FullCache:
        """A cache with room for so many tokens.

        Raises:
            NoRoomError: if it fits nowhere.
            OSError: if its file cannot be made.
        """
        shape, self._expected = self.shape, self._expected[1:]
        left = self.memory.device - self.taken["device"] - sum(self._expected)
        if shape.nbytes * tokens <= left:
            plain = FullCache(tokens)
            self._keep(plain, device=shape.nbytes * tokens)
            return plain
        capacity = _rounded(tokens)
        sizes = {layer: each.nbytes * capacity for layer, each in shape.layers.items()}
        stay = _fitting(sizes, left - least(shape, tokens))
        if stay is None:
            raise NoRoomError(
                f"a text of {tokens:,} tokens needs {least(shape, tokens):,} bytes on the device, for two of its "
                f"layers; {max(0, left):,} of {self.memory.device:,} are free"
            )
        return self._offloaded(sizes, capacity, stay)

    def close(self) -> None:
        """End the link's thread."""
        self.link.close()

    def _offloaded(self, sizes: Mapping[int, int], capacity: int, stay: Sequence[int]) -> OffloadedCache:
        kinds: dict[int, tuple[Kind, ...]] = {
            layer: ((each.heads, each.dim, self.dtype), (each.heads, each.out_dim, self.dtype))
            for layer, each in self.shape.layers.items()
        }
        away = [layer for layer in kinds if layer not in stay]
        host = self._in_host(sizes, away)
        file = away[len(host) :]
        nbytes = {
            "device": sum(sizes[layer] for layer in stay) + BUFFERS * max(sizes.values()),
            "host": sum(sizes[layer] for layer in host),
            "file": sum(sizes[layer] for layer in file),
        }
        if file and self.memory.folder is None:
            limit = self.memory.host or 0
            raise NoRoomError(
                f"a text of {capacity:,} tokens needs {nbytes['host'] + nbytes['file']:,} bytes beside the device; "
                f"{limit - self.taken['host']:,} of {limit:,} are free, and no folder is given for a file"
            )
        cut = {name: Layout({layer: kinds[layer] for layer in layers}, capacity) for name, layers in
               (("device", stay), ("host", host), ("file", file))}  # fmt: skip
        home = cut["host"].cut(self._host_memory(nbytes["host"])) | cut["file"].cut(self._file_memory(nbytes["file"]))
        spare = [torch.empty(max(sizes.values()), dtype=torch.uint8, device=self.link.device) for _ in range(BUFFERS)]
        buffers: dict[int, Rows] = {}
        for place, layer in enumerate(away):
            one = Layout({layer: kinds[layer]}, capacity)
            buffers |= one.cut(spare[place % BUFFERS][: one.size])
        resident = cut["device"].cut(torch.empty(cut["device"].size, dtype=torch.uint8, device=self.link.device))
        cache = OffloadedCache(capacity, resident, home, buffers, self.link)
        self._keep(cache, **nbytes)
        return cache

    def _in_host(self, sizes: Mapping[int, int], away: Sequence[int]) -> list[int]:
        """The first layers of ``away`` that fit in the host's memory."""
        if self.memory.host is None:
            return list(away)
        return _fitting({layer: sizes[layer] for layer in away}, self.memory.host - self.taken["host"]) or []

    def _host_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.link.device.type == "cuda")

    def _file_memory(self, size: int) -> torch.Tensor:
        """A part of a file without a name, as memory. Its bytes are on the disk from the start: a full disk is an error
        here, and not when it is written to."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        with tempfile.TemporaryFile(dir=self.memory.folder, prefix="forerun-kv-") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                told = f"{size:,} bytes of keys and values cannot be kept in {self.memory.folder}"
                raise OSError(error.errno, f"{told}: {error.strerror}") from None
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)

    def _keep(self, cache: FullCache, **nbytes: int) -> None:
        for name, size in nbytes.items():
            self.taken[name] += size
        weakref.finalize(cache, self._free, nbytes)

    def _free(self, nbytes: Mapping[str, int]) -> None:
        for name, size in nbytes.items():
            self.taken[name] -= size


def _rounded(tokens: int) -> int:
    return math.ceil(tokens / ALIGNMENT) * ALIGNMENT


def _fitting(sizes: Mapping[int, int], left: int) -> list[int] | None:
    """The first layers that fit in what is left; None if that is less than nothing."""
    if left < 0:
        return None
    found: list[int] = []
    for layer, size in sizes.items():
        if size > left:
            break
        found.append(layer)
        left -= size
    return found
