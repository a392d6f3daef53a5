"""Where a chain ends: how likely all of it is accepted, by what the drafting model itself thinks of its tokens.

The model states how likely each token is, and that is corrected by how often tokens of similar statements were
accepted. So a chain ends where a further token is not worth its cost."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.policy.calibration import CalibrationTable, calibrated, count, forget, group_of, odds_of, settle

AGREEING = 0.2
"""At first a token of probability p is assumed to be accepted with probability p to this power: where the model is
unsure, the target still often chooses the same token."""


class ChainConfidence:
    """Corrects a drafting model's probabilities by what was accepted."""

    def __init__(self) -> None:
        self._table = CalibrationTable.empty()

    def chance(self, probability: float) -> float:
        """How likely a token is accepted to which the model gives this probability, if those before it are."""
        return float(calibrated(self._table, odds_of(probability**AGREEING)))

    def learn(self, probabilities: Sequence[float], accepted: int) -> None:
        """Learn from a verified chain, of which the first ``accepted`` tokens were accepted."""
        tested = probabilities[: accepted + 1]
        if not tested:
            return
        forget(self._table)
        for depth, probability in enumerate(tested):
            odds = odds_of(probability**AGREEING)
            count(self._table, group_of(odds), odds, depth < accepted)
        settle(self._table)
