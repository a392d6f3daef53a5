"""A budget for drafts that do not pay.

Estimates can be wrong, and only drafting shows it. The time lost that way stays under a small share of all time. So a
text that cannot be predicted takes hardly longer than with plain decoding.
"""

from __future__ import annotations

from typing import Literal

Source = Literal["tree", "chain"]
EXPLORATION_SHARE = 0.01
"""The share of all time that drafts without success may take."""
EXPLORATION_START = 1.0
"""The budget at first, and its maximum for a source without savings, in plain steps."""
STAKE = 0.25
"""The share of what is left that a single draft may lose, where a lesser one is possible."""
SAVINGS = 16.0
"""The maximum of a source's savings, in plain steps: how long a source is trusted after it stops paying."""


class ExplorationBudget:
    """Compares the time of steps with drafts to what plain steps would have taken for the same tokens.

    Each source may lose what it saved before. Beyond that, all sources share one budget, which grows with time. Amounts
    are in plain steps, so that batches and contexts of any size share a budget.
    """

    def __init__(self) -> None:
        self._common = EXPLORATION_START
        self._saved: dict[Source, float] = {"tree": 0.0, "chain": 0.0}

    def left(self, source: Source) -> float:
        """What this source may lose."""
        return self._saved[source] + self._common

    def affords(self, source: Source, cost: float) -> bool:
        """Whether this source may spend ``cost``. More than ``EXPLORATION_START`` is never in the budget, so such a
        cost is allowed when the budget is full: every source is tried now and then."""
        return self.left(source) >= min(cost, EXPLORATION_START) and self.left(source) > 0

    def stake(self, source: Source, least: float) -> float:
        """What a single draft of this source may lose: a part of what is left, so that bad luck at first does not end
        all trials, but as much as the least draft takes, if it is there."""
        left = self.left(source)
        return max(left * STAKE, min(left, least))

    def proven(self, source: Source) -> bool:
        """Whether this source has savings."""
        return self._saved[source] > 0

    @property
    def full(self) -> bool:
        """Whether nothing was lost lately, so that the least draft may be tried."""
        return self._common == EXPLORATION_START

    def add_time(self, steps: float) -> None:
        """A step took as long as ``steps`` plain ones."""
        self._common = min(self._common + EXPLORATION_SHARE * steps, EXPLORATION_START)

    def record(self, source: Source, saved: float) -> None:
        """A step's drafts saved this; less than 0 if they lost."""
        balance = self._saved[source] + saved
        self._saved[source] = min(max(balance, 0.0), SAVINGS)
        self._common += min(balance, 0.0)
