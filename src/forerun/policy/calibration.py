"""Calibration: how often drafted nodes are right in truth, learned from the nodes before.

A drafter may state a node's probability. It is corrected by how often nodes of similar stated log-odds were right.
Where a drafter states nothing, nodes are grouped by depth. Old counts fade, so that the correction follows the text.

There is a tree at every step, so this is compiled: functions over arrays that are allocated once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.policy.cost_curve import FloatArray

FIRST_GUESS = 0.8
"""Chance of a node whose parent is right, for a drafter that states nothing, before anything was seen. It counts as
one node."""
LOWEST_ODDS, HIGHEST_ODDS = -6, 8
"""Nodes are grouped by their stated log-odds, rounded to whole numbers in this range."""
STATEMENT_WEIGHT = 2.0
"""Weight of a drafter's own statement, in seen nodes."""
MEMORY = 0.97
"""The factor by which counts fade at each step with nodes: half is left after 23 of them."""

ODDS_GROUPS = HIGHEST_ODDS - LOWEST_ODDS + 1
DEPTH_GROUPS = 24
_NONE = 1e-9  # the weight of a group without nodes
_FURTHEST = 12.0  # log-odds beyond which a chance counts as certain


class CalibrationTable(NamedTuple):
    """Counts by group, and what follows from them.

    Attributes:
        seen, right: nodes whose parent was right, and the right ones among them, by stated log-odds and then by depth,
            ``[ODDS_GROUPS + DEPTH_GROUPS]``.
        expected: how many of them the drafter expected to be right, ``[ODDS_GROUPS]``.
        odds: the true log-odds of each group, ``[ODDS_GROUPS]``; never falling.
        pools: scratch memory of ``settle``, ``[ODDS_GROUPS, 3]``.
    """

    seen: FloatArray
    right: FloatArray
    expected: FloatArray
    odds: FloatArray
    pools: FloatArray

    @classmethod
    def empty(cls) -> CalibrationTable:
        """Without counts."""
        counts = np.zeros(ODDS_GROUPS + DEPTH_GROUPS), np.zeros(ODDS_GROUPS + DEPTH_GROUPS), np.zeros(ODDS_GROUPS)
        return cls(*counts, np.arange(LOWEST_ODDS, HIGHEST_ODDS + 1, dtype=np.float64), np.zeros((ODDS_GROUPS, 3)))


@compiled
def chance_of(odds: float) -> float:
    """The probability with these log-odds."""
    return 1.0 / (1.0 + math.exp(-odds))


@compiled
def odds_of(chance: float) -> float:
    """The log-odds of a probability, within the range of the groups; the lowest for what is no number."""
    furthest = 1.0 / (1.0 + math.exp(-_FURTHEST))
    within = min(chance, furthest) if chance > 1.0 - furthest else 1.0 - furthest
    return min(max(math.log(within / (1.0 - within)), float(LOWEST_ODDS)), float(HIGHEST_ODDS))


@compiled
def group_of(odds: float) -> int:
    """The group of a node with these stated log-odds."""
    return round(odds) - LOWEST_ODDS


@compiled
def calibrated(table: CalibrationTable, odds: float) -> float:
    """The chance of a node with these stated log-odds, if its parent is right.

    Each group has its own shift. The result stays on its group's side of the middle between neighbouring groups.
    """
    group, true = group_of(odds), table.odds
    shifted = odds + true[group] - (group + LOWEST_ODDS)
    if group > 0:
        shifted = max(shifted, (true[group - 1] + true[group]) / 2)
    if group < ODDS_GROUPS - 1:
        shifted = min(shifted, (true[group] + true[group + 1]) / 2)
    return chance_of(shifted)


@compiled
def chance_at_depth(table: CalibrationTable, depth: int) -> float:
    """The chance of a node of which only the depth is known, if its parent is right."""
    at = ODDS_GROUPS + min(depth, DEPTH_GROUPS) - 1
    return float((table.right[at] + FIRST_GUESS) / (table.seen[at] + 1))


@compiled
def count(table: CalibrationTable, group: int, odds: float, right: bool) -> None:
    """Count a node whose parent was right."""
    table.seen[group] += 1
    table.right[group] += right
    if group < ODDS_GROUPS:
        table.expected[group] += chance_of(odds)


@compiled
def settle(table: CalibrationTable) -> None:
    """Work out each group's true log-odds from the counts.

    A group's shift is the log-odds of how many nodes were right, less those of how many were expected to be. Groups in
    the wrong order are merged (isotonic regression): what a drafter states to be likelier is never ranked lower.
    """
    pools, size = table.pools, 0
    for group in range(ODDS_GROUPS):
        own, seen = STATEMENT_WEIGHT * chance_of(group + LOWEST_ODDS), table.seen[group] + STATEMENT_WEIGHT
        right, expected = table.right[group] + own, table.expected[group] + own
        value = group + LOWEST_ODDS + math.log(right / (seen - right) * (seen - expected) / expected)
        weight, members = max(table.seen[group], _NONE), 1.0
        while size > 0 and pools[size - 1, 0] > value:
            size -= 1
            before, heavy = pools[size, 0], pools[size, 1]
            value = (before * heavy + value * weight) / (heavy + weight)
            weight, members = heavy + weight, members + pools[size, 2]
        pools[size, 0], pools[size, 1], pools[size, 2] = value, weight, members
        size += 1
    group = 0
    for pool in range(size):
        for _ in range(int(pools[pool, 2])):
            table.odds[group] = pools[pool, 0]
            group += 1


@compiled
def forget(table: CalibrationTable) -> None:
    """Let old counts fade."""
    for group in range(len(table.seen)):
        table.seen[group] *= MEMORY
        table.right[group] *= MEMORY
    for group in range(ODDS_GROUPS):
        table.expected[group] *= MEMORY
