"""What the trails foresee, put on the board: their tokens, and what their ways on were worth behind such tokens."""

from __future__ import annotations

import numpy as np

from forerun.core.tree import IntArray
from forerun.index.arrays import COUNT, FOLLOWER, ORDERS, TOTAL, VALUE, Index, find
from forerun.index.board import (
    AHEAD_OF,
    BIAS,
    CROSSING,
    INPUTS,
    NONE,
    TURN,
    WAY,
    WAY_CELLS,
    Board,
    Facts,
    candidate,
    cell_of,
    class_of_count,
    class_of_total,
)
from forerun.index.compiling import compiled
from forerun.index.history import UNWRITTEN, following, read
from forerun.index.spelling import spelled
from forerun.index.trail import (
    AHEAD,
    ASTRAY,
    AT,
    GAP,
    HEARD,
    INSIDE,
    JOINED,
    NEXT,
    OTHER,
    PROMPT,
    SPELLED,
    SPELT,
    SPELT_AHEAD,
    UNFORESEEN,
    WAYS,
    crossing,
    heard,
    next_on,
    trail_cell,
)


@compiled
def _way_cell(row: int, way: int, count: int, total: int, state: int) -> int:
    number = 2 * ORDERS + 1 + 2 * row + (1 if way == WAYS else 0)
    return cell_of(number, class_of_count(count), class_of_total(total), state)


@compiled
def look_around(own: Index, trails: IntArray, at: int, row: int, hashed: np.uint64, facts: Facts) -> None:
    """What a trail's ways on are worth, if it came by here before."""
    crossed = crossing(trails, at, row, hashed)
    slot = find(own, crossed) if crossed != 0 else 0
    total, value = own.slots[slot, TOTAL], own.slots[slot, VALUE]
    for way in range(WAYS + 1):
        facts.ways[row, way] = NONE if slot == 0 else _way_cell(row, way, 0, total, 0)
    if slot == 0:
        return
    block = -1 - value
    for entry in range(1, 2 if value >= 0 else own.blocks[block, FOLLOWER] + 1):
        way = value if value >= 0 else own.blocks[block + entry, FOLLOWER]
        count = total if value >= 0 else own.blocks[block + entry, COUNT]
        state = 2 if value >= 0 else 1 if entry == own.blocks[block, COUNT] else 0
        if way <= WAYS:  # else another context's hash is the same
            facts.ways[row, way] = _way_cell(row, way, count, total, state)


@compiled
def _foreseen(trails: IntArray, at: int, row: int, board: Board, token: int, kind: int, way_cell: int) -> None:
    """Put a token that a trail foresees on the board, unless it foresees it already."""
    number = candidate(board, token, True)
    if number == NONE or board.cells[number, WAY + row] != NONE:
        return
    joined, next_is = trails[at, row, JOINED], kind in (0, INSIDE, NEXT)
    board.cells[number, CROSSING + row] = way_cell
    board.cells[number, WAY + row] = WAY_CELLS + trail_cell(kind, joined, trails[at, row, GAP])
    board.names[number, AHEAD_OF] = max(board.names[number, AHEAD_OF], 2 if next_is and joined > HEARD else 1)


@compiled
def _foresee_row(own: Index, trails: IntArray, at: int, row: int, facts: Facts, board: Board) -> int:
    """Put what a trail foresees on the board; what it says of all other tokens."""
    position, ahead = trails[at, row, AT], 0
    if trails[at, row, SPELLED] != 0:
        inside = spelled(own.spelling, read(own, position), trails[at, row, SPELLED])
        _foreseen(trails, at, row, board, inside, INSIDE, NONE)
        return ASTRAY
    while ahead < (AHEAD if row == PROMPT else 1):
        said = next_on(own, trails, at, row, position)
        if said == UNWRITTEN:
            break
        _foreseen(trails, at, row, board, said, ahead if row == PROMPT else NEXT, facts.ways[row, ahead])
        spelt = spelled(own.spelling, said, 0) if row == PROMPT else UNWRITTEN
        if spelt != UNWRITTEN:
            kind = SPELT if ahead == 0 else SPELT_AHEAD
            _foreseen(trails, at, row, board, spelt, kind, facts.ways[row, AHEAD + ahead])
        position = following(own, position)
        ahead += 1
    return UNFORESEEN if row == PROMPT else OTHER


@compiled
def foresee(own: Index, trails: IntArray, at: int, hashed: np.uint64, facts: Facts, board: Board) -> None:
    """Put what the trails foresee on the board; ``hashed`` is of the last two tokens."""
    facts.trails[INPUTS] = TURN
    for row in range(2):
        facts.trails[row], facts.ways[row, WAYS] = NONE, NONE
        if heard(trails, at, row):
            facts.trails[INPUTS] = BIAS
            look_around(own, trails, at, row, hashed, facts)
            rest = _foresee_row(own, trails, at, row, facts, board)
            facts.trails[row] = WAY_CELLS + trail_cell(rest, trails[at, row, JOINED], trails[at, row, GAP])
