"""A draft tree of a fixed size, with its ancestor mask, for engines that verify whole trees."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun.core.tree import IntArray
from forerun.trie.recycled import RecycledRows
from forerun.trie.trie import Draft

BoolArray = npt.NDArray[np.bool_]


class VerifiedTree:
    """A tree as SGLang verifies it: the text's last token, the drafted nodes, and padding up to a fixed size.

    Padding is what SGLang's own drafts have there: token 0 below the root. It is verified like any other node.

    Args:
        text: the row's tokens, one or more.
        draft: its nodes, parents first, fewer than ``size``.
        size: nodes of the tree.
        vocabulary: tokens that the model has; others, as from a trie file of another model, become 0.
    """

    def __init__(self, text: IntArray, draft: Draft, size: int, vocabulary: int) -> None:
        self.drafted, self._before = len(draft.tokens) + 1, int(text[-2]) if len(text) > 1 else -1
        self.tokens, self.parents = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.tokens[0] = text[-1]
        self.tokens[1 : self.drafted] = np.where(draft.tokens < vocabulary, draft.tokens, 0)
        self.parents[1 : self.drafted] = draft.parents + 1

    def mask(self) -> BoolArray:
        """Whether node j is node i or an ancestor of it, ``[size, size]``."""
        mask = np.eye(len(self.tokens), dtype=np.bool_)
        for node in range(1, len(mask)):
            mask[node] |= mask[self.parents[node]]
        return mask

    def recycled(self, tokens: IntArray, scores: npt.NDArray[np.float32]) -> RecycledRows:
        """The best tokens behind the root and the drafted nodes, of those of all nodes, ``[size, LISTED]``."""
        last = self.tokens[: self.drafted]
        before = np.concatenate([[self._before], last[self.parents[1 : self.drafted]]])
        return RecycledRows(before, last, tokens[: self.drafted].astype(np.int32), scores[: self.drafted])
