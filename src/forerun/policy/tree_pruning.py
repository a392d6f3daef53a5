"""Prune trees to the nodes worth scoring: those whose tokens are worth more than they cost.

A node's probability is the drafter's, calibrated by how often similar nodes were correct (``calibration.py``). Nodes
that were not scored count, too: the committed tokens show whether they were correct. Not so under rejection sampling:
the decision must not depend on the drawn token's own probability, and only scoring shows whether it is accepted. So
nodes with ``q`` are judged by depth, and count only if scored. No clock is involved: for a given curve, pruning is
reproducible.

A step of a small model lasts half a millisecond, so this is compiled, over columns that are allocated once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from forerun.core.array_handles import ArrayHandles, reader
from forerun.core.compiling import compiled
from forerun.core.tree import ROOT, DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.policy.calibration import (
    DEPTH_GROUPS,
    ODDS_GROUPS,
    CalibrationTable,
    calibrated,
    chance_at_depth,
    count,
    fit_odds,
    forget,
    group_of,
    odds_of,
)
from forerun.policy.cost_curve import CostTable, FloatArray
from forerun.policy.pass_shape import PassShape

BEGIN, DEPTH, STATED, CACHED, SCORED, KEPT = range(6)
"""Rows of ``prune``'s table by row of the batch: index of the tree's first node, maximum depth, whether the drafter
states probabilities, cached tokens, tokens scored so far, and kept nodes."""

EMPTY = DraftTree.empty()


class NodeTable(NamedTuple):
    """The nodes of all trees, concatenated; each column ``[n]``.

    Attributes:
        parents: the parent's index in the table, or ``ROOT``.
        depths: 1 for a child of the root.
        odds: stated log-odds of acceptance after an accepted parent; 0 if not stated.
        groups: index into a ``CalibrationTable``.
        chances: probability of acceptance; 0 if impossible.
        kept: index in the scored tree, or -1; ``kept_tokens``, ``kept_parents``: of these trees, from each row's first
            node on.
        order, worth: nodes by worth, best first, and their worth.
    """

    tokens: IntArray
    parents: IntArray
    rows: IntArray
    depths: IntArray
    odds: FloatArray
    groups: IntArray
    chances: FloatArray
    kept: IntArray
    kept_tokens: IntArray
    kept_parents: IntArray
    order: IntArray
    worth: FloatArray

    @classmethod
    def allocate(cls, nodes: int) -> NodeTable:
        columns: dict[str, Any] = {name: np.zeros(nodes, np.int64) for name in cls._fields}
        return cls(**columns | {name: np.zeros(nodes) for name in ("odds", "chances", "worth")})


class PrunedTrees(NamedTuple):
    """The part of a step's trees that is worth scoring: number of nodes, expected worth of their tokens in plain
    passes, expected number of accepted ones, and what they add to the pass by the curve."""

    trees: list[DraftTree]
    nodes: int
    worth: float
    tokens: float
    added: float


class TreePruner:
    """Prunes trees, and calibrates probabilities by what was accepted."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._calibration, self._nodes = CalibrationTable.empty(), NodeTable.allocate(64)
        self._handles: tuple[ArrayHandles[NodeTable], ArrayHandles[CalibrationTable]] = ArrayHandles(), ArrayHandles()
        self._begins = [0]  # first node of each row's tree in the table, and the end of the last

    def prune(
        self,
        shape: PassShape,
        trees: Sequence[DraftTree],
        values: Sequence[float],
        table: CostTable,
        fixed: float = 0.0,
        slope: float = 1.0,
        slack: float = float("inf"),
    ) -> PrunedTrees:
        """Keep what is worth scoring of each row's tree. ``values`` are of a row's token, in plain passes; nodes cost
        ``slope`` times what they add by the table, plus ``fixed``, and at most ``slack``."""
        self._begins = begins = [0, *accumulate(map(len, trees))]
        if not (size := begins[-1]):
            return PrunedTrees([EMPTY] * len(trees), 0, 0.0, 0.0, 0.0)
        if size > len(self._nodes.tokens):
            self._nodes = NodeTable.allocate(2 * size)
        stated = [None if tree.q is not None else tree.probability for tree in trees]
        depths, states, none = (
            [left - 1 for left in shape.left],
            [each is not None for each in stated],
            [0] * len(trees),
        )
        rows = np.array([begins, [*depths, 0], [*states, 0], [*shape.cached, 0], [*shape.pending, 0], [*none, 0]])
        passes, looks = table.curves(shape.tokens + size + 1)
        kept, worth, tokens, added = prune(
            *self._addresses(),
            _joined([tree.tokens for tree in trees]),
            _joined([tree.parents for tree in trees]),
            _joined([np.ones(len(tree)) if p is None else p for tree, p in zip(trees, stated, strict=True)]),
            rows, self._vocabulary, passes, looks, shape.tokens, fixed, slope, np.array(values), slack,
        )  # fmt: skip
        sizes = rows[KEPT].tolist()[:-1]
        return PrunedTrees(list(map(self._part, trees, sizes, begins)), kept, worth, tokens, added)

    def _addresses(self) -> tuple[int, int]:
        nodes, calibration = self._handles
        return nodes.at(self._nodes), calibration.at(self._calibration)

    def _part(self, tree: DraftTree, size: int, begin: int) -> DraftTree:
        """Return the kept part of a tree."""
        if size == len(tree):
            return tree
        if not size:
            return EMPTY
        nodes = self._nodes
        keep = nodes.kept[begin : begin + len(tree)] >= 0
        if tree.q is not None:
            return tree.select(keep)
        tokens, parents = (
            nodes.kept_tokens[begin : begin + size].copy(),
            nodes.kept_parents[begin : begin + size].copy(),
        )
        return DraftTree.unchecked(tokens, parents, origins=None if tree.origins is None else tree.origins[keep])

    def learn(self, outcomes: Iterable[tuple[int, Outcome, bool]]) -> dict[int, int]:
        """Calibrate by the outcomes of trees of the last ``prune``: the row's index, its outcome, and whether the tree
        was drawn (with ``q``), so that only accepted and rejected nodes count. Returns correct nodes by row."""
        judged, committed = list[tuple[int, ...]](), list[int]()
        for row, outcome, drawn in outcomes:
            tokens, accepted = outcome.verdict.tokens, len(outcome.verdict.path)
            judged.append((row, *self._begins[row : row + 2], len(tokens), drawn, 0))
            committed += [*tokens[:accepted], *[ROOT] * (len(tokens) - accepted)] if drawn else tokens
        if not judged:
            return {}
        table = np.array(judged)
        learn(*self._addresses(), table, np.array(committed, np.int64))
        return dict(zip(table[:, 0].tolist(), table[:, -1].tolist(), strict=True))


