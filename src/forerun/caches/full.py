"""Every committed token's keys and values: the cache that decides what is generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from forerun.attention import AttentionSpec, merge
from forerun.block import Block
from forerun.caches.base import Cache
from forerun.caches.rows import Rows, append, attend_in_order, compact

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
        self._layers: dict[int, Rows] = {}
        self.queries: dict[int, torch.Tensor] = {}
        """The queries of the last pass, by layer, ``[1, H, n, d]``: what a sparse cache chooses its keys by. None are
        left where the tokens of that pass were forgotten."""
        self.specs: dict[int, AttentionSpec] = {}
        """What each layer asked for in its last pass."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        """See ``Cache.attend``."""
        end = self.length + len(block)
        if end > self._capacity:
            self._capacity = end + max(GROWTH, end // 32)
        rows = self._layers[layer] = append(self._layers.get(layer), (k, v), self.length, self._capacity)
        self.queries[layer], self.specs[layer] = q, spec
        return merge(*attend_in_order(q, rows, self.length, block, spec))

    def commit(self, block: Block, path: Sequence[int]) -> None:
        """See ``Cache.commit``. An accepted chain lies in place already and costs nothing."""
        start = self.length + len(block.pending)
        for rows in self._layers.values():
            compact(rows, start, path)
        self.length = start + len(path)

    def truncate(self, length: int) -> None:
        """See ``Cache.truncate``."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}; it must be between 0 and {self.length}")
        if length < self.length:
            self.queries = {}
        self.length = length

    def blank(self, length: int) -> None:
        """Hold zeros as if ``length`` tokens were committed: for measurements, after a first pass."""
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (torch.zeros_like(keys), torch.zeros_like(values))
        self.length = length

    def extend(self, layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Append committed tokens whose keys and values, ``[1, Hkv, m, d]``, come from elsewhere, for every layer."""
        count = {keys.shape[2] for keys, _ in layers.values()}
        if len(count) != 1 or (self._layers and set(layers) != set(self._layers)):
            raise ValueError("keys and values must be given for every layer, for as many tokens in each")
        self._capacity = max(self._capacity, self.length + max(count))
        for layer, pair in layers.items():
            self._layers[layer] = append(self._layers.get(layer), pair, self.length, self._capacity)
        self.length += max(count)

    def read(self, layer: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys and values of positions ``first`` to ``last`` (not included), ``[1, Hkv, m, d]``."""
        keys, values = self._layers[layer]
        return keys[:, :, first:last], values[:, :, first:last]

    @property
    def layers(self) -> list[int]:
        """The layers that a pass has filled, in order."""
        return sorted(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(t.nbytes for rows in self._layers.values() for t in rows)
