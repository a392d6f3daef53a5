"""Which nodes of trees are worth scoring: those that maximise expected tokens over the time of the pass.

The ``CostCurve`` gives the cost of a pass. A node adds its chance of being accepted to the expected tokens. So the
likeliest nodes of all rows are taken, as many as maximise tokens over cost. A pass that reads a prompt has to be made
anyway. There, a node must give at least as many tokens for its cost as passes of these rows alone give for theirs, by
the curve and by what drafts gained lately.

A node's chance is the one that the drafter states, corrected by how often similar nodes were right
(``calibration.py``). Nodes that were not scored count as well, because the committed text shows whether they were
right. Rejection sampling is different: the decision must not depend on the drawn token's own probability, and only
scoring shows whether it is accepted. So nodes with ``q`` are judged by their depth, and count only if they were scored.

Nothing here looks at a clock: for a given curve, the choice repeats exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core.request import Request
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome
from forerun.policy import node_table
from forerun.policy.calibration import MEMORY, Table, forget, settle
from forerun.policy.cost_curve import TILE, CostCurve, FloatArray
from forerun.policy.node_table import NodeTable
from forerun.policy.pass_times import AS_THE_CURVE_SAYS

_UNSAID = np.empty(0)


@dataclass(frozen=True, slots=True)
class Load:
    """What each row of a batch feeds before its tree, and what its cache holds, in tokens.

    Attributes:
        pending, cached: of each row.
        beside: tokens that the pass reads for rows that are not drafted for.
    """

    pending: Sequence[int]
    cached: Sequence[int]
    beside: int = 0

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.pending)

    @property
    def decoding(self) -> bool:
        """Whether every row feeds one token only."""
        return self.fed == self.rows

    @property
    def fed(self) -> int:
        """Tokens of the pass without trees."""
        return sum(self.pending) + self.beside


@dataclass(frozen=True, slots=True)
class PrunedTrees:
    """What a step scores.

    Attributes:
        trees: the part of each proposed tree that is worth it.
        nodes: of all of them.
        tokens: expected of the step, over all rows.
        plain: cost of a pass without trees, as the curve has it.
        added: to that by the trees, as the curve has it.
        cost: of this one, as such passes lately were.
        load: of the batch.
    """

    trees: list[DraftTree]
    nodes: int
    tokens: float
    plain: float
    added: float
    cost: float
    load: Load


class TreePruner:
    """Cuts trees to what is worth scoring, and learns from what is accepted.

    Args:
        costs: what a pass costs.
        vocabulary: tokens that the target knows; by default all that there can be.

    Attributes:
        rise: the correction of the curve for passes with trees; see ``Rise``.
    """

    def __init__(self, costs: CostCurve, vocabulary: int = 1 << 31) -> None:
        self.rise = AS_THE_CURVE_SAYS
        self._vocabulary = vocabulary
        self._table, self._sheet = Table.empty(), NodeTable.allocate(64)
        self._places: list[tuple[int, int]] = []  # where each row's tree is on the sheet
        self._tokens = self._spent = 1.0  # of recent passes: tokens of a row, and cost in passes without trees
        self.fit(costs)

    def fit(self, costs: CostCurve) -> None:
        """Go by other costs from now on."""
        self.costs, self._known = costs, costs.passes(np.arange(128))

    def cut(
        self, requests: Sequence[Request], trees: Sequence[DraftTree], load: Load, sunk: float = 0.0
    ) -> PrunedTrees:
        """What is worth scoring of each row's tree.

        Args:
            requests: the rows.
            trees: one for each.
            load: of the rows.
            sunk: what the step has cost already, in the curve's units. The more, the more nodes are worth scoring.
        """
        end = self._enter(requests, trees)
        plain = self.plain(load)
        if not end:
            return self.whole(trees, load)
        fed = load.fed
        looking = self.costs.per_tile * np.array(load.cached, np.float64), np.array(load.pending)
        alone = plain if load.decoding else self.cost([1] * load.rows, load.cached)
        curve, rate = self._curve(fed + end + 1), load.rows * self._tokens / self._spent / alone
        kept, tokens, added = node_table.choose(self._sheet, end, curve, fed, *looking, plain, sunk, *self.rise, rate)
        parts = list(trees)
        for row, tree in enumerate(trees):
            begin, end = self._places[row]
            if end > begin:
                parts[row] = self._part(tree, begin, end) if kept else DraftTree.empty()
        return PrunedTrees(parts, kept, load.rows + tokens, plain, added, self._raised(plain, added, kept), load)

    def _enter(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> int:
        """Enter the trees."""
        size = sum(map(len, trees))
        if size > len(self._sheet.tokens):
            self._sheet = NodeTable.allocate(2 * size)
        self._places, begin = [], 0
        for row, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            end = begin + len(tree)
            if end > begin:
                said = _UNSAID if tree.probability is None or tree.q is not None else tree.probability
                deepest = request.max_draft_depth
                node_table.enter(
                    self._sheet, self._table, row, begin, tree.tokens, tree.parents, said, deepest, self._vocabulary
                )
            self._places.append((begin, end))
            begin = end
        return begin

    def _part(self, tree: DraftTree, begin: int, end: int) -> DraftTree:
        """What is kept of a tree."""
        tokens, parents = np.empty(end - begin, np.int64), np.empty(end - begin, np.int64)
        size = node_table.take(self._sheet, begin, end, tokens, parents)
        if size == len(tree):
            return tree
        if not size:
            return DraftTree.empty()
        if tree.q is None:
            origins = None if tree.origins is None else tree.origins[self._sheet.kept[begin:end] >= 0]
            return DraftTree(tokens[:size], parents[:size], origins=origins)
        return tree.select(self._sheet.kept[begin:end] >= 0)

    def whole(self, trees: Sequence[DraftTree], load: Load) -> PrunedTrees:
        """All of each tree."""
        plain, nodes = self.plain(load), sum(map(len, trees))
        if not nodes:
            return PrunedTrees(list(trees), 0, load.rows, plain, 0.0, plain, load)
        tokens = [fed + len(tree) for fed, tree in zip(load.pending, trees, strict=True)]
        added = self.cost(tokens, load.cached, load.beside) - plain
        return PrunedTrees(list(trees), nodes, load.rows, plain, added, self._raised(plain, added, nodes), load)

    def _raised(self, plain: float, added: float, nodes: int) -> float:
        return self.rise.start * plain + self.rise.each * added if nodes else plain

    def learn(self, row: int, outcome: Outcome, drawn: bool) -> int:
        """Learn which nodes of a row's tree were right, whether they were scored or not.

        Args:
            row: its number in the last ``cut``.
            outcome: of the row.
            drawn: whether the tree carries ``q``, so that only accepted and rejected nodes count.

        Returns:
            How many nodes were right.
        """
        begin, end = self._places[row]
        if begin == end:
            return 0
        tokens = np.array(outcome.verdict.tokens, np.int64)
        if drawn:
            tokens[len(outcome.verdict.path) :] = ROOT
        return node_table.learn(self._sheet, self._table, begin, end, tokens, drawn)

    def end(self, cut: PrunedTrees, tokens: int) -> None:
        """All rows of a step were learned from; together they gave so many tokens."""
        if self._places and self._places[-1][1]:
            settle(self._table)
            forget(self._table)
        if cut.load.decoding:
            self._tokens = MEMORY * self._tokens + tokens / cut.load.rows
            self._spent = MEMORY * self._spent + cut.cost / cut.plain

    def plain(self, load: Load) -> float:
        """What a pass without trees costs."""
        return self.cost(load.pending, load.cached, load.beside)

    def cost(self, tokens: Sequence[int], cached: Sequence[int], beside: int = 0) -> float:
        """``CostCurve.of``, quickly; of a pass that reads some tokens of other rows, too."""
        costs, count = self.costs, sum(tokens) + beside
        return float(self._curve(count + 1)[count]) + costs.per_row * (len(tokens) - 1) + costs.looking(tokens, cached)

    def passes(self, load: Load, count: int) -> FloatArray:
        """What passes cost over 1 to ``count`` drafts of each row."""
        fed = load.fed
        drafts = np.arange(1, count + 1)
        curve = self._curve(fed + load.rows * count + 1)
        tiles = (np.add.outer(np.array(load.pending), np.arange(count + 1)) - 1) // TILE
        looking = self.costs.per_tile * (np.array(load.cached) @ tiles)
        added = curve[fed + load.rows * drafts] - curve[fed] + looking[1:] - looking[0]
        return np.asarray(self.rise.start * self.plain(load) + self.rise.each * added)

    def _curve(self, count: int) -> FloatArray:
        """Costs of passes over 0 to at least ``count`` - 1 tokens with empty caches, worked out once."""
        if len(self._known) < count:
            self._known = self.costs.passes(np.arange(2 * count))
        return self._known
