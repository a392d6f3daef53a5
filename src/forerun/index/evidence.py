"""What speaks for each token that may come next.

Candidates are what followed the last one to ``ORDERS`` tokens, in the request's own text (source 0) and in the
namespace's (source 1), what the two copies and the trails say, and the tokens seen last.
"""

from __future__ import annotations

import math

import numpy as np

from forerun.core.tree import IntArray
from forerun.index.arrays import (
    COUNT,
    FOLLOWER,
    ORDERS,
    TOKENS,
    TOTAL,
    VALUE,
    HashArray,
    Index,
    Int32Array,
    find,
    mix,
)
from forerun.index.board import (
    AHEAD_OF,
    ALONE,
    COMMON,
    COPY,
    COPY_CELLS,
    COUNTS,
    CROSSING,
    ELSE,
    INPUTS,
    LENGTHS,
    MISSES,
    NONE,
    OWN,
    RANKS,
    SAID,
    SIZE,
    TOKEN,
    TOKEN_CELLS,
    TURN,
    WAY,
    Board,
    Facts,
    candidate,
    cell_of,
    class_of_count,
    class_of_total,
    clear,
)
from forerun.index.compiling import compiled
from forerun.index.foresight import foresee
from forerun.index.history import FAR, UNWRITTEN
from forerun.index.trail import OUTPUT, PROMPT, WAYS, turn

WIDTH = 24
"""Followers of one context that are looked at."""

ENOUGH = 24
"""With so many candidates, those that nothing but their frequency speaks for are left out."""


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
    total_class = class_of_total(total)
    facts.missing[source, order - 1, 0] = cell_of(number, 0, total_class, 0)
    facts.missing[source, order - 1, 1] = cell_of(number, COUNTS - 1, total_class, 0)
    facts.missing[source, order - 1, 2] = cell_of(number, 1, total_class, 0)
    if value >= 0:
        _note(board, at, source, order, value, cell_of(number, class_of_count(total), total_class, 2), True)
        return
    block, blocks = -1 - value, index.blocks
    last = blocks[block, COUNT]
    for entry in range(1, min(blocks[block, FOLLOWER], WIDTH) + 1):
        count = blocks[block + entry, COUNT]
        if count <= least * total and entry != last:  # those behind are rarer still
            break
        cell = cell_of(number, class_of_count(count), total_class, 1 if entry == last else 0)
        _note(board, at, source, order, blocks[block + entry, FOLLOWER], cell, count > least * total)
    if last > WIDTH:
        cell = cell_of(number, class_of_count(blocks[block + last, COUNT]), total_class, 1)
        _note(board, at, source, order, blocks[block + last, FOLLOWER], cell, True)


@compiled
def _turns(own: Index, trails: IntArray, at: int, facts: Facts, board: Board, least: float) -> None:
    """Put what came instead of what the prompt's trail says on the board."""
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
    least: float,
) -> None:
    """What the copies and the trails say, and what followed the contexts ``slots[at]``."""
    clear(board)
    foresee(own, trails, at, hashes[at, 0, 2], facts, board)
    _turns(own, trails, at, facts, board, least)
    for source in range(2):
        if facts.copies[source, SAID] != UNWRITTEN:
            candidate(board, facts.copies[source, SAID], True)
    for order in range(ORDERS, 0, -1):
        for source in range(2):
            slot = slots[at, source, order]
            if slot == 0:
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
