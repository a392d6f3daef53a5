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
    Index,
    Int32Array,
    find,
    mix,
)
from forerun.index.compiling import compiled
from forerun.index.history import FAR, UNWRITTEN
from forerun.tree import IntArray

COUNTS, TOTALS, STATES = 9, 10, 3
"""Classes of a follower's count (the last: unknown to the shorter context too), a context's, and a follower's state:
others came later, it came last, it is the only one."""

LENGTHS, MISSES = 8, 4
"""Classes of the agreement before a copy and of what it got wrong lately."""

COMMON, RANKS = 16, 6
"""Classes of a token's frequency and of how long ago it was seen."""

CONTEXT = COUNTS * TOTALS * STATES

COPY_CELLS = 2 * ORDERS * CONTEXT

TOKEN_CELLS = COPY_CELLS + 2 * LENGTHS * MISSES * 2

CELLS = TOKEN_CELLS + 2 * COMMON * RANKS

COPY, ALONE, BIAS = 2 * ORDERS, 2 * ORDERS + 2, 2 * ORDERS + 4

ROOM = 64
"""Candidates of one position at most."""

WIDTH = 24
"""Followers of one context that are looked at."""

ENOUGH = 24
"""With so many candidates, those that nothing but their frequency speaks for are left out."""

NONE = -1

TOKEN, OWN, SHARED = range(3)
"""Columns of ``Board.names``."""

SIZE = 256
"""Entry of ``Board.seen`` that holds the number of candidates."""


class Board(NamedTuple):
    """The candidates of one position.

    Attributes:
        names: token and order of the longest context that it followed, own and shared; int64 ``[ROOM, 3]``.
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
        names, cells = np.zeros((ROOM, 3), np.int64), np.zeros((ROOM, BIAS), np.int32)
        return cls(names, cells, np.zeros((ROOM, 3)), np.zeros(SIZE + 1, np.int32))


class Facts(NamedTuple):
    """What all candidates of one position share.

    Attributes:
        missing: cells of contexts that a candidate did not follow, by source and order: known to the next shorter one
            (0), not even to that (1), or followed but not found among the most frequent (2); int32 ``[2, ORDERS, 3]``.
        copies: token that each copy says, cell of its saying another, agreement; int64 ``[2, 3]``.
    """

    missing: Int32Array
    copies: IntArray

    @classmethod
    def allocate(cls) -> Facts:
        """Room for them."""
        return cls(np.zeros((2, ORDERS, 3), np.int32), np.zeros((2, 3), np.int64))


SAID, ELSE, AGREED = range(3)
"""Columns of ``Facts.copies``."""


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
    for at in range(BIAS):
        board.cells[number, at] = NONE
    return int(number)


@compiled
def _note(board: Board, source: int, order: int, token: int, cell: int, fresh: bool) -> None:
    number = candidate(board, token, fresh)
    if number != NONE:
        board.cells[number, source * ORDERS + order - 1] = cell
        if board.names[number, OWN + source] < order:
            board.names[number, OWN + source] = order


@compiled
def _followers(index: Index, slot: int, source: int, order: int, facts: Facts, board: Board, least: float) -> None:
    """Put what followed a context on the board; new ones only if ``least`` is a share that they can reach."""
    number, value = source * ORDERS + order - 1, index.slots[slot, VALUE]
    total = index.slots[slot, TOTAL]
    total_class = _total_class(total)
    facts.missing[source, order - 1, 0] = _cell(number, 0, total_class, 0)
    facts.missing[source, order - 1, 1] = _cell(number, COUNTS - 1, total_class, 0)
    facts.missing[source, order - 1, 2] = _cell(number, 1, total_class, 0)
    if value >= 0:
        _note(board, source, order, value, _cell(number, _count_class(total), total_class, 2), True)
        return
    block, blocks = -1 - value, index.blocks
    last = blocks[block, COUNT]
    for entry in range(1, min(blocks[block, FOLLOWER], WIDTH) + 1):
        count = blocks[block + entry, COUNT]
        if count <= least * total and entry != last:  # those behind are rarer still
            break
        cell = _cell(number, _count_class(count), total_class, 1 if entry == last else 0)
        _note(board, source, order, blocks[block + entry, FOLLOWER], cell, count > least * total)
    if last > WIDTH:
        cell = _cell(number, _count_class(blocks[block + last, COUNT]), total_class, 1)
        _note(board, source, order, blocks[block + last, FOLLOWER], cell, True)


@compiled
def gather(
    own: Index,
    shared: Index,
    slots: Int32Array,
    at: int,
    facts: Facts,
    board: Board,
    lowest: int,
    least: float,
) -> None:
    """What the copies say and all that followed the contexts ``slots[at]``, from the longest to those of ``lowest``."""
    clear(board)
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
    for source in range(2):
        if facts.copies[source, SAID] != UNWRITTEN:
            candidate(board, facts.copies[source, SAID], True)


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
