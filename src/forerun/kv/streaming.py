"""StreamingLLM's cache (Xiao et al. 2023, arXiv 2309.17453): the first tokens and a recent window.

The first tokens are attention sinks, which heads attend to when nothing else fits; a model fails without them.
Positions count within the cache (section 3.2), so that a model only sees trained ones; when the window moves, its keys
are rotated by the difference.

An eviction, every ``slack`` tokens, writes into a second buffer, and the first stays unchanged until the next one. A
drafter commits drafts one by one and truncates rejected ones; if an eviction came in between, the cache returns to the
first buffer. So its state does not depend on rejected drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from forerun.core.block import Block
from forerun.core.checks import check_integer
from forerun.kernels.attention.attention import AttentionSpec, Rows
from forerun.kv.cache import (
    READ_BLOCK,
    ROLLBACK_TOKENS,
    Addresses,
    Cache,
    KVShape,
    addresses_of,
    append,
    compact,
    reserve,
)


@dataclass(frozen=True, eq=False)
class LayerRotation:
    """The rotation of one layer's keys with position.

    Rotary embedding (Su et al. 2021, RoFormer) rotates pairs of a key's dimensions by angles proportional to position,
    so rotating a key by a difference of positions moves it exactly.

    Attributes:
        first, second: the dimensions that form pairs, m of each.
        frequencies: angle per position of each pair, float64 ``[m]``.
    """

    first: slice
    second: slice
    frequencies: torch.Tensor

    def __call__(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Return keys ``[..., d]`` moved by ``by`` positions, computed in at least float32."""
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        angles = self.frequencies * by
        cos, sin = (part.to(wide.device, wide.dtype) for part in (angles.cos(), angles.sin()))
        a, b = wide[..., self.first], wide[..., self.second]
        turned = wide.clone()
        turned[..., self.first] = a * cos - b * sin
        turned[..., self.second] = b * cos + a * sin
        return turned.to(keys.dtype)


