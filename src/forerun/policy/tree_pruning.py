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

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from forerun.core.array_handles import ArrayHandles
from forerun.core.pass_context import PassContext
from forerun.core.tree import ROOT, DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.policy import node_table
from forerun.policy.calibration import MEMORY, CalibrationTable
from forerun.policy.cost_curve import CostCurve, CostTable, FloatArray
from forerun.policy.node_table import NodeTable
from forerun.policy.prices import AS_THE_CURVE_SAYS, LinearCost


@dataclass(frozen=True, slots=True)
class TreeSelection:
    """What a step scores.

    Attributes:
        context: the rows, and what the pass reads besides their trees.
        trees: of each proposed tree the part that is worth it.
        nodes: number of nodes in all of them.
        tokens: expected of the step, over all rows.
        plain: cost of the pass without trees, by the curve.
        alone: cost of a pass that only decodes these rows, without trees.
        added: what the trees add to the pass, by the curve.
        cost: of the pass with the trees, by the curve and its correction.
    """

    context: PassContext
    trees: list[DraftTree]
    nodes: int
    tokens: float
    plain: float
    alone: float
    added: float
    cost: float

    @property
    def steps(self) -> float:
        """The cost in steps that only decode these rows, if what the pass reads of prompts is left out."""
        return 1.0 + (self.cost - self.plain) / self.alone

    def steps_at(self, correction: LinearCost) -> float:
        """``steps`` by another correction of the curve."""
        cost = _corrected(correction, self.plain, self.alone, self.added, self.nodes)
        return 1.0 + (cost - self.plain) / self.alone


