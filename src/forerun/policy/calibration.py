"""Calibration: correct a drafter's stated probability by how often nodes with similar log-odds were accepted. Nodes
without one are grouped by depth. Old counts fade. Compiled, over arrays that are allocated once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.policy.cost_curve import FloatArray

FIRST_GUESS = 0.8
"""Acceptance probability of a node after an accepted parent, if none is stated, before any was counted."""
LOWEST_ODDS, HIGHEST_ODDS = -6, 8
"""Nodes are grouped by their stated log-odds, rounded to integers in this range."""
STATEMENT_WEIGHT = 2.0
"""Weight of a drafter's own statement, in counted nodes."""
MEMORY = 0.97
"""Factor by which counts fade at each step with nodes: a half-life of 23 steps."""
AGREEMENT = 0.2
"""A drafting model's token of probability p is first assumed to be accepted with probability p to this power: where the
model is unsure, the target often agrees."""

ODDS_GROUPS = HIGHEST_ODDS - LOWEST_ODDS + 1
DEPTH_GROUPS = 24
_NONE = 1e-9  # weight of a group without nodes
_FURTHEST = 12.0  # log-odds beyond which a probability counts as certain


class CalibrationTable(NamedTuple):
    """Counts by group, and log-odds derived from them.

    Attributes:
        seen, right: nodes whose parent was accepted, and the accepted ones among them, by stated log-odds and then by
            depth, ``[ODDS_GROUPS + DEPTH_GROUPS]``.
        expected: how many the drafter expected to be accepted, ``[ODDS_GROUPS]``.
        odds: each group's calibrated log-odds, ``[ODDS_GROUPS]``, never falling.
        pools: scratch memory of ``fit_odds``, ``[ODDS_GROUPS, 3]``.
    """

    seen: FloatArray
    right: FloatArray
    expected: FloatArray
    odds: FloatArray
    pools: FloatArray

    @classmethod
    def empty(cls) -> CalibrationTable:
        counts = np.zeros(ODDS_GROUPS + DEPTH_GROUPS), np.zeros(ODDS_GROUPS + DEPTH_GROUPS), np.zeros(ODDS_GROUPS)
        return cls(*counts, np.arange(LOWEST_ODDS, HIGHEST_ODDS + 1, dtype=np.float64), np.zeros((ODDS_GROUPS, 3)))


@compiled
def chance_of(odds: float) -> float:
    """Convert log-odds to a probability."""
    return 1.0 / (1.0 + math.exp(-odds))


@compiled
def odds_of(chance: float) -> float:
    """Convert a probability to log-odds within the groups' range; NaN to the lowest."""
    furthest = 1.0 / (1.0 + math.exp(-_FURTHEST))
    within = min(chance, furthest) if chance > 1.0 - furthest else 1.0 - furthest
    return min(max(math.log(within / (1.0 - within)), float(LOWEST_ODDS)), float(HIGHEST_ODDS))


@compiled
def group_of(odds: float) -> int:
    """Return the group of a node with these stated log-odds."""
    return round(odds) - LOWEST_ODDS


@compiled
def calibrated(table: CalibrationTable, odds: float) -> float:
    """Return the acceptance probability of a node with these stated log-odds, after an accepted parent, shifted as its
    group is, but not across the midpoint to a neighbour."""
    group, true = group_of(odds), table.odds
    shifted = odds + true[group] - (group + LOWEST_ODDS)
    if group > 0:
        shifted = max(shifted, (true[group - 1] + true[group]) / 2)
    if group < ODDS_GROUPS - 1:
        shifted = min(shifted, (true[group] + true[group + 1]) / 2)
    return chance_of(shifted)


@compiled
def chance_at_depth(table: CalibrationTable, depth: int) -> float:
    """Return the acceptance probability of a node by its depth alone, after an accepted parent."""
    at = ODDS_GROUPS + min(depth, DEPTH_GROUPS) - 1
    return float((table.right[at] + FIRST_GUESS) / (table.seen[at] + 1))


@compiled
def count(table: CalibrationTable, group: int, odds: float, right: bool) -> None:
    """Count a node whose parent was accepted."""
    table.seen[group] += 1
    table.right[group] += right
    if group < ODDS_GROUPS:
        table.expected[group] += chance_of(odds)


@compiled
def fit_odds(table: CalibrationTable) -> None:
    """Derive each group's calibrated log-odds from those of its accepted and expected shares. Groups out of order are
    merged (isotonic regression), so what a drafter states to be likelier never ranks lower."""
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
    """Fade old counts by ``MEMORY``."""
    for group in range(len(table.seen)):
        table.seen[group] *= MEMORY
        table.right[group] *= MEMORY
    for group in range(ODDS_GROUPS):
        table.expected[group] *= MEMORY


class ChainConfidence:
    """Decides where a chain ends: calibrates a drafting model's own probabilities by acceptance."""

    def __init__(self) -> None:
        self._table = CalibrationTable.empty()

    def chance(self, probability: float) -> float:
        """Return the acceptance probability of a token with this model probability, after accepted ones."""
        return float(calibrated(self._table, odds_of(probability**AGREEMENT)))

    def learn(self, probabilities: Sequence[float], accepted: int) -> None:
        """Update from a verified chain, of which the first ``accepted`` tokens were accepted."""
        tested = probabilities[: accepted + 1]
        if not tested:
            return
        forget(self._table)
        for depth, probability in enumerate(tested):
            odds = odds_of(probability**AGREEMENT)
            count(self._table, group_of(odds), odds, depth < accepted)
        fit_odds(self._table)
