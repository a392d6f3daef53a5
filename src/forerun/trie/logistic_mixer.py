"""Estimates how likely a token comes next, by logistic mixing as in the PAQ compressors (Mahoney, 2005).

1. Each piece of evidence has a *cell* (``candidates``), which learns how often tokens with such evidence came.
2. The log-odds of a candidate's cells are summed with *weights*, trained by gradient descent, one set per quality of
match: a long context makes short ones worth less.
3. A *correction* maps the sum to a probability, from how often candidates with that sum came.

No cell, weight or correction contains tokens.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.core.compiling import compiled
from forerun.trie.arrays import ORDERS, FloatArray
from forerun.trie.candidates import (
    BIAS,
    CELLS,
    COPIED,
    NOISY,
    NONE,
    RECYCLED,
    RECYCLED_ORDERS,
    CandidateTable,
    PositionEvidence,
    context_input,
)
from forerun.trie.tables import OWN, SHARED
from forerun.trie.token_store import UNWRITTEN

WEIGHT_COLUMNS = BIAS + 1

TEXT_SETS = 81
"""Weight sets for evidence from sequences: three classes each of longest contexts by source, copies and matches."""

SETS = 4 * TEXT_SETS
"""``TEXT_SETS`` for each class of recycled logits: no list; not on the list; on it after one token, or two."""

KNOTS = 33
"""Points of the correction: log-odds -8 to 8 in steps of 0.5."""

STEEPEST = 7.99

PRIOR_FILE = Path(__file__).with_name("prior.npy")

SLOWEST_CELL_RATE = 0.0003

CORRECTION_RATE = 0.01

LONG_COPY = 16
"""Copies that agree for at least this many tokens use a separate weight set."""


class Cells(NamedTuple):
    """Statistics of each kind of evidence, float32 ``[CELLS + 1]``; the last is for ``NONE`` (-1), with log-odds 0.

    Attributes:
        odds: log(chance / (1 - chance)).
        chance: how often tokens with such evidence came.
        changed: 1 while ``odds`` is older than ``chance``.
    """

    odds: npt.NDArray[np.float32]
    chance: npt.NDArray[np.float32]
    uses: npt.NDArray[np.float32]
    changed: npt.NDArray[np.float32]


class Mixer(NamedTuple):
    """Everything learned about evidence.

    Attributes:
        weights: of each input, by set; float64 ``[SETS, WEIGHT_COLUMNS]``.
        correction: probability at each knot, by set, and last the logistic function; float64 ``[SETS + 1, KNOTS]``.
    """

    cells: Cells
    weights: FloatArray
    correction: FloatArray

    def copy(self) -> Mixer:
        return Mixer(Cells(*(part.copy() for part in self.cells)), self.weights.copy(), self.correction.copy())


@compiled
def _knot(odds: float) -> float:
    return (min(max(odds, -STEEPEST), STEEPEST) + 8) * 2


@compiled
def corrected(mixer: Mixer, chosen: int, odds: float) -> float:
    """Return the final probability: the mean of the logistic function and the correction."""
    knot = _knot(odds)
    low = int(knot)
    table = mixer.correction
    left = table[chosen, low] + table[SETS, low]
    right = table[chosen, low + 1] + table[SETS, low + 1]
    return float(0.5 * (left + (right - left) * (knot - low)))


@compiled
def _weights_of(table: CandidateTable, number: int, evidence: PositionEvidence) -> int:
    found, copied = table.candidates[number], 0
    for source in range(2):
        if evidence.copies[source].token == found.token:
            copied = max(copied, 2 if evidence.copies[source].agreed >= LONG_COPY else 1)
    own, shared = found.longest[OWN], found.longest[SHARED]
    chosen = (min(own, 1) + (1 if own > 2 else 0)) * 9 + (min(shared, 1) + (1 if shared > 2 else 0)) * 3 + copied
    return int(chosen + 27 * found.match_class + TEXT_SETS * _listed_class(evidence, found.listed))


@compiled
def _listed_class(evidence: PositionEvidence, listed: int) -> int:
    """Return the class of recycled logits for a token on a list of order ``listed``, or on none (0)."""
    if evidence.unlisted[0] == NONE and evidence.unlisted[1] == NONE:
        return 0
    return 1 + listed


@compiled
def unmatched_by_text(chosen: int) -> bool:
    """Return whether a weight set is for tokens that only recycled logits predict."""
    return bool(chosen >= 2 * TEXT_SETS and chosen % TEXT_SETS == 0)


@compiled
def weights_unmatched(evidence: PositionEvidence) -> int:
    """Return the weight set for a token without context, copy, match or list."""
    return TEXT_SETS * _listed_class(evidence, 0)


@compiled
def weigh(mixer: Mixer, table: CandidateTable, evidence: PositionEvidence) -> None:
    """Compute each candidate's weight set, log-odds and probability."""
    for number in range(table.size[0]):
        chosen = _weights_of(table, number, evidence)
        odds = mixer.weights[chosen, BIAS]
        for at in range(evidence.inputs[0]):
            odds += mixer.weights[chosen, at] * mixer.cells.odds[table.cells[number, at]]
        found = table.candidates[number]
        odds += mixer.weights[chosen, NOISY] * found.noise
        found.weights, found.odds, found.chance = chosen, odds, corrected(mixer, chosen, odds)