class TreePruner:
    """Prunes trees to what is worth scoring, and learns from what is accepted.

    Args:
        costs: of passes.
        vocabulary: number of tokens that the target knows; by default there is no limit.
    """

    def __init__(self, costs: CostCurve, vocabulary: int = 1 << 31) -> None:
        self._vocabulary = vocabulary
        self._calibration, self._nodes = CalibrationTable.empty(), NodeTable.allocate(64)
        self._handles: tuple[ArrayHandles[NodeTable], ArrayHandles[CalibrationTable]] = ArrayHandles(), ArrayHandles()
        self._begins = [0]  # where each row's tree begins in the table of nodes, and where the last ends
        self._outcomes: list[int] = []  # four numbers for each; see ``node_table.learn``
        self._committed: list[int] = []  # tokens of these
        self._priced: tuple[PassContext, float, float] | None = None  # the last pass, with what ``price`` says
        self._tokens = self._spent = 1.0  # of recent passes: tokens of a row, and cost in passes without trees
        self.fit(costs)

    def fit(self, costs: CostCurve) -> None:
        """Go by other costs from now on."""
        self.table, self._priced = CostTable(costs), None

    def prune(
        self,
        context: PassContext,
        trees: Sequence[DraftTree],
        spent: float = 0.0,
        correction: LinearCost = AS_THE_CURVE_SAYS,
    ) -> TreeSelection:
        """Select what is worth scoring of each row's tree.

        Args:
            context: the rows.
            trees: one for each.
            spent: what the step has cost already, in the curve's units. The more, the more nodes are worth scoring.
            correction: of the curve, for passes with trees; see ``Prices``.
        """
        flat = self._flat(context, trees)
        if flat is None:
            return self.keep_all(context, trees, correction)
        waiting, tokens, (plain, alone) = context.waiting, context.tokens, self.price(context)
        end = self._begins[-1]
        curves, rate = self.table.curves(tokens + end + 1), waiting * self._tokens / self._spent / alone
        nodes, calibration = self._memory()
        kept, expected, added = node_table.prune(
            nodes,
            calibration,
            *flat,
            self._vocabulary,
            *curves,
            waiting,
            tokens,
            plain,
            alone,
            spent,
            *correction,
            rate,
        )
        parts = self._parts(trees, *flat[:2], flat[4][-1].tolist()) if kept else [DraftTree.empty()] * len(context)
        cost = _corrected(correction, plain, alone, added, kept)
        return TreeSelection(context, parts, kept, waiting + expected, plain, alone, added, cost)

    def _memory(self) -> tuple[int, int]:
        """Addresses of the table of nodes and of the calibration."""
        nodes, calibration = self._handles
        return nodes.at(self._nodes), calibration.at(self._calibration)

    def _flat(
        self, context: PassContext, trees: Sequence[DraftTree]
    ) -> tuple[IntArray, IntArray, FloatArray, IntArray, IntArray] | None:
        """The trees one after the other, as ``node_table.prune`` takes them; the table has room for their nodes. None
        if they have none."""
        self._begins, self._outcomes, self._committed = [0, *accumulate(map(len, trees))], [], []
        if not (size := self._begins[-1]):
            return None
        if size > len(self._nodes.tokens):
            self._nodes = NodeTable.allocate(2 * size)
        stated = [None if tree.q is not None else tree.probability for tree in trees]
        deepest, states = [row.max_draft_depth for row in context.rows], [p is not None for p in stated]
        return (
            np.concatenate([tree.tokens for tree in trees]),
            np.concatenate([tree.parents for tree in trees]),
            np.concatenate([np.ones(len(tree)) if p is None else p for tree, p in zip(trees, stated, strict=True)]),
            np.array(self._begins),
            np.array([deepest, states, context.cached, context.pending, [0] * len(trees)]),
        )

    def _parts(
        self, trees: Sequence[DraftTree], tokens: IntArray, parents: IntArray, sizes: Sequence[int]
    ) -> list[DraftTree]:
        """The parts of the trees that are kept."""
        parts = list(trees)
        for row, (tree, size) in enumerate(zip(trees, sizes, strict=True)):
            begin, end = self._begins[row : row + 2]
            if size == len(tree):
                continue
            if not size:
                parts[row] = DraftTree.empty()
                continue
            keep = self._nodes.kept[begin:end] >= 0
            if tree.q is not None:
                parts[row] = tree.select(keep)
            else:
                origins = None if tree.origins is None else tree.origins[keep]
                own = slice(begin, begin + size)
                parts[row] = DraftTree.unchecked(tokens[own], parents[own], origins=origins)
        return parts

    def keep_all(
        self, context: PassContext, trees: Sequence[DraftTree], correction: LinearCost = AS_THE_CURVE_SAYS
    ) -> TreeSelection:
        """All of each tree."""
        (plain, alone), waiting = self.price(context), context.waiting
        if not (nodes := sum(map(len, trees))):
            return TreeSelection(context, [DraftTree.empty()] * len(context), 0, waiting, plain, alone, 0.0, plain)
        tokens = [pending + len(tree) for pending, tree in zip(context.pending, trees, strict=True)]
        added = self._cost(context, tokens) - plain
        cost = _corrected(correction, plain, alone, added, nodes)
        return TreeSelection(context, list(trees), nodes, waiting, plain, alone, added, cost)

    def learn(self, row: int, outcome: Outcome, drawn: bool) -> None:
        """Note which nodes of a row's tree were right, whether they were scored or not; ``end`` learns it.

        Args:
            row: its number in the last ``prune``.
            outcome: of the row.
            drawn: whether the tree carries ``q``, so that only accepted and rejected nodes count.
        """
        begin, end = self._begins[row : row + 2]
        if begin == end:
            return
        tokens, accepted = outcome.verdict.tokens, len(outcome.verdict.path)
        self._outcomes += begin, end, len(tokens), drawn
        self._committed += [*tokens[:accepted], *[ROOT] * (len(tokens) - accepted)] if drawn else tokens

    def end(self, selection: TreeSelection, tokens: int, chained: bool = False) -> int:
        """Learn from a step's trees.

        Args:
            selection: what was scored.
            tokens: that all rows gave together.
            chained: whether chains were scored, not the trees.

        Returns:
            How many of the trees' nodes were right.
        """
        right = 0
        if self._begins[-1]:
            outcomes = np.array(self._outcomes, np.int64).reshape(-1, 4)
            right = node_table.learn(*self._memory(), outcomes, np.array(self._committed, np.int64))
            self._outcomes, self._committed = [], []
        if not chained:
            context = selection.context
            self._remember((tokens + len(context.undrafted)) / context.waiting, selection.steps)
        return right

    def rest(self) -> None:
        """Learn from a step for which no trees were proposed."""
        self._remember(1.0, 1.0)

    def _remember(self, tokens: float, steps: float) -> None:
        """A step gave so many tokens a row, and took as long as ``steps`` without trees."""
        self._tokens, self._spent = MEMORY * self._tokens + tokens, MEMORY * self._spent + steps

    @property
    def gain(self) -> float:
        """Tokens for the cost of recent passes that had no chains, by those of passes without trees."""
        return self._tokens / self._spent

    def price(self, context: PassContext) -> tuple[float, float]:
        """Cost of a pass without trees, and of one that only decodes its rows."""
        if self._priced is None or self._priced[0] is not context:
            plain = self._cost(context, context.pending)
            rows = [*context.cached, *context.undrafted]
            alone = plain if context.decodes else self.table.cost([1] * len(rows), rows)
            self._priced = context, plain, alone
        return self._priced[1:]

    def _cost(self, context: PassContext, tokens: Sequence[int]) -> float:
        """Cost of the pass if it reads so many tokens of each row that is drafted for."""
        return self.table.cost(tokens, context.cached, context.beside, context.undrafted)

    def node_cost(self, context: PassContext, correction: LinearCost) -> float:
        """What a node of one row takes: in a pass that only decodes, times the rows that wait for it."""
        waiting = context.waiting / len(context)
        return correction.each * self._added(context, 1) * waiting / self.price(context)[1]

    def chain_pass(self, context: PassContext, length: int, correction: LinearCost) -> float:
        """Cost of a pass over a chain of ``length`` tokens for each row."""
        return _corrected(correction, *self.price(context), self._added(context, length), length)

    def _added(self, context: PassContext, length: int) -> float:
        """What chains of ``length`` tokens for each row add to a pass, by the curve."""
        tokens = [pending + length for pending in context.pending]
        return self._cost(context, tokens) - self.price(context)[0]

    def affordable(self, context: PassContext, most: int, limit: float, correction: LinearCost) -> int:
        """The longest chains, of up to ``most`` tokens for each row, whose pass costs no more than ``limit``."""
        if self.chain_pass(context, most, correction) <= limit:
            return most
        return bisect_right(range(1, most), limit, key=lambda length: self.chain_pass(context, length, correction))

    def chain_passes(self, context: PassContext, length: int, correction: LinearCost) -> FloatArray:
        """Costs of passes over chains of 1 to ``length`` tokens for each row."""
        rows, tokens = len(context), context.tokens
        lengths = np.arange(1, length + 1)
        curve, looks = self.table.curves(tokens + rows * length + 1)
        looking = np.array(context.cached) @ looks[np.add.outer(np.array(context.pending), np.arange(length + 1))]
        added = curve[tokens + rows * lengths] - curve[tokens] + looking[1:] - looking[0]
        plain, alone = self.price(context)
        return np.asarray(plain + (correction.start - 1.0) * alone + correction.each * added)


def _corrected(correction: LinearCost, plain: float, alone: float, added: float, nodes: int) -> float:
    """Cost of a pass with trees; without nodes nothing is corrected. What drafting displaces in the processor's caches
    does not depend on what the pass reads of prompts."""
    return plain + (correction.start - 1.0) * alone + correction.each * added if nodes else plain
