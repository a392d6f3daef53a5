"""Bounds what guesses may lose: an allowance once, and a little for each step without any."""

from __future__ import annotations


class Ledger:
    """Open as long as there is something left to lose; closed, until so much has come together again.

    Args:
        allowance: what may be lost at first, and after a time without losses; in passes, as all of this.
        interest: what each step without guesses adds, up to the allowance.
        reopening: what must be there before guesses are tried again.
        savings: what guesses may have saved, at most, to lose it later.
    """

    def __init__(self, allowance: float, interest: float, reopening: float, savings: float) -> None:
        self.open = True
        self._allowance, self._interest, self._reopening, self._savings = allowance, interest, reopening, savings
        self._balance = allowance

    def enter(self, saved: float | None) -> None:
        """Book a step: what its guesses saved, in passes without them, or None if it had none."""
        if saved is not None:
            self._balance = min(self._balance + saved, self._savings)
        elif self._balance < self._allowance:
            self._balance = min(self._balance + self._interest, self._allowance)
        self.open = self._balance > 0 if self.open else self._balance >= self._reopening
