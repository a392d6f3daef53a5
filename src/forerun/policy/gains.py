"""What sources gave: trees by how much they promised, chains by how often their tokens were accepted."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass

from forerun.policy.calibration import FIRST_GUESS, MEMORY, STATEMENT_WEIGHT

SUFFIXES = (3, 8, 32)
"""Known suffixes from which a class begins, in tokens: where a copy may begin, a copy, and a long one."""
SUFFIX_GAINS = (0.25, 1.0, 4.0, 8.0)
"""Accepted tokens assumed of a tree in each class before any was seen, with care. Measured alone: 0.5, 2.8, 11 and 15
with the bundled model, 0.2 to 0.5, 1 to 2.3 and 6 to 8 with SmolLM2."""
EXPECTED_NODES = (0.5, 1.5)
"""Accepted nodes that a tree expects, from which a class begins."""
DEEPER_GAINS = (1.0, 0.75, 0.5)
"""Tokens assumed of a model or a head beside such a tree before any was seen: enough to be tried."""
PRIOR_TREES, DEEPER_PRIOR_TREES = 20, 4
"""How many trees the prior counts for: of a trie; and of a model or a head, a draft of which costs a hundred times as
much. With 20, a head that was never right cost 5 to 6 % of 600 tokens on the simulated clock, with 4, 4 to 5 %."""
RECENT_TREES = 100
"""How many of the last trees count."""
TREE_SPREAD, DEEPER_SPREAD = 3.0, 1.0
"""Standard deviations of what a tree gives, over its mean, so it takes that many trees to know the mean; and of what a
costly source adds, in tokens, at least. A source that added nothing to a few trees may still be a good one."""


class Gains:
    """Mean accepted tokens of a source's drafts, by classes of what they promised.

    A tree of mean gain G is taken for a chain whose tokens are accepted at the rate a = G / (1 + G): its n-th node is
    accepted with probability a^n. So it is known what is left of the gain where nodes cost something.

    Args:
        limits: of the classes of promises.
        prior: the gain in each class before any was seen; one more than limits.
        trees: that the prior counts for.
        spread: least standard deviation of a draft's gain, in tokens.
    """

    def __init__(
        self, limits: tuple[float, ...], prior: tuple[float, ...], trees: int = PRIOR_TREES, spread: float = 0.0
    ) -> None:
        self._limits, self._gains, self._counts = limits, list(prior), [trees] * len(prior)
        self._spread = spread

    def kind(self, promise: float) -> int:
        """The class of a promise."""
        return bisect(self._limits, promise)

    def expected(self, kind: int, price: float = 0.0, doubt: float = 0.0) -> float:
        """Return the tokens that a draft of this class is expected to gain, less what its nodes cost.

        Args:
            kind: the class.
            price: of a node, in tokens.
            doubt: standard deviations that are added to the mean.
        """
        mean = self._gains[kind]
        gain = mean + doubt * max(TREE_SPREAD * mean, self._spread) / math.sqrt(self._counts[kind])
        if price <= 0.0:
            return gain
        rate = gain / (1.0 + gain)
        if rate <= price:
            return 0.0
        nodes = int(math.log(price) / math.log(rate))
        return gain * (1.0 - rate**nodes) - nodes * price

    def record(self, kind: int, tokens: float) -> None:
        """A draft of this class gave ``tokens``."""
        self._counts[kind] = min(self._counts[kind] + 1, RECENT_TREES)
        self._gains[kind] += (tokens - self._gains[kind]) / self._counts[kind]


@dataclass(slots=True)
class AcceptanceRate:
    """Accepted tokens of chains by tested ones. Those behind a rejected one are not tested.

    Attributes:
        tested, accepted: numbers of tokens; old ones fade.
        longest: how long the next chain may be: twice as long as the last was accepted, or a token longer. The rate of
            a few tokens says little of long chains.
    """

    tested: float = STATEMENT_WEIGHT
    accepted: float = STATEMENT_WEIGHT * FIRST_GUESS
    longest: float = 1.0

    def child(self) -> AcceptanceRate:
        """That of a new request, for which this one is a first guess."""
        return AcceptanceRate(STATEMENT_WEIGHT, STATEMENT_WEIGHT * self.rate(), self.longest)

    def rate(self, doubt: float = 0.0) -> float:
        """The mean, and ``doubt`` standard deviations more."""
        mean = self.accepted / self.tested
        if not doubt:
            return mean
        return min(mean + doubt * math.sqrt(max(mean * (1 - mean), 0.05) / (self.tested + 1)), 0.999)

    def record(self, accepted: int, drafted: int) -> None:
        """Learn from a chain."""
        fade = MEMORY ** min(accepted + 1, drafted)
        self.tested = self.tested * fade + accepted + (accepted < drafted)
        self.accepted = self.accepted * fade + accepted
        self.longest = max(2.0 * accepted, self.longest + 1 if accepted == drafted else self.longest / 2, 1.0)
