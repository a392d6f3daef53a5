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
    DOUBT,
    FIRST_GUESS,
    MEMORY,
    Table,
    corrected,
    count,
    forget,
    group_of,
    odds_of,
    settle,
)
from forerun.policy.cost_curve import FloatArray
from forerun.policy.pass_times import Line

AGREEING = 0.2
"""At first a token of probability p is taken to be accepted with probability p to this power: where the model is
unsure, the target still often chooses the same token."""


class Length(NamedTuple):
    """The best length of a chain, and the tokens for each unit of cost that it gives."""

    tokens: int
    rate: float


@dataclass
class Acceptance:
    """The acceptance rate: accepted of tested drafts. Those behind a rejected one are not tested."""

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
        """Start a text with the acceptance rate of all texts, weighed as a first guess."""
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
        """Start new chains. Each grows as long as the chance that all of it is accepted is above ``price``."""
        self._price, self._likely = price, {}
        self._alive = {request.id: 1.0 for request in requests}

    def enough(self, request: Request, likely: float) -> bool:
        """Whether the chain should end with this token, to which the model gave the probability ``likely``."""
        self.asked = True
        self._likely.setdefault(request.id, []).append(likely)
        self._alive[request.id] *= corrected(self._table, odds_of(likely**AGREEING))
        return self._alive[request.id] < self._price

    def count(self, request: Request, accepted: int, drafted: int) -> None:
        """Learn from a row's verified chain."""
        if not drafted:
            return
        for acceptance in (self._rates[request.id], self._all):
            acceptance.count(accepted, drafted)
        if likely := self._likely.get(request.id, [])[: min(drafted, accepted + 1)]:
            forget(self._table)
            for depth, said in enumerate(likely):
                odds = odds_of(said**AGREEING)
                count(self._table, group_of(odds), odds, depth < accepted)
            settle(self._table)


def best(rates: Sequence[float], draft: Line, passes: FloatArray) -> Length:
    """The length that gives the most tokens by cost, for rows that accept drafts at these rates (``Chains.best``)."""
    lengths = np.arange(1, len(passes) + 1)
    powers = np.asarray(rates)[:, None] ** lengths
    worth = (len(rates) + powers.cumsum(1).sum(0)) / (draft.start + draft.each * lengths + passes)
    at = int(worth.argmax())
    return Length(at + 1, float(worth[at]))
