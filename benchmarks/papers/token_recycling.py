"""Token Recycling as in its paper (Luo et al., 2024, arXiv 2408.08696): an adjacency matrix and a fixed tree.

For each token of the vocabulary the matrix has the ``k`` best tokens of the last row of logits behind it, accepted or
not. A draft is a fixed tree over it: node by node, the first child is the best candidate, the second the next. The
paper's tree has 80 nodes and was found by search. Here it is the 80 likeliest paths, if a candidate's chance falls with
its rank as ``RANK_CHANCES`` says.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from forerun.core.tree import ROOT, DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source
from forerun.decoding.sources.trie_source import best_of_rows
from forerun.trie.tables import LISTED

NODES, CANDIDATES = 80, LISTED
"""Of the paper: nodes of the tree, and tokens in a row of the matrix."""

RANK_CHANCES = (0.5, 0.14, 0.07, 0.05, 0.035, 0.025, 0.02, 0.015)
"""Chance that the candidate of each rank comes. It decides the tree's form alone."""


def fixed_tree() -> list[tuple[int, int]]:
    """Parent and rank of each node, likeliest paths first; parents come before their children."""
    found: list[tuple[int, int]] = []
    waiting = [(-chance, ROOT, rank) for rank, chance in enumerate(RANK_CHANCES)]
    heapq.heapify(waiting)
    while len(found) < NODES:
        chance, parent, rank = heapq.heappop(waiting)
        for below, share in enumerate(RANK_CHANCES):
            heapq.heappush(waiting, (chance * share, len(found), below))
        found.append((parent, rank))
    return found


class TokenRecyclingSource(Source):
    """One matrix for all texts, as in the paper."""

    def __init__(self) -> None:
        self.tree = fixed_tree()
        self._matrix: dict[int, IntArray] = {}
        """By token, the candidates behind it; a row that was never written has none."""

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        both = zip(rows, limits, strict=True)
        return [self._draft(int(row.request.tokens[-1]), limit.nodes) for row, limit in both]

    def _draft(self, last: int, budget: int) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        places = {ROOT: ROOT}
        for node, (parent, rank) in enumerate(self.tree):
            if parent not in places or len(tokens) == budget:
                continue
            above = last if parent == ROOT else tokens[places[parent]]
            candidates = self._matrix.get(above)
            if candidates is not None and candidates[rank] >= 0:
                places[node] = len(tokens)
                tokens.append(int(candidates[rank]))
                parents.append(places[parent])
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        """Write the matrix row of each token after which logits were computed; the last one wins."""
        for row, outcome in zip(rows, outcomes, strict=True):
            root = row.request.tokens[len(row.request) - len(outcome.verdict.tokens) - 1]
            best, _ = best_of_rows(outcome.logits)
            for token, candidates in zip([root, *outcome.tree.tokens], best, strict=True):
                self._matrix[int(token)] = candidates
