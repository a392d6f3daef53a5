"""How likely a token comes next: evidence from every context and source, mixed by what it was worth before.

Indirect logistic mixing as in the PAQ compressors (Mahoney, 2005): each piece of evidence (a context's order, its
source, how often it occurred, how often the token followed) owns a cell that learns how often such evidence was right.
The cells' log-odds are added with weights that are learned too, one set for each quality of match, and a last table
corrects the result. Nothing here holds text.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.index.arrays import ORDERS, FloatArray
from forerun.index.board import (
    AGREED,
    AHEAD_OF,
    ALONE,
    BIAS,
    CELLS,
    CONTEXT,
    COPY,
    COPY_CELLS,
    COUNTS,
    CROSSING,
    ELSE,
    INPUTS,
    MISSES,
    NONE,
    OWN,
    SAID,
    SHARED,
    SIZE,
    STATES,
    TOKEN,
    TOKEN_CELLS,
    TOTALS,
    TURN,
    WAY_CELLS,
    Board,
    Facts,
)
from forerun.index.compiling import compiled
from forerun.index.history import UNWRITTEN
from forerun.index.trail import AHEAD, GAPS, JOINS, KINDS

ALL = BIAS + 1
"""Inputs: contexts by order in own and shared text, what a trail says, copies, the token itself, trails, a constant."""

SETS = 81

KNOTS = 33
"""Points of the final correction, every half a unit of log-odds from -8."""

PRIOR = Path(__file__).with_name("prior.npy")
"""What was learned on other texts."""

SLOWEST = 0.0003
"""Least rate at which a cell changes."""

STRETCHED, CHANCE, SEEN, STAMP = range(4)

LIKELY, ODDS, SET = range(3)
"""Columns of ``Board.result``."""


class Mixer(NamedTuple):
    """What was learned.

    Attributes:
        cells: log-odds, probability and uses of each piece of evidence, and a stamp; float32
            ``[4, CELLS + 1]``; the last column, which ``NONE`` stands for too, says nothing.
        weights: float64 ``[SETS, ALL]``.
        correction: probability at each knot, float64 ``[SETS + 1, KNOTS]``; the last row is the logistic function.
    """

    cells: npt.NDArray[np.float32]
    weights: FloatArray
    correction: FloatArray

    def copy(self) -> Mixer:
        """The same, to learn on from."""
        return Mixer(self.cells.copy(), self.weights.copy(), self.correction.copy())


@compiled
def corrected(mixer: Mixer, chosen: int, odds: float) -> float:
    """The final probability: half logistic, half as it turned out before."""
    knot = (min(max(odds, -7.99), 7.99) + 8) * 2
    low = int(knot)
    table = mixer.correction
    left = table[chosen, low] + table[SETS, low]
    right = table[chosen, low + 1] + table[SETS, low + 1]
    return float(0.5 * (left + (right - left) * (knot - low)))


@compiled
def weigh(mixer: Mixer, board: Board, number: int, facts: Facts) -> float:
    """The probability of a candidate, noted on the board with what led to it."""
    token, copied = board.names[number, TOKEN], 0
    for source in range(2):
        if facts.copies[source, SAID] == token:
            copied = max(copied, 2 if facts.copies[source, AGREED] >= 16 else 1)
    own, shared = board.names[number, OWN], board.names[number, SHARED]
    chosen = (min(own, 1) + (1 if own > 2 else 0)) * 9 + (min(shared, 1) + (1 if shared > 2 else 0)) * 3 + copied
    chosen += 27 * board.names[number, AHEAD_OF]
    odds = mixer.weights[chosen, BIAS]
    for at in range(facts.trails[INPUTS]):
        odds += mixer.weights[chosen, at] * mixer.cells[STRETCHED, board.cells[number, at]]
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
    return float(odds)


@compiled
def _correct(mixer: Mixer, chosen: int, odds: float, hit: float) -> None:
    knot = (min(max(odds, -7.99), 7.99) + 8) * 2
    low = int(knot)
    table = mixer.correction
    table[chosen, low] += (hit - table[chosen, low]) * (low + 1 - knot) * 0.01
    table[chosen, low + 1] += (hit - table[chosen, low + 1]) * (knot - low) * 0.01


@compiled
def _teach(mixer: Mixer, board: Board, inputs: int, number: int, hit: float, rate: float) -> None:
    """Learn from one candidate, which came (1) or did not (0)."""
    odds, chosen, cells = board.result[number, ODDS], int(board.result[number, SET]), mixer.cells
    error = rate * (hit - 1 / (1 + math.exp(-min(max(odds, -20.0), 20.0))))
    _correct(mixer, chosen, odds, hit)
    mixer.weights[chosen, BIAS] += error
    for at in range(inputs):
        cell = board.cells[number, at]
        if cell != NONE:
            mixer.weights[chosen, at] += error * cells[STRETCHED, cell]
            cells[SEEN, cell] += 1
            step = max(1 / (cells[SEEN, cell] + 1.5), SLOWEST)
            cells[CHANCE, cell] += (hit - cells[CHANCE, cell]) * step
            cells[STAMP, cell] = 1


@compiled
def teach(mixer: Mixer, board: Board, inputs: int, token: int, rate: float) -> None:
    """Learn from what came."""
    cells, size = mixer.cells, board.seen[SIZE]
    for number in range(size):
        _teach(mixer, board, inputs, number, 1.0 if board.names[number, TOKEN] == token else 0.0, rate)
    for number in range(size):
        for at in range(inputs):
            cell = board.cells[number, at]
            if cell != NONE and cells[STAMP, cell] != 0:
                chance = min(max(cells[CHANCE, cell], 1e-4), 1 - 1e-4)
                cells[CHANCE, cell], cells[STRETCHED, cell] = chance, math.log(chance / (1 - chance))
                cells[STAMP, cell] = 0


def dump(mixer: Mixer) -> FloatArray:
    """What was learned, as one vector."""
    return np.concatenate(
        [mixer.cells[CHANCE, :CELLS], mixer.cells[SEEN, :CELLS], mixer.weights.ravel(), mixer.correction[:SETS].ravel()]
    )


def restore(learned: FloatArray) -> Mixer | None:
    """The mixer of a vector, or None if it cannot be one."""
    ends = np.cumsum([CELLS, CELLS, SETS * ALL, SETS * KNOTS])
    if len(learned) != ends[-1] or not np.isfinite(learned).all():
        return None
    chances, seen, weights, correction = np.split(learned, ends[:-1])
    mixer = untrained()
    mixer.cells[CHANCE, :CELLS] = chances.clip(1e-4, 1 - 1e-4)
    mixer.cells[STRETCHED] = np.log(mixer.cells[CHANCE] / (1 - mixer.cells[CHANCE]))
    mixer.cells[SEEN, :CELLS] = seen.clip(0)
    mixer.weights[:] = weights.reshape(SETS, ALL)
    mixer.correction[:SETS] = correction.reshape(SETS, KNOTS).clip(0, 1)
    return mixer


def prior() -> Mixer:
    """A mixer that starts from what was learned on other texts (``benchmarks/learn_evidence.py``)."""
    return _learned().copy()


@functools.cache
def _learned() -> Mixer:
    mixer = restore(np.load(PRIOR, allow_pickle=False).astype(np.float64))
    if mixer is None:
        raise ValueError(f"{PRIOR} is not what this program learned; run benchmarks/learn_evidence.py")
    return mixer


def untrained() -> Mixer:
    """A mixer that expects what relative frequencies suggest."""
    counts = np.array([0, 1, 2, 3, 4.5, 8, 20, 60, 0])[:, None]
    totals = np.maximum(np.array([0.5, 1, 2, 3, 4, 5.5, 8, 15, 40, 150]), np.maximum(counts, 1))
    cells = np.full((4, CELLS + 1), 0.01)
    contexts = cells[CHANCE, : 2 * ORDERS * CONTEXT].reshape(2, ORDERS, COUNTS, TOTALS, STATES)
    for order, discount in enumerate((0.58, 0.45, 0.4, 0.33)):
        share = np.where(counts > 0, (counts - discount) / (totals + 0.2), 0.03 * (order + 1) / (totals + 1))
        share[-1] = 0.015 / (totals[-1] + 1)
        contexts[:, order] = share.clip(0.002, 0.95)[..., None]
    cells[CHANCE, 2 * ORDERS * CONTEXT : COPY_CELLS] = np.tile(contexts[0, 1].ravel(), 5)
    agreed = np.array([0.3, 0.4, 0.6, 0.75, 0.85, 0.92, 0.97, 0.99])[:, None] * 0.9 ** np.arange(MISSES)
    says = np.stack([(1 - agreed) / 50, agreed], axis=-1)
    cells[CHANCE, COPY_CELLS:TOKEN_CELLS] = np.tile(says.ravel(), 2)
    ways = cells[CHANCE, WAY_CELLS:CELLS].reshape(KINDS, JOINS, GAPS)
    expected = [*(0.2 * 0.4 ** np.arange(AHEAD)), 0.1, 0.05, 0.9, 0.02, 0.005, 0.4, 0.02]  # in the order of the kinds
    ways[:] = np.array(expected)[:, None, None]
    ways[0, :, 0] = 0.6
    cells[CHANCE, NONE] = 0.5
    cells[STRETCHED] = np.log(cells[CHANCE] / (1 - cells[CHANCE]))
    cells[SEEN:] = 0
    weights = np.full((SETS, ALL), 0.3)
    weights[:, BIAS] = 0
    weights[18:, BIAS] = weights[6:9, BIAS] = weights[15:18, BIAS] = 0.3  # a context of three or more tokens
    weights[0, ALONE:BIAS] = 0.5
    weights[9:12, ORDERS:COPY] = 0.2
    weights[18:21, ORDERS:COPY] = 0.1
    weights[2::3, COPY:ALONE] = 0.9  # a long copy says the candidate
    weights[:, TURN:BIAS] = 0.1
    weights[27:] = np.tile(weights[:27], (2, 1))
    weights[54:, CROSSING:BIAS] = 0.6  # a trail is sure of it
    correction = np.tile(1 / (1 + np.exp(8 - np.arange(KNOTS) / 2)), (SETS + 1, 1))
    return Mixer(cells.astype(np.float32), weights, correction)