@compiled
def odds_unmatched(mixer: Mixer, chosen: int, evidence: PositionEvidence) -> float:
    """Return the log-odds of a token without context, copy or match, before its frequency and recency."""
    odds = mixer.weights[chosen, BIAS]
    for order in range(RECYCLED_ORDERS):
        odds += mixer.weights[chosen, RECYCLED + order] * mixer.cells.odds[evidence.unlisted[order]]
    for source in range(2):
        for order in range(1, ORDERS + 1):
            absent = evidence.absent[source, order - 1]
            cell = absent.shorter if order == 1 else absent.unknown
            if cell != NONE:
                odds += mixer.weights[chosen, context_input(source, order)] * mixer.cells.odds[cell]
        if evidence.copies[source].token != UNWRITTEN:
            odds += mixer.weights[chosen, COPIED + source] * mixer.cells.odds[evidence.copies[source].cell]
    return float(odds)


@compiled
def _teach_correction(mixer: Mixer, chosen: int, odds: float, hit: float) -> None:
    knot = _knot(odds)
    low = int(knot)
    table = mixer.correction
    table[chosen, low] += (hit - table[chosen, low]) * (low + 1 - knot) * CORRECTION_RATE
    table[chosen, low + 1] += (hit - table[chosen, low + 1]) * (knot - low) * CORRECTION_RATE


@compiled
def _teach_candidate(mixer: Mixer, table: CandidateTable, inputs: int, number: int, hit: float, rate: float) -> None:
    odds, chosen = table.candidates[number].odds, table.candidates[number].weights
    cells, weights = mixer.cells, mixer.weights
    error = rate * (hit - 1 / (1 + math.exp(-min(max(odds, -20.0), 20.0))))
    _teach_correction(mixer, chosen, odds, hit)
    weights[chosen, BIAS] += error
    weights[chosen, NOISY] += error * table.candidates[number].noise
    for at in range(inputs):
        cell = table.cells[number, at]
        if cell != NONE:
            weights[chosen, at] += error * cells.odds[cell]
            cells.uses[cell] += 1
            step = max(1 / (cells.uses[cell] + 1.5), SLOWEST_CELL_RATE)
            cells.chance[cell] += (hit - cells.chance[cell]) * step
            cells.changed[cell] = 1


@compiled
def teach(mixer: Mixer, table: CandidateTable, inputs: int, token: int, rate: float) -> None:
    """Train on the token that came. Log-odds change last, so that all candidates of a position train on equal ones."""
    cells, size = mixer.cells, table.size[0]
    for number in range(size):
        _teach_candidate(mixer, table, inputs, number, 1.0 if table.candidates[number].token == token else 0.0, rate)
    for number in range(size):
        for at in range(inputs):
            cell = table.cells[number, at]
            if cell != NONE and cells.changed[cell] != 0:
                chance = min(max(cells.chance[cell], 1e-4), 1 - 1e-4)
                cells.chance[cell], cells.odds[cell] = chance, math.log(chance / (1 - chance))
                cells.changed[cell] = 0


def dump(mixer: Mixer) -> FloatArray:
    """Return everything learned as one vector."""
    return np.concatenate(
        [mixer.cells.chance[:CELLS], mixer.cells.uses[:CELLS], mixer.weights.ravel(), mixer.correction[:SETS].ravel()]
    )


def restore(learned: FloatArray) -> Mixer:
    """Restore a mixer from ``dump``'s vector; raise ValueError for another length or infinite values."""
    ends = np.cumsum([CELLS, CELLS, SETS * WEIGHT_COLUMNS, SETS * KNOTS])
    if len(learned) != ends[-1] or not np.isfinite(learned).all():
        raise ValueError("the learned weights have the wrong size, or are not finite")
    chances, uses, weights, correction = np.split(learned, ends[:-1])
    mixer = blank()
    cells = mixer.cells
    cells.chance[:CELLS] = chances.clip(1e-4, 1 - 1e-4)
    cells.odds[:] = np.log(cells.chance / (1 - cells.chance))
    cells.uses[:CELLS] = uses.clip(0)
    mixer.weights[:] = weights.reshape(SETS, WEIGHT_COLUMNS)
    mixer.correction[:SETS] = correction.reshape(SETS, KNOTS).clip(0, 1)
    return mixer


def prior() -> Mixer:
    """Return the bundled mixer, trained by ``python -m benchmarks learn-evidence``, then ``learn-recycled``."""
    return _load_prior().copy()


@functools.cache
def _load_prior() -> Mixer:
    try:
        return restore(np.load(PRIOR_FILE, allow_pickle=False).astype(np.float64))
    except ValueError as error:
        raise ValueError(
            f"{PRIOR_FILE}: {error}; run python -m benchmarks learn-evidence, then learn-recycled"
        ) from error


def blank() -> Mixer:
    """Return an untrained mixer; all weights are 0."""
    cells = Cells(*(np.zeros(CELLS + 1, np.float32) for _ in Cells._fields))
    cells.chance[NONE] = 0.5
    correction = np.tile(1 / (1 + np.exp(8 - np.arange(KNOTS) / 2)), (SETS + 1, 1))
    return Mixer(cells, np.zeros((SETS, WEIGHT_COLUMNS)), correction)
