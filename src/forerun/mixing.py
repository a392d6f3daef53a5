"""How likely a token comes next: evidence from every context and source, mixed by what it was worth before.

Indirect logistic mixing as in the PAQ compressors (Mahoney, 2005): each piece of evidence (a context's order, its
source, how often it occurred, how often the token followed) owns a cell that learns how often such evidence was right.
The cells' log-odds are added with weights that are learned too, one set for each quality of match, and a last table
corrects the result. Nothing here holds text.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.contexts import COUNT, FOLLOWER, ORDERS, TOTAL, VALUE, Index, Int32Array, compiled
from forerun.history import FAR, UNWRITTEN
from forerun.tree import IntArray

PRIOR = Path(__file__).with_name("prior.npz")
ORDER = ("chances", "seen", "weights", "correction")

FloatArray = npt.NDArray[np.float64]

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
INPUTS = BIAS + 1
"""Inputs: contexts of own and shared text by order, two copies, the token itself by source, and a constant."""
SETS = 27
KNOTS = 33
"""Points of the final correction, every half a unit of log-odds from -8."""
ROOM = 64
"""Candidates of one position at most."""
WIDTH = 32
"""Followers of one context that are looked at."""
ENOUGH = 24
"""With so many candidates, those that nothing but their frequency speaks for are left out."""
SLOWEST = 0.0003
"""Least rate at which a cell changes."""
NONE = -1

STRETCHED, CHANCE, SEEN, STAMP = range(4)
TOKEN, OWN, SHARED = range(3)
"""Columns of ``Board.names``."""
LIKELY, ODDS, SET = range(3)
"""Columns of ``Board.result``."""
SIZE = 256
"""Entry of ``Board.seen`` that holds the number of candidates."""


class Mixer(NamedTuple):
    """What was learned.

    Attributes:
        cells: log-odds, probability and uses of each piece of evidence, and a stamp; float64 ``[4, CELLS]``.
        weights: float64 ``[SETS, INPUTS]``.
        correction: probability at each knot, float64 ``[SETS + 1, KNOTS]``; the last row is the logistic function.
    """

    cells: FloatArray
    weights: FloatArray
    correction: FloatArray


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
            return board.seen[at] - 1
        at = (at + 1) & (SIZE - 1)
    number = board.seen[SIZE]
    if not fresh or number == ROOM:
        return NONE
    board.seen[at] = number + 1
    board.seen[SIZE] += 1
    board.names[number, TOKEN], board.names[number, OWN], board.names[number, SHARED] = token, 0, 0
    for at in range(BIAS):
        board.cells[number, at] = NONE
    return number


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
        cell = _cell(number, _count_class(count), total_class, 1 if entry == last else 0)
        _note(board, source, order, blocks[block + entry, FOLLOWER], cell, count > least * total)
    if last > WIDTH:
        cell = _cell(number, _count_class(blocks[block + last, COUNT]), total_class, 1)
        _note(board, source, order, blocks[block + last, FOLLOWER], cell, True)


@compiled
def gather(
    own: Index, shared: Index, slots: Int32Array, at: int, facts: Facts, board: Board, lowest: int, least: float
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
def corrected(mixer: Mixer, chosen: int, odds: float) -> float:
    """The final probability: half logistic, half as it turned out before."""
    knot = (min(max(odds, -7.99), 7.99) + 8) * 2
    low = int(knot)
    table = mixer.correction
    left = table[chosen, low] + table[SETS, low]
    right = table[chosen, low + 1] + table[SETS, low + 1]
    return 0.5 * (left + (right - left) * (knot - low))


@compiled
def weigh(mixer: Mixer, board: Board, number: int, facts: Facts) -> float:
    """The probability of a candidate, noted on the board with what led to it."""
    token, copied = board.names[number, TOKEN], 0
    for source in range(2):
        if facts.copies[source, SAID] == token:
            copied = max(copied, 2 if facts.copies[source, AGREED] >= 16 else 1)
    own, shared = board.names[number, OWN], board.names[number, SHARED]
    chosen = (min(own, 1) + (1 if own > 2 else 0)) * 9 + (min(shared, 1) + (1 if shared > 2 else 0)) * 3 + copied
    odds = mixer.weights[chosen, BIAS]
    for at in range(BIAS):
        cell = board.cells[number, at]
        if cell != NONE:
            odds += mixer.weights[chosen, at] * mixer.cells[STRETCHED, cell]
    likely = corrected(mixer, chosen, odds)
    board.result[number, LIKELY], board.result[number, ODDS], board.result[number, SET] = likely, odds, chosen
    return likely


@compiled
def odds_alone(mixer: Mixer, facts: Facts) -> float:
    """The log-odds of a token that only its frequency speaks for, but for that."""
    odds = mixer.weights[0, BIAS]
    for source in range(2):
        for order in range(1, ORDERS + 1):
            cell = facts.missing[source, order - 1, 0 if order == 1 else 1]
            if cell != NONE:
                odds += mixer.weights[0, source * ORDERS + order - 1] * mixer.cells[STRETCHED, cell]
        if facts.copies[source, SAID] != UNWRITTEN:
            odds += mixer.weights[0, COPY + source] * mixer.cells[STRETCHED, facts.copies[source, ELSE]]
    return odds


@compiled
def _correct(mixer: Mixer, chosen: int, odds: float, hit: float) -> None:
    knot = (min(max(odds, -7.99), 7.99) + 8) * 2
    low = int(knot)
    table = mixer.correction
    table[chosen, low] += (hit - table[chosen, low]) * (low + 1 - knot) * 0.01
    table[chosen, low + 1] += (hit - table[chosen, low + 1]) * (knot - low) * 0.01


@compiled
def _teach(mixer: Mixer, board: Board, number: int, hit: float, rate: float) -> None:
    """Learn from one candidate, which came (1) or did not (0)."""
    odds, chosen, cells = board.result[number, ODDS], int(board.result[number, SET]), mixer.cells
    error = rate * (hit - 1 / (1 + math.exp(-min(max(odds, -20.0), 20.0))))
    _correct(mixer, chosen, odds, hit)
    mixer.weights[chosen, BIAS] += error
    for at in range(BIAS):
        cell = board.cells[number, at]
        if cell != NONE:
            mixer.weights[chosen, at] += error * cells[STRETCHED, cell]
            cells[SEEN, cell] += 1
            step = max(1 / (cells[SEEN, cell] + 1.5), SLOWEST)
            cells[CHANCE, cell] += (hit - cells[CHANCE, cell]) * step
            cells[STAMP, cell] = 1


@compiled
def teach(mixer: Mixer, board: Board, token: int, rate: float) -> None:
    """Learn from what came."""
    cells, size = mixer.cells, board.seen[SIZE]
    for number in range(size):
        _teach(mixer, board, number, 1.0 if board.names[number, TOKEN] == token else 0.0, rate)
    for number in range(size):
        for at in range(BIAS):
            cell = board.cells[number, at]
            if cell != NONE and cells[STAMP, cell] != 0:
                chance = min(max(cells[CHANCE, cell], 1e-4), 1 - 1e-4)
                cells[CHANCE, cell], cells[STRETCHED, cell] = chance, math.log(chance / (1 - chance))
                cells[STAMP, cell] = 0


def trained() -> Mixer:
    """A mixer as it comes with the package, or an untrained one where there is none."""
    if not PRIOR.exists():
        return untrained()
    with np.load(PRIOR) as stored:
        mixer = restore(np.concatenate([stored[name].astype(np.float64).ravel() for name in ORDER]))
    assert mixer is not None, f"{PRIOR} does not fit this version"
    return mixer


def dump(mixer: Mixer) -> FloatArray:
    """What was learned, as one vector."""
    return np.concatenate([mixer.cells[CHANCE], mixer.cells[SEEN], mixer.weights.ravel(), mixer.correction[:SETS].ravel()])


def restore(learned: FloatArray) -> Mixer | None:
    """The mixer of a vector, or None if it cannot be one."""
    ends = np.cumsum([CELLS, CELLS, SETS * INPUTS, SETS * KNOTS])
    if len(learned) != ends[-1] or not np.isfinite(learned).all():
        return None
    chances, seen, weights, correction = np.split(learned, ends[:-1])
    mixer = untrained()
    mixer.cells[CHANCE] = chances.clip(1e-4, 1 - 1e-4)
    mixer.cells[STRETCHED] = np.log(mixer.cells[CHANCE] / (1 - mixer.cells[CHANCE]))
    mixer.cells[SEEN] = seen.clip(0)
    mixer.weights[:] = weights.reshape(SETS, INPUTS)
    mixer.correction[:SETS] = correction.reshape(SETS, KNOTS).clip(0, 1)
    return mixer


def untrained() -> Mixer:
    """A mixer that expects what relative frequencies suggest."""
    counts = np.array([0, 1, 2, 3, 4.5, 8, 20, 60, 0])[:, None]
    totals = np.maximum(np.array([0, 1, 2, 3, 4, 5.5, 8, 15, 40, 150]), np.maximum(counts, 1))
    contexts = np.where(counts > 0, (counts - 0.6) / (totals + 0.3), 0.03 / (totals + 1)).clip(0.002, 0.95)
    cells = np.full((4, CELLS), 0.01)
    cells[CHANCE, :COPY_CELLS] = np.tile(np.repeat(contexts.ravel(), STATES), 2 * ORDERS)
    says = np.where(np.arange(TOKEN_CELLS - COPY_CELLS) % 2, 0.7, 0.005)
    cells[CHANCE, COPY_CELLS:TOKEN_CELLS] = says
    cells[STRETCHED] = np.log(cells[CHANCE] / (1 - cells[CHANCE]))
    cells[SEEN:] = 0
    weights = np.full((SETS, INPUTS), 0.3)
    weights[:, BIAS] = 0
    weights[:, ALONE:BIAS] = 0.3
    correction = np.tile(1 / (1 + np.exp(8 - np.arange(KNOTS) / 2)), (SETS + 1, 1))
    return Mixer(cells, weights, correction)
