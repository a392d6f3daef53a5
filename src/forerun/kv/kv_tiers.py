"""Memory tiers for the keys and values of full caches: the device, the host's memory, and a file.

The device is filled first. Of a cache that does not fit, as many layers as fit stay there, the others go to the host's
memory, or to a file if that is full too (``offloaded.py``).
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from forerun.core.pinned import pinned, pinned_size
from forerun.kernels.attention.attention import Rows
from forerun.kv.cache import KVShape
from forerun.kv.full_cache import FullCache
from forerun.kv.offloaded import BUFFERS, CopyEngine, OffloadedCache, OffloadError
from forerun.kv.shared_prefix import Kind, Layout, aligned

TIERS = ("device", "host", "file")
"""Memory tiers, in the order in which they fill."""


@dataclass(frozen=True)
class KVMemory:
    """How much memory all full caches of an engine may use; raise ValueError for a value out of range.

    Attributes:
        device: bytes on the device that computes.
        host: bytes of host memory for what does not fit there; None for no limit.
        folder: for files with what fits in neither; None for no files.
        bandwidth: bytes per second between the device and the other tiers, to simulate a slower link; on a CPU.
        file: bytes of all files in the folder together; None for no limit but the disk's.
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
        """Bytes of each tier; infinite if unlimited."""
        given = {"device": self.device, "host": self.host, "file": 0 if self.folder is None else self.file}
        return {tier: math.inf if limit is None else float(limit) for tier, limit in given.items()}


class NoRoomError(MemoryError):
    """A cache fits in no tier."""


@dataclass(frozen=True)
class Placement:
    """Which tiers hold a sequence's keys and values.

    Attributes:
        on_device: whether all of it is on the device, not offloaded.
        layers: by tier, if offloaded.
        nbytes: by tier; on the device with the buffers.
    """

    tokens: int
    on_device: bool
    layers: Mapping[str, Sequence[int]]
    nbytes: Mapping[str, int]


class DeviceReserve(NamedTuple):
    """Device bytes that a new sequence leaves free for others: ``needed`` always, ``wanted`` if it can be offloaded."""

    needed: int = 0
    wanted: int = 0


NO_RESERVE = DeviceReserve()


def min_device_bytes(shape: KVShape, tokens: int) -> int:
    """Return the device bytes that an offloaded sequence needs: two buffers for its largest layer."""
    return BUFFERS * max(each.nbytes for each in shape.layers.values()) * aligned(tokens)


def layer_bytes(shape: KVShape, tokens: int) -> dict[int, int]:
    """Return the bytes of each layer of an offloaded sequence."""
    return {layer: each.nbytes * aligned(tokens) for layer, each in shape.layers.items()}


def place(
    memory: KVMemory,
    taken: Mapping[str, int],
    shape: KVShape,
    tokens: int,
    reserve: DeviceReserve = NO_RESERVE,
    host_size: Callable[[int], int] = int,
) -> Placement:
    """Choose the tiers for the layers of a sequence; raise NoRoomError, with the numbers, if it fits nowhere.

    Args:
        taken: bytes in use, by tier.
        tokens: of the sequence at its longest, drafts included.
        host_size: bytes that an allocation of this size uses on the host.
    """
    left = memory.device - taken["device"] - reserve.needed
    for spare in dict.fromkeys((reserve.wanted, 0)):
        if shape.nbytes * tokens <= left - spare:
            return Placement(tokens, True, {}, {"device": shape.nbytes * tokens, "host": 0, "file": 0})
        if min_device_bytes(shape, tokens) > left:
            break
        free = _offloaded(memory, taken, shape, tokens, left - spare, host_size)
        if free is not None:
            return free
    raise NoRoomError(_why(memory, taken, shape, tokens, left))


def _offloaded(
    memory: KVMemory,
    taken: Mapping[str, int],
    shape: KVShape,
    tokens: int,
    left: int,
    host_size: Callable[[int], int],
) -> Placement | None:
    sizes = layer_bytes(shape, tokens)
    buffers, limits = min_device_bytes(shape, tokens), memory.limits
    stay = _fitting(sizes, list(sizes), left - buffers)
    away = [layer for layer in sizes if layer not in stay]
    host = _fitting(sizes, away, limits["host"] - taken["host"], host_size)
    layers = {"device": stay, "host": host, "file": away[len(host) :]}
    nbytes = {tier: sum(sizes[layer] for layer in layers[tier]) for tier in TIERS}
    if nbytes["file"] and nbytes["file"] > limits["file"] - taken["file"]:
        return None
    taken_now = {"device": nbytes["device"] + buffers, "host": host_size(nbytes["host"])}
    return Placement(aligned(tokens), False, layers, nbytes | taken_now)


def _why(memory: KVMemory, taken: Mapping[str, int], shape: KVShape, tokens: int, left: int) -> str:
    buffers, sizes = min_device_bytes(shape, tokens), layer_bytes(shape, tokens)
    if buffers > left:
        return (
            f"a sequence of {tokens:,} tokens needs {buffers:,} bytes on the device, for two of its "
            f"layers; {max(0, left):,} of {memory.device:,} are free"
        )
    stay = _fitting(sizes, list(sizes), left - buffers)
    beside = sum(size for layer, size in sizes.items() if layer not in stay)
    message = f"a sequence of {tokens:,} tokens needs {beside:,} bytes off the device"
    host = memory.host or 0
    free = f"{max(0, host - taken['host']):,} of {host:,} are free"
    if memory.folder is None:
        return f"{message}; {free}, and no folder is given for a file"
    file = memory.file or 0
    return f"{message}; {free} in the host's memory, and {max(0, file - taken['file']):,} of {file:,} in files"


