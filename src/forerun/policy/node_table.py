"""The trees of all rows in one table: each node's chance, which nodes are scored, and which were right.

A tree has a dozen nodes, and a step of a small model takes half a millisecond. numpy's microsecond per operation would
cost more than it saves. So this is compiled, over columns that are allocated once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.tree import ROOT, IntArray
from forerun.policy.calibration import (
    DEPTHS,
    GROUPS,
    Table,
    by_depth,
    corrected,
    count,
    forget,
    group_of,
    odds_of,
    settle,
)
from forerun.policy.cost_curve import TILE, FloatArray


class NodeTable(NamedTuple):
    """The nodes of all rows' trees, one tree after the other; each column ``[n]``.

    Attributes:
        tokens: token ids.
        parents: the parent's place on the sheet; ``ROOT`` for none.
        rows: the number of the row.
        depths: 1 for a child of the root.
        odds: stated log-odds that the node is right if its parent is; 0 where the drafter states nothing.
        groups: the node's group in a ``Table``.
        chances: the probability that it is accepted; 0 where it cannot be.
        kept: its number in the tree that is scored, or -1.
        order: nodes by their worth, best first.
        worth: of the nodes in ``order``.
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
        """Room for so many nodes."""
        columns = {name: np.zeros(nodes, np.int64) for name in cls._fields}
        return cls(**columns)._replace(odds=np.zeros(nodes), chances=np.zeros(nodes), worth=np.zeros(nodes))  # type: ignore[arg-type]


@compiled
def enter(
    sheet: NodeTable,
    table: Table,
    row: int,
    begin: int,
    tokens: IntArray,
    parents: IntArray,
    said: FloatArray,
    deepest: int,
    vocabulary: int,
) -> None:
    """Enter a row's tree, from ``begin`` on, with each node's chance.

    Args:
        said: the stated probability that a node is accepted; empty if the drafter states none.
        deepest: the maximum depth of an accepted node.
        vocabulary: number of the target's tokens. Other tokens, and what is below them, cannot be accepted.
    """
    for node in range(len(tokens)):
        at, above = begin + node, begin + parents[node] if parents[node] != ROOT else ROOT
        depth = 1 if above == ROOT else sheet.depths[above] + 1
        chance = 1.0 if above == ROOT else sheet.chances[above]
        sheet.tokens[at], sheet.parents[at], sheet.rows[at], sheet.depths[at] = tokens[node], above, row, depth
        sheet.odds[at], sheet.groups[at], sheet.kept[at] = 0.0, GROUPS + min(depth, DEPTHS) - 1, -1
        if len(said):
            before = 1.0 if above == ROOT else max(said[parents[node]], 1e-12)
            sheet.odds[at] = odds_of(said[node] / before)
            sheet.groups[at] = group_of(sheet.odds[at])
            chance *= corrected(table, sheet.odds[at])
        else:
            chance *= by_depth(table, depth)
        possible = depth <= deepest and 0 <= tokens[node] < vocabulary
        sheet.chances[at] = chance if possible else 0.0


@compiled
def _sort(sheet: NodeTable, end: int, scoring: FloatArray, rate: float) -> int:
    """Sort the nodes that can be accepted by their worth, parents before children; returns how many there are."""
    order, worth, size = sheet.order, sheet.worth, 0
    for node in range(end):
        if sheet.chances[node] <= 0.0:
            continue
        value = sheet.chances[node] - rate * scoring[sheet.rows[node]] / TILE
        at = size
        while at > 0 and worth[at - 1] < value:
            order[at], worth[at] = order[at - 1], worth[at - 1]
            at -= 1
        order[at], worth[at] = node, value
        size += 1
    return size