def _joined(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 and parts[0].flags.carray else np.concatenate(parts)


_nodes_at, _calibration_at = reader(NodeTable.allocate(1)), reader(CalibrationTable.empty())


@compiled
def _add_tree(
    table: NodeTable,
    calibration: CalibrationTable,
    row: int,
    rows: IntArray,
    tokens: IntArray,
    parents: IntArray,
    stated: FloatArray,
    vocabulary: int,
) -> None:
    begin = rows[BEGIN, row]
    for at in range(begin, rows[BEGIN, row + 1]):
        above = begin + parents[at] if parents[at] != ROOT else ROOT
        depth = 1 if above == ROOT else table.depths[above] + 1
        chance = 1.0 if above == ROOT else table.chances[above]
        table.tokens[at], table.parents[at], table.rows[at], table.depths[at] = tokens[at], above, row, depth
        table.odds[at], table.groups[at], table.kept[at] = 0.0, ODDS_GROUPS + min(depth, DEPTH_GROUPS) - 1, -1
        if rows[STATED, row]:
            before = 1.0 if above == ROOT else max(stated[above], 1e-12)
            table.odds[at] = odds_of(stated[at] / before)
            table.groups[at] = group_of(table.odds[at])
            chance *= calibrated(calibration, table.odds[at])
        else:
            chance *= chance_at_depth(calibration, depth)
        possible = depth <= rows[DEPTH, row] and 0 <= tokens[at] < vocabulary
        table.chances[at] = chance if possible else 0.0


@compiled
def _sort(table: NodeTable, end: int, looks: FloatArray, rows: IntArray, slope: float, values: FloatArray) -> int:
    """Sort the nodes that can be accepted by worth, parents before children. Returns their number."""
    order, worth, size = table.order, table.worth, 0
    look = slope * (looks[-1] - looks[1]) / max(len(looks) - 2, 1)  # cost of a node per cached token
    for node in range(end):
        if table.chances[node] <= 0.0:
            continue
        row = table.rows[node]
        worth_of_node = table.chances[node] * values[row] - look * rows[CACHED, row]
        at = size
        while at > 0 and worth[at - 1] < worth_of_node:
            order[at], worth[at] = order[at - 1], worth[at - 1]
            at -= 1
        order[at], worth[at] = node, worth_of_node
        size += 1
    return size


@compiled
def _extract(table: NodeTable, rows: IntArray) -> None:
    for row in range(rows.shape[1] - 1):
        begin, size = rows[BEGIN, row], 0
        for node in range(begin, rows[BEGIN, row + 1]):
            if table.kept[node] >= 0:
                above = table.parents[node]
                table.kept_tokens[begin + size] = table.tokens[node]
                table.kept_parents[begin + size] = ROOT if above == ROOT else table.kept[above]
                table.kept[node] = size
                size += 1
        rows[KEPT, row] = size


@compiled
def prune(
    nodes: int,
    groups: int,
    tokens: IntArray,
    parents: IntArray,
    stated: FloatArray,
    rows: IntArray,
    vocabulary: int,
    curve: FloatArray,
    looks: FloatArray,
    fed: int,
    fixed: float,
    slope: float,
    values: FloatArray,
    slack: float,
) -> tuple[int, float, float, float]:
    """Keep the nodes whose tokens are worth more than they cost.

    Args:
        nodes, groups: addresses of a ``NodeTable`` and a ``CalibrationTable``.
        tokens, parents, stated: of all trees, and the stated probabilities.
        rows: see ``BEGIN``; ``[6, rows + 1]``.
        vocabulary: of the target. Other tokens and their descendants cannot be accepted.
        curve, looks: costs of passes over 0, 1, ... tokens with empty caches, and per cached token.
        fed: tokens of the pass besides nodes.
        fixed, slope: nodes cost ``slope`` times what they add by the curve, plus ``fixed``.
        values: of a token, ``[rows]``.
        slack: maximum cost of all nodes.

    Returns:
        The number of kept nodes, their tokens' expected worth and number, and what the nodes add to the pass by the
        curve.
    """
    table, calibration = _nodes_at(nodes), _calibration_at(groups)
    for row in range(rows.shape[1] - 1):
        _add_tree(table, calibration, row, rows, tokens, parents, stated, vocabulary)
    size = _sort(table, len(tokens), looks, rows, slope, values)
    best, best_worth, best_tokens, best_added, most = 0, 0.0, 0.0, 0.0, 0.0
    worth, expected, looking = 0.0, 0.0, 0.0
    for number in range(size):
        node = table.order[number]
        row = table.rows[node]
        expected += table.chances[node]
        worth += table.chances[node] * values[row]
        looking += rows[CACHED, row] * (looks[rows[SCORED, row] + 1] - looks[rows[SCORED, row]])
        rows[SCORED, row] += 1
        added = curve[fed + number + 1] - curve[fed] + looking
        cost = fixed + slope * added
        if cost > slack:
            break
        if worth - cost > most:
            most, best, best_worth, best_tokens, best_added = worth - cost, number + 1, worth, expected, added
    for number in range(best):
        table.kept[table.order[number]] = 0
    _extract(table, rows)
    return best, best_worth, best_tokens, best_added


@compiled
def _judge(
    table: NodeTable, calibration: CalibrationTable, begin: int, end: int, tokens: IntArray, scored: bool
) -> int:
    """Count the nodes of a row's tree that its committed tokens show to be correct or not, if ``scored`` only those
    that were. Returns how many are correct."""
    depths, right = table.order, 0  # depth of each correct node, else 0
    for node in range(begin, end):
        above = table.parents[node]
        depth = 0 if above == ROOT else depths[above]
        depths[node] = 0
        if (above != ROOT and depth == 0) or depth >= len(tokens) or (scored and table.kept[node] < 0):
            continue
        if right == depth and table.tokens[node] == tokens[depth]:
            depths[node] = depth + 1
            right += 1
        count(calibration, table.groups[node], table.odds[node], depths[node] > 0)
    return right


@compiled
def learn(nodes: int, groups: int, outcomes: IntArray, tokens: IntArray) -> None:
    """Calibrate by the outcomes of a step's trees: row, first node, end, number of committed tokens, whether only
    scored nodes count, and the number of correct nodes, filled in; ``[rows, 6]``. ``tokens`` are the committed ones of
    all rows."""
    table, calibration = _nodes_at(nodes), _calibration_at(groups)
    at, judged = 0, 0
    for row in range(len(outcomes)):
        begin, end, length, scored = outcomes[row, 1], outcomes[row, 2], outcomes[row, 3], outcomes[row, 4] != 0
        outcomes[row, 5] = _judge(table, calibration, begin, end, tokens[at : at + length], scored)
        at, judged = at + length, judged + end - begin
    if judged:
        fit_odds(calibration)
        forget(calibration)


def warm_up() -> None:
    """Compile the code of pruning, or load it from the cache."""
    pruner, ones = TreePruner(2), np.ones(1, np.int64)
    tree = DraftTree.unchecked(ones, np.full(1, ROOT), np.ones(1))
    rows, costs = np.array([[0, 1], [1, 0], [1, 0], [0, 0], [1, 0], [0, 0]]), np.arange(3.0)
    prune(*pruner._addresses(), tree.tokens, tree.parents, np.ones(1), rows, 2, costs, costs, 1, 0.0, 1.0, costs, 1.0)
    learn(*pruner._addresses(), np.zeros((1, 6), np.int64), ones)
