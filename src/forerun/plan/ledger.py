"""Bounds what guesses may lose: an allowance once, and a little for each step without any."""

from __future__ import annotations

from dataclasses import dataclass, field


class Ledger:
    """Open as long as there is something left to lose; closed, until so much has come together again.

    Args:
        allowance: what may be lost at first, and after a time without losses; in passes, as all of this.
        interest: what each step without guesses adds, up to the allowance.
    """

    def __init__(self, allowance: float, interest: float) -> None:
        self.open = True
        self._allowance, self._interest = allowance, interest
        self._balance = allowance

    def enter(self, saved: float | None) -> None:
        """Book a step: what its guesses saved, in passes without them, or None if it had none."""
        self._balance = min(self._balance + (self._interest if saved is None else saved), self._allowance)
        self.open = self._balance > 0 if self.open else self._balance >= self._allowance


@dataclass
class Purse:
    """The same in seconds, which are valued by what a step without guesses takes as it is known now.

    What guesses saved they may lose later.

    Attributes:
        allowance, interest: as of ``Ledger``, in steps without guesses.
        savings: what may be saved, at most.
        balance: what there is left to lose, in steps without guesses.
    """

    allowance: float
    interest: float
    savings: float
    balance: float = field(init=False)
    _given: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0

    def __post_init__(self) -> None:
        self.balance = self.allowance

    def enter(self, tokens: float, seconds: float, plain: float, guessed: bool) -> None:
        """Book a step.

        Args:
            tokens: that a row got of it.
            seconds: that it took.
            plain: that a step without guesses takes, which gives one token; where it takes no time nothing is booked.
            guessed: whether it had any.
        """
        if not plain:
            return
        if guessed:
            self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        self._tokens = min(self._tokens, self.savings + self._seconds / plain)
        self.balance = self.allowance + self._given + self._tokens - self._seconds / plain
        if not guessed and self.balance < self.allowance:
            self._given += self.interest

    def rest(self) -> None:
        """Book a step without guesses whose time is not known."""
        if self.balance < self.allowance:
            self._given += self.interest
            self.balance += self.interest
