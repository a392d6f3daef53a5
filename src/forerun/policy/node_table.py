"""The trees of all rows in one table: each node's probability, whether it is scored, and whether it was correct.

A step of a small model lasts half a millisecond; numpy's microsecond per operation would cost more than pruning saves.
So this is compiled, over columns that are allocated once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.array_handles import ArrayHandles, reader
from forerun.core.compiling import compiled
from forerun.core.tree import ROOT, IntArray
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
from forerun.policy.cost_curve import FloatArray


class Trees(NamedTuple):
    """The trees of all rows, concatenated.

    Attributes:
        tokens, parents: of ``DraftTree``; int64 ``[n]``.
        stated: stated probability of acceptance; float64 ``[n]``.
        begins: index of each row's first node, and the total; int64 ``[rows + 1]``.
        deepest, states: maximum depth, and 1 if the drafter states probabilities; int64 ``[rows]``.
        cached, counts: tokens cached, and scored besides nodes (pruning adds the kept ones); int64 ``[rows]``.
        sizes: nodes kept; int64 ``[rows]``.
    """

    tokens: IntArray
    parents: IntArray
    stated: FloatArray
    begins: IntArray
    deepest: IntArray
    states: IntArray
    cached: IntArray
    counts: IntArray
    sizes: IntArray


class NodeTable(NamedTuple):
    """The nodes of all trees, concatenated; each column ``[n]``.

    Attributes:
        parents: the parent's index in the table, or ``ROOT``.
        depths: 1 for a child of the root.
        odds: stated log-odds of acceptance after an accepted parent; 0 if not stated.
        groups: index into a ``CalibrationTable``.
        chances: probability of acceptance; 0 if impossible.
        kept: index in the scored tree, or -1.
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
    order: IntArray
    worth: FloatArray

    @classmethod
    def allocate(cls, nodes: int) -> NodeTable:
        columns = {name: np.zeros(nodes, np.int64) for name in cls._fields}
        table = cls(**columns)  # type: ignore[arg-type]
        return table._replace(odds=np.zeros(nodes), chances=np.zeros(nodes), worth=np.zeros(nodes))


table_at, calibration_at = reader(NodeTable.allocate(1)), reader(CalibrationTable.empty())


@compiled
def _add_tree(table: NodeTable, calibration: CalibrationTable, row: int, trees: Trees, vocabulary: int) -> None:
    tokens, parents, stated, deepest = trees.tokens, trees.parents, trees.stated, trees.deepest[row]
    begin = trees.begins[row]
    for at in range(begin, trees.begins[row + 1]):
        above = begin + parents[at] if parents[at] != ROOT else ROOT
        depth = 1 if above == ROOT else table.depths[above] + 1
        chance = 1.0 if above == ROOT else table.chances[above]
        table.tokens[at], table.parents[at], table.rows[at], table.depths[at] = tokens[at], above, row, depth
        table.odds[at], table.groups[at], table.kept[at] = 0.0, ODDS_GROUPS + min(depth, DEPTH_GROUPS) - 1, -1
        if trees.states[row]:
            before = 1.0 if above == ROOT else max(stated[above], 1e-12)
            table.odds[at] = odds_of(stated[at] / before)
            table.groups[at] = group_of(table.odds[at])
            chance *= calibrated(calibration, table.odds[at])
        else:
            chance *= chance_at_depth(calibration, depth)
        possible = depth <= deepest and 0 <= tokens[at] < vocabulary
        table.chances[at] = chance if possible else 0.0


@compiled
def _sort(table: NodeTable, end: int, looks: FloatArray, cached: IntArray, slope: float, values: FloatArray) -> int:
    """Sort the nodes that can be accepted by worth, parents before children. Returns their number."""
    order, worth, size = table.order, table.worth, 0
    look = slope * (looks[-1] - looks[1]) / max(len(looks) - 2, 1)  # cost of a node per cached token
    for node in range(end):
        if table.chances[node] <= 0.0:
            continue
        row = table.rows[node]
        worth_of_node = table.chances[node] * values[row] - look * cached[row]
        at = size
        while at > 0 and worth[at - 1] < worth_of_node:
            order[at], worth[at] = order[at - 1], worth[at - 1]
            at -= 1
        order[at], worth[at] = node, worth_of_node
        size += 1
    return size


