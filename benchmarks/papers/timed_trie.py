"""A trie whose proposals and updates are timed, step by step.

A trie notes what was committed and indexes it when it is asked for drafts. So that each time is of its own work, it is
made to index as soon as it has noted, and both are the update.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.decoding.row import Row
from forerun.decoding.source import Limit
from forerun.decoding.sources.trie_source import TrieSource
from forerun.trie.trie import TrieConfig


@dataclass(frozen=True)
class Times:
    """Seconds of each proposal, and of each update after a step."""

    retrieve: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


class EagerTrie(TrieSource):
    """Indexes what each step commits at once, not before the next draft."""

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        super().learn(rows, outcomes)
        self.trie.step([self._update(row.states[self], row.request) for row in rows])


class TimedTrie(EagerTrie):
    """Measures its own proposals and updates.

    Args:
        times: collects the measurements; several sources may share it.
        config: of the trie.
    """

    def __init__(self, times: Times, config: TrieConfig | None = None) -> None:
        super().__init__(config)
        self.times = times

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        begin = time.perf_counter()
        trees = super().propose(rows, limits)
        self.times.retrieve.append(time.perf_counter() - begin)
        return trees

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        begin = time.perf_counter()
        super().learn(rows, outcomes)
        self.times.update.append(time.perf_counter() - begin)
