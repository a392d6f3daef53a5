"""Trees of all rows on one sheet: what each node's chance is, which are scored, and what became of them.

A tree has a dozen nodes, and a step of a small model takes less than half a millisecond: what takes a microsecond for
each operation on an array would take longer than it saves. So this is compiled, over columns that are laid out once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.tree import ROOT, IntArray
from forerun.plan.calibration import DEPTHS, KINDS, Table, by_depth, corrected, count, kind_of, odds_of
from forerun.plan.costs import FloatArray


class Sheet(NamedTuple):
    """The nodes of all rows' trees, one behind the other; each column ``[n]``.

    Attributes:
        tokens: token ids.
        parents: where on the sheet; ``ROOT`` for none.
        rows: whose tree it is.
        depths: 1 under the root.
        odds: what its drafter says, under its parent; 0 where it says nothing.
        kinds: in a ``Table``.
        chances: that it is accepted; 0 where it cannot be.
        kept: its place in what is scored of its tree, or -1.
        order: nodes by their worth, best first.
        worth: of these.
    """

    tokens: IntArray
    parents: IntArray
    rows: IntArray
    depths: IntArray
    odds: FloatArray
    kinds: IntArray
    chances: FloatArray
    kept: IntArray
    order: IntArray
    worth: FloatArray

    @classmethod
    def allocate(cls, nodes: int) -> Sheet:
        """Room for so many nodes."""
        columns = {name: np.zeros(nodes, np.int64) for name in cls._fields}
        return cls(**columns)._replace(odds=np.zeros(nodes), chances=np.zeros(nodes), worth=np.zeros(nodes))  # type: ignore[arg-type]


@compiled
def enter(
    sheet: Sheet,
    table: Table,
    row: int,
    begin: int,
    tokens: IntArray,
    parents: IntArray,
    said: FloatArray,
    deepest: int,
    vocabulary: int,
) -> None:
    """Write a row's tree down, from ``begin`` on, with each node's chance.

    Args:
        said: the drafter's estimate that a node is accepted; empty if it says nothing.
        deepest: nodes below cannot be accepted, nor tokens outside of the vocabulary, nor what is under them.
        vocabulary: tokens that the target knows.
    """
    for node in range(len(tokens)):
        at, above = begin + node, begin + parents[node] if parents[node] != ROOT else ROOT
        depth = 1 if above == ROOT else sheet.depths[above] + 1
        chance = 1.0 if above == ROOT else sheet.chances[above]
        sheet.tokens[at], sheet.parents[at], sheet.rows[at], sheet.depths[at] = tokens[node], above, row, depth
        sheet.odds[at], sheet.kinds[at], sheet.kept[at] = 0.0, KINDS + min(depth, DEPTHS) - 1, -1
        if len(said):
            before = 1.0 if above == ROOT else max(said[parents[node]], 1e-12)
            sheet.odds[at] = odds_of(said[node] / before)
            sheet.kinds[at] = kind_of(sheet.odds[at])
            chance *= corrected(table, sheet.odds[at])
        else:
            chance *= by_depth(table, depth)
        possible = depth <= deepest and 0 <= tokens[node] < vocabulary
        sheet.chances[at] = chance if possible else 0.0


@compiled
def _sort(sheet: Sheet, end: int, reading: FloatArray, rate: float) -> int:
    """Put all nodes that can be accepted in the order of their worth, parents first; how many there are."""
    order, worth, size = sheet.order, sheet.worth, 0
    for node in range(end):
        if sheet.chances[node] <= 0.0:
            continue
        value = sheet.chances[node] - rate * reading[sheet.rows[node]]
        at = size
        while at > 0 and worth[at - 1] < value:
            order[at], worth[at] = order[at - 1], worth[at - 1]
            at -= 1
        order[at], worth[at] = node, value
        size += 1
    return size


@compiled
def choose(
    sheet: Sheet,
    end: int,
    curve: FloatArray,
    fed: int,
    reading: FloatArray,
    plain: float,
    sunk: float,
    lift: float,
    slope: float,
    rate: float,
) -> tuple[int, float, float]:
    """Keep the nodes that give the most tokens by cost.

    Args:
        end: of what was entered.
        curve: costs of passes over 0, 1, ... tokens with empty caches.
        fed: tokens of the pass besides nodes; one a row but where prompts are read.
        reading: what looking back costs a node of each row.
        plain: cost of the pass without nodes.
        sunk: what the step cost already.
        lift, slope: how much longer passes with nodes take: so many plain ones, and so many times what nodes add.
        rate: tokens by cost, of late; of a pass that reads a prompt only the nodes are ours to choose.

    Returns:
        How many are kept, how many tokens they are expected to give, and what they add to the pass by the curve.
    """
    size, rows = _sort(sheet, end, reading, rate), len(reading)
    decoding = fed == rows
    best, best_tokens, best_added = 0, 0.0, 0.0
    most = rows / (sunk + plain) if decoding else -rate * lift * plain
    tokens, looking = 0.0, 0.0
    for number in range(size):
        node = sheet.order[number]
        tokens += sheet.chances[node]
        looking += reading[sheet.rows[node]]
        added = curve[fed + number + 1] - curve[fed] + looking
        cost = lift * plain + slope * added
        value = (rows + tokens) / (sunk + cost) if decoding else tokens - rate * cost
        if value > most:
            most, best, best_tokens, best_added = value, number + 1, tokens, added
    for number in range(best):
        sheet.kept[sheet.order[number]] = 0
    return best, best_tokens, best_added


@compiled
def take(sheet: Sheet, begin: int, end: int, tokens: IntArray, parents: IntArray) -> int:
    """Copy what is kept of a row's tree; how many nodes there are."""
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
def learn(sheet: Sheet, table: Table, begin: int, end: int, tokens: IntArray, scored: bool) -> int:
    """Take in what a row's committed tokens say of its tree: those under the root and under nodes that came were put to
    the test, as far as the text is known.

    Args:
        scored: whether only nodes that were scored are.

    Returns:
        How many came.
    """
    came, right = sheet.order, 0  # how deep a node is that came, or 0
    for node in range(begin, end):
        above = sheet.parents[node]
        depth = 0 if above == ROOT else came[above]
        came[node] = 0
        if (above != ROOT and depth == 0) or depth >= len(tokens) or (scored and sheet.kept[node] < 0):
            continue
        if right == depth and sheet.tokens[node] == tokens[depth]:
            came[node] = depth + 1
            right += 1
        count(table, sheet.kinds[node], sheet.odds[node], came[node] > 0)
    return right