@compiled
def _extract(table: NodeTable, trees: Trees) -> None:
    for row in range(len(trees.sizes)):
        begin, size = trees.begins[row], 0
        for node in range(begin, trees.begins[row + 1]):
            if table.kept[node] >= 0:
                above = table.parents[node]
                trees.tokens[begin + size] = table.tokens[node]
                trees.parents[begin + size] = ROOT if above == ROOT else table.kept[above]
                table.kept[node] = size
                size += 1
        trees.sizes[row] = size


@compiled
def prune(
    table_address: int,
    calibration_address: int,
    tokens: IntArray,
    parents: IntArray,
    stated: FloatArray,
    begins: IntArray,
    by_row: IntArray,
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
        tokens, parents, stated, begins: see ``Trees``. Kept nodes overwrite the trees.
        by_row: the other attributes of ``Trees``, ``[5, rows]``.
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
    table, calibration = table_at(table_address), calibration_at(calibration_address)
    cached, counts, rows = by_row[2], by_row[3], len(begins) - 1
    trees = Trees(tokens, parents, stated, begins, by_row[0], by_row[1], cached, counts, by_row[4])
    for row in range(rows):
        _add_tree(table, calibration, row, trees, vocabulary)
    size = _sort(table, begins[rows], looks, cached, slope, values)
    best, best_worth, best_tokens, best_added, most = 0, 0.0, 0.0, 0.0, 0.0
    worth, expected, looking = 0.0, 0.0, 0.0
    for number in range(size):
        node = table.order[number]
        row = table.rows[node]
        expected += table.chances[node]
        worth += table.chances[node] * values[row]
        looking += cached[row] * (looks[counts[row] + 1] - looks[counts[row]])
        counts[row] += 1
        added = curve[fed + number + 1] - curve[fed] + looking
        cost = fixed + slope * added
        if cost > slack:
            break
        if worth - cost > most:
            most, best, best_worth, best_tokens, best_added = worth - cost, number + 1, worth, expected, added
    for number in range(best):
        table.kept[table.order[number]] = 0
    _extract(table, trees)
    return best, best_worth, best_tokens, best_added


@compiled
def _learn(
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
def learn(table_address: int, calibration_address: int, outcomes: IntArray, tokens: IntArray) -> None:
    """Update from the outcomes of a step's trees: row, first node, end, number of committed tokens, whether only scored
    nodes count, and the number of correct nodes, filled in; ``[rows, 6]``. ``tokens`` are the committed ones of all
    rows."""
    table, calibration = table_at(table_address), calibration_at(calibration_address)
    at, judged = 0, 0
    for row in range(len(outcomes)):
        begin, end, length, scored = outcomes[row, 1], outcomes[row, 2], outcomes[row, 3], outcomes[row, 4] != 0
        outcomes[row, 5] = _learn(table, calibration, begin, end, tokens[at : at + length], scored)
        at, judged = at + length, judged + end - begin
    if judged:
        fit_odds(calibration)
        forget(calibration)


def warm_up() -> None:
    """Compile the code of pruning, or load it from the cache."""
    nodes, calibration, ones = ArrayHandles[NodeTable](), ArrayHandles[CalibrationTable](), np.ones(1, np.int64)
    table, groups = nodes.at(NodeTable.allocate(1)), calibration.at(CalibrationTable.empty())
    tree, by_row = (ones.copy(), np.full(1, ROOT, np.int64), np.ones(1)), np.ones((5, 1), np.int64)
    curve, looks = np.arange(3.0), np.arange(3.0)
    prune(table, groups, *tree, np.arange(2), by_row, 1, curve, looks, 1, 0.0, 1.0, np.ones(1), 1.0)
    learn(table, groups, np.zeros((1, 6), np.int64), ones)
