"""The candidates of one position, what speaks for each, and the cells that know what such evidence was worth.

A cell belongs to one kind of evidence: a context's order, source and counts, a copy's agreement, a trail's state. What
they learn is in ``mixing.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.tree import IntArray
from forerun.index.arrays import ORDERS, FloatArray, Int32Array
from forerun.index.compiling import compiled
from forerun.index.trail import TRAIL_CELLS, WAYS

COUNTS, TOTALS, STATES = 9, 10, 3
"""Classes of a follower's count (the last: unknown to the shorter context too), a context's, and a follower's state:
others came later, it came last, it is the only one."""

COUNT_CLASSES = np.searchsorted([0, 1, 2, 3, 5, 10, 30], np.arange(32))
TOTAL_CLASSES = np.searchsorted([0, 1, 2, 3, 4, 6, 10, 20, 60], np.arange(62))

LENGTHS, MISSES = 8, 4
"""Classes of the agreement before a copy and of what it got wrong lately."""

COMMON, RANKS = 16, 6
"""Classes of a token's frequency and of how long ago it was seen."""

CONTEXT = COUNTS * TOTALS * STATES

COPY_CELLS = (2 * ORDERS + 5) * CONTEXT

TOKEN_CELLS = COPY_CELLS + 2 * LENGTHS * MISSES * 2

WAY_CELLS = TOKEN_CELLS + 2 * COMMON * RANKS

CELLS = WAY_CELLS + TRAIL_CELLS

COPY, ALONE, TURN, CROSSING, WAY = 2 * ORDERS, 2 * ORDERS + 2, 2 * ORDERS + 4, 2 * ORDERS + 5, 2 * ORDERS + 7

BIAS = WAY + 2

ROOM = 64
"""Candidates of one position at most."""

NONE = -1

TOKEN, OWN, SHARED, AHEAD_OF = range(4)
"""Columns of ``Board.names``."""

SIZE = 256
"""Entry of ``Board.seen`` that holds the number of candidates."""


class Board(NamedTuple):
    """The candidates of one position.

    Attributes:
        names: token, order of the longest context that it followed, own and shared, and whether a trail foresees it
            or its stand-in (1), or is sure of it (2); int64 ``[ROOM, 4]``.
        cells: cell of each input or ``NONE``, int32 ``[ROOM, BIAS]``.
        result: probability, log-odds before the correction, and set; float64 ``[ROOM, 3]``.
        seen: number of a candidate plus one by hash of its token, and their number; int32 ``[SIZE + 1]``.
    """

    names: IntArray
    cells: Int32Array
    result: FloatArray
    seen: Int32Array

    @classmethod
    def allocate(cls) -> Board:
        """An empty board."""
        names, cells = np.zeros((ROOM, 4), np.int64), np.zeros((ROOM, BIAS), np.int32)
        return cls(names, cells, np.zeros((ROOM, 3)), np.zeros(SIZE + 1, np.int32))


class Facts(NamedTuple):
    """What all candidates of one position share.

    Attributes:
        missing: cells of contexts that a candidate did not follow, by source and order: known to the next shorter one
            (0), not even to that (1), or followed but not found among the most frequent (2); int32
            ``[2, ORDERS + 1, 3]``, of which ``[0, ORDERS]`` is that of what the prompt's trail says.
        ways: cells of each trail's ways on, or ``NONE``; int32 ``[2, WAYS + 1]``.
        copies: token that each copy says, cell of its saying another, agreement; int64 ``[2, 3]``.
        trails: cell of what each does not foresee, and inputs to look at: those of trails are the last; int64 ``[3]``.
    """

    missing: Int32Array
    ways: Int32Array
    copies: IntArray
    trails: IntArray

    @classmethod
    def allocate(cls) -> Facts:
        """Room for them."""
        missing, ways = np.zeros((2, ORDERS + 1, 3), np.int32), np.full((2, WAYS + 1), NONE, np.int32)
        return cls(missing, ways, np.zeros((2, 3), np.int64), np.full(3, NONE, np.int64))


SAID, ELSE, AGREED = range(3)
"""Columns of ``Facts.copies``."""

INPUTS = 2
"""Entry of ``Facts.trails``."""


@compiled
def class_of_count(count: int) -> int:
    """Of ``COUNTS``."""
    return int(COUNT_CLASSES[min(count, len(COUNT_CLASSES) - 1)])


@compiled
def class_of_total(total: int) -> int:
    """Of ``TOTALS``."""
    return int(TOTAL_CLASSES[min(total, len(TOTAL_CLASSES) - 1)])


@compiled
def cell_of(number: int, count_class: int, total_class: int, state: int) -> int:
    """The cell of a context's evidence; ``number`` is that of its source and order, or of what stands for one."""
    return ((number * COUNTS + count_class) * TOTALS + total_class) * STATES + state


@compiled
def clear(board: Board) -> None:
    """Take all candidates off."""
    for at in range(SIZE + 1):
        board.seen[at] = 0


@compiled
def candidate(board: Board, token: int, fresh: bool) -> int:
    """The number of a token on the board, put there if ``fresh``; or ``NONE``."""
    at = (token * 40503 >> 4) & (SIZE - 1)
    while board.seen[at] != 0:
        if board.names[board.seen[at] - 1, TOKEN] == token:
            return int(board.seen[at] - 1)
        at = (at + 1) & (SIZE - 1)
    number = board.seen[SIZE]
    if not fresh or number == ROOM:
        return NONE
    board.seen[at] = number + 1
    board.seen[SIZE] += 1
    board.names[number, TOKEN], board.names[number, OWN], board.names[number, SHARED] = token, 0, 0
    board.names[number, AHEAD_OF] = 0
    for at in range(BIAS):
        board.cells[number, at] = NONE
    return int(number)
