"""Where the keys and values of full caches lie: on the device, in the host's memory, and in a file.

The device is filled first. A cache that does not fit in what is left of it is offloaded (``offloaded.py``): as many
layers as fit stay on the device, and the others go to the host's memory, or to a file if that is full too.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from forerun.kv.cache import KVShape
from forerun.kv.copy_engine import AwayError, CopyEngine
from forerun.kv.full_cache import FullCache
from forerun.kv.kv_rows import Rows
from forerun.kv.offloaded import BUFFERS, OffloadedCache
from forerun.kv.placement import TIERS, KVMemory, NoRoomError, Placement, layer_bytes, least, place
from forerun.kv.shared_prefix import Kind, Layout

__all__ = ["KVMemory", "NoRoomError", "Tiers", "least"]


class Tiers:
    """Makes full caches within a ``KVMemory``. What a cache takes is free again when it is gone. Threads may share it.

    Args:
        memory: the limits, or bytes on the device.
        device: that computes.
        shape: of a token's keys and values.
        dtype: of them.
    """

    def __init__(self, memory: KVMemory | int, device: torch.device, shape: KVShape, dtype: torch.dtype) -> None:
        self.memory = memory if isinstance(memory, KVMemory) else KVMemory(memory)
        self.shape, self.dtype = shape, dtype
        self.link = CopyEngine(device, self.memory.bandwidth)
        self.leave: Callable[[int], int] = _nothing
        """Of the tokens of a new text: bytes on the device that it is to leave to others, if it can go elsewhere."""
        self._lock = threading.Lock()
        self._taken = dict.fromkeys(TIERS, 0)
        self._gone: deque[Mapping[str, int]] = deque()  # of caches that are gone; a finalizer must wait for no lock
        self._held: weakref.WeakKeyDictionary[FullCache, weakref.finalize[..., FullCache]] = weakref.WeakKeyDictionary()
        self._told = threading.local()  # each thread expects its own caches

    @property
    def taken(self) -> dict[str, int]:
        """Bytes by tier."""
        with self._lock:
            return dict(self._count())

    @contextmanager
    def expecting(self, texts: Sequence[int]) -> Iterator[None]:
        """A context in which this thread makes caches, in order, of so many tokens: each leaves the others what they
        need on the device."""
        self._told.expected = [min(self.shape.nbytes * tokens, least(self.shape, tokens)) for tokens in texts]
        try:
            yield
        finally:
            self._told.expected = []

    def placed(self, tokens: int, beside: int = 0, empty: bool = False) -> Placement:
        """Where a cache would lie now; nothing is made.

        Args:
            tokens: as for ``cache``.
            beside: bytes on the device that are needed besides it; see ``lend``.
            empty: as if nothing were taken.

        Raises:
            NoRoomError: if it would fit nowhere.
        """
        with self._lock:
            taken = dict.fromkeys(TIERS, 0) if empty else self._count()
            return place(self.memory, taken, self.shape, tokens, beside, 0 if empty else self.leave(tokens))

    def lend(self, nbytes: int) -> None:
        """Count bytes on the device for something else than a full cache; what is negative is given back."""
        with self._lock:
            self._taken["device"] += nbytes

    def cache(self, tokens: int, shareable: bool = False) -> FullCache:
        """A cache with room for ``tokens`` tokens; see ``FullCache`` for ``shareable``.

        Raises:
            NoRoomError: if it fits nowhere.
            AwayError: if its file cannot be made.
        """
        self._told.expected = others = getattr(self._told, "expected", [])[1:]
        with self._lock:
            placed = place(self.memory, self._count(), self.shape, tokens, sum(others), self.leave(tokens))
            for tier, size in placed.nbytes.items():
                self._taken[tier] += size
        try:
            made = FullCache(tokens, shareable) if placed.whole else self._offloaded(placed)
        except BaseException:
            self._gone.append(placed.nbytes)
            raise
        with self._lock:
            self._held[made] = weakref.finalize(made, self._gone.append, placed.nbytes)
        return made

    def free(self, cache: FullCache) -> None:
        """Let go of a cache's memory now, whoever still has the cache; nothing can be read from it any more."""
        with self._lock:
            held = self._held.pop(cache, None)
        if held is not None:
            cache.clear()
            held()

    def close(self) -> None:
        """End the link's thread."""
        self.link.close()

    def _count(self) -> dict[str, int]:
        while self._gone:
            for tier, size in self._gone.popleft().items():
                self._taken[tier] -= size
        return self._taken

    def _offloaded(self, placed: Placement) -> OffloadedCache:
        kinds: dict[int, tuple[Kind, ...]] = {
            layer: ((each.heads, each.dim, self.dtype), (each.heads, each.out_dim, self.dtype))
            for layer, each in self.shape.layers.items()
        }
        cut = {
            tier: Layout({layer: kinds[layer] for layer in layers}, placed.tokens)
            for tier, layers in placed.layers.items()
        }
        home = cut["host"].cut(self._host_memory(placed.nbytes["host"]))
        home |= cut["file"].cut(self._file_memory(placed.nbytes["file"]))
        largest = max(layer_bytes(self.shape, placed.tokens).values())
        spare = [torch.empty(largest, dtype=torch.uint8, device=self.link.device) for _ in range(BUFFERS)]
        buffers: dict[int, Rows] = {}
        for number, layer in enumerate(sorted(home)):
            one = Layout({layer: kinds[layer]}, placed.tokens)
            buffers |= one.cut(spare[number % BUFFERS][: one.size])
        resident = cut["device"].cut(torch.empty(cut["device"].size, dtype=torch.uint8, device=self.link.device))
        return OffloadedCache(placed.tokens, resident, home, buffers, self.link)

    def _host_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.link.device.type == "cuda")

    def _file_memory(self, size: int) -> torch.Tensor:
        """A part of a file without a name, as memory. Its bytes are on the disk from the start: a full disk is an error
        here, and not when it is written to."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        try:
            with tempfile.TemporaryFile(dir=self.memory.folder, prefix="forerun-kv-") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as error:
            told = f"{size:,} bytes of keys and values cannot be kept in {self.memory.folder}"
            raise AwayError(error.errno, f"{told}: {error.strerror}") from error


def _nothing(tokens: int) -> int:
    return 0
