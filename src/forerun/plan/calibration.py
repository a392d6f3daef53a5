"""How often a drafter is right, learnt from what became of its nodes.

What a drafter says of its nodes is corrected by what became of nodes like them: of equal log-odds under their parent,
or of equal depth if it says nothing. Old counts fade, so that the correction follows the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from forerun.core.tree import BoolArray, DraftTree, IntArray
from forerun.plan.costs import FloatArray

DEPTHS = 24
"""Depths told apart."""
FIRST_GUESS = 0.8
"""Chance of a node under its parent, before a drafter that does not say has shown anything."""
LOWEST, HIGHEST = -6, 8
"""Log-odds of what a drafter says, between which kinds are told apart by whole numbers."""
DOUBT = 2.0
"""Nodes that a drafter's own estimate counts for, against those that were seen."""
UNSEEN = 0.1
"""The same where kinds disagree about their order: one that was not seen has little to say about it."""
MEMORY = 0.97
"""What remains of the counts after a step with a proposal."""


class Calibration(ABC):
    """How often nodes of each kind came where their parent did."""

    def __init__(self, kinds: int) -> None:
        self._seen = np.zeros(kinds)
        self._hits = np.zeros(kinds)

    @abstractmethod
    def rates(self, tree: DraftTree) -> FloatArray:
        """Each node's chance under its parent."""

    @abstractmethod
    def kinds(self, tree: DraftTree) -> IntArray:
        """Each node's kind."""

    def count(self, tree: DraftTree, tested: BoolArray, came: BoolArray) -> None:
        """Take in the nodes that were put to the test, and those of them that came."""
        kinds = self.kinds(tree)
        self._seen += np.bincount(kinds[tested], minlength=len(self._seen))
        self._hits += np.bincount(kinds[came], minlength=len(self._hits))

    def forget(self) -> None:
        """Let old counts fade."""
        self._seen *= MEMORY
        self._hits *= MEMORY


class ByDepth(Calibration):
    """For drafters that do not say how likely their nodes are."""

    def __init__(self) -> None:
        super().__init__(DEPTHS)

    def rates(self, tree: DraftTree) -> FloatArray:
        """Each node's chance under its parent."""
        rates: FloatArray = ((self._hits + FIRST_GUESS) / (self._seen + 1))[self.kinds(tree)]
        return rates

    def kinds(self, tree: DraftTree) -> IntArray:
        """Each node's kind."""
        return np.asarray(np.minimum(tree.depths, DEPTHS) - 1)


class ByOdds(Calibration):
    """A drafter's log-odds, corrected.

    Each kind's correction is the log-odds of what came less those of what was expected, both with the drafter's own
    estimate as so many nodes. Kinds that were found in the wrong order are taken as one, so that what a drafter thinks
    likelier is never thought less likely here.
    """

    def __init__(self) -> None:
        self._centres = np.arange(LOWEST, HIGHEST + 1, dtype=np.float64)
        super().__init__(len(self._centres))
        self._expected = np.zeros(len(self._centres))
        self._own = DOUBT * _chance(self._centres)
        self._correction: tuple[FloatArray, FloatArray] | None = None

    def rates(self, tree: DraftTree) -> FloatArray:
        """Each node's chance under its parent."""
        if self._correction is None:
            self._correction = self._correct()
        shifts, middles = self._correction
        kinds = self.kinds(tree)
        odds = np.minimum(np.maximum(_within(tree.odds) + shifts[kinds], middles[kinds]), middles[kinds + 1])
        return _chance(odds)

    def _correct(self) -> tuple[FloatArray, FloatArray]:
        """What to add to each kind's log-odds, and the bounds between kinds."""
        came, expected, seen = self._hits + self._own, self._expected + self._own, self._seen + DOUBT
        odds = self._centres + np.log(came / (seen - came) * (seen - expected) / expected)
        corrected = _rising(odds, self._seen + UNSEEN)
        middles = (corrected[1:] + corrected[:-1]) / 2
        return corrected - self._centres, np.concatenate(([-np.inf], middles, [np.inf]))

    def kinds(self, tree: DraftTree) -> IntArray:
        """Each node's kind."""
        return np.rint(_within(tree.odds)).astype(np.int64) - LOWEST

    def count(self, tree: DraftTree, tested: BoolArray, came: BoolArray) -> None:
        """Take in the nodes that were put to the test, and those of them that came."""
        super().count(tree, tested, came)
        expected = _chance(_within(tree.odds[tested]))
        self._expected += np.bincount(self.kinds(tree)[tested], expected, minlength=len(self._expected))
        self._correction = None

    def forget(self) -> None:
        """Let old counts fade."""
        super().forget()
        self._expected *= MEMORY
        self._correction = None


def _rising(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The closest values that never fall: neighbours in the wrong order take their mean (isotonic regression)."""
    if (values[1:] >= values[:-1]).all():
        return values
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        size = 1
        while pools and pools[-1][0] > value:
            before, heavy, count = pools.pop()
            value, weight, size = (before * heavy + value * weight) / (heavy + weight), heavy + weight, size + count
        pools.append((value, weight, size))
    return np.repeat([value for value, _, _ in pools], [size for _, _, size in pools])


def _within(odds: FloatArray) -> FloatArray:
    return np.asarray(np.minimum(np.maximum(odds, LOWEST), HIGHEST))


def _chance(odds: FloatArray) -> FloatArray:
    return np.asarray(1 / (1 + np.exp(-odds)))
