"""Which nodes of trees are worth scoring: those that give the most tokens for the time that the pass takes.

A pass costs what its ``CostCurve`` says, and a node adds its chance of being accepted to the tokens that it gives. So
the likeliest nodes are taken, over all rows of the batch, up to the number that gives the most tokens by cost. Where
the pass reads a prompt, only the nodes are ours to choose: a node must give as many tokens for what it adds to the cost
as passes lately gave for all of theirs.

A node's chance is the drafter's, corrected by what became of nodes like it (``calibration.py``). All that was proposed
is counted, scored or not, for what was committed shows whether it would have been right. Under rejection sampling a
drawn token's own probability must not decide about it, and whether it would have been accepted is not known unless it
is scored: trees with ``q`` are judged by depth, by what was scored.

Nothing here looks at a clock: for a given curve, what is cut repeats exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core.tree import ROOT, BoolArray, DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.plan.calibration import ByDepth, ByOdds, Calibration
from forerun.plan.costs import CostCurve, FloatArray

RECENT = 0.9
"""What remains of tokens and costs after a step, where tokens by cost are asked for as of late."""


@dataclass(frozen=True)
class Load:
    """What each row of a batch feeds before its tree, and what its cache holds, in tokens."""

    pending: Sequence[int]
    cached: Sequence[int]

    @property
    def decoding(self) -> bool:
        """Whether every row feeds one token only."""
        return sum(self.pending) == len(self.pending)


@dataclass(frozen=True)
class Cut:
    """What a step scores.

    Attributes:
        trees: the part of each proposed tree that is worth it.
        proposed: all of each.
        tokens: expected of the step, over all rows.
        plain: cost of a pass without trees, as the curve has it.
        cost: of this one.
        load: of the batch.
    """

    trees: list[DraftTree]
    proposed: list[DraftTree]
    tokens: float
    plain: float
    cost: float
    load: Load

    @property
    def empty(self) -> bool:
        """Whether nothing is scored but the rows' own tokens."""
        return not any(map(len, self.trees))


