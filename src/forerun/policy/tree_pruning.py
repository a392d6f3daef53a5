"""Prune trees to the nodes worth scoring: those whose tokens are worth more than they cost.

A node's probability is the drafter's, calibrated by how often similar nodes were correct (``calibration.py``), scored
or not: the committed tokens show it. Under rejection sampling, the decision must not depend on the drawn token's own
probability, and only scoring shows whether it is accepted. So nodes with ``q`` are judged by depth, and count only if
scored. A step of a small model lasts half a millisecond, so this is compiled; no clock is involved.
"""

from __future__ import annotations

import math
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
from forerun.policy.cost_curve import CostCurve, CostTable, FloatArray
from forerun.policy.ledger import TokenValues, token_values
from forerun.policy.pass_shape import PassShape

BEGIN, DEPTH, STATES, CACHED, SCORED, KEPT = range(6)
"""By row: its tree's first node, maximum depth, whether the drafter states probabilities, cached tokens, tokens scored
so far, and picked or kept nodes."""

EACH, LAST, WEIGHT, SPREAD = range(4)
"""Fields of ``TokenValues``."""

EMPTY = DraftTree.empty()


class NodeTable(NamedTuple):
    """The nodes of all trees, concatenated; each column ``[n]``.

    Attributes:
        parents: index of each node's parent in its tree, or ``ROOT``; then in the table.
        stated: probability of acceptance, if stated; ``odds``: its log-odds after an accepted parent.
        depths: 1 for a child of the root; ``groups``: index into a ``CalibrationTable``.
        chances: probability of acceptance; 0 if impossible.
        kept: index in the scored tree, or -1; ``kept_tokens``, ``kept_parents``: of that tree, from ``BEGIN`` on.
        order, picks: each row's nodes by chance, and all rows' by worth, best first.
    """

    tokens: IntArray
    parents: IntArray
    stated: FloatArray
    odds: FloatArray
    rows: IntArray
    depths: IntArray
    groups: IntArray
    chances: FloatArray
    kept: IntArray
    kept_tokens: IntArray
    kept_parents: IntArray
    order: IntArray
    picks: IntArray

    @classmethod
    def allocate(cls, nodes: int) -> NodeTable:
        columns: dict[str, Any] = {name: np.zeros(nodes, np.int64) for name in cls._fields}
        return cls(**columns | {name: np.zeros(nodes) for name in ("stated", "odds", "chances")})


class PrunedTrees(NamedTuple):
    """The part of a step's trees that is worth scoring: its nodes, the expected worth of their tokens in plain passes,
    the expected number of accepted ones, and what they add to the pass by the curve."""

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
        worth: TokenValues,
        table: CostTable,
        fixed: float = 0.0,
        slope: float = 1.0,
        slack: float = float("inf"),
    ) -> PrunedTrees:
        """Keep what is worth scoring of each row's tree; see the function ``prune``. ``worth`` is of these rows, and
        further ones without trees."""
        self._begins = begins = [0, *accumulate(map(len, trees))]
        if not (size := begins[-1]):
            return PrunedTrees([EMPTY] * len(trees), 0, 0.0, 0.0, 0.0)
        if size > len(self._nodes.tokens):
            self._nodes = NodeTable.allocate(2 * size)
        states = [tree.q is None and tree.probability is not None for tree in trees]
        for tree, begin, end, stated in zip(trees, begins, begins[1:], states, strict=False):
            self._nodes.tokens[begin:end], self._nodes.parents[begin:end] = tree.tokens, tree.parents
            if stated:
                self._nodes.stated[begin:end] = tree.probability
        depths, none = [left - 1 for left in shape.left], [0] * len(trees)
        rows = np.array([begins, *([*each, 0] for each in (depths, states, shape.cached, shape.pending, none))])
        passes, looks = table.curves(shape.tokens + size + 1)
        nodes, groups = self._addresses()
        scored = shape.tokens, fixed, slope, np.array(worth), slack
        found = prune(nodes, groups, rows, self._vocabulary, passes, looks, *scored)
        return PrunedTrees(list(map(self._part, trees, rows[KEPT].tolist(), begins)), *found)

    def _addresses(self) -> tuple[int, int]:
        nodes, calibration = self._handles
        return nodes.at(self._nodes), calibration.at(self._calibration)

    def _part(self, tree: DraftTree, size: int, begin: int) -> DraftTree:
        if size == len(tree) or not size:
            return tree if size else EMPTY
        end, nodes = begin + size, self._nodes
        keep = nodes.kept[begin : begin + len(tree)] >= 0
        if tree.q is not None:
            return tree.select(keep)
        origins = None if tree.origins is None else tree.origins[keep]
        return DraftTree.unchecked(
            nodes.kept_tokens[begin:end].copy(), nodes.kept_parents[begin:end].copy(), origins=origins
        )

    def learn(self, outcomes: Iterable[tuple[int, Outcome, bool]]) -> dict[int, int]:
        """Calibrate by the last pruned trees' outcomes: row, outcome, and whether the tree was drawn (with ``q``);
        return the number of correct nodes by row."""
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