def _fitting(
    sizes: Mapping[int, int], layers: Sequence[int], left: float, taken: Callable[[int], int] = int
) -> list[int]:
    """Return the first layers that fit in ``left``; ``taken`` maps their total size to its use."""
    totals = accumulate(sizes[layer] for layer in layers)
    return [layer for layer, total in zip(layers, totals, strict=True) if taken(total) <= left]


class Tiers:
    """Makes full caches within a ``KVMemory``; their memory is free again after their last use. Thread-safe."""

    def __init__(self, memory: KVMemory | int, device: torch.device, shape: KVShape, dtype: torch.dtype) -> None:
        self.memory = memory if isinstance(memory, KVMemory) else KVMemory(memory)
        self.shape, self.dtype = shape, dtype
        self.copy_engine = CopyEngine(device, self.memory.bandwidth)
        self._host_size: Callable[[int], int] = pinned_size if device.type == "cuda" else int
        self._lock = threading.RLock()  # reentrant: the garbage collector may free a cache inside it
        self._taken = dict.fromkeys(TIERS, 0)
        self._released: deque[Mapping[str, int]] = deque()  # by finalizers, which must not wait for a lock
        self._finalizers: weakref.WeakKeyDictionary[FullCache, weakref.finalize[..., FullCache]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def taken(self) -> dict[str, int]:
        """Bytes in use by tier."""
        with self._lock:
            return dict(self._collect())

    def room_for(self, texts: Iterable[int]) -> DeviceReserve:
        """Return what a sequence must leave free for others of these lengths."""
        return DeviceReserve(sum(min(self.shape.nbytes * n, min_device_bytes(self.shape, n)) for n in texts))

    def placement(self, tokens: int, reserve: DeviceReserve = NO_RESERVE, empty: bool = False) -> Placement:
        """Return where a cache would be placed, in ``empty`` or current memory; raise NoRoomError if nowhere."""
        with self._lock:
            taken = dict.fromkeys(TIERS, 0) if empty else self._collect()
            return place(self.memory, taken, self.shape, tokens, reserve, self._host_size)

    def charge(self, nbytes: int) -> None:
        """Count device bytes used by anything but full caches; a negative number releases them."""
        with self._lock:
            self._taken["device"] += nbytes

    def cache(
        self, tokens: int, shareable: bool = False, releases: bool = False, reserve: DeviceReserve | None = None
    ) -> FullCache:
        """Return a cache with room for ``tokens`` tokens, drafts included (arguments: ``FullCache``, ``place``).
        Offloaded caches release nothing.

        Raises NoRoomError if it fits nowhere, OffloadError if its file cannot be created.
        """
        with self._lock:
            placed = place(self.memory, self._collect(), self.shape, tokens, reserve or NO_RESERVE, self._host_size)
            for tier, size in placed.nbytes.items():
                self._taken[tier] += size
        try:
            made = FullCache(tokens, shareable, releases) if placed.on_device else self._offloaded(placed)
        except BaseException:
            self._released.append(placed.nbytes)
            raise
        with self._lock:
            self._finalizers[made] = weakref.finalize(made, self._released.append, placed.nbytes)
        return made

    def free(self, cache: FullCache) -> None:
        """Free a cache's memory now; it cannot be read afterwards."""
        with self._lock:
            release = self._finalizers.pop(cache, None)
        if release is not None:
            cache.clear()
            release()

    def close(self) -> None:
        self.copy_engine.close()

    def _collect(self) -> dict[str, int]:
        while self._released:
            for tier, size in self._released.popleft().items():
                self._taken[tier] -= size
        return self._taken

    def _offloaded(self, placed: Placement) -> OffloadedCache:
        device = self.copy_engine.device
        kinds: dict[int, tuple[Kind, ...]] = {
            layer: ((each.heads, each.dim, self.dtype), (each.heads, each.out_dim, self.dtype))
            for layer, each in self.shape.layers.items()
        }
        cut = {
            tier: Layout({layer: kinds[layer] for layer in layers}, placed.tokens)
            for tier, layers in placed.layers.items()
        }
        make = pinned if device.type == "cuda" else partial(torch.empty, dtype=torch.uint8)
        home = cut["host"].cut(make(cut["host"].size))
        home |= cut["file"].cut(self._file_memory(placed.nbytes["file"]))
        largest = max(layer_bytes(self.shape, placed.tokens).values())
        spare = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        buffers: dict[int, Rows] = {}
        for number, layer in enumerate(sorted(home)):
            one = Layout({layer: kinds[layer]}, placed.tokens)
            buffers |= one.cut(spare[number % BUFFERS][: one.size])
        resident = cut["device"].cut(torch.empty(cut["device"].size, dtype=torch.uint8, device=device))
        return OffloadedCache(placed.tokens, resident, home, buffers, self.copy_engine)

    def _file_memory(self, size: int) -> torch.Tensor:
        """Map memory from an unnamed file, allocating its disk space now, so that a full disk is an error here."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        try:
            with tempfile.TemporaryFile(dir=self.memory.folder, prefix="forerun-kv-") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as error:
            message = f"{size:,} bytes of keys and values cannot be stored in {self.memory.folder}"
            raise OffloadError(error.errno, f"{message}: {error.strerror}") from error
