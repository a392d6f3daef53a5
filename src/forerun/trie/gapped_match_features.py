"""The evidence of trails: candidates that they foresee, and what their ways on were worth after such tokens."""

from __future__ import annotations

import numpy as np

from forerun.core.compiling import compiled
from forerun.trie.arrays import Index, find
from forerun.trie.candidates import (
    AHEAD_CELLS,
    AHEAD_ON,
    BIAS,
    CAME_LAST,
    CROSSED,
    CROSSING_GROUP,
    NONE,
    ONLY_ONE,
    OTHERS_SINCE,
    STAND_IN,
    CandidateTable,
    Facts,
    candidate,
    cell_of,
    class_of_count,
    class_of_total,
)
from forerun.trie.gapped_match import (
    AHEAD,
    ASTRAY,
    HEARD,
    INSIDE,
    NEXT,
    OTHER,
    SPELT,
    SPELT_AHEAD,
    UNFORESEEN,
    WAYS,
    crossing,
    heard,
    next_on,
    trail_cell,
)
from forerun.trie.spelling import spelled
from forerun.trie.tables import PROMPT, RecordArray
from forerun.trie.token_store import UNWRITTEN, following, read


@compiled
def _way_cell(row: int, way: int, count: int, total: int, state: int) -> int:
    group = CROSSING_GROUP + 2 * row + (1 if way == WAYS else 0)
    return cell_of(group, class_of_count(count), class_of_total(total), state)


@compiled
def look_around(own: Index, trail: np.record, row: int, hashed: np.uint64, facts: Facts) -> None:
    """Fill in ``Facts.ways``: how often each way on was taken after the last two tokens, whose hash is ``hashed``."""
    crossed = crossing(trail, row, hashed)
    slot = find(own, crossed) if crossed != 0 else 0
    total, value = own.slots[slot].total, own.slots[slot].value
    for way in range(WAYS + 1):
        facts.ways[row, way] = NONE if slot == 0 else _way_cell(row, way, 0, total, OTHERS_SINCE)
    if slot == 0:
        return
    block = -1 - value
    for entry in range(1, 2 if value >= 0 else own.blocks[block].followers + 1):
        way = value if value >= 0 else own.blocks[block + entry].token
        count = total if value >= 0 else own.blocks[block + entry].count
        state = ONLY_ONE if value >= 0 else CAME_LAST if entry == own.blocks[block].last else OTHERS_SINCE
        if way <= WAYS:  # otherwise it is a token: another context has the same hash
            facts.ways[row, way] = _way_cell(row, way, count, total, state)


@compiled
def _foreseen(trail: np.record, row: int, board: CandidateTable, token: int, kind: int, way_cell: int) -> None:
    """Make a foreseen token a candidate, unless the trail foresaw it nearer already."""
    number = candidate(board, token, True)
    if number == NONE or board.cells[number, AHEAD_ON + row] != NONE:
        return
    sure = kind in (0, INSIDE, NEXT) and trail.resumed > HEARD
    board.cells[number, CROSSED + row] = way_cell
    board.cells[number, AHEAD_ON + row] = AHEAD_CELLS + trail_cell(kind, trail.resumed, trail.gap)
    board.candidates[number].foreseen = max(board.candidates[number].foreseen, 2 if sure else 1)


@compiled
def _foresee_row(own: Index, trail: np.record, row: int, facts: Facts, board: CandidateTable) -> int:
    """Make what a trail foresees candidates; the kind of evidence that it is for all other tokens."""
    position, ahead = trail.position, 0
    if trail.spelled != 0:
        inside = spelled(own.spelling, read(own, position), trail.spelled)
        _foreseen(trail, row, board, inside, INSIDE, NONE)
        return ASTRAY
    while ahead < (AHEAD if row == PROMPT else 1):
        said = next_on(own, trail, row, position)
        if said == UNWRITTEN:
            break
        _foreseen(trail, row, board, said, ahead if row == PROMPT else NEXT, facts.ways[row, ahead])
        spelt = spelled(own.spelling, said, 0) if row == PROMPT else UNWRITTEN
        if spelt != UNWRITTEN:
            kind = SPELT if ahead == 0 else SPELT_AHEAD
            _foreseen(trail, row, board, spelt, kind, facts.ways[row, AHEAD + ahead])
        position = following(own, position)
        ahead += 1
    return UNFORESEEN if row == PROMPT else OTHER


@compiled
def foresee(own: Index, trails: RecordArray, node: int, hashed: np.uint64, facts: Facts, board: CandidateTable) -> None:
    """Make what a node's trails foresee candidates; ``hashed`` is of its last two tokens."""
    facts.inputs[0] = STAND_IN
    for row in range(2):
        trail = trails[node, row]
        facts.unforeseen[row], facts.ways[row, WAYS] = NONE, NONE
        if heard(trail):
            facts.inputs[0] = BIAS
            look_around(own, trail, row, hashed, facts)
            rest = _foresee_row(own, trail, row, facts, board)
            facts.unforeseen[row] = AHEAD_CELLS + trail_cell(rest, trail.resumed, trail.gap)
