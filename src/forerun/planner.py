"""How much of each draft to score: nodes that pay for themselves, and none when drafts do not hit.

A pass over N tokens costs about 1 + N / ``critical_length`` passes over one (the Lookahead paper's critical decoding
length, section 3.4, is where the extra tokens cost as much as the pass). A node adds its probability of being accepted.
So the planner takes the likeliest nodes, over all rows of the batch, as long as the tokens expected per unit of cost
rise. It learns how often nodes like these were accepted where their parent was; it never looks at a clock, so what it
plans repeats exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forerun.tree import ROOT, BoolArray, DraftTree, IntArray
from forerun.verify import Outcome

KINDS = 24
"""Kinds of nodes told apart: by the drafter's estimate of their chance under their parent, or by depth without one."""
PRIOR_WEIGHT = 1.0
"""Nodes that the first guess about a kind counts for."""
MEMORY = 0.99
"""What remains of the counts after a step; so drafts that stopped paying are tried again now and then."""

FloatArray = npt.NDArray[np.floating]


class Planner:
    """Cuts trees to what is worth scoring.

    Args:
        critical_length: tokens that double the cost of a pass over one token.
    """

    def __init__(self, critical_length: float) -> None:
        if not critical_length > 0:
            raise ValueError(f"critical_length is {critical_length}; it must be positive")
        self.critical_length = critical_length
        self._tables = (
            _Table(np.exp2(-(np.arange(KINDS) - 0.5).clip(0.05) / 3)),
            _Table(np.full(KINDS, 0.8)),
        )

    def plan(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Each tree, or the part of it worth scoring. Trees with probes are left as they are."""
        estimates = [self._estimate(tree) for tree in trees]
        every = np.concatenate(estimates)
        if not len(every):
            return list(trees)
        order = np.argsort(-every, kind="stable")  # parents first: an estimate never rises along a path
        chosen = np.zeros(len(every), np.bool_)
        chosen[order[: self._worth(every[order], len(trees))]] = True
        parts = np.split(chosen, np.cumsum([len(estimate) for estimate in estimates])[:-1])
        return [_part(tree, keep) for tree, keep in zip(trees, parts, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn which of the scored nodes were accepted."""
        for outcome in outcomes:
            if len(outcome.tree) and outcome.tree.probe is None:
                table, kinds = self._kinds(outcome.tree)
                table.count(kinds, outcome)
        for table in self._tables:
            table.forget()

    def _worth(self, falling: FloatArray, rows: int) -> int:
        """How many of the nodes, likeliest first, give the most tokens per unit of cost."""
        tokens = rows + np.concatenate(([0.0], np.cumsum(falling)))
        cost = 1 + (rows + np.arange(len(tokens))) / self.critical_length
        return int(np.argmax(tokens / cost))

    def _estimate(self, tree: DraftTree) -> FloatArray:
        if not len(tree) or tree.probe is not None:
            return np.empty(0)
        table, kinds = self._kinds(tree)
        chance: list[float] = table.rates()[kinds].tolist()
        for node, parent in enumerate(tree.parents.tolist()):
            if parent != ROOT:
                chance[node] *= chance[parent]
        return np.array(chance)

    def _kinds(self, tree: DraftTree) -> tuple[_Table, IntArray]:
        by_chance, by_depth = self._tables
        if tree.probability is None:
            return by_depth, np.minimum(tree.depths, KINDS) - 1
        above = np.where(tree.parents == ROOT, 1.0, tree.probability[tree.parents])
        chance = np.clip(tree.probability / np.maximum(above, 1e-12), 1e-6, 1)
        kinds = np.where(chance > 0.95, 0, 1 - 3 * np.log2(chance))
        return by_chance, np.minimum(kinds, KINDS - 1).astype(np.int64)


class _Table:
    """How often nodes of each kind were accepted where their parent was."""

    def __init__(self, prior: FloatArray) -> None:
        self._prior = prior
        self._seen = np.zeros(KINDS)
        self._hits = np.zeros(KINDS)

    def rates(self) -> FloatArray:
        """Estimated acceptance of each kind."""
        return (self._hits + PRIOR_WEIGHT * self._prior) / (self._seen + PRIOR_WEIGHT)

    def count(self, kinds: IntArray, outcome: Outcome) -> None:
        """Take in the nodes under the accepted path; the others were never put to the test."""
        tested = np.isin(outcome.tree.parents, [ROOT, *outcome.verdict.path])
        self._seen += np.bincount(kinds[tested], minlength=KINDS)
        self._hits += np.bincount(kinds[outcome.verdict.path], minlength=KINDS)

    def forget(self) -> None:
        """Let old counts fade."""
        self._seen *= MEMORY
        self._hits *= MEMORY


def _part(tree: DraftTree, keep: BoolArray) -> DraftTree:
    return tree if len(keep) != len(tree) or keep.all() else tree.select(keep)
