"""How likely a token comes next: all evidence for it, mixed by how much each kind of evidence was worth before.

This is logistic mixing as in the PAQ compressors (Mahoney, 2005), in three steps:

1. Each piece of evidence has a *cell* (``table``). It learns how often tokens with such evidence came.
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
    CONTEXT_CELLS,
    COPIED,
    COPY_CELLS,
    COUNTS,
    MATCH_CELLS,
    MISSES,
    NOISY,
    NONE,
    RECYCLED,
    RECYCLED_CELLS,
    RECYCLED_ORDERS,
    SKIPPED,
    STATES,
    SUBSTITUTE,
    TOTALS,
    UNIGRAM,
    UNIGRAM_CELLS,
    CandidateTable,
    PositionEvidence,
    context_input,
)
from forerun.trie.gapped_match import GAP_CLASSES, MATCH_KINDS, PROMPT_LOOKAHEAD, RESUMED_CLASSES
from forerun.trie.tables import CHANCE_CLASSES, LISTED, OWN, SHARED
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
def weigh(mixer: Mixer, table: CandidateTable, number: int, evidence: PositionEvidence) -> float:
    """The probability of a candidate. It is noted on the table, with what led to it."""
    chosen = _weights_of(table, number, evidence)
    odds = mixer.weights[chosen, BIAS]
    for at in range(evidence.inputs[0]):
        odds += mixer.weights[chosen, at] * mixer.cells.odds[table.cells[number, at]]
    found = table.candidates[number]
    odds += mixer.weights[chosen, NOISY] * found.noise
    found.weights, found.odds, found.chance = chosen, odds, corrected(mixer, chosen, odds)
    return float(found.chance)


@compiled
def odds_unmatched(mixer: Mixer, evidence: PositionEvidence) -> float:
    """The log-odds of a token that no context, copy or match speaks for, without its own frequency and recency."""
    chosen = weights_unmatched(evidence)
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
def _correct(mixer: Mixer, chosen: int, odds: float, hit: float) -> None:
    """Let the correction learn from one candidate."""
    knot = _knot(odds)
    low = int(knot)
    table = mixer.correction
    table[chosen, low] += (hit - table[chosen, low]) * (low + 1 - knot) * CORRECTION_RATE
    table[chosen, low + 1] += (hit - table[chosen, low + 1]) * (knot - low) * CORRECTION_RATE


@compiled
def _teach(mixer: Mixer, table: CandidateTable, inputs: int, number: int, hit: float, rate: float) -> None:
    """Learn from one candidate, which came (1) or did not (0)."""
    odds, chosen = table.candidates[number].odds, table.candidates[number].weights
    cells, weights = mixer.cells, mixer.weights
    error = rate * (hit - 1 / (1 + math.exp(-min(max(odds, -20.0), 20.0))))
    _correct(mixer, chosen, odds, hit)
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
        _teach(mixer, table, inputs, number, 1.0 if table.candidates[number].token == token else 0.0, rate)
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
    mixer = untrained()
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
    return _learned().copy()


@functools.cache
def _learned() -> Mixer:
    try:
        return restore(np.load(PRIOR_FILE, allow_pickle=False).astype(np.float64))
    except ValueError as error:
        raise ValueError(
            f"{PRIOR_FILE}: {error}; run python -m benchmarks learn-evidence, then learn-recycled"
        ) from error


def untrained() -> Mixer:
    """A mixer that expects what relative frequencies suggest."""
    chance = _expected()
    odds, none = np.log(chance / (1 - chance)), np.zeros(CELLS + 1, np.float32)
    cells = Cells(odds.astype(np.float32), chance.astype(np.float32), none, none.copy())
    correction = np.tile(1 / (1 + np.exp(8 - np.arange(KNOTS) / 2)), (SETS + 1, 1))
    return Mixer(cells, _first_weights(), correction)


def _expected() -> FloatArray:
    """The chance of each kind of evidence before any was seen, float64 ``[CELLS + 1]``."""
    counts = np.array([0, 1, 2, 3, 4.5, 8, 20, 60, 0])[:, None]
    totals = np.maximum(np.array([0.5, 1, 2, 3, 4, 5.5, 8, 15, 40, 150]), np.maximum(counts, 1))
    chance = np.full(CELLS + 1, 0.01)
    contexts = chance[: 2 * ORDERS * CONTEXT_CELLS].reshape(2, ORDERS, COUNTS, TOTALS, STATES)
    for order, discount in enumerate((0.58, 0.45, 0.4, 0.33)):
        share = np.where(counts > 0, (counts - discount) / (totals + 0.2), 0.03 * (order + 1) / (totals + 1))
        share[-1] = 0.015 / (totals[-1] + 1)
        contexts[:, order] = share.clip(0.002, 0.95)[..., None]
    chance[2 * ORDERS * CONTEXT_CELLS : COPY_CELLS] = np.tile(contexts[0, 1].ravel(), 5)
    agreed = np.array([0.3, 0.4, 0.6, 0.75, 0.85, 0.92, 0.97, 0.99])[:, None] * 0.9 ** np.arange(MISSES)
    says = np.stack([(1 - agreed) / 50, agreed], axis=-1)
    chance[COPY_CELLS:UNIGRAM_CELLS] = np.tile(says.ravel(), 2)
    matches = chance[MATCH_CELLS:RECYCLED_CELLS].reshape(MATCH_KINDS, RESUMED_CLASSES, GAP_CLASSES)
    ahead, others = 0.2 * 0.4 ** np.arange(PROMPT_LOOKAHEAD), [0.1, 0.05, 0.9, 0.02, 0.005, 0.4, 0.02]
    matches[:] = np.concatenate((ahead, others))[:, None, None]  # in the order of the kinds
    matches[0, :, 0] = 0.6
    share = 1 / (1 + np.exp(CHANCE_CLASSES / 2 - 0.5 - np.arange(CHANCE_CLASSES)))
    lists = chance[RECYCLED_CELLS:CELLS].reshape(RECYCLED_ORDERS, LISTED + 1, CHANCE_CLASSES)
    lists[0], lists[1] = 0.5 * share, 0.8 * share
    lists[:, LISTED] = 0.01
    chance[NONE] = 0.5
    return chance


def _first_weights() -> FloatArray:
    """The weights before anything was learned, float64 ``[SETS, WEIGHT_COLUMNS]``; rows are numbered as in
    ``_weights_of``."""
    weights = np.full((TEXT_SETS, WEIGHT_COLUMNS), 0.3)
    weights[:, BIAS] = 0
    weights[18:, BIAS] = weights[6:9, BIAS] = weights[15:18, BIAS] = 0.3  # a context of three or more tokens
    weights[0, UNIGRAM:BIAS] = 0.5
    weights[9:12, ORDERS:COPIED] = 0.2
    weights[18:21, ORDERS:COPIED] = 0.1
    weights[2::3, COPIED:UNIGRAM] = 0.9  # a long copy predicts the candidate
    weights[:, SUBSTITUTE:BIAS] = 0.1
    weights[27:] = np.tile(weights[:27], (2, 1))
    weights[54:, SKIPPED:BIAS] = 0.6  # a match is sure of it
    return np.tile(weights, (SETS // TEXT_SETS, 1))
