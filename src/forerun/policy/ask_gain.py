"""Whether asking a source of drafts is worth its time: what asking gave, by how much it promised.

Asking takes a time, whatever comes of it. Where a model's pass takes under a millisecond, even asking a trie takes a
good part of a pass. What it promises is known first. For a tree from texts, that is how long a suffix of the text was
seen before (``Drafter.known_suffixes``): a text that repeats another one for three tokens goes on repeating it. For the
draft of a small model or a head beside such a tree, it is how many nodes of the tree are expected to be accepted.
"""

from __future__ import annotations

from bisect import bisect

SUFFIXES = (3, 8, 32)
"""Known suffixes from which a class begins, in tokens: where a copy may begin, a copy, and a long one."""
SUFFIX_GAINS = (0.25, 1.0, 4.0, 8.0)
"""Tokens that a tree from texts is taken to give in each class before any was seen, with care for batches, where it
gives less. Measured alone: 0.5, 2.8, 11 and 15 with the bundled model, 0.2, 1.0 and 8 with SmolLM2."""
EXPECTED_NODES = (0.5, 1.5)
"""Accepted nodes that a tree expects, from which a class begins."""
DEEPER_GAINS = (1.0, 0.75, 0.5)
"""Tokens that a model or a head is taken to give beside such a tree before any was seen: enough to be tried. Halved
and doubled, they change simulated texts by at most 3.2 %."""
PRIOR_TREES, RECENT_TREES = 20, 100
"""How many trees the prior counts for, and how many of the last ones count. What a tree gives varies by three times its
mean, so it takes that many to know it. With 4 and 20, SmolLM2 stopped asking at temperature 0.8, where it pays."""


class AskGain:
    """Mean tokens that a source's draft for a row gives, less what it costs after asking.

    Args:
        limits: of the classes of promises.
        prior: the gain in each class before any was seen; one more than limits.
    """

    def __init__(self, limits: tuple[float, ...], prior: tuple[float, ...]) -> None:
        self._limits, self._gains, self._counts = limits, list(prior), [PRIOR_TREES] * len(prior)

    def expected(self, promise: float) -> float:
        """Tokens that asking is expected to give."""
        return self._gains[bisect(self._limits, promise)]

    def record(self, promise: float, tokens: float) -> None:
        """Asking gave ``tokens``."""
        kind = bisect(self._limits, promise)
        self._counts[kind] = min(self._counts[kind] + 1, RECENT_TREES)
        self._gains[kind] += (tokens - self._gains[kind]) / self._counts[kind]
