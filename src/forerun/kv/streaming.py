"""StreamingLLM's cache (Xiao et al. 2023, arXiv 2309.17453): the first tokens and a window of the most recent ones.

The first tokens are attention sinks: heads with nothing to attend to put their attention there, and a model fails
without them. Positions are counted in the cache, not in the text (section 3.2). So a model only sees positions that it
was trained on, however long the text is. When the window moves, its keys are rotated by the difference of positions.
"""

from __future__ import annotations

import torch

from forerun.core.block import Block
from forerun.core.tree import IntArray
from forerun.kernels.attention.attention import AttentionSpec, merge
from forerun.kv.bounded import SLACK, BoundedCache, Extent
from forerun.kv.cache import READ_BLOCK, Addresses
from forerun.kv.kv_rows import Rows, attend_in_order, located
from forerun.kv.rerotation import Rotation


class StreamingCache(BoundedCache):
    """Sinks and a recent window of one row.

    One buffer per layer holds the sinks, the window and the block being scored. A layer with a sliding window measures
    distances in this buffer. A token of a block sees the sinks, at least ``window`` tokens before the block (fewer
    only if there are fewer), and its ancestors in the block, however large the block is.

    Args:
        window: recent tokens that are always kept. Up to ``slack`` more are held; then all of these go at once.
        sinks: first tokens, always kept.
        slack: see ``BoundedCache``. At least the draft length, so that drafts can be rolled back exactly.
        rotation: how the model's keys rotate with position. Positions are then those in the cache: below
            ``sinks + window + slack`` plus the block's length. None keeps each token's position in the text, for a
            model with learned positions.
    """

    def __init__(self, window: int, sinks: int = 4, slack: int = SLACK, rotation: Rotation | None = None) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; it must be at least 1")
        if sinks < 0:
            raise ValueError(f"sinks is {sinks}; it must be 0 or more")
        super().__init__(sinks, window, slack)
        self.window = window
        self.sinks = sinks
        self.rotation = rotation

    def positions(self, block: Block) -> IntArray:
        """See ``Cache.positions``."""
        return block.positions if self.rotation is None else self._held + block.offsets

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        """See ``Cache.attend``."""
        rows = self._store(layer, k, v)
        return merge(*attend_in_order(q, rows, self._held, block, spec), sinks=spec.sinks)

    def addressed(self, layers: int, like: torch.Tensor, count: int) -> Addresses | None:
        """See ``Cache.addressed``."""
        rows = [self._reserve(layer, (like, like), count) for layer in range(layers)]
        return located(rows, self._held)

    def next_read(self, goal: int) -> int:
        """See ``Cache.next_read``: reads the sinks, then skips to the last ``window`` tokens before ``goal``."""
        if self.length < self.sinks:
            return min(goal, self.sinks) - self.length
        if self._held == self._fixed:
            self.skip(max(0, goal - self.window - self.length))
        return goal - self.length

    @property
    def _largest(self) -> int:
        return min(READ_BLOCK, max(self.sinks, self.window, self.slack))

    def skip(self, count: int) -> None:
        """Treat the next ``count`` tokens as read and evicted, so that of a long prompt only its ends are read.

        The tokens held now, at most ``sinks`` of them, become the sinks.

        Raises:
            ValueError: if more tokens than the sinks have been read.
        """
        if count < 0:
            raise ValueError(f"count is {count}; it must be 0 or more")
        if self._held > self._fixed:
            raise ValueError(f"tokens can be skipped behind the {self._fixed} sinks only, and {self._held} are held")
        if count:
            self._fixed = self._held
            self.length += count

    def truncate(self, length: int) -> None:
        """See ``BoundedCache.truncate``; any length works whose tokens are still held."""
        super().truncate(length)
        if self.length == self._held:  # nothing held has been evicted or skipped
            self._fixed = self.sinks

    def _lowest(self, back: Extent | None) -> int:
        length, held = back or (self.length, self._held)
        return self._fixed + length - held

    def _thin(self, layer: int, rows: Rows) -> Rows:
        keys, values = rows
        sinks, recent = slice(0, self._fixed), slice(self._held - self.window, self._held)
        moved = keys[:, :, recent]
        if self.rotation is not None:
            moved = self.rotation(layer, moved, self._fixed + self.window - self._held)
        return torch.cat((keys[:, :, sinks], moved), 2), torch.cat((values[:, :, sinks], values[:, :, recent]), 2)
