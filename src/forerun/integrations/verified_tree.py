"""A draft tree of fixed size, with its ancestor mask, for engines that verify trees."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun.core.tree import IntArray
from forerun.trie.recycled import RecycledRows
from forerun.trie.trie import Draft

BoolArray = npt.NDArray[np.bool_]


class VerifiedTree:
    """A tree in SGLang's layout: the sequence's last token, the drafted nodes, and padding to a fixed size. Padding is
    token 0 under the root, as in SGLang's own drafts, and verified like any other node.

    Args:
        draft: its nodes, parents first, fewer than ``size``.
        vocabulary: number of the model's tokens; larger ids, as from another model's trie file, become 0.
    """

    def __init__(self, text: IntArray, draft: Draft, size: int, vocabulary: int) -> None:
        self.drafted, self._before = len(draft.tokens) + 1, int(text[-2]) if len(text) > 1 else -1
        self.tokens, self.parents = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.tokens[0] = text[-1]
        self.tokens[1 : self.drafted] = np.where(draft.tokens < vocabulary, draft.tokens, 0)
        self.parents[1 : self.drafted] = draft.parents + 1

    def mask(self) -> BoolArray:
        """Return whether node j is node i or its ancestor, ``[size, size]``."""
        mask = np.eye(len(self.tokens), dtype=np.bool_)
        for node in range(1, len(mask)):
            mask[node] |= mask[self.parents[node]]
        return mask

    def recycled(self, tokens: IntArray, scores: npt.NDArray[np.float32]) -> RecycledRows:
        """Select the top tokens at the root and the drafted nodes from those of all nodes, ``[size, LISTED]``."""
        last = self.tokens[: self.drafted]
        before = np.concatenate([[self._before], last[self.parents[1 : self.drafted]]])
        return RecycledRows(before, last, tokens[: self.drafted].astype(np.int32), scores[: self.drafted])
