"""What the trie's mixer starts its training from: what relative frequencies suggest.

``learn-evidence`` and ``learn-recycled`` train it. The package has the result only, ``prior.npy``.
"""

from __future__ import annotations

import numpy as np

from forerun.trie import candidates as at
from forerun.trie import logistic_mixer
from forerun.trie.arrays import ORDERS, FloatArray
from forerun.trie.gapped_match import GAP_CLASSES, MATCH_KINDS, PROMPT_LOOKAHEAD, RESUMED_CLASSES
from forerun.trie.logistic_mixer import SETS, TEXT_SETS, WEIGHT_COLUMNS, Mixer
from forerun.trie.tables import CHANCE_CLASSES, LISTED


def untrained() -> Mixer:
    mixer, chance = logistic_mixer.blank(), _initial_chances()
    mixer.cells.odds[:], mixer.cells.chance[:] = np.log(chance / (1 - chance)), chance
    mixer.weights[:] = _initial_weights()
    return mixer


def _initial_chances() -> FloatArray:
    """Return the initial chance of each kind of evidence, float64 ``[at.CELLS + 1]``."""
    counts = np.array([0, 1, 2, 3, 4.5, 8, 20, 60, 0])[:, None]
    totals = np.maximum(np.array([0.5, 1, 2, 3, 4, 5.5, 8, 15, 40, 150]), np.maximum(counts, 1))
    chance = np.full(at.CELLS + 1, 0.01)
    contexts = chance[: 2 * ORDERS * at.CONTEXT_CELLS].reshape(
        2, ORDERS, at.COUNT_CLASSES, at.TOTAL_CLASSES, at.FOLLOWER_STATES
    )
    for order, discount in enumerate((0.58, 0.45, 0.4, 0.33)):
        share = np.where(counts > 0, (counts - discount) / (totals + 0.2), 0.03 * (order + 1) / (totals + 1))
        share[-1] = 0.015 / (totals[-1] + 1)
        contexts[:, order] = share.clip(0.002, 0.95)[..., None]
    chance[2 * ORDERS * at.CONTEXT_CELLS : at.COPY_CELLS] = np.tile(contexts[0, 1].ravel(), 5)
    agreed = np.array([0.3, 0.4, 0.6, 0.75, 0.85, 0.92, 0.97, 0.99])[:, None] * 0.9 ** np.arange(at.MISS_CLASSES)
    says = np.stack([(1 - agreed) / 50, agreed], axis=-1)
    chance[at.COPY_CELLS : at.UNIGRAM_CELLS] = np.tile(says.ravel(), 2)
    matches = chance[at.MATCH_CELLS : at.RECYCLED_CELLS].reshape(MATCH_KINDS, RESUMED_CLASSES, GAP_CLASSES)
    ahead, others = 0.2 * 0.4 ** np.arange(PROMPT_LOOKAHEAD), [0.1, 0.05, 0.9, 0.02, 0.005, 0.4, 0.02]
    matches[:] = np.concatenate((ahead, others))[:, None, None]  # in the order of the kinds
    matches[0, :, 0] = 0.6
    share = 1 / (1 + np.exp(CHANCE_CLASSES / 2 - 0.5 - np.arange(CHANCE_CLASSES)))
    lists = chance[at.RECYCLED_CELLS : at.CELLS].reshape(at.LIST_GROUPS, LISTED + 1, CHANCE_CLASSES)
    lists[:], lists[2 : at.STATIC_GROUP] = 0.5 * share, 0.8 * share
    lists[:, LISTED] = 0.01
    chance[at.NONE] = 0.5
    return chance


def _initial_weights() -> FloatArray:
    """The weights before anything was learned, float64 ``[SETS, WEIGHT_COLUMNS]``; rows are numbered as in
    ``_weights_of``."""
    weights = np.full((TEXT_SETS, WEIGHT_COLUMNS), 0.3)
    weights[:, at.BIAS] = 0
    weights[18:, at.BIAS] = weights[6:9, at.BIAS] = weights[15:18, at.BIAS] = 0.3  # a context of three or more tokens
    weights[0, at.UNIGRAM : at.BIAS] = 0.5
    weights[9:12, ORDERS : at.COPIED] = 0.2
    weights[18:21, ORDERS : at.COPIED] = 0.1
    weights[2::3, at.COPIED : at.UNIGRAM] = 0.9  # a long copy predicts the candidate
    weights[:, at.SUBSTITUTE : at.BIAS] = 0.1
    weights[27:] = np.tile(weights[:27], (2, 1))
    weights[54:, at.SKIPPED : at.BIAS] = 0.6  # a match is sure of it
    return np.tile(weights, (SETS // TEXT_SETS, 1))
