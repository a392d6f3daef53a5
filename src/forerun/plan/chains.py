"""Chains that take passes of a model to draft: how long they should be, and what they give.

For a chain whose tokens are accepted with probability a, a step over n drafts commits (1 - a^(n+1)) / (1 - a) tokens
(Leviathan et al., 2023, equation 1), and takes the time to draft n tokens and to verify them. A model knows more: how
likely it found each token. From that, and from what was accepted of tokens like it, a chain's chance is known as it
grows, and it ends where the next token would bring less than the time it takes is worth elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forerun.core.request import Request
from forerun.plan.calibration import (
    DOUBT,
    FIRST_GUESS,
    MEMORY,
    Table,
    corrected,
    count,
    forget,
    kind_of,
    odds_of,
    settle,
)
from forerun.plan.costs import FloatArray
from forerun.plan.passes import Line

AGREEING = 0.2
"""A token of probability p is taken to be accepted with probability p to this power at first: where a model is not sure
either, the target often chooses the same."""


class Length(NamedTuple):
    """The best length of a chain, and the tokens for each unit of cost that it gives."""

    tokens: int
    rate: float


@dataclass
class Acceptance:
    """How often drafts are accepted that were put to the test."""

    tested: float = DOUBT
    accepted: float = DOUBT * FIRST_GUESS

    @property
    def rate(self) -> float:
        """Accepted of tested."""
        return self.accepted / self.tested

    def count(self, accepted: int, drafted: int) -> None:
        """Take in a chain."""
        fade = MEMORY ** min(accepted + 1, drafted)
        self.tested = self.tested * fade + accepted + (accepted < drafted)
        self.accepted = self.accepted * fade + accepted


class Chains:
    """What chains give each row, and where they end."""

    def __init__(self) -> None:
        self._all = Acceptance()
        self._rates: dict[int, Acceptance] = {}
        self._table = Table.empty()
        self._likely: dict[int, list[float]] = {}  # how likely the model found the tokens of each row's chain
        self._alive: dict[int, float] = {}  # the chance that all of it is accepted
        self._price = 0.0
        self.asked = False
        """Whether who drafts asks where chains end."""

    def begin(self, request: Request) -> None:
        """A text of which nothing is known: what other texts accepted, counted as a first guess is."""
        self._rates[request.id] = Acceptance(DOUBT, DOUBT * self._all.rate)

    def finish(self, request: Request) -> None:
        """Forget a text."""
        self._rates.pop(request.id, None)

    def best(self, requests: Sequence[Request], draft: Line, passes: FloatArray) -> Length:
        """The length that gives the most tokens by cost, going by what was accepted.

        Args:
            requests: the rows.
            draft: what drafting chains for all rows costs, by their tokens.
            passes: what verifying 1, 2, ... drafts of each row costs.
        """
        return best([self._rates[request.id].rate for request in requests], draft, passes)

    def open(self, requests: Sequence[Request], price: float) -> None:
        """Chains begin to grow; a token of a row has to be likelier than ``price`` to be accepted."""
        self._price, self._likely = price, {}
        self._alive = {request.id: 1.0 for request in requests}

    def enough(self, request: Request, likely: float) -> bool:
        """Whether the token behind this one, which the model found so likely, would cost more than it brings."""
        self.asked = True
        self._likely.setdefault(request.id, []).append(likely)
        self._alive[request.id] *= corrected(self._table, odds_of(likely**AGREEING))
        return self._alive[request.id] < self._price

    def count(self, request: Request, accepted: int, drafted: int) -> None:
        """What became of a row's chain."""
        if not drafted:
            return
        for acceptance in (self._rates[request.id], self._all):
            acceptance.count(accepted, drafted)
        if likely := self._likely.get(request.id, [])[: min(drafted, accepted + 1)]:
            forget(self._table)
            for depth, said in enumerate(likely):
                odds = odds_of(said**AGREEING)
                count(self._table, kind_of(odds), odds, depth < accepted)
            settle(self._table)


def best(rates: Sequence[float], draft: Line, passes: FloatArray) -> Length:
    """The length that gives the most tokens by cost, for rows that accept drafts at these rates (``Chains.best``)."""
    lengths = np.arange(1, len(passes) + 1)
    powers = np.asarray(rates)[:, None] ** lengths
    worth = (len(rates) + powers.cumsum(1).sum(0)) / (draft.start + draft.each * lengths + passes)
    at = int(worth.argmax())
    return Length(at + 1, float(worth[at]))