_nodes_at, _calibration_at = reader(NodeTable.allocate(1)), reader(CalibrationTable.empty())


@compiled
def _add_tree(table: NodeTable, calibration: CalibrationTable, row: int, rows: IntArray, vocabulary: int) -> None:
    begin = rows[BEGIN, row]
    for at in range(begin, rows[BEGIN, row + 1]):
        above, depth, chance, before = ROOT, 1, 1.0, 1.0
        if table.parents[at] != ROOT:
            above = begin + table.parents[at]
            depth, chance, before = table.depths[above] + 1, table.chances[above], max(table.stated[above], 1e-12)
        table.parents[at], table.rows[at], table.depths[at], table.kept[at] = above, row, depth, -1
        if rows[STATES, row]:
            table.odds[at] = odds_of(table.stated[at] / before)
            table.groups[at] = group_of(table.odds[at])
            chance *= calibrated(calibration, table.odds[at])
        else:
            table.odds[at], table.groups[at] = 0.0, ODDS_GROUPS + min(depth, DEPTH_GROUPS) - 1
            chance *= chance_at_depth(calibration, depth)
        possible = depth <= rows[DEPTH, row] and 0 <= table.tokens[at] < vocabulary
        table.chances[at] = chance if possible else 0.0


@compiled
def _sort(table: NodeTable, rows: IntArray) -> None:
    """Sort each row's nodes by chance, parents before children."""
    order, chances = table.order, table.chances
    for row in range(rows.shape[1] - 1):
        begin = rows[BEGIN, row]
        for node in range(begin, rows[BEGIN, row + 1]):
            at = node
            while at > begin and chances[order[at - 1]] < chances[node]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = node


@compiled
def _best_row(table: NodeTable, rows: IntArray, look: float, worth: FloatArray) -> int:
    """Return the row whose next node is worth most, or -1 if none can be accepted; ``look``: cost of a node per cached
    token."""
    best, most, total = -1, 0.0, worth[WEIGHT].sum()
    for row in range(rows.shape[1] - 1):
        at = rows[BEGIN, row] + rows[KEPT, row]
        if at < rows[BEGIN, row + 1]:
            chance = table.chances[table.order[at]]
            value = worth[EACH, row] + worth[LAST, row] * worth[WEIGHT, row] / total
            own = chance * value - look * rows[CACHED, row]
            if chance > 0.0 and (best < 0 or own > most):
                best, most = row, own
    return best


@compiled
def _gain(worth: FloatArray, row: int, tokens: float) -> float:
    """Return what a row's expected ``tokens`` save, and let its weight fade."""
    spread, total = worth[SPREAD, row], worth[WEIGHT].sum()
    share = worth[WEIGHT, row] / total
    left = math.exp(-tokens / spread)
    worth[WEIGHT, row] *= left
    return float(worth[EACH, row] * tokens - worth[LAST, row] * spread * math.log(1.0 - share * (1.0 - left)))