@compiled
def choose(
    sheet: NodeTable,
    end: int,
    curve: FloatArray,
    fed: int,
    scoring: FloatArray,
    counts: IntArray,
    plain: float,
    sunk: float,
    lift: float,
    slope: float,
    rate: float,
) -> tuple[int, float, float]:
    """Keep the nodes that maximise expected tokens over cost.

    Args:
        end: number of nodes that were entered.
        curve: costs of passes over 0, 1, ... tokens with empty caches.
        fed: tokens of the pass besides nodes: one per row, more where prompts are read.
        scoring: what each row's cache costs for each of its ``TILE`` tokens but the first.
        counts: tokens of each row besides its nodes; written over.
        plain: cost of the pass without nodes.
        sunk: what the step has cost already.
        lift, slope: a pass with nodes costs ``lift`` times ``plain``, and ``slope`` times what the nodes add.
        rate: recent tokens per cost. A pass that reads a prompt has to be made anyway; there, nodes are kept that give
            more tokens for their cost than this.

    Returns:
        How many are kept, how many tokens they are expected to give, and what they add to the pass by the curve.
    """
    size, rows = _sort(sheet, end, scoring, rate), len(scoring)
    decoding = fed == rows
    best, best_tokens, best_added = 0, 0.0, 0.0
    most = rows / (sunk + plain) if decoding else -rate * lift * plain
    tokens, looking = 0.0, 0.0
    for number in range(size):
        node = sheet.order[number]
        row = sheet.rows[node]
        tokens += sheet.chances[node]
        if counts[row] % TILE == 0:
            looking += scoring[row]
        counts[row] += 1
        added = curve[fed + number + 1] - curve[fed] + looking
        cost = lift * plain + slope * added
        value = (rows + tokens) / (sunk + cost) if decoding else tokens - rate * cost
        if value > most:
            most, best, best_tokens, best_added = value, number + 1, tokens, added
    for number in range(best):
        sheet.kept[sheet.order[number]] = 0
    return best, best_tokens, best_added


@compiled
def take(sheet: NodeTable, begin: int, end: int, tokens: IntArray, parents: IntArray) -> int:
    """Copy the nodes of a row's tree that are kept; returns how many there are."""
    size = 0
    for node in range(begin, end):
        if sheet.kept[node] >= 0:
            above = sheet.parents[node]
            tokens[size] = sheet.tokens[node]
            parents[size] = ROOT if above == ROOT else sheet.kept[above]
            sheet.kept[node] = size
            size += 1
    return size


@compiled
def learn(sheet: NodeTable, table: Table, begin: int, end: int, tokens: IntArray, scored: bool) -> int:
    """Count the nodes of a row's tree that its committed tokens show to be right or wrong: the children of the root and
    of right nodes, as far as the text is known.

    Args:
        scored: whether only nodes that were scored count.

    Returns:
        How many were right.
    """
    came, right = sheet.order, 0  # the depth of a node that was right, or 0
    for node in range(begin, end):
        above = sheet.parents[node]
        depth = 0 if above == ROOT else came[above]
        came[node] = 0
        if (above != ROOT and depth == 0) or depth >= len(tokens) or (scored and sheet.kept[node] < 0):
            continue
        if right == depth and sheet.tokens[node] == tokens[depth]:
            came[node] = depth + 1
            right += 1
        count(table, sheet.groups[node], sheet.odds[node], came[node] > 0)
    return right


def warm_up() -> None:
    """Compile what choosing nodes runs, or load it from an earlier process."""
    sheet, table, tokens, parents = (
        NodeTable.allocate(1),
        Table.empty(),
        np.zeros(1, np.int64),
        np.full(1, ROOT, np.int64),
    )
    for said in (np.empty(0), np.ones(1)):
        enter(sheet, table, 0, 0, tokens, parents, said, 1, 1)
    choose(sheet, 1, np.arange(3.0), 1, np.zeros(1), np.ones(1, np.int64), 1.0, 0.0, 1.0, 1.0, 1.0)
    take(sheet, 0, 1, tokens, parents)
    learn(sheet, table, 0, 1, tokens, False)
    settle(table)
    forget(table)
