"""One row's input to a forward pass, uncached committed tokens and then a draft tree, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from forerun.core.tree import BoolArray, DraftTree, IntArray


class Block:
    """Pending tokens, then the nodes of a draft tree.

    Args:
        pending: committed tokens not cached yet, int64 ``[m]``, at least one.
        whole_chunk: whether this is a complete prompt chunk, always one pass; a scorer may then sum in another order
            (``Scorer.prompt_chunk``).
        ids: the tokens ``[m + n]`` if they are only on the device; ``pending`` is then zeros. For scorers with
            ``by_tables``.

    Attributes:
        noise: with which a pass on a device chooses the tokens after the last pending one and after each node, int64
            ``[n + 1, 2]``; see ``Sampler.noise``.
    """

    def __init__(
        self,
        pending: IntArray,
        tree: DraftTree,
        start: int,
        whole_chunk: bool = False,
        ids: torch.Tensor | None = None,
    ) -> None:
        self.pending, self.tree, self.start = pending, tree, start
        self.nodes = len(tree.tokens)
        self.count = len(pending) + self.nodes
        self.whole_chunk, self.ids = whole_chunk, ids
        self.noise: IntArray | None = None
        self._biases: dict[tuple[object, ...], torch.Tensor | None] = {}

    def __len__(self) -> int:
        return self.count

    @property
    def tokens(self) -> IntArray:
        """Token ids, int64 ``[m + n]``."""
        return np.concatenate((self.pending, self.tree.tokens)) if len(self.tree) else self.pending

    @cached_property
    def offsets(self) -> IntArray:
        """Position of each token relative to ``start``, int64 ``[m + n]``."""
        m = len(self.pending)
        return np.concatenate((np.arange(m), m - 1 + self.tree.depths)) if len(self.tree) else np.arange(m)

    @cached_property
    def deepest(self) -> int:
        """The largest offset."""
        return int(self.offsets.max())

    @property
    def positions(self) -> IntArray:
        """Position of each token in the sequence, int64 ``[m + n]``."""
        return self.start + self.offsets

    @cached_property
    def visible(self) -> BoolArray:
        """Which tokens of the block each one attends to, bool ``[m + n, m + n]``."""
        m = len(self.pending)
        mask = np.zeros((len(self), len(self)), np.bool_)
        mask[:m, :m] = np.tri(m, dtype=np.bool_)
        mask[m:, :m] = True
        mask[m:, m:] = self.tree.ancestors
        return mask

    def bias(self, window: int | None, edge: range, like: torch.Tensor) -> torch.Tensor | None:
        """Return an additive mask ``[m + n, len(edge) + m + n]``, or None if every token sees all keys. ``edge``: cache
        positions, before the block's keys, that only some tokens see."""
        key = (window, edge, like.dtype, like.device)
        if key not in self._biases:
            self._biases[key] = self._make_bias(window, edge, like)
        return self._biases[key]

    def _make_bias(self, window: int | None, edge: range, like: torch.Tensor) -> torch.Tensor | None:
        seen = np.concatenate((np.ones((len(self), len(edge)), np.bool_), self.visible), axis=1)
        if window is not None:
            keys = np.concatenate((np.array(edge, np.int64), self.positions))
            seen &= keys[None] > self.positions[:, None] - window
        if seen.all():
            return None
        bias = torch.zeros(seen.shape, dtype=like.dtype)
        return bias.masked_fill_(torch.from_numpy(~seen), -torch.inf).to(like.device)


class JoinedBlocks(NamedTuple):
    """The blocks of a pass side by side.

    Attributes:
        cuts: for each row, its numbers of pending and of all tokens, the index of the first in the row's memory, its
            position for the model, and columns for values computed later; int64 ``[rows, >= 4]``.
        parents: int64; indices within each tree.
    """

    cuts: IntArray
    tokens: IntArray
    parents: IntArray

    @classmethod
    def of(
        cls, blocks: Sequence[Block], columns: int, places: Sequence[int] | None, positions: Sequence[int] | None
    ) -> JoinedBlocks:
        """Join blocks. ``places`` default to the blocks' starts, and ``positions`` to the places."""
        tokens, parents, cuts = list[IntArray](), list[IntArray](), np.empty((len(blocks), columns), np.int64)
        for row, block in enumerate(blocks):
            place = block.start if places is None else places[row]
            cuts[row, :4] = len(block.pending), block.count, place, place if positions is None else positions[row]
            tokens += block.pending, block.tree.tokens
            parents.append(block.tree.parents)
        return cls(cuts, np.concatenate(tokens), np.concatenate(parents))


class RowScores(NamedTuple):
    """A row's results of a forward pass.

    Attributes:
        logits: after the last pending token (row 0) and at node i (row i + 1), ``[len(tree) + 1, V]``.
        states: hidden states of the block, layers side by side, ``[len(block), layers * hidden]``, if requested.
        best: best token of each row of logits with the block's noise, int64 ``[len(tree) + 1]``, if computed.
    """

    logits: torch.Tensor
    states: torch.Tensor | None = None
    best: torch.Tensor | None = None
