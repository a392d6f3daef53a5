"""How often a drafter is right, learnt from what became of its nodes.

What a drafter says of its nodes is corrected by what became of nodes like them: of equal log-odds under their parent,
or of equal depth if it says nothing. Old counts fade, so that the correction follows the text.

Trees are small and there is one at every step, so this is compiled: functions over arrays that are laid out once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.plan.costs import FloatArray

FIRST_GUESS = 0.8
"""Chance of a node under its parent, before a drafter that does not say has shown anything; it counts as one node."""
LOWEST, HIGHEST = -6, 8
"""Log-odds of what a drafter says, between which kinds are told apart by whole numbers."""
DOUBT = 2.0
"""Nodes that a drafter's own estimate counts for, against those that were seen."""
UNSEEN = 0.1
"""The same where kinds disagree about their order: one that was not seen has little to say about it."""
MEMORY = 0.97
"""What remains of what was seen after a step that had something to show."""

KINDS = HIGHEST - LOWEST + 1
DEPTHS = 24
_FURTHEST = 12.0  # log-odds that are told from certainty


class Table(NamedTuple):
    """Counts by kind, and what follows from them.

    Attributes:
        seen, came: nodes whose parent came, and those of them that came themselves; ``[KINDS + DEPTHS]``: by their
            log-odds, then by their depth.
        expected: how many the drafter thought would come, ``[KINDS]``.
        odds: what the log-odds of each kind are in truth, ``[KINDS]``; it never falls.
        pools: for ``settle``, ``[KINDS, 3]``.
    """

    seen: FloatArray
    came: FloatArray
    expected: FloatArray
    odds: FloatArray
    pools: FloatArray

    @classmethod
    def empty(cls) -> Table:
        """Nothing was seen."""
        counts = np.zeros(KINDS + DEPTHS), np.zeros(KINDS + DEPTHS), np.zeros(KINDS)
        return cls(*counts, np.arange(LOWEST, HIGHEST + 1, dtype=np.float64), np.zeros((KINDS, 3)))


@compiled
def chance_of(odds: float) -> float:
    """From log-odds."""
    return 1.0 / (1.0 + math.exp(-odds))


@compiled
def odds_of(chance: float) -> float:
    """Log-odds, within the bounds between which kinds are told apart."""
    furthest = 1.0 / (1.0 + math.exp(-_FURTHEST))
    within = min(max(chance, 1.0 - furthest), furthest)
    return min(max(math.log(within / (1.0 - within)), float(LOWEST)), float(HIGHEST))


@compiled
def kind_of(odds: float) -> int:
    """The kind of a node whose drafter says so."""
    return round(odds) - LOWEST


@compiled
def corrected(table: Table, odds: float) -> float:
    """The chance of a node under its parent where its drafter says these log-odds.

    Each kind is corrected by a shift of its own; the result stays on its side of the middle to the next kind.
    """
    kind, true = kind_of(odds), table.odds
    shifted = odds + true[kind] - (kind + LOWEST)
    if kind > 0:
        shifted = max(shifted, (true[kind - 1] + true[kind]) / 2)
    if kind < KINDS - 1:
        shifted = min(shifted, (true[kind] + true[kind + 1]) / 2)
    return chance_of(shifted)


@compiled
def by_depth(table: Table, depth: int) -> float:
    """The chance of a node under its parent, of which nothing is said but its depth."""
    at = KINDS + min(depth, DEPTHS) - 1
    return float((table.came[at] + FIRST_GUESS) / (table.seen[at] + 1))


@compiled
def count(table: Table, kind: int, odds: float, came: bool) -> None:
    """Take in a node whose parent came."""
    table.seen[kind] += 1
    table.came[kind] += came
    if kind < KINDS:
        table.expected[kind] += chance_of(odds)


@compiled
def settle(table: Table) -> None:
    """Work out what the counts say of the log-odds.

    Each kind's correction is the log-odds of what came less those of what was expected, both with the drafter's own
    estimate as so many nodes. Kinds that were found in the wrong order are taken as one, so that what a drafter thinks
    likelier is never thought less likely here (isotonic regression).
    """
    pools, size = table.pools, 0
    for kind in range(KINDS):
        own, seen = DOUBT * chance_of(kind + LOWEST), table.seen[kind] + DOUBT
        came, expected = table.came[kind] + own, table.expected[kind] + own
        value = kind + LOWEST + math.log(came / (seen - came) * (seen - expected) / expected)
        weight, members = table.seen[kind] + UNSEEN, 1.0
        while size > 0 and pools[size - 1, 0] > value:
            size -= 1
            before, heavy = pools[size, 0], pools[size, 1]
            value = (before * heavy + value * weight) / (heavy + weight)
            weight, members = heavy + weight, members + pools[size, 2]
        pools[size, 0], pools[size, 1], pools[size, 2] = value, weight, members
        size += 1
    kind = 0
    for pool in range(size):
        for _ in range(int(pools[pool, 2])):
            table.odds[kind] = pools[pool, 0]
            kind += 1


@compiled
def forget(table: Table) -> None:
    """Let old counts fade."""
    for kind in range(len(table.seen)):
        table.seen[kind] *= MEMORY
        table.came[kind] *= MEMORY
    for kind in range(KINDS):
        table.expected[kind] *= MEMORY
