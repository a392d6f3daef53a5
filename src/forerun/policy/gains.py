"""Track what drafts gain: trees by what they promised, chains by their acceptance rate."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass

from forerun.policy.calibration import FIRST_GUESS, MEMORY, STATEMENT_WEIGHT

SUFFIXES = (3, 8, 32)
"""Lengths of the known suffix that separate classes, in tokens: a copy may begin, a copy, a long one."""
SUFFIX_GAINS = (0.25, 1.0, 4.0, 8.0)
"""Accepted tokens assumed of a tree in each class before the first. Measured: 0.5, 2.8, 11 and 15 with the bundled
model; 0.2 to 0.5, 1 to 2.3 and 6 to 8 with SmolLM2."""
EXPECTED_NODES = (0.5, 1.5)
"""Expected accepted nodes of a tree that separate classes."""
COSTLY_GAINS = (1.0, 0.75, 0.5)
"""Tokens that a small model or head is assumed to add to such a tree before the first: enough for a trial."""
PRIOR_TREES, COSTLY_PRIOR_TREES = 20, 4
"""Trees that the prior counts for: of a trie; and of a head or small model, whose draft costs a hundred times as much.
A head that is never accepted costs 5 to 6 % of 600 tokens with 20, and 4 to 5 % with 4 (simulated)."""
RECENT_TREES = 100
"""Number of recent trees that count."""
TREE_SPREAD, COSTLY_SPREAD = 3.0, 1.0
"""Standard deviation of a tree's gain over its mean; and its minimum for what a costly source adds, in tokens, as one
that added nothing to a few trees may still be good."""


class Gains:
    """Mean accepted tokens of a source's drafts, by class of what they promised.

    A tree of mean gain G counts as a chain with acceptance rate a = G / (1 + G), whose n-th node is accepted with
    probability a^n: this tells what remains of the gain when nodes cost something.

    Args:
        limits: between classes of promises.
        prior: gain of each class before any draft, weighing ``trees`` drafts; one more than limits.
        spread: minimum standard deviation of a draft's gain, in tokens.
    """

    def __init__(
        self, limits: tuple[float, ...], prior: tuple[float, ...], trees: int = PRIOR_TREES, spread: float = 0.0
    ) -> None:
        self._limits, self._gains, self._counts = limits, list(prior), [trees] * len(prior)
        self._spread = spread

    def kind(self, promise: float) -> int:
        """Return the class of a promise."""
        return bisect(self._limits, promise)

    def expected(self, kind: int, price: float = 0.0, doubt: float = 0.0) -> float:
        """Return a draft's expected gain, plus ``doubt`` standard errors, less ``price`` per node; in tokens."""
        gain, nodes = self._mean(kind, doubt), self.nodes(kind, price, doubt)
        return gain if price <= 0.0 else gain * (1.0 - (gain / (1.0 + gain)) ** nodes) - nodes * price

    def nodes(self, kind: int, price: float, doubt: float = 0.0) -> int:
        """Return how many nodes of a draft are worth more than ``price`` tokens each; 0 if they cost nothing."""
        gain = self._mean(kind, doubt)
        rate = gain / (1.0 + gain)
        return int(math.log(price) / math.log(rate)) if 0.0 < price < rate else 0

    def _mean(self, kind: int, doubt: float) -> float:
        mean = self._gains[kind]
        return mean + doubt * max(TREE_SPREAD * mean, self._spread) / math.sqrt(self._counts[kind])

    def record(self, kind: int, tokens: float) -> None:
        """Record that a draft of this class gained ``tokens``."""
        self._counts[kind] = min(self._counts[kind] + 1, RECENT_TREES)
        self._gains[kind] += (tokens - self._gains[kind]) / self._counts[kind]


@dataclass(slots=True)
class AcceptanceRate:
    """Acceptance rate of chains; old counts fade. ``longest`` limits the next chain to twice what was last accepted, or
    one token more: the rate of a few tokens says little about long chains."""

    tested: float = STATEMENT_WEIGHT
    accepted: float = STATEMENT_WEIGHT * FIRST_GUESS
    longest: float = 1.0

    def child(self) -> AcceptanceRate:
        """Return the rate of a new request, with this one as its prior."""
        return AcceptanceRate(STATEMENT_WEIGHT, STATEMENT_WEIGHT * self.rate(), self.longest)

    def rate(self, doubt: float = 0.0) -> float:
        """Return the mean plus ``doubt`` standard errors."""
        mean = self.accepted / self.tested
        if not doubt:
            return mean
        return min(mean + doubt * math.sqrt(max(mean * (1 - mean), 0.05) / (self.tested + 1)), 0.999)

    def record(self, accepted: int, drafted: int) -> None:
        fade = MEMORY ** min(accepted + 1, drafted)
        self.tested = self.tested * fade + accepted + (accepted < drafted)
        self.accepted = self.accepted * fade + accepted
        self.longest = max(2.0 * accepted, self.longest + 1 if accepted == drafted else self.longest / 2, 1.0)


ROW_WEIGHT = 0.2
"""Weight of the last step in a row's recent tokens per step: averages over a handful of steps."""


@dataclass
class RowGains:
    """What a row recently gained: the acceptance rate of its chains, and its tokens per step."""

    rate: AcceptanceRate
    tokens: float = 1.0

    def record(self, tokens: float, steps: int = 1) -> None:
        """Record steps of this many tokens each."""
        self.tokens = tokens + (1.0 - ROW_WEIGHT) ** steps * (self.tokens - tokens)
