"""Drafts for an engine that takes one branch of a tree: the best one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.integrations.settings import DraftSettings
from forerun.integrations.texts import Shown, Texts
from forerun.trie.autosave import AutoSaver
from forerun.trie.trie import Draft, Trie, TrieConfig
from forerun.trie.trie_store import TrieStore

BREADTH = 2
"""Nodes of the tree for each token of the branch that is taken out of it. More changed nothing in replays."""

PRIVATE_BYTES = 1 << 16
"""Of a namespace that only one request writes to; its own text is in an index of its own anyway."""


@dataclass(frozen=True)
class TrieFile:
    """One file that an index is saved to.

    Attributes:
        path: of the file; it is replaced as a whole or not at all.
        vocabulary: a name for what the token ids mean.
    """

    path: Path
    vocabulary: str

    def save(self, store: TrieStore, /) -> None:
        """Write all of it."""
        store.save(self.path, self.vocabulary)

    def close(self) -> None:
        """Nothing is held."""


class Drafting:
    """An index that follows an engine's texts and drafts them on.

    Args:
        settings: see ``DraftSettings``.
        saves: whether this process is the one that writes the trie file.

    Raises:
        ValueError: if the trie file is damaged or of another vocabulary.
        OSError: if it cannot be read.
    """

    def __init__(self, settings: DraftSettings, saves: bool = True) -> None:
        self.settings = settings
        config = TrieConfig(capacity=settings.capacity) if settings.share else TrieConfig(PRIVATE_BYTES, namespaces=1)
        self.trie = Trie(config)
        if settings.trie is not None and settings.trie.exists():
            self.trie.load(settings.trie, settings.vocabulary)
        self.trie.warm_up()
        self.texts = Texts(self.trie, settings.namespace, settings.share)
        self._saving: weakref.finalize[[], Drafting] | None = None
        if settings.trie is not None and settings.save_seconds and saves:
            keeper = AutoSaver(self.trie, TrieFile(settings.trie, settings.vocabulary), settings.save_seconds)
            keeper.start()
            self._saving = weakref.finalize(self, keeper.close)  # at the interpreter's end too

    def step(self, shown: Sequence[Shown], most: Sequence[int]) -> list[list[int]]:
        """Learn what came, and draft what may follow.

        Args:
            shown: all rows of the step.
            most: tokens to draft for each, at most.

        Returns:
            Token ids by row.

        Raises:
            ValueError: see ``Texts.follow``.
        """
        requests = self.texts.follow(shown)
        return [
            [] if request is None or not each.new else self._draft(request, length)
            for request, each, length in zip(requests, shown, most, strict=True)
        ]

    def close(self) -> None:
        """End all requests, and save what is new."""
        self.texts.end()
        if self._saving is not None:
            self._saving()

    def _draft(self, request: int, length: int) -> list[int]:
        if length < 1:
            return []
        return best_branch(self.trie.retrieve(request, BREADTH * length, length), self.settings.least_probability)


def best_branch(draft: Draft, least: float) -> list[int]:
    """The branch of which most tokens are expected to be accepted, as far as they are likely enough.

    Args:
        draft: nodes of a tree, parents first; none is likelier than its parent.
        least: probability of a node that is worth drafting.
    """
    size = int(np.count_nonzero(draft.probability >= least))  # likeliest first
    expected, parents = draft.probability[:size].tolist(), draft.parents[:size].tolist()
    for node, parent in enumerate(parents):
        if parent >= 0:
            expected[node] += expected[parent]
    node, branch = int(np.argmax(expected)) if size else -1, []
    while node >= 0:
        branch.append(int(draft.tokens[node]))
        node = parents[node]
    return branch[::-1]
