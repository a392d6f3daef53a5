"""Drafts for other engines: trees, or the best branch of one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.integrations.draft_settings import DraftSettings
from forerun.integrations.row_texts import FollowedTexts, RowText
from forerun.trie.autosave import AutoSaver
from forerun.trie.recycled import RecycledRows
from forerun.trie.trie import Draft, Trie, TrieConfig
from forerun.trie.trie_store import TrieStore

TREE_NODES_PER_TOKEN = 2
"""Tree nodes per token of the drafted branch; more changed nothing in replays."""
PRIVATE_NAMESPACE_BYTES = 1 << 16
"""Capacity of a private namespace: its only request is indexed separately anyway."""
NO_DRAFT = Draft.allocate(0)


@dataclass(frozen=True)
class TrieFile:
    """The file that a trie is saved to, atomically; ``vocabulary`` names what the token ids mean."""

    path: Path
    vocabulary: str

    def save(self, store: TrieStore, /) -> None:
        store.save(self.path, self.vocabulary)

    def close(self) -> None:
        """Do nothing: no file is open."""


class BranchDrafter:
    """A trie that indexes an engine's requests and drafts their continuations. ``saves``: whether this process writes
    the trie file. Raises ValueError if that is damaged or has another vocabulary, and OSError if it cannot be read."""

    def __init__(self, settings: DraftSettings, saves: bool = True) -> None:
        self.settings = settings
        config = (
            TrieConfig(capacity=settings.capacity)
            if settings.share
            else TrieConfig(PRIVATE_NAMESPACE_BYTES, namespaces=1)
        )
        self.trie = Trie(config)
        if settings.trie is not None and settings.trie.exists():
            self.trie.load(settings.trie, settings.vocabulary)
        self.trie.warm_up()
        self.texts = FollowedTexts(self.trie, settings.namespace, settings.share)
        self._requests: list[int | None] = []
        self._saving: weakref.finalize[[], BranchDrafter] | None = None
        if settings.trie is not None and settings.save_seconds and saves:
            keeper = AutoSaver(self.trie, TrieFile(settings.trie, settings.vocabulary), settings.save_seconds)
            keeper.start()
            self._saving = weakref.finalize(self, keeper.close)  # also at interpreter exit

    def step(self, rows: Sequence[RowText], lengths: Sequence[int]) -> list[list[int]]:
        """Index the new tokens and draft the next ones, at most ``lengths``; return ids by row. Raises as ``trees``."""
        trees = self.trees(rows, [TREE_NODES_PER_TOKEN * length for length in lengths], lengths)
        return list(map(best_branch, trees))

    def trees(
        self,
        rows: Sequence[RowText],
        nodes: Sequence[int],
        depths: Sequence[int],
        recycled: Sequence[RecycledRows] = (),
    ) -> list[Draft]:
        """Index the new tokens and draft a tree per row, without nodes below ``least_probability``; raise as
        ``FollowedTexts.follow``.

        Args:
            nodes, depths: limits of each tree.
            recycled: by row of the last step, the top tokens of its logits; empty, or one entry per row.

        Returns:
            By row, nodes in order of probability, parents before children; empty for a row without a new token.
        """
        before, self._requests = self._requests, self.texts.follow(rows)
        for request, scored in zip(before, recycled, strict=bool(recycled)):
            if request is not None and request in self._requests:
                self.trie.recycle(request, scored)
        least = self.settings.least_probability
        return [
            NO_DRAFT if request is None or not row.new else self.trie.retrieve(request, size, depth, least=least)
            for request, row, size, depth in zip(self._requests, rows, nodes, depths, strict=True)
        ]

    def close(self) -> None:
        """End all requests and save the trie."""
        self.texts.end()
        if self._saving is not None:
            self._saving()


def best_branch(draft: Draft) -> list[int]:
    """Return the branch with the most expected accepted tokens; parents come first and are no less likely."""
    expected, parents = draft.probability.tolist(), draft.parents.tolist()
    for node, parent in enumerate(parents):
        if parent >= 0:
            expected[node] += expected[parent]
    node, branch = int(np.argmax(expected)) if expected else -1, []
    while node >= 0:
        branch.append(int(draft.tokens[node]))
        node = parents[node]
    return branch[::-1]
