"""What speaks for each token that may come next: the candidates of one position, and the cells that know its worth.

Candidates are what followed the last one to ``ORDERS`` tokens, in the request's own text (source 0) and in the
namespace's (source 1), what the two copies say, and the tokens seen last.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from forerun.index.arrays import (
    COUNT,
    FOLLOWER,
    ORDERS,
    TOKENS,
    TOTAL,
    VALUE,
    FloatArray,
    HashArray,
    Index,
    Int32Array,
    find,
    mix,
)
from forerun.index.compiling import compiled
from forerun.index.history import FAR, UNWRITTEN, following, read
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
    OUTPUT,
    PROMPT,
    SPELLED,
    SPELT,
    SPELT_AHEAD,
    TRAIL_CELLS,
    UNFORESEEN,
    WAYS,
    crossing,
    heard,
    next_on,
    trail_cell,
    turn,
)
from forerun.tree import IntArray

COUNTS, TOTALS, STATES = 9, 10, 3
"""Classes of a follower's count (the last: unknown to the shorter context too), a context's, and a follower's state:
others came later, it came last, it is the only one."""

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

WIDTH = 24
"""Followers of one context that are looked at."""

ENOUGH = 24
"""With so many candidates, those that nothing but their frequency speaks for are left out."""

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
def _count_class(count: int) -> int:
    if count <= 3:
        return count
    return 4 if count <= 5 else 5 if count <= 10 else 6 if count <= 30 else 7


@compiled
def _total_class(total: int) -> int:
    if total <= 4:
        return total
    return 5 if total <= 6 else 6 if total <= 10 else 7 if total <= 20 else 8 if total <= 60 else 9


@compiled
def _cell(number: int, count_class: int, total_class: int, state: int) -> int:
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


@compiled
def _note(board: Board, at: int, source: int, order: int, token: int, cell: int, fresh: bool) -> None:
    number = candidate(board, token, fresh)
    if number != NONE:
        board.cells[number, at] = cell
        if at == TURN:
            board.names[number, AHEAD_OF] = max(board.names[number, AHEAD_OF], 1)
        elif board.names[number, OWN + source] < order:
            board.names[number, OWN + source] = order


@compiled
def _followers(index: Index, slot: int, source: int, order: int, facts: Facts, board: Board, least: float) -> None:
    """Put what followed a context on the board; new ones only if ``least`` is a share that they can reach."""
    turned = order > ORDERS
    number = 2 * ORDERS if turned else source * ORDERS + order - 1
    at = TURN if turned else number
    value, total = index.slots[slot, VALUE], index.slots[slot, TOTAL]
    total_class = _total_class(total)
    facts.missing[source, order - 1, 0] = _cell(number, 0, total_class, 0)
    facts.missing[source, order - 1, 1] = _cell(number, COUNTS - 1, total_class, 0)
    facts.missing[source, order - 1, 2] = _cell(number, 1, total_class, 0)
    if value >= 0:
        _note(board, at, source, order, value, _cell(number, _count_class(total), total_class, 2), True)
        return
    block, blocks = -1 - value, index.blocks
    last = blocks[block, COUNT]
    for entry in range(1, min(blocks[block, FOLLOWER], WIDTH) + 1):
        count = blocks[block + entry, COUNT]
        if count <= least * total and entry != last:  # those behind are rarer still
            break
        cell = _cell(number, _count_class(count), total_class, 1 if entry == last else 0)
        _note(board, at, source, order, blocks[block + entry, FOLLOWER], cell, count > least * total)
    if last > WIDTH:
        cell = _cell(number, _count_class(blocks[block + last, COUNT]), total_class, 1)
        _note(board, at, source, order, blocks[block + last, FOLLOWER], cell, True)


@compiled
def _way_cell(row: int, way: int, count: int, total: int, state: int) -> int:
    number = 2 * ORDERS + 1 + 2 * row + (1 if way == WAYS else 0)
    return _cell(number, _count_class(count), _total_class(total), state)


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
def _foresee(
    own: Index, trails: IntArray, at: int, hashed: np.uint64, facts: Facts, board: Board, least: float
) -> None:
    """Put what the trails foresee, and what came instead of such tokens, on the board."""
    facts.trails[INPUTS] = TURN
    for row in range(2):
        facts.trails[row], facts.ways[row, WAYS] = NONE, NONE
        if heard(trails, at, row):
            facts.trails[INPUTS] = BIAS
            look_around(own, trails, at, row, hashed, facts)
            rest = _foresee_row(own, trails, at, row, facts, board)
            facts.trails[row] = WAY_CELLS + trail_cell(rest, trails[at, row, JOINED], trails[at, row, GAP])
    turned = turn(own, trails, at)
    slot = find(own, turned) if turned != 0 else 0
    facts.missing[0, ORDERS, 0] = NONE
    if slot != 0:
        _followers(own, slot, 0, ORDERS + 1, facts, board, least)


@compiled
def gather(
    own: Index,
    shared: Index,
    hashes: HashArray,
    slots: Int32Array,
    trails: IntArray,
    at: int,
    facts: Facts,
    board: Board,
    lowest: int,
    least: float,
) -> None:
    """What the copies and the trails say, and what followed the contexts ``slots[at]`` of no less than ``lowest``."""
    clear(board)
    _foresee(own, trails, at, hashes[at, 0, 2], facts, board, least)
    for source in range(2):
        if facts.copies[source, SAID] != UNWRITTEN:
            candidate(board, facts.copies[source, SAID], True)
    for order in range(ORDERS, 0, -1):
        for source in range(2):
            slot = slots[at, source, order]
            if slot == 0 or order < lowest:
                for kind in range(3):
                    facts.missing[source, order - 1, kind] = NONE
            elif source == 0:
                _followers(own, slot, 0, order, facts, board, least)
            else:
                _followers(shared, slot, 1, order, facts, board, least)


@compiled
def copy_cell(source: int, length: int, misses: int) -> int:
    """The cell of a copy that says another token than the candidate; the next is that of its saying the candidate."""
    wrong = 0
    for bit in range(8):
        wrong += (misses >> bit) & 1
    if length < 16:
        agreed = 0 if length < 3 else 1 if length < 6 else 2 if length < 9 else 3 if length < 12 else 4
    else:
        agreed = 5 if length < 24 else 6 if length < FAR else 7
    return COPY_CELLS + ((source * LENGTHS + agreed) * MISSES + min(wrong, MISSES - 1)) * 2


@compiled
def complete(board: Board, number: int, facts: Facts) -> None:
    """Fill in the evidence of contexts that a candidate did not follow, or was not found behind, and of copies."""
    for source in range(2):
        best = board.names[number, OWN + source]
        for order in range(1, ORDERS + 1):
            at = source * ORDERS + order - 1
            if board.cells[number, at] == NONE:
                kind = 2 if order < best else 0 if order == best + 1 else 1
                board.cells[number, at] = facts.missing[source, order - 1, kind]
        said = facts.copies[source, SAID]
        if said != UNWRITTEN:
            says = 1 if said == board.names[number, TOKEN] else 0
            board.cells[number, COPY + source] = facts.copies[source, ELSE] + says
    if facts.trails[INPUTS] == TURN:
        return
    for row in range(2):
        if board.cells[number, CROSSING + row] == NONE:
            board.cells[number, CROSSING + row] = facts.ways[row, WAYS]
    if board.cells[number, WAY + OUTPUT] == NONE:
        board.cells[number, WAY + OUTPUT] = facts.trails[OUTPUT]
    if board.cells[number, TURN] == NONE:
        board.cells[number, TURN] = facts.missing[0, ORDERS, 0]
        if board.cells[number, WAY + PROMPT] == NONE:
            board.cells[number, WAY + PROMPT] = facts.trails[PROMPT]


@compiled
def _common(index: Index, source: int, token: int) -> int:
    """Class of a token's frequency."""
    slot = find(index, mix(np.uint64(0), token))
    if slot == 0:
        return 0
    share = 8000 * index.slots[slot, TOTAL] / (index.state[TOKENS] + 10)
    return min(max(int(1.5 * math.log(share)) + 2, 1), COMMON - 1)


@compiled
def _rank_class(rank: int) -> int:
    return 0 if rank < 2 else 1 if rank < 6 else 2 if rank < 12 else 3 if rank < 24 else 4


@compiled
def _recent(index: Index, source: int, board: Board, first: int) -> None:
    for rank in range(len(index.recent)):
        if index.recent[rank] < 0:
            break
        number = candidate(board, index.recent[rank], True)
        if number >= first:
            board.cells[number, ALONE + source] = _rank_class(rank)


@compiled
def gather_alone(own: Index, shared: Index, board: Board) -> None:
    """Put the tokens seen last on the board, with what their frequency says."""
    first = board.seen[SIZE]
    _recent(own, 0, board, first)
    _recent(shared, 1, board, first)
    for number in range(first, board.seen[SIZE]):
        for source in range(2):
            token, rank = board.names[number, TOKEN], board.cells[number, ALONE + source]
            common = _common(own, 0, token) if source == 0 else _common(shared, 1, token)
            rank = RANKS - 1 if rank == NONE else rank
            board.cells[number, ALONE + source] = TOKEN_CELLS + (source * COMMON + common) * RANKS + rank