@compiled
def _extract(table: NodeTable, rows: IntArray, count: int) -> None:
    """Write the trees of the first ``count`` picked nodes."""
    for number in range(count):
        table.kept[table.picks[number]] = 0
    for row in range(rows.shape[1] - 1):
        begin, size = rows[BEGIN, row], 0
        for node in range(begin, rows[BEGIN, row + 1]):
            if table.kept[node] >= 0:
                above, table.kept[node] = table.parents[node], size
                table.kept_tokens[begin + size] = table.tokens[node]
                table.kept_parents[begin + size] = ROOT if above == ROOT else table.kept[above]
                size += 1
        rows[KEPT, row] = size


@compiled
def prune(
    nodes: int,
    groups: int,
    rows: IntArray,
    vocabulary: int,
    curve: FloatArray,
    looks: FloatArray,
    fed: int,
    fixed: float,
    slope: float,
    worth: FloatArray,
    slack: float,
) -> tuple[int, float, float, float]:
    """Keep the nodes whose tokens are worth more than they cost; return all but the first field of ``PrunedTrees``.

    Args:
        nodes, groups: addresses of a ``NodeTable``, whose first three columns are filled, and a ``CalibrationTable``.
        rows: see ``BEGIN``; ``[6, rows + 1]``.
        vocabulary: of the target. Other tokens and their descendants cannot be accepted.
        curve, looks: costs of passes over 0, 1, ... tokens with empty caches, and per cached token.
        fed: tokens of the pass besides nodes.
        fixed, slope: nodes cost ``slope`` times what they add by the curve, plus ``fixed``; at most ``slack``.
        worth: ``TokenValues``, ``[4, all rows]``; changed.
    """
    table, calibration = _nodes_at(nodes), _calibration_at(groups)
    for row in range(rows.shape[1] - 1):
        _add_tree(table, calibration, row, rows, vocabulary)
    _sort(table, rows)
    look = slope * (looks[-1] - looks[1]) / max(len(looks) - 2, 1)
    best, best_worth, best_tokens, best_added, most = 0, 0.0, 0.0, 0.0, 0.0
    saved, expected, looking, number = 0.0, 0.0, 0.0, 0
    while True:
        row = _best_row(table, rows, look, worth)
        if row < 0:
            break
        node = table.order[rows[BEGIN, row] + rows[KEPT, row]]
        table.picks[number] = node
        expected += table.chances[node]
        saved += _gain(worth, row, table.chances[node])
        looking += rows[CACHED, row] * (looks[rows[SCORED, row] + 1] - looks[rows[SCORED, row]])
        rows[SCORED, row] += 1
        rows[KEPT, row] += 1
        number += 1
        added = curve[fed + number] - curve[fed] + looking
        cost = fixed + slope * added
        if cost > slack:
            break
        if saved - cost > most:
            most, best, best_worth, best_tokens, best_added = saved - cost, number, saved, expected, added
    _extract(table, rows, best)
    return best, best_worth, best_tokens, best_added


@compiled
def _judge(
    table: NodeTable, calibration: CalibrationTable, begin: int, end: int, tokens: IntArray, scored: bool
) -> int:
    """Count a row's nodes that its committed tokens decide (only ``scored`` ones); return how many are correct."""
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
    """Calibrate by outcomes, ``[rows, 6]``: row, first node, end, number of committed tokens, whether only scored nodes
    count, and the number of correct ones, filled in. ``tokens``: the committed ones of all rows."""
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
    table = CostTable(CostCurve.linear(10.0))
    pruner.prune(PassShape([2], [0], [1], [1]), [tree], token_values([2], [1.0], [0], table, 1.0, True), table)
    learn(*pruner._addresses(), np.zeros((1, 6), np.int64), ones)