@dataclass(frozen=True, eq=False)
class Rotation:
    """A model's rotary embedding (``rotary_probe``): each layer's rotation, or None if position does not matter."""

    layers: Mapping[int, LayerRotation | None]

    def __call__(self, layer: int, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Return a layer's keys ``[1, Hkv, n, d]`` moved by ``by`` positions (earlier if negative)."""
        rotation = self.layers[layer]
        return keys if rotation is None or by == 0 else rotation(keys, by)


class _Extent(NamedTuple):
    length: int
    held: int


class StreamingCache(Cache):
    """Sinks and a recent window of one row, in one buffer per layer, followed by the current block.

    A layer with a sliding window measures distances in the buffer. A token of a block sees the sinks, at least
    ``window`` tokens before the block (if there are as many), and its ancestors in the block. A commit that leaves more
    than ``sinks + window + slack`` tokens evicts down to ``sinks + window``. After up to ``slack`` drafts, committed
    one by one, truncating restores the earlier state bit for bit. Arguments out of range raise ValueError.

    Args:
        window, sinks: recent and first tokens, always kept.
        slack: tokens between evictions; at least the draft length, so that drafts can be rolled back exactly.
        rotation: how the model's keys rotate with position. Positions are then those in the cache: below ``sinks +
            window + slack`` plus the block's length. None keeps positions in the sequence, for a model with learned
            positions.
    """

    def __init__(
        self, window: int, sinks: int = 4, slack: int = ROLLBACK_TOKENS, rotation: Rotation | None = None
    ) -> None:
        check_integer("window", window, 1)
        for name, value in (("sinks", sinks), ("slack", slack)):
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more")
        self.window, self.sinks, self.slack, self.rotation = window, sinks, slack, rotation
        self.length = 0
        self._sinks = sinks  # fewer if tokens were skipped before there were as many
        self._held = 0
        self._layers: dict[int, Rows] = {}
        self._spare: dict[int, Rows] = {}
        self._before: _Extent | None = None  # of self._spare: the state before the last eviction

    @property
    def held(self) -> int:
        return self._held

    @property
    def position(self) -> int:
        return self.length if self.rotation is None else self._held

    def store(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> Rows:
        rows = append(self._layers.get(layer), (k, v), self._held, self._capacity(k.shape[2]))
        self._layers[layer] = rows
        return tuple(t[:, :, : self._held + len(block)] for t in rows)

    def addressed(self, layers: Sequence[int], like: torch.Tensor, count: int) -> Addresses | None:
        held, end, capacity = self._held, self._held + count, self._capacity(count)
        for layer in layers:
            self._layers[layer] = reserve(self._layers.get(layer), (like, like), held, end, capacity)
        return addresses_of([self._layers[layer] for layer in layers], held, self.position)

    def next_read(self, goal: int) -> int:
        """Prefill the sinks, then skip to the last ``window`` tokens before ``goal``."""
        if self.length < self.sinks:
            return min(goal, self.sinks) - self.length
        if self._held == self._sinks:
            self.skip(max(0, goal - self.window - self.length))
        return goal - self.length

    def skip(self, count: int) -> None:
        """Treat the next ``count`` tokens as prefilled and evicted, so that only the ends of a long prompt need a
        prefill. The tokens held now become the sinks; raise ValueError if there are more than ``sinks``."""
        if count < 0:
            raise ValueError(f"count is {count}; it must be 0 or more")
        if self._held > self._sinks:
            raise ValueError(f"tokens can be skipped only after the {self._sinks} sinks, but {self._held} are held")
        if count:
            self._sinks = self._held
            self.length += count

    def commit(self, block: Block, path: Sequence[int]) -> None:
        start = self._held + len(block.pending)
        for rows in self._layers.values():
            compact(rows, start, path)
        self._held = start + len(path)
        self.length += len(block.pending) + len(path)
        if self._held > self._sinks + self.window + self.slack:
            self._evict()

    def _evict(self) -> None:
        kept = {
            layer: append(self._spare.get(layer), self._sinks_and_window(layer, rows), 0, rows[0].shape[2])
            for layer, rows in self._layers.items()
        }
        self._layers, self._spare = kept, self._layers
        self._before = _Extent(self.length, self._held)
        self._held = self._sinks + self.window

    def _sinks_and_window(self, layer: int, rows: Rows) -> Rows:
        keys, values = rows
        sinks, recent = slice(0, self._sinks), slice(self._held - self.window, self._held)
        moved = keys[:, :, recent]
        if self.rotation is not None:
            moved = self.rotation(layer, moved, self._sinks + self.window - self._held)
        return torch.cat((keys[:, :, sinks], moved), 2), torch.cat((values[:, :, sinks], values[:, :, recent]), 2)

    def truncate(self, length: int) -> None:
        """Drop the committed tokens from ``length`` on; raise ValueError if tokens before it are no longer held."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}; it must be between 0 and {self.length}")
        back = self._before if self._before is not None and length < self._before.length else None
        read, held = back or (self.length, self._held)
        lowest = self._sinks + read - held  # the shortest length above the sinks, now or after going back
        if self._sinks < length < lowest:
            raise ValueError(
                f"length is {length}, but tokens before it are evicted; "
                f"it must be between {lowest} and {self.length}, or at most {self._sinks} (slack is {self.slack})"
            )
        if back is not None:
            self.length, self._held = back
            self._layers, self._spare, self._before = self._spare, self._layers, None
        if length <= self._sinks:
            self._held, self._before = length, None
        else:
            self._held -= self.length - length
        self.length = length
        if self.length == self._held:  # nothing held has been evicted or skipped
            self._sinks = self.sinks

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for layers in (self._layers, self._spare) for rows in layers.values() for t in rows)

    def needs(self, shape: KVShape, tokens: int) -> int:
        """Count both buffers, with the largest block of a prefill."""
        block = min(tokens, READ_BLOCK, max(self.sinks, self.window, self.slack))
        return 2 * self._capacity(block) * shape.nbytes

    def _capacity(self, count: int) -> int:
        return self._sinks + self.window + self.slack + count