class Cutter:
    """Cuts trees to what is worth scoring, and learns from what is accepted.

    Args:
        costs: what a pass costs.

    Attributes:
        surcharge: how much longer passes with trees take than the curve says, measured by passes without.
    """

    def __init__(self, costs: CostCurve) -> None:
        self.costs = costs
        self.surcharge = 1.0
        self._by_odds, self._by_depth = ByOdds(), ByDepth()
        self._tokens = self._spent = 1.0
        self._known = np.empty(0)

    def cut(self, trees: Sequence[DraftTree], load: Load) -> Cut:
        """What is worth scoring of each tree; trees with probes are left as they are.

        Args:
            trees: one for each row.
            load: of the rows.
        """
        chances = [self._chances(tree) for tree in trees]
        masks = self._worth(chances, load)
        kept = [part(tree, mask) for tree, mask in zip(trees, masks, strict=True)]
        expected = sum(float(chance[mask].sum()) for chance, mask in zip(chances, masks, strict=True))
        return self._cut(kept, trees, expected, load)

    def whole(self, trees: Sequence[DraftTree], load: Load) -> Cut:
        """All of each tree."""
        chances = [self._chances(tree) for tree in trees]
        return self._cut(trees, trees, sum(float(chance.sum()) for chance in chances), load)

    def _cut(self, kept: Sequence[DraftTree], proposed: Sequence[DraftTree], expected: float, load: Load) -> Cut:
        drafted = [len(tree) for tree in kept]
        plain = self.costs.of(load.pending, load.cached)
        cost = plain
        if any(drafted):
            cost = self.surcharge * self.costs.of(np.add(load.pending, drafted).tolist(), load.cached)
        return Cut(list(kept), list(proposed), len(kept) + expected, plain, cost, load)

    def learn(self, proposed: Sequence[DraftTree], outcomes: Sequence[Outcome]) -> int:
        """Take in what became of trees, row by row, whatever part of them was scored, or none.

        Returns:
            How many nodes came true.
        """
        if any(map(len, proposed)):
            self._by_odds.forget()
            self._by_depth.forget()
        right = 0
        for tree, outcome in zip(proposed, outcomes, strict=True):
            if len(tree) and tree.probe is None:
                drawn = tree.q is not None
                tested, came = put_to_the_test(outcome) if drawn else _shown(tree, outcome.verdict.tokens)
                self._table(tree).count(outcome.tree if drawn else tree, tested, came)
                right += int(came.sum())
        return right

    def spend(self, cut: Cut, tokens: int) -> None:
        """A step of this cut gave so many tokens."""
        self._tokens, self._spent = RECENT * self._tokens + tokens, RECENT * self._spent + cut.cost

    def passes(self, load: Load, count: int) -> FloatArray:
        """What passes cost over 1 to ``count`` drafts of each row."""
        rows = len(load.pending)
        fixed = self.costs.of(load.pending, load.cached) - self._curve(sum(load.pending) + 1)[sum(load.pending)]
        sizes = sum(load.pending) + rows * np.arange(1, count + 1)
        pairs = self.costs.per_pair * sum(load.cached) * np.arange(1, count + 1)
        return np.asarray(self.surcharge * (fixed + self._curve(int(sizes[-1]) + 1)[sizes] + pairs))

    def _worth(self, chances: Sequence[FloatArray], load: Load) -> list[BoolArray]:
        """Which nodes of each tree give the most tokens by cost."""
        ends = list(itertools.accumulate(map(len, chances)))
        chosen = np.zeros(ends[-1] if ends else 0, np.bool_)
        if len(chosen):
            order, tokens, added = self._offers(chances, load)
            rows, plain, rate = len(load.pending), self.costs.of(load.pending, load.cached), self._tokens / self._spent
            cost = self.surcharge * (plain + added)
            if load.decoding:
                worth, none = (rows + tokens) / cost, rows / plain
            else:
                worth, none = tokens - rate * cost, -rate * self.surcharge * plain
            best = int(worth.argmax())
            if worth[best] > none:
                chosen[order[: best + 1]] = True
        return [chosen[end - len(chance) : end] for end, chance in zip(ends, chances, strict=True)]

    def _offers(self, chances: Sequence[FloatArray], load: Load) -> tuple[IntArray, FloatArray, FloatArray]:
        """Nodes in the order of their worth, parents first for chances never rise along a path; then, by how many are
        taken, the tokens that they give and what they add to the cost of the pass."""
        chance, fed = np.concatenate(chances), sum(load.pending)
        curve = self._curve(fed + len(chance) + 1)
        looking = self.costs.per_pair * np.repeat(np.asarray(load.cached, np.float64), list(map(len, chances)))
        order = np.argsort(self._tokens / self._spent * looking - chance, kind="stable")
        added = curve[fed + 1 : fed + len(chance) + 1] - curve[fed] + np.cumsum(looking[order])
        return order, np.cumsum(chance[order]), added

    def _curve(self, count: int) -> FloatArray:
        """Costs of passes over 0 to at least ``count`` - 1 tokens with empty caches, worked out once."""
        if len(self._known) < count:
            self._known = self.costs.passes(np.arange(2 * count))
        return self._known

    def _chances(self, tree: DraftTree) -> FloatArray:
        """Each node's chance of being accepted; none for trees with probes."""
        if not len(tree) or tree.probe is not None:
            return np.empty(0)
        chance: list[float] = self._table(tree).rates(tree).tolist()
        for node, parent in enumerate(tree.parents.tolist()):
            if parent != ROOT:
                chance[node] *= chance[parent]
        return np.array(chance)

    def _table(self, tree: DraftTree) -> Calibration:
        return self._by_depth if tree.probability is None or tree.q is not None else self._by_odds


def put_to_the_test(outcome: Outcome) -> tuple[BoolArray, BoolArray]:
    """Which of the scored nodes were put to the test, and which of them were accepted."""
    return under(outcome.tree, outcome.verdict.path, len(outcome.verdict.path) < len(outcome.verdict.tokens))


def _shown(tree: DraftTree, tokens: Sequence[int]) -> tuple[BoolArray, BoolArray]:
    """Which nodes the committed tokens speak for or against, and which for."""
    path, node = [], tree.children.get((ROOT, tokens[0]))
    while node is not None:
        path.append(node)
        node = tree.children.get((node, tokens[len(path)])) if len(path) < len(tokens) else None
    return under(tree, path, len(path) < len(tokens))


def under(tree: DraftTree, path: list[int], further: bool) -> tuple[BoolArray, BoolArray]:
    """Nodes under the root and a path, and those of the path. Under its end only if what follows is known as well."""
    came = np.zeros(len(tree) + 1, np.bool_)  # the last entry is the root's
    came[path] = True
    above = came.copy()
    above[ROOT] = True
    above[path[-1] if path else ROOT] = further
    return above[tree.parents], came[:-1]


def part(tree: DraftTree, keep: BoolArray) -> DraftTree:
    """The nodes to keep; all of a tree with probes."""
    return tree if len(keep) != len(tree) or keep.all() else tree.select(keep)
