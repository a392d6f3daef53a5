"""Common to caches that evict: a budget, a slack beyond it, and evictions that can be rolled back.

Between evictions tokens are only added, so the cache is copied only once in ``slack`` tokens. An eviction writes what
it keeps into a second buffer; the first stays unchanged until the next eviction. A drafter commits its drafts one by
one and truncates when they are rejected. If an eviction came in between, the cache goes back to the first buffer. So
its state does not depend on rejected drafts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from forerun.core.block import Block
from forerun.kv.cache import READ_BLOCK, Cache, KVShape, LayerShape
from forerun.kv.kv_rows import Rows, append, compact, reserve

SLACK = 64
"""Default slack in tokens: more than the usual draft length."""


class Extent(NamedTuple):
    """How many tokens a cache has read, and how many it holds."""

    length: int
    held: int


class BoundedCache(Cache):
    """At most ``fixed + budget + slack`` committed tokens in text order, and the block after them.

    A commit that exceeds this evicts down to ``fixed + budget``. After up to ``slack`` drafts, committed one by one,
    truncating restores the earlier state bit for bit.

    Args:
        fixed: first tokens, never evicted.
        budget: further tokens that an eviction leaves.
        slack: tokens that may be added after an eviction before the next one.
    """

    def __init__(self, fixed: int, budget: int, slack: int) -> None:
        if slack < 0:
            raise ValueError(f"slack is {slack}; it must be 0 or more")
        self.length = 0
        self.slack = slack
        self._fixed = fixed
        self._budget = budget
        self._held = 0
        self._layers: dict[int, Rows] = {}
        self._spare: dict[int, Rows] = {}
        self._before: Extent | None = None  # what self._spare holds: the state before the last eviction

    def commit(self, block: Block, path: Sequence[int]) -> None:
        """See ``Cache.commit``."""
        self._keep(block, path)
        if self._held > self._fixed + self._budget + self.slack:
            self._evict()

    def truncate(self, length: int) -> None:
        """See ``Cache.truncate``.

        Raises:
            ValueError: if tokens before ``length`` are no longer held.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}; it must be between 0 and {self.length}")
        back = self._before if self._before is not None and length < self._before.length else None
        lowest = self._lowest(back)
        if self._fixed < length < lowest:
            raise ValueError(
                f"length is {length}, and tokens before it are evicted; "
                f"it must be between {lowest} and {self.length}, or at most {self._fixed} (slack is {self.slack})"
            )
        if back is not None:
            self._turn_back(back)
        self._cut(length)

    @property
    def held(self) -> int:
        """Committed tokens that a pass sees."""
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes reserved, in both buffers."""
        return sum(t.nbytes for layers in (self._layers, self._spare) for rows in layers.values() for t in rows)

    def needs(self, shape: KVShape, tokens: int) -> int:
        """See ``Cache.needs``: both buffers, with the largest block that is read at once."""
        return 2 * self._places(tokens) * sum(self._place_bytes(layer) for layer in shape.layers.values())

    def _places(self, tokens: int) -> int:
        """Tokens of a text of so many that one buffer has room for, at most."""
        return self._fixed + self._budget + self.slack + min(tokens, self._largest)

    @property
    def _largest(self) -> int:
        """Tokens of a prompt that are read at once, at most."""
        return READ_BLOCK

    def _place_bytes(self, layer: LayerShape) -> int:
        """Bytes that a token takes in one buffer."""
        return layer.nbytes

    @abstractmethod
    def _thin(self, layer: int, rows: Rows) -> Rows:
        """The ``fixed + budget`` of the ``_held`` rows of a layer that an eviction keeps."""

    @abstractmethod
    def _lowest(self, back: Extent | None) -> int:
        """The shortest length above ``fixed`` that truncation can reach, now or after going ``back``."""

    def _store(self, layer: int, *new: torch.Tensor) -> Rows:
        """Write the block after the committed tokens; room for it grows to the largest block so far."""
        rows = self._layers[layer] = append(self._layers.get(layer), new, self._held, self._capacity(new[0].shape[2]))
        return rows

    def _reserve(self, layer: int, like: Rows, count: int) -> Rows:
        """A layer's rows, with room for a block of ``count`` tokens of the shape of ``like``."""
        held, end = self._held, self._held + count
        rows = self._layers[layer] = reserve(self._layers.get(layer), like, held, end, self._capacity(count))
        return rows

    def _capacity(self, count: int) -> int:
        """Tokens that a buffer for blocks of ``count`` tokens has room for."""
        return self._fixed + self._budget + self.slack + count

    def _keep(self, block: Block, path: Sequence[int]) -> None:
        start = self._held + len(block.pending)
        for rows in self._layers.values():
            compact(rows, start, path)
        self._held = start + len(path)
        self.length += len(block.pending) + len(path)

    def _evict(self) -> None:
        kept = {
            layer: append(self._spare.get(layer), self._thin(layer, rows), 0, rows[0].shape[2])
            for layer, rows in self._layers.items()
        }
        self._layers, self._spare = kept, self._layers
        self._before = Extent(self.length, self._held)
        self._held = self._fixed + self._budget

    def _turn_back(self, back: Extent) -> None:
        """Roll the last eviction back."""
        self.length, self._held = back
        self._layers, self._spare = self._spare, self._layers
        self._before = None

    def _cut(self, length: int) -> None:
        if length <= self._fixed:
            self._held, self._before = length, None
        else:
            self._held -= self.length - length
        self.length = length
