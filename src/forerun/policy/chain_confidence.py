"""Decide where a chain ends: the probability that all of it is accepted, from the drafting model's own probabilities,
corrected by how often tokens with similar ones were accepted."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.policy.calibration import CalibrationTable, calibrated, count, fit_odds, forget, group_of, odds_of

AGREEING = 0.2
"""Before any counts, a token of probability p is accepted with probability p to this power: where the model is unsure,
the target often still agrees."""


class ChainConfidence:
    """Calibrates a drafting model's probabilities by acceptance."""

    def __init__(self) -> None:
        self._table = CalibrationTable.empty()

    def chance(self, probability: float) -> float:
        """Return the acceptance probability of a token with this model probability, given its predecessors'
        acceptance."""
        return float(calibrated(self._table, odds_of(probability**AGREEING)))

    def learn(self, probabilities: Sequence[float], accepted: int) -> None:
        """Update from a verified chain, of which the first ``accepted`` tokens were accepted."""
        tested = probabilities[: accepted + 1]
        if not tested:
            return
        forget(self._table)
        for depth, probability in enumerate(tested):
            odds = odds_of(probability**AGREEING)
            count(self._table, group_of(odds), odds, depth < accepted)
        fit_odds(self._table)
