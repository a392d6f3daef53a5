"""A budget for drafts that do not pay.

Estimates can be wrong, and only drafting shows it. The time lost that way stays under a small share of all time. So a
text that cannot be predicted takes hardly longer than with plain decoding.
"""

from __future__ import annotations

from typing import Literal

Source = Literal["tree", "chain"]
SHARE = 0.01
"""The share of all time that drafts without success may take."""
START = 1.0
"""The budget at first, and its maximum for a source without savings, in plain steps."""
STAKE = 0.25
"""The share of what is left that a single draft may lose, where a lesser one is possible."""
SAVINGS = 16.0
"""The maximum of a source's savings, in plain steps: how long a source is trusted after it stops paying."""


class ExplorationBudget:
    """Compares the time of steps with drafts to what plain steps would have taken for the same tokens.

    Each source may lose what it saved before. Beyond that, all sources share one budget, which grows with time. Amounts
    are in plain steps, so that batches and contexts of any size share an account.
    """

    def __init__(self) -> None:
        self._common = START
        self._saved: dict[Source, float] = {"tree": 0.0, "chain": 0.0}

    def left(self, source: Source) -> float:
        """What this source may lose."""
        return self._saved[source] + self._common

    def affords(self, source: Source, cost: float) -> bool:
        """Whether this source may lose so much. More than ``START`` never is in the budget, so such a cost is allowed
        when the budget is full: every source is tried now and then."""
        return self.left(source) >= min(cost, START) and self.left(source) > 0

    def stake(self, source: Source, least: float) -> float:
        """What a single draft of this source may lose: a part of what is left, so that bad luck at first does not end
        all trials, but as much as the least draft takes, if it is there."""
        left = self.left(source)
        return max(left * STAKE, min(left, least))

    @property
    def untouched(self) -> bool:
        """Whether the common budget is full: nothing was lost lately, so the least that can be tried may be."""
        return self._common == START

    def pass_by(self, took: float) -> None:
        """A step took so long."""
        self._common = min(self._common + SHARE * took, START)

    def enter(self, source: Source, saved: float) -> None:
        """A step's drafts saved so much; less than 0 if they lost."""
        balance = self._saved[source] + saved
        self._saved[source] = min(max(balance, 0.0), SAVINGS)
        self._common += min(balance, 0.0)
