"""Where drafts are worked out: memory that is laid out once, since compiled functions here allocate nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.core.tree import IntArray
from forerun.index.arrays import ORDERS, FloatArray, HashArray, Index, Int32Array, find
from forerun.index.board import AGREED, ELSE, SAID, Board, Facts
from forerun.index.compiling import compiled
from forerun.index.evidence import copy_cell
from forerun.index.history import UNWRITTEN, read
from forerun.index.place import DEPTH, LENGTH, POSITION, WRONG, Place
from forerun.index.trail import COLUMNS


class Desk(NamedTuple):
    """Where drafts are worked out; what the functions here leave on it means nothing to the next.

    Attributes:
        hashes: of the contexts at the root (row 0) and each node, uint64 ``[n + 1, 2, ORDERS + 1]``.
        slots: of the same contexts, int32 ``[n + 1, 2, ORDERS + 1]``.
        copies: where copies stand, and in ``[:, 0, DEPTH]`` the node's depth; int64 ``[n + 1, 2, 4]``.
        trails: where trails stand, int64 ``[n + 1, 2, COLUMNS]``.
        chances: of the frontier's candidates, likeliest first from ``ends[0]`` to ``ends[1]``; float64 ``[2 n + 1]``.
        entries: token, parent and best orders of each, packed; int64 ``[2 n + 1]``.
        ends: int64 ``[2]``.
        found: candidates of the node at hand.
        alone: tokens seen last, whose place does not depend on the node.
        facts: of the node at hand.
    """

    hashes: HashArray
    slots: Int32Array
    copies: IntArray
    trails: IntArray
    chances: FloatArray
    entries: IntArray
    ends: IntArray
    found: Board
    alone: Board
    facts: Facts

    @classmethod
    def allocate(cls, budget: int) -> Desk:
        """Room for drafts of up to ``budget`` nodes."""
        return cls(
            np.zeros((budget + 1, 2, ORDERS + 1), np.uint64),
            np.zeros((budget + 1, 2, ORDERS + 1), np.int32),
            np.zeros((budget + 1, 2, 4), np.int64),
            np.zeros((budget + 1, 2, COLUMNS), np.int64),
            np.zeros(2 * budget + 1),
            np.zeros(2 * budget + 1, np.int64),
            np.zeros(2, np.int64),
            Board.allocate(),
            Board.allocate(),
            Facts.allocate(),
        )


class Draft(NamedTuple):
    """The draft: int64, int64 and float64, ``[budget]``; ``ROOT`` marks what follows the context directly."""

    tokens: IntArray
    parents: IntArray
    probability: npt.NDArray[np.float64]


@compiled
def look(
    own: Index, shared: Index, hashes: HashArray, slots: Int32Array, at: int, least: int, own_most: int, most: int
) -> None:
    """The slots of a node's contexts from one order up to the given ones; those of others count for nothing."""
    for order in range(1, ORDERS + 1):
        slots[at, 0, order] = find(own, hashes[at, 0, order]) if least <= order <= own_most else 0
        slots[at, 1, order] = find(shared, hashes[at, 1, order]) if least <= order <= most else 0


@compiled
def hear(index: Index, source: int, copies: IntArray, at: int, facts: Facts) -> None:
    """What a copy says."""
    position, length = copies[at, source, POSITION], copies[at, source, LENGTH]
    facts.copies[source, SAID] = UNWRITTEN if position == 0 else read(index, position)
    facts.copies[source, ELSE] = copy_cell(source, length, copies[at, source, WRONG])
    facts.copies[source, AGREED] = length


@compiled
def stand(own: Index, shared: Index, place: Place, desk: Desk) -> None:
    """Make the text's end the root."""
    for source in range(2):
        for order in range(ORDERS + 1):
            desk.hashes[0, source, order] = place.hashes[source, order]
        for column in range(3):
            desk.copies[0, source, column] = place.copies[0, source, column]
        for column in range(COLUMNS):
            desk.trails[0, source, column] = place.trails[0, source, column]
    desk.copies[0, 0, DEPTH] = 0
    look(own, shared, desk.hashes, desk.slots, 0, 1, ORDERS, ORDERS)
