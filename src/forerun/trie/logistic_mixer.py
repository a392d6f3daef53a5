"""How likely a token comes next: all evidence for it, mixed by how much each kind of evidence was worth before.

This is logistic mixing as in the PAQ compressors (Mahoney, 2005), in three steps:

1. Each piece of evidence has a *cell* (``candidates``). It learns how often tokens with such evidence came.
2. The log-odds of a candidate's cells are added up, each with a *weight*. Weights are learned too, by gradient descent.
   There is one set of them for each quality of match, because a long context makes the short ones worth less.
3. A *correction* maps the sum to a probability. It learns how often candidates with that sum came.

Nothing here holds text.
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
"""Columns of ``Mixer.weights``: the inputs, and the constant."""

TEXT_SETS = 81
"""Sets of weights for what texts say: three classes each of the longest own and shared context, copies and matches."""

SETS = 4 * TEXT_SETS
"""Rows of ``Mixer.weights``: a set for each class of recycled logits, too. There are none, they do not list the token,
they list it behind one token, or behind two."""

KNOTS = 33
"""Points of the correction: log-odds from -8 to 8 in steps of a half."""

STEEPEST = 7.99
"""Log-odds beyond this are corrected as if they were this."""

PRIOR_FILE = Path(__file__).with_name("prior.npy")
"""What was learned on other texts."""

SLOWEST_CELL_RATE = 0.0003
"""Least rate at which a cell's chance changes."""

CORRECTION_RATE = 0.01
"""Rate at which the correction changes."""

LONG_COPY = 16
"""Tokens of agreement from which on a copy makes a set of weights of its own."""


class Cells(NamedTuple):
    """What is known of each kind of evidence.

    The last entry is for ``NONE`` (-1): it has log-odds 0, which adds nothing.

    Attributes:
        odds: logarithm of chance / (1 - chance), float32 ``[CELLS + 1]``.
        chance: how often tokens with such evidence came, float32 ``[CELLS + 1]``.
        uses: how often that was seen, float32 ``[CELLS + 1]``.
        changed: 1 while ``odds`` is older than ``chance``, float32 ``[CELLS + 1]``.
    """

    odds: npt.NDArray[np.float32]
    chance: npt.NDArray[np.float32]
    uses: npt.NDArray[np.float32]
    changed: npt.NDArray[np.float32]


class Mixer(NamedTuple):
    """What was learned.

    Attributes:
        cells: see ``Cells``.
        weights: of each input, by set; float64 ``[SETS, WEIGHT_COLUMNS]``.
        correction: probability at each knot, by set; float64 ``[SETS + 1, KNOTS]``. The last row is the logistic
            function.
    """

    cells: Cells
    weights: FloatArray
    correction: FloatArray

    def copy(self) -> Mixer:
        """The same, to learn on from."""
        return Mixer(Cells(*(part.copy() for part in self.cells)), self.weights.copy(), self.correction.copy())


@compiled
def _knot(odds: float) -> float:
    """Where log-odds lie among the knots."""
    return (min(max(odds, -STEEPEST), STEEPEST) + 8) * 2


@compiled
def corrected(mixer: Mixer, chosen: int, odds: float) -> float:
    """The final probability: the mean of the logistic function and of how often such candidates came."""
    knot = _knot(odds)
    low = int(knot)
    table = mixer.correction
    left = table[chosen, low] + table[SETS, low]
    right = table[chosen, low + 1] + table[SETS, low + 1]
    return float(0.5 * (left + (right - left) * (knot - low)))


@compiled
def _weights_of(table: CandidateTable, number: int, evidence: PositionEvidence) -> int:
    """The set of weights for a candidate, by the quality of its match."""
    found, copied = table.candidates[number], 0
    for source in range(2):
        if evidence.copies[source].token == found.token:
            copied = max(copied, 2 if evidence.copies[source].agreed >= LONG_COPY else 1)
    own, shared = found.longest[OWN], found.longest[SHARED]
    chosen = (min(own, 1) + (1 if own > 2 else 0)) * 9 + (min(shared, 1) + (1 if shared > 2 else 0)) * 3 + copied
    return int(chosen + 27 * found.match_class + TEXT_SETS * _listed_class(evidence, found.listed))


@compiled
def _listed_class(evidence: PositionEvidence, listed: int) -> int:
    """What recycled logits say of a token that is on a list of order ``listed``, or on none (0)."""
    if evidence.unlisted[0] == NONE and evidence.unlisted[1] == NONE:
        return 0
    return 1 + listed


@compiled
def unmatched_by_text(chosen: int) -> bool:
    """Whether weights are for a token that nothing but recycled logits speaks for."""
    return bool(chosen >= 2 * TEXT_SETS and chosen % TEXT_SETS == 0)


@compiled
def weights_unmatched(evidence: PositionEvidence) -> int:
    """The set of weights for a token that no context, copy, match or list speaks for."""
    return TEXT_SETS * _listed_class(evidence, 0)


@compiled
def weigh(mixer: Mixer, table: CandidateTable, evidence: PositionEvidence) -> None:
    """Note the probability of each candidate on the table, with what led to it."""
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
    """The log-odds of a token that no context, copy or match speaks for, without its own frequency and recency;
    ``chosen`` is its set of weights, ``weights_unmatched``."""
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
    """Let the correction learn from one candidate."""
    knot = _knot(odds)
    low = int(knot)
    table = mixer.correction
    table[chosen, low] += (hit - table[chosen, low]) * (low + 1 - knot) * CORRECTION_RATE
    table[chosen, low + 1] += (hit - table[chosen, low + 1]) * (knot - low) * CORRECTION_RATE


@compiled
def _teach_candidate(mixer: Mixer, table: CandidateTable, inputs: int, number: int, hit: float, rate: float) -> None:
    """Learn from one candidate, which came (1) or did not (0)."""
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
    """Learn from the token that came.

    Log-odds are brought up to date at the end, so that all candidates of a position learn from the same ones.
    """
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
    """What was learned, as one vector."""
    return np.concatenate(
        [mixer.cells.chance[:CELLS], mixer.cells.uses[:CELLS], mixer.weights.ravel(), mixer.correction[:SETS].ravel()]
    )


def restore(learned: FloatArray) -> Mixer:
    """The mixer of a vector.

    Raises:
        ValueError: if it cannot be one.
    """
    ends = np.cumsum([CELLS, CELLS, SETS * WEIGHT_COLUMNS, SETS * KNOTS])
    if len(learned) != ends[-1] or not np.isfinite(learned).all():
        raise ValueError("what was learned is not of this program")
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
    """A mixer that starts from what was learned on other texts, and from a model's answers.

    ``python -m benchmarks learn-evidence``, then ``learn-recycled``, write it.
    """
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
    """A mixer that has learned nothing; all its weights are 0."""
    cells = Cells(*(np.zeros(CELLS + 1, np.float32) for _ in Cells._fields))
    cells.chance[NONE] = 0.5
    correction = np.tile(1 / (1 + np.exp(8 - np.arange(KNOTS) / 2)), (SETS + 1, 1))
    return Mixer(cells, np.zeros((SETS, WEIGHT_COLUMNS)), correction)
