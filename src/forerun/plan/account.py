"""What drafts may lose: a share of all time, so that where nothing can be foreseen plain decoding is hardly slower."""

from __future__ import annotations

from typing import Literal

Source = Literal["tree", "chain"]
SHARE = 0.01
"""Of all time, that drafts which did not pay may take."""
START = 1.0
"""Plain steps that may be lost at first, and at once by a source that saved nothing. A single draft may cost more: no
more than a step, or it could not pay."""
SAVINGS = 16.0
"""Plain steps of what drafts saved that they may lose again: how long a source that was good is believed in after it is
not any more."""


class Account:
    """Books what steps with drafts took against what plain steps would have taken for the same tokens.

    A source lives on what it saved, and all of them on a share of all time. Amounts are plain steps, so that batches
    and contexts of any size share an account.
    """

    def __init__(self) -> None:
        self._common = START
        self._saved: dict[Source, float] = {"tree": 0.0, "chain": 0.0}

    def left(self, source: Source) -> float:
        """What this source may lose."""
        return self._saved[source] + self._common

    def affords(self, source: Source, cost: float) -> bool:
        """Whether this source may lose so much, which is to be tried now and then however much it is."""
        return self.left(source) >= min(cost, START) and self.left(source) > 0

    @property
    def untouched(self) -> bool:
        """Whether nothing was lost lately, so that something may be tried."""
        return self._common == START

    def pass_by(self, took: float) -> None:
        """A step took so long."""
        self._common = min(self._common + SHARE * took, START)

    def enter(self, source: Source, saved: float) -> None:
        """A step's drafts saved so much; less than 0 if they lost."""
        balance = self._saved[source] + saved
        self._saved[source] = min(max(balance, 0.0), SAVINGS)
        self._common += min(balance, 0.0)
