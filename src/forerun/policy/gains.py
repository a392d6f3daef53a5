"""Track what drafts gain: trees by class of what they promised, chains by their acceptance rate.

A tree of mean gain G counts as a chain with acceptance rate a = G / (1 + G), whose n-th node is accepted with
probability a^n: this tells what remains of the gain when nodes cost something.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forerun.core.compiling import compiled
from forerun.policy.calibration import FIRST_GUESS, MEMORY, STATEMENT_WEIGHT
from forerun.policy.cost_curve import FloatArray
from forerun.policy.policy_tables import COSTLY, policy_at

SUFFIXES = (3, 8, 32)
"""Lengths of the known suffix that separate classes, in tokens: a copy may begin, a copy, a long one."""
SUFFIX_GAINS = (0.25, 1.0, 4.0, 8.0)
"""Accepted tokens assumed of a tree in each class before the first. Measured: 0.5, 2.8, 11 and 15 with the bundled
model; 0.2 to 0.5, 1 to 2.3 and 6 to 8 with SmolLM2."""
EXPECTED_NODES = (0.5, 1.5, math.inf)
"""Expected accepted nodes of a tree that separate classes."""
COSTLY_GAINS = (1.0, 0.75, 0.5, 0.0)
"""Tokens that a small model or head is assumed to add to such a tree before the first: enough for a trial."""
PRIOR_TREES, COSTLY_PRIOR_TREES = 20.0, 4.0
"""Trees that the prior counts for: of a trie; and of a head or small model, whose draft costs a hundred times as much.
A head that is never accepted costs 5 to 6 % of 600 tokens with 20, and 4 to 5 % with 4 (simulated)."""
RECENT_TREES = 100
"""Number of recent trees that count."""
TREE_SPREAD, COSTLY_SPREAD = 3.0, 1.0
"""Standard deviation of a tree's gain over its mean; and its minimum for what a costly source adds, in tokens, as one
that added nothing to a few trees may still be good."""


def first_gains() -> tuple[FloatArray, FloatArray]:
    """Return the first ``Policy.gains`` and ``Policy.counts``."""
    counts = np.array([PRIOR_TREES, COSTLY_PRIOR_TREES])
    return np.array([SUFFIX_GAINS, COSTLY_GAINS]), np.repeat(counts[:, None], len(SUFFIX_GAINS), 1)


@compiled
def class_of(source: int, promise: float) -> int:
    """Return the class of a promise: a known suffix, or a tree's expected nodes for the costly source."""
    kind = 0
    for number in range(len(SUFFIXES)):
        kind += promise >= (EXPECTED_NODES[number] if source == COSTLY else SUFFIXES[number])
    return kind


@compiled
def _mean(address: int, source: int, kind: int, doubt: float) -> float:
    policy = policy_at(address)
    mean, least = policy.gains[source, kind], COSTLY_SPREAD if source == COSTLY else 0.0
    return float(mean + doubt * max(TREE_SPREAD * mean, least) / math.sqrt(policy.counts[source, kind]))


@compiled
def paying_nodes(address: int, source: int, kind: int, price: float, doubt: float) -> int:
    """Return how many nodes of a draft are worth more than ``price`` tokens each; 0 if they cost nothing."""
    gain = _mean(address, source, kind, doubt)
    rate = gain / (1.0 + gain)
    return int(math.log(price) / math.log(rate)) if 0.0 < price < rate else 0


@compiled
def gain_of(address: int, source: int, kind: int, price: float, doubt: float) -> float:
    """Return a draft's expected gain, plus ``doubt`` standard errors, less ``price`` per node; in tokens."""
    gain = _mean(address, source, kind, doubt)
    if price <= 0.0:
        return gain
    nodes = paying_nodes(address, source, kind, price, doubt)
    return float(gain * (1.0 - (gain / (1.0 + gain)) ** nodes) - nodes * price)


@compiled
def record_gain(address: int, source: int, kind: int, tokens: float) -> None:
    """Record that a draft of this class gained ``tokens``."""
    policy = policy_at(address)
    policy.counts[source, kind] = min(policy.counts[source, kind] + 1, RECENT_TREES)
    policy.gains[source, kind] += (tokens - policy.gains[source, kind]) / policy.counts[source, kind]


@dataclass(slots=True)
class AcceptanceRate:
    """Acceptance rate of chains; old counts fade. ``longest`` limits the next chain to twice what was last accepted, or
    one token more: the rate of a few tokens says little about long chains."""

    tested: float = STATEMENT_WEIGHT
    accepted: float = STATEMENT_WEIGHT * FIRST_GUESS
    longest: float = 1.0

    @classmethod
    def guessed(cls, rate: float, longest: float = 1.0) -> AcceptanceRate:
        """Make a rate that a few tokens change."""
        return cls(STATEMENT_WEIGHT, STATEMENT_WEIGHT * rate, longest)

    def child(self) -> AcceptanceRate:
        """Return the rate of a new request, with this one as its prior."""
        return self.guessed(self.rate(), self.longest)

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
