"""A full cache whose keys and values do not all fit on the device (TriForce, section 5.3: offloading).

The first layers stay on the device, the others lie at home: in the host's memory, or in a file. A pass brings them in
layer by layer, into two buffers in turn: while it computes with one layer, the next one comes. Only new rows are
written back. The buffers are in text order, as a full cache is, so the bits of a pass are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from forerun.core.block import Block
from forerun.kv.cache import KVShape
from forerun.kv.copy_engine import AwayError, CopyEngine, Ticket
from forerun.kv.full_cache import FullCache
from forerun.kv.kv_rows import Rows, compact
from forerun.kv.shared_prefix import SharedPrefix

BUFFERS = 2
"""Layers that are on the device besides those that stay: the one that is computed with, and the next."""


@dataclass
class _Buffer:
    """What a buffer holds: a layer's first rows, or will hold when the copies are done."""

    layer: int
    held: int
    copies: list[Ticket] = field(default_factory=list)


class OffloadedCache(FullCache):
    """As a full cache, of a fixed size.

    Args:
        capacity: tokens, at most.
        resident: keys and values of the layers that stay on the device, ``[1, Hkv, capacity, d]``.
        home: those of the others, in memory of the host.
        buffers: for each of the others, in order, its rows in one of the buffers on the device, which take turns.
        link: between device and home.
    """

    offloaded = True

    def __init__(
        self, capacity: int, resident: Mapping[int, Rows], home: Mapping[int, Rows], buffers: Mapping[int, Rows],
        link: CopyEngine,
    ) -> None:  # fmt: skip
        super().__init__(capacity)
        every = {**resident, **home}
        self._layers = {layer: every[layer] for layer in sorted(every)}
        self._rows, self.link = dict(buffers), link
        self._away = sorted(home)
        self._buffers = [_Buffer(layer, 0) for layer in self._away[:BUFFERS]]
        self._writes: list[Ticket] = []
        self._failed: AwayError | None = None

    @property
    def lost(self) -> Exception | None:
        """See ``FullCache.lost``. It waits for what is being copied."""
        try:
            for ticket in self._asked():
                ticket.wait()
        except AwayError as error:
            return error
        return self._failed

    def clear(self) -> None:
        """See ``FullCache.clear``. Copies on their way end first: they write to this memory."""
        for ticket in self._asked():
            with suppress(AwayError):
                ticket.wait()
        super().clear()
        self._rows, self._away, self._buffers, self._writes = {}, [], [], []

    @property
    def away(self) -> Sequence[int]:
        """The layers that are not on the device."""
        return self._away

    def enter(self, layer: int, count: int) -> Rows:
        """A layer's rows on the device, the committed ones and room for ``count`` after them; the next layer is sent
        for.

        Raises:
            ValueError: if there is no room.
            AwayError: if a copy failed.
        """
        if self.length + count > self._capacity:
            raise ValueError(f"this cache has room for {self._capacity} tokens, not for {self.length + count}")
        if layer not in self._rows:
            return self._layers[layer]
        buffer = self._send_for(layer)
        for ticket in buffer.copies:
            ticket.wait()
        buffer.copies = []
        self._writes = [ticket for ticket in self._writes if not ticket.done()]
        following = self._away[(self._away.index(layer) + 1) % len(self._away)]
        if self._buffer(following) is not buffer:  # the first layer, after the last one, may have the same
            self._send_for(following)
        return self._rows[layer]

    def leave(self, layer: int, count: int) -> None:
        """Bring the ``count`` rows home that were written after the committed ones."""
        if layer in self._rows:
            first, last = self.length, self.length + count
            parts = [
                (home[:, :, first:last], new[:, :, first:last])
                for home, new in zip(self._layers[layer], self._rows[layer], strict=True)
            ]
            ticket = self.link.write(parts)
            self._buffer(layer).copies.append(ticket)
            self._writes.append(ticket)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``FullCache.append``."""
        count = k.shape[2]
        keys, values = self.enter(layer, count)
        keys[:, :, self.length : self.length + count] = k
        values[:, :, self.length : self.length + count] = v
        self.leave(layer, count)
        return keys, values

    def commit(self, block: Block, path: Sequence[int]) -> None:
        """See ``Cache.commit``. Rows at home are moved there."""
        start = self.length + len(block.pending)
        moved = list(path)
        for layer in self._layers:
            if layer not in self._rows:
                compact(self._layers[layer], start, moved)
        if moved != list(range(len(moved))):
            away = [self._layers[layer] for layer in self._away]
            self._writes.append(self.link.then(lambda: _compact_all(away, start, moved)))
        self.length = start + len(moved)
        for layer in self._away[:BUFFERS]:
            self._send_for(layer)

    def truncate(self, length: int) -> None:
        """See ``Cache.truncate``."""
        super().truncate(length)
        for buffer in self._buffers:
            buffer.held = min(buffer.held, length)

    def blank(self, length: int) -> None:
        """See ``FullCache.blank``."""
        self._settle()
        super().blank(length)
        for buffer in self._buffers:
            buffer.held = 0

    def extend(self, layers: Mapping[int, Rows]) -> None:
        """See ``FullCache.extend``."""
        count = {rows[0].shape[2] for rows in layers.values()}
        if len(count) != 1 or set(layers) != set(self._layers):
            raise ValueError("keys and values must be given for every layer, for as many tokens in each")
        end = self.length + max(count)
        if end > self._capacity:
            raise ValueError(f"this cache has room for {self._capacity} tokens, not for {end}")
        self._settle()
        for layer, rows in layers.items():
            for to, new in zip(self._layers[layer], rows, strict=True):
                to[:, :, self.length : end] = new
        self.length = end

    def read(self, layer: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``FullCache.read``; what is not on the device is brought there."""
        keys, values = super().read(layer, first, last)
        if layer in self._rows:
            keys, values = self._brought((keys, values))
        return keys, values

    def every(self, layer: int, step: int) -> torch.Tensor:
        """See ``FullCache.every``; what is not on the device is brought there."""
        keys = super().every(layer, step)
        return keys if layer not in self._rows else self._brought((keys,))[0]

    def chunks(self, layer: int, head: torch.Tensor, chunk: torch.Tensor, size: int) -> Rows:
        """See ``FullCache.chunks``; what is not on the device is brought there."""
        if layer not in self._rows:
            return super().chunks(layer, head, chunk, size)
        self._settle()
        place = self._layers[layer][0].device
        found = super().chunks(layer, head.to(place), chunk.to(place), size)
        return tuple(t[0] for t in self._brought([t[None] for t in found]))

    def reserve(self, layers: int, like: torch.Tensor, count: int) -> torch.Tensor:
        """There is no one piece of memory to reserve."""
        raise TypeError("an offloaded cache is not in one piece; its passes go layer by layer (enter, leave)")

    def share(self, length: int) -> SharedPrefix:
        """Its beginning cannot be shared: it is too large to be kept twice."""
        raise TypeError("the beginning of an offloaded cache cannot be shared")

    def needs(self, shape: KVShape, tokens: int) -> int:
        """See ``Cache.needs``: on all tiers."""
        return shape.nbytes * self._capacity

    def _buffer(self, layer: int) -> _Buffer:
        return self._buffers[self._away.index(layer) % BUFFERS]

    def _send_for(self, layer: int) -> _Buffer:
        """Bring a layer's committed rows to its buffer, unless they are there or on their way."""
        buffer = self._buffer(layer)
        if buffer.layer != layer:
            buffer.layer, buffer.held = layer, 0
        first, last = buffer.held, self.length
        if first < last:
            parts = [
                (to[:, :, first:last], home[:, :, first:last])
                for to, home in zip(self._rows[layer], self._layers[layer], strict=True)
            ]
            buffer.copies.append(self.link.fetch(parts))
            buffer.held = last
        return buffer

    def _brought(self, rows: Sequence[torch.Tensor]) -> Rows:
        """Rows at home, on the device, at the link's speed."""
        self._settle()
        to = tuple(t.new_empty(t.shape, device=self.link.device) for t in rows)
        try:
            self.link.urgent(list(zip(to, rows, strict=True)))
        except AwayError as error:
            self._failed = error
            raise
        return to

    def _asked(self) -> list[Ticket]:
        """Copies that may not be done."""
        return [*self._writes, *(ticket for buffer in self._buffers for ticket in buffer.copies)]

    def _settle(self) -> None:
        """What was written is at home."""
        for ticket in self._writes:
            ticket.wait()
        self._writes = []


def _compact_all(layers: Sequence[Rows], start: int, path: Sequence[int]) -> None:
    for rows in layers:
        compact(rows, start, path)
