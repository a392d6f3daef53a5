"""Chains that a model drafts: how long they should be, and what they give.

If each token is accepted with probability a, a step over n drafts commits (1 - a^(n+1)) / (1 - a) tokens (Leviathan et
al., 2023, equation 1). It takes the time to draft n tokens and to verify them. The drafting model also states how
likely each token is. So the chance that the whole chain is accepted is known while it grows, and it ends where one more
token would cost more time than it is expected to save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forerun.core.request import Request
from forerun.policy.calibration import (
    FIRST_GUESS,
    MEMORY,
    STATEMENT_WEIGHT,
    CalibrationTable,
    calibrated,
    count,
    forget,
    group_of,
    odds_of,
    settle,
)
from forerun.policy.cost_curve import FloatArray
from forerun.policy.prices import LinearCost

AGREEING = 0.2
"""At first a token of probability p is taken to be accepted with probability p to this power: where the model is
unsure, the target still often chooses the same token."""


class ChainLength(NamedTuple):
    """The best length of a chain, and the tokens for each unit of cost that it gives."""

    tokens: int
    rate: float


@dataclass
class AcceptanceRate:
    """The acceptance rate: accepted drafts by tested ones. Those behind a rejected one are not tested.

    Attributes:
        tested, accepted: numbers of drafts; old ones fade.
        longest: how long the next chain may be.
    """

    tested: float = STATEMENT_WEIGHT
    accepted: float = STATEMENT_WEIGHT * FIRST_GUESS
    longest: float = 1.0

    @property
    def rate(self) -> float:
        """Accepted by tested."""
        return self.accepted / self.tested

    def record(self, accepted: int, drafted: int) -> None:
        """Learn from a chain."""
        fade = MEMORY ** min(accepted + 1, drafted)
        self.tested = self.tested * fade + accepted + (accepted < drafted)
        self.accepted = self.accepted * fade + accepted
        self.longest = max(2.0 * accepted, self.longest + 1 if accepted == drafted else self.longest / 2, 1.0)


class ChainAcceptance:
    """What chains give each row, and where they end."""

    def __init__(self) -> None:
        self._all = AcceptanceRate()
        self._rates: dict[int, AcceptanceRate] = {}
        self._table = CalibrationTable.empty()
        self._stated: dict[int, list[float]] = {}  # the model's probabilities of the tokens of each row's chain
        self._alive: dict[int, float] = {}  # the chance that all of it is accepted
        self._price = 0.0
        self.stops_early = False
        """True if the drafter stops chains early."""

    def begin(self, request: Request) -> None:
        """Start a text with the acceptance rate of all texts, weighed as a first guess."""
        known = self._all
        self._rates[request.id] = AcceptanceRate(STATEMENT_WEIGHT, STATEMENT_WEIGHT * known.rate, known.longest)

    def finish(self, request: Request) -> None:
        """Forget a text."""
        self._rates.pop(request.id, None)

    def best(
        self, requests: Sequence[Request], draft: LinearCost, passes: FloatArray, undrafted: int = 0
    ) -> ChainLength:
        """The length that gives the most tokens by cost, going by what was accepted.

        Args:
            requests: the rows.
            draft: cost of drafting chains for all rows, by their tokens.
            passes: cost of verifying 1, 2, ... drafts of each row.
            undrafted: rows that only wait, and get one token.
        """
        return best_length([self._rates[request.id].rate for request in requests], draft, passes, undrafted)

    def longest(self, requests: Sequence[Request]) -> int:
        """The longest chain to draft: the longest that one of these texts allows.

        A text allows twice as many tokens as a chain of it was accepted for, one more after each chain that was right
        to its end, and half as many after a wrong one. The acceptance rate of a few drafts says little of long chains,
        and one that is wrong from the start loses the time of all its tokens.
        """
        return int(max(self._rates[request.id].longest for request in requests))

    def start(self, requests: Sequence[Request], price: float) -> None:
        """Start new chains. Each grows as long as the chance that all of it is accepted is above ``price``."""
        self._price, self._stated = price, {}
        self._alive = {request.id: 1.0 for request in requests}

    def stop(self, request: Request, probability: float) -> bool:
        """Whether the chain should end with this token, to which the model gave ``probability``."""
        self.stops_early = True
        self._stated.setdefault(request.id, []).append(probability)
        self._alive[request.id] *= calibrated(self._table, odds_of(probability**AGREEING))
        return self._alive[request.id] < self._price

    def record(self, request: Request, accepted: int, drafted: int) -> None:
        """Learn from a row's verified chain."""
        if not drafted:
            return
        for acceptance in (self._rates[request.id], self._all):
            acceptance.record(accepted, drafted)
        if stated := self._stated.get(request.id, [])[: min(drafted, accepted + 1)]:
            forget(self._table)
            for depth, probability in enumerate(stated):
                odds = odds_of(probability**AGREEING)
                count(self._table, group_of(odds), odds, depth < accepted)
            settle(self._table)


def best_length(rates: Sequence[float], draft: LinearCost, passes: FloatArray, undrafted: int = 0) -> ChainLength:
    """The length that gives the most tokens by cost, for rows that accept drafts at these rates, and some without."""
    lengths = np.arange(1, len(passes) + 1)
    powers = np.asarray(rates)[:, None] ** lengths
    worth = (len(rates) + undrafted + powers.cumsum(1).sum(0)) / (draft.start + draft.each * lengths + passes)
    at = int(worth.argmax())
    return ChainLength(at + 1, float(worth[at]))
