"""The target's cache, with the keys and values of all tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.tree import IntArray
from forerun.kernels.attention.attention import AttentionSpec, Rows
from forerun.kv.cache import Addresses, Cache, KVShape, LayerShape, append, compact, release, reserve, slack
from forerun.kv.recurrent import RECURRENT_STATES, RecurrentStates, check_type
from forerun.kv.shared_prefix import Layout, SharedMemory, SharedPrefix, Tensors

if TYPE_CHECKING:
    from forerun.kv.view import View

MIN_GROWTH_TOKENS = 256
SAMPLED_QUERIES = 128
"""Maximum queries kept of a block's pending tokens: as many as a wide head has dimensions."""


class FullCache(Cache):
    """A preallocated buffer that grows in blocks; accepted rows are compacted in place.

    Args:
        capacity: initial room in tokens; memory is touched only as it fills.
        shareable: use memory that other caches can start from without a copy (on a CPU).
        releases: release the memory of keys outside of sliding windows (on a CPU, under Linux). Then not every length
            can be truncated to, nor every prefix shared; see ``least``.
    """

    offloaded = False
    """Whether a part is not on the device that computes."""

    stateful = False
    """Whether the model has recurrent layers; see ``Scorer.adopt``."""

    def __init__(self, capacity: int = 0, shareable: bool = False, releases: bool = False) -> None:
        self.length = 0
        self.releases = releases
        self.least = 0
        """Minimum length above 0 whose next token still sees all keys in its windows."""
        self._released: dict[int, int] = {}  # by layer, the first row that is kept
        self._full_at = 0  # the length at which there is something to release
        self._shareable = shareable
        self._capacity = capacity
        self._layers: dict[int, Rows] = {}
        self._store: torch.Tensor | None = None  # if all layers have one shape: [layers, 2, Hkv, capacity, d]
        self.queries: dict[int, torch.Tensor] = {}
        """Queries of the last pass by layer, ``[1, H, n, d]``, by which sparse caches select: up to ``SAMPLED_QUERIES``
        of the pending tokens, evenly spaced up to the last, and all tree nodes'. Empty after truncation."""
        self.sample: dict[int, torch.Tensor] = {}
        """Queries of the last pass with ``SAMPLED_QUERIES``, or else of the longest; truncation keeps them."""
        self.specs: Mapping[int, AttentionSpec] = {}
        self.views: WeakSet[View] = WeakSet()
        """Sparse caches over this one that are in use."""
        self._shared: SharedMemory | None = None  # its memory, if shareable
        self._prefix: SharedPrefix | None = None
        self._prefix_length = 0  # tokens of it in this cache
        self._recurrent = RecurrentStates()

    @property
    def full(self) -> FullCache:
        return self

    def store(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> Rows:
        keys, values = self.append(layer, k, v)
        self.specs = {**self.specs, layer: spec}
        self.record_queries([layer], q, block)
        end = self.length + len(block)
        return keys[:, :, :end], values[:, :, :end]

    def begin_pass(self, specs: Mapping[int, AttentionSpec]) -> None:
        """Set each layer's attention parameters for a pass without ``store``; requested queries follow."""
        self.specs, self.queries = specs, {}

    def record_queries(self, layers: Sequence[int], q: torch.Tensor, block: Block) -> None:
        """Copy some layers' queries of a pass, ``[layers, H, n, d]``."""
        pending = len(block.pending)
        apart = max(1, pending // SAMPLED_QUERIES)
        first = max(0, pending - 1 - (SAMPLED_QUERIES - 1) * apart)
        kept = torch.cat((q[:, :, first:pending:apart], q[:, :, pending:]), 2)
        count = min(kept.shape[2], SAMPLED_QUERIES)
        for layer, own in zip(layers, torch.split(kept, 1), strict=True):
            self.queries[layer] = own
            if layer not in self.sample or self.sample[layer].shape[2] <= count:
                self.sample[layer] = own[:, :, :count]

    def wants_queries(self, block: Block) -> bool:
        """Return whether to record a pass's queries: in a prefill, if no pass had more, or if a view needs them."""
        known = next(iter(self.sample.values()), None)
        more = known is None or len(block) >= known.shape[2]
        return len(block.pending) > 1 or more or any(view.uses_queries for view in self.views)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, ahead: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a block's keys and values ``[1, Hkv, n, d]`` after the committed ones and ``ahead`` speculative ones;
        return all of the layer's."""
        if self._store is not None:
            self.reserve(list(self._layers), k, k.shape[2], ahead)
        self._check_type(k)
        held, first = self.length + ahead, self._released.get(layer, 0)
        self._grow(held + k.shape[2])
        self._layers[layer] = append(self._layers.get(layer), (k, v), held, self._capacity, first)
        keys, values = self._layers[layer]
        return keys, values

    def _check_type(self, like: torch.Tensor) -> None:
        """Raise ValueError for rows of another type than the cached ones, as after a cast of the model."""
        held = next(iter(self._layers.values()), None)
        if held is not None:
            check_type(held[0].dtype, like.dtype)

    def reserve(self, layers: Sequence[int], like: torch.Tensor, count: int, ahead: int = 0) -> torch.Tensor:
        """Make room for ``count`` tokens after the committed ones and ``ahead`` speculative ones, in all layers; see
        ``Cache.addressed``.

        Returns ``[layers, 2, Hkv, capacity, d]``: keys, then values; rows from ``length`` on are speculative. Raises
        ValueError if the cache holds rows of another shape or type.
        """
        held, store = self.length + ahead, self._store
        end = held + count
        if store is None or store.shape[3] < end or store.dtype != like.dtype:
            self._check_type(like)
            if self._layers and list(self._layers) != list(layers):
                raise ValueError(f"this cache holds the layers {list(self._layers)} and the model has {list(layers)}")
            self._grow(end)
            store = self._memory(layers, like)
            for rows, (layer, both) in zip(store, self._layers.items(), strict=bool(self._layers)):
                kept = slice(self._released.get(layer, 0), held)
                for new, old in zip(rows, both, strict=True):
                    new[:, kept] = old[0, :, kept]
            self._hold(layers, store)
        return store

    def reserve_layers(self, likes: Mapping[int, Rows], count: int) -> Mapping[int, Rows]:
        """Make room for ``count`` tokens after the committed ones, in layers that differ, with rows like ``likes``."""
        end = self.length + count
        self._grow(end)
        for layer, like in likes.items():
            first = self._released.get(layer, 0)
            self._layers[layer] = reserve(self._layers.get(layer), like, self.length, end, self._capacity, first)
        return self._layers

    def addressed(self, layers: Sequence[int], like: torch.Tensor, count: int, ahead: int = 0) -> Addresses | None:
        if self.offloaded:
            return None
        store, place = self.reserve(layers, like, count, ahead), self.length + ahead
        width = store.element_size()
        head, row = store.stride(2) * width, store.stride(3) * width
        return Addresses(self.addresses, (head, row, head, row), place, place)

    def fetch_layer(self, layer: int, count: int) -> Rows:
        """Return a layer's rows on the device, with room for ``count`` tokens after the committed ones."""
        return self._layers[layer]

    def write_back(self, layer: int, count: int) -> None:
        """Copy the ``count`` new rows after the committed ones to where they are stored."""

    def _memory(self, layers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        self._shared, (_, heads, _, width) = None, like.shape
        if self._shareable and like.device.type == "cpu":
            layout = Layout.of(dict.fromkeys(layers, (like, like)), self._capacity)
            with suppress(OSError, MemoryError):  # sharing then copies
                self._shared = SharedMemory.of(layout)
        if self._shared is None:
            return like.new_empty(len(layers), 2, heads, self._capacity, width)
        return self._shared.memory.view(like.dtype).view(len(layers), 2, heads, -1, width)

    def _grow(self, end: int) -> None:
        if end > self._capacity:
            self._capacity = end + max(MIN_GROWTH_TOKENS, end // 32)

    def _hold(self, layers: Iterable[int], store: torch.Tensor) -> None:
        self._store = store
        self._layers = {layer: (both[0][None], both[1][None]) for layer, both in zip(layers, store, strict=True)}
        step = store.stride(0) * store.element_size()
        first = store.data_ptr() + step * np.arange(len(store))
        self.addresses: IntArray = np.stack((first, first + store.stride(1) * store.element_size()), 1)

    def commit(self, block: Block, path: Sequence[int]) -> None:
        start = self.length + len(block.pending)
        self.compact(start, path)
        if self._recurrent.inputs:
            self._recurrent.commit(block, path)
        self.length = start + len(path)
        if self.releases and self.length >= self._full_at:
            self._release()

    def compact(self, start: int, path: Sequence[int]) -> None:
        """Move the nodes of ``path``, of a speculative tree at position ``start``, together, in all layers."""
        if any(node != place for place, node in enumerate(path)):
            parts = [(self._store.flatten(0, 2)[None],)] if self._store is not None else self._layers.values()
            for rows in parts:
                compact(rows, start, path)

    def _release(self) -> None:
        self._full_at = sys.maxsize if self.specs else 0
        for layer, rows in self._layers.items():
            if (spec := self.specs.get(layer)) is None or spec.window is None:
                continue
            spare = slack(spec.window)
            first, last = self._released.get(layer, 0), self.length - spec.window - spare
            if last - first >= spare:
                release(rows, first, last, self._shared is not None)
                self._released[layer] = first = last
                self.least = max(self.least, last + spec.window - 1)
            self._full_at = min(self._full_at, first + spec.window + 2 * spare)

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}; it must be between 0 and {self.length}")
        if self._recurrent.inputs:
            length = self._recurrent.truncate(length)
        if length < self.least:
            length = self._recurrent.truncate(0) if self._recurrent.inputs else 0
            self._keeps_all_from(0)
        if length < self.length:
            self.queries = {}
        self._prefix_length = min(self._prefix_length, length)
        self.length = length

    def _keeps_all_from(self, least: int) -> None:
        """Record that no row is released yet that a sequence of ``least`` tokens sees."""
        self._released, self._full_at, self.least = {}, 0, least

    def clear(self) -> None:
        """Free all memory. The cache cannot be used afterwards."""
        self.length, self._capacity, self._prefix_length = 0, 0, 0
        self._layers, self.queries, self.sample = {}, {}, {}
        self._store = self._shared = self._prefix = None
        self._recurrent.clear()

    def blank(self, length: int) -> None:
        """Hold zeros for ``length`` committed tokens; for measurements, after a first pass."""
        for rows in self._layers.values():
            for t in rows:
                t.zero_()
        self._recurrent.blank(length)
        self.length = length

    def recurrent(self) -> RecurrentStates:
        return self._recurrent

    def extend(self, layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        count = {keys.shape[2] for keys, _ in layers.values()}
        if len(count) != 1 or (self._layers and set(layers) != set(self._layers)):
            raise ValueError("every layer needs keys and values of the same number of tokens")
        if self._recurrent.inputs:
            raise ValueError("keys and values alone cannot extend a cache with recurrent layers")
        for layer, (keys, values) in layers.items():
            self.append(layer, keys, values)
        self.length += max(count)

    def share(self, length: int) -> SharedPrefix:
        """Return the first ``length`` tokens for other caches to start from, while this one continues in the same
        memory; raise ValueError if fewer are committed."""
        if not 0 < length <= self.length:
            raise ValueError(f"length is {length}; it must be between 1 and {self.length}")
        if self._prefix_length < length and self.grow_prefix() is None:
            queries, shared, length = self.queries, self._shared, self.length
            prefix = shared.prefix(length) if shared else SharedPrefix.of(self._layers, length, self._capacity)
            self._take_over(self._described(prefix), length)
            self.queries = queries  # of the same sequence
        assert self._prefix is not None
        return self._prefix

    def grow_prefix(self) -> SharedPrefix | None:
        """Append this cache's tokens to its prefix's memory; return that prefix, or None if this would need a copy."""
        prefix = self._prefix
        if prefix is None or self._prefix_length < prefix.length:
            return None
        if self.length > prefix.length:
            grown = prefix.grown(self._layers, self.length)
            if grown is None:
                return None
            self._prefix, self._prefix_length = self._described(grown), self.length
        return self._prefix

    @property
    def shared_length(self) -> int:
        """Tokens in the prefix that this cache started from or shared."""
        return self._prefix_length

    def _described(self, prefix: SharedPrefix) -> SharedPrefix:
        prefix.least = self.least
        prefix.add_state(RECURRENT_STATES, self._recurrent.saved_state(prefix.length))
        return prefix

    def begin_with(self, prefix: SharedPrefix, length: int) -> None:
        """Replace the content by the first ``length`` tokens of a prefix; with recurrent layers, up to their last
        snapshot. Do nothing if the cache holds as many, or the prefix's ``least`` is more."""
        states = None
        if self.stateful:
            states = self._recurrent.beginning(prefix.state(RECURRENT_STATES) or {}, length)
            length = states.length
        if length < prefix.least or (states is not None and length <= self.length):
            return
        self._take_over(prefix, length)
        if states is not None:
            self._recurrent = states

    def _take_over(self, prefix: SharedPrefix, length: int) -> None:
        capacity = max(self._capacity, length)
        self._layers = prefix.layers(capacity)  # if memory is short, nothing has changed
        self._capacity, self._store, self._shared = capacity, None, None
        self._prefix, self._prefix_length = prefix, length
        self.length, self.queries = length, {}
        self._keeps_all_from(prefix.least)
        if (store := joined(self._layers)) is not None:
            self._hold(list(self._layers), store)

    def saved_state(self, name: str) -> tuple[Tensors, int]:
        """Return a view's saved state in the prefix, or nothing, and how many prefix tokens this cache has."""
        found = self._prefix.state(name) if self._prefix is not None and self._prefix_length else None
        return (found, self._prefix_length) if found else ({}, 0)

    def read(self, layer: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the keys and values of positions ``first`` to before ``last``, ``[1, Hkv, m, d]``."""
        keys, values = self._layers[layer]
        return keys[:, :, first:last], values[:, :, first:last]

    def read_keys(self, layer: int, first: int, last: int) -> torch.Tensor:
        """Return a view of the keys of positions ``first`` to before ``last``, ``[1, Hkv, m, d]``."""
        return self._layers[layer][0][:, :, first:last]

    def read_together(self, first: int, last: int) -> torch.Tensor | None:
        """Return all layers' keys and values at some positions, ``[layers, 2, Hkv, m, d]``; None if not contiguous."""
        return None if self._store is None else self._store[:, :, :, first:last]

    @property
    def likes(self) -> Mapping[int, Rows]:
        """Empty keys and values of each layer, on the device that computes."""
        return {layer: (keys[:, :, :0], values[:, :, :0]) for layer, (keys, values) in self._layers.items()}

    def strided_keys(self, layer: int, step: int) -> torch.Tensor:
        """Return every ``step``-th of a layer's committed keys, ``[1, Hkv, m, d]``."""
        return self._layers[layer][0][:, :, : self.length : step]

    def chunks(self, layer: int, head: torch.Tensor, chunk: torch.Tensor, size: int) -> Rows:
        """Return keys and values of chunks, given their KV heads and numbers ``[n]``; ``[n, size, d]`` each."""
        places = chunk[:, None] * size + torch.arange(size, device=chunk.device)
        return tuple(t[0][head[:, None], places] for t in self._layers[layer])

    @property
    def lost(self) -> Exception | None:
        """The error that lost some keys and values, or None."""
        return None

    @property
    def capacity(self) -> int:
        """Room in tokens."""
        return self._capacity

    @property
    def layers(self) -> list[int]:
        """The layers that passes have filled, in order."""
        return sorted(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes reserved for tokens, and of recurrent layers' states."""
        return self._most(self.shape, self._capacity) + self._recurrent.nbytes

    def needs(self, shape: KVShape, tokens: int) -> int:
        return self._most(shape, max(tokens, self._capacity)) + shape.state_bytes

    def _most(self, shape: KVShape, tokens: int) -> int:
        return shape.released(tokens) if self.releases else shape.nbytes * tokens

    @property
    def shape(self) -> KVShape:
        """The shape of the layers that a pass has filled."""
        windows = {layer: spec.window for layer, spec in self.specs.items()}
        shapes = {
            layer: LayerShape(k.shape[1], k.shape[3], v.shape[3], k.element_size(), windows.get(layer))
            for layer, (k, v) in self._layers.items()
        }
        return KVShape(shapes, self._recurrent.max_bytes)


def joined(layers: Mapping[int, Rows]) -> torch.Tensor | None:
    """Return adjacent layers of one shape as one tensor, ``[layers, 2, Hkv, capacity, d]``; None for others."""
    rows = [t for both in layers.values() for t in both]
    if not rows:
        return None
    first, size = rows[0], rows[0].nbytes
    alike = all(t.shape == first.shape and t.dtype == first.dtype for t in rows)
    in_order = list(layers) == sorted(layers)
    side_by_side = all(t.data_ptr() == first.data_ptr() + i * size for i, t in enumerate(rows))
    memory = {t.untyped_storage().data_ptr() for t in rows}  # separate rows may be neighbours by chance
    if not (alike and in_order and side_by_side and len(memory) == 1):
        return None
    shape = torch.Size((len(layers), 2, *first.shape[1:]))
    return first.as_strided(shape, torch.empty(shape, device="meta").stride(), first.storage_offset())
