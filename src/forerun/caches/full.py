"""Every committed token's keys and values: the cache that decides what is generated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.attention import AttentionSpec, attend, merge
from forerun.block import Block
from forerun.caches.base import Cache

GROWTH = 256
"""Tokens by which the cache grows at least."""


class FullCache(Cache):
    """A preallocated buffer per layer that grows in blocks; accepted rows are compacted in place.

    Args:
        capacity: tokens to make room for at the start; memory is only touched as it fills.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.length = 0
        self._capacity = capacity
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        """See ``Cache.attend``."""
        keys, values = self._store(layer, k, v)
        if len(block) == 1:  # one token sees all that is kept, itself included: no mask, and nothing to merge
            first = 0 if spec.window is None else max(0, self.length - spec.window + 1)
            seen = slice(first, self.length + 1)
            return attend(q, keys[:, :, seen], values[:, :, seen], spec).out
        edge, prefix = _split(self.length, block, spec.window)
        if edge:
            k = torch.cat((keys[:, :, edge.start : edge.stop], k), 2)
            v = torch.cat((values[:, :, edge.start : edge.stop], v), 2)
        local = attend(q, k, v, spec, block.bias(spec.window, edge, q))
        if not prefix:
            return local.out
        seen = slice(prefix.start, prefix.stop)
        return merge(attend(q, keys[:, :, seen], values[:, :, seen], spec), local)

    def commit(self, block: Block, path: Sequence[int]) -> None:
        """See ``Cache.commit``. An accepted chain lies in place already and costs nothing."""
        start = self.length + len(block.pending)
        if list(path) != list(range(len(path))):
            for keys, values in self._layers.values():
                rows = torch.tensor([start + node for node in path], device=keys.device)
                keys[:, :, start : start + len(path)] = keys.index_select(2, rows)
                values[:, :, start : start + len(path)] = values.index_select(2, rows)
        self.length = start + len(path)

    def truncate(self, length: int) -> None:
        """See ``Cache.truncate``."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}; it must be between 0 and {self.length}")
        self.length = length

    def blank(self, length: int) -> None:
        """Hold zeros as if ``length`` tokens were committed: for measurements, after a first pass."""
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (_room(keys, self._capacity).zero_(), _room(values, self._capacity).zero_())
        self.length = length

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(t.nbytes for pair in self._layers.values() for t in pair)

    def _store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the block behind the committed tokens and return the layer's buffers."""
        end = self.length + k.shape[2]
        pair = self._layers.get(layer)
        if pair is None or pair[0].shape[2] < end:
            pair = self._layers[layer] = self._grow(pair, k, v, end)
        pair[0][:, :, self.length : end] = k
        pair[1][:, :, self.length : end] = v
        return pair

    def _grow(
        self, pair: tuple[torch.Tensor, torch.Tensor] | None, k: torch.Tensor, v: torch.Tensor, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if end > self._capacity:
            self._capacity = end + max(GROWTH, end // 32)
        grown = (_room(k, self._capacity), _room(v, self._capacity))
        if pair is not None:
            for old, new in zip(pair, grown, strict=True):
                new[:, :, : self.length] = old[:, :, : self.length]
        return grown


def _room(like: torch.Tensor, capacity: int) -> torch.Tensor:
    return like.new_empty(1, like.shape[1], capacity, like.shape[3])


def _split(length: int, block: Block, window: int | None) -> tuple[range, range]:
    """Cached positions that only some of the block's tokens see, and those that all of them see."""
    if window is None or length + block.deepest < window:
        return range(0), range(length)
    common = min(length, length + block.deepest - window + 1)
    return range(max(0, length - window + 1), common), range(common, length)
