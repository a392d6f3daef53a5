"""Whether asking for a row's tree is worth its time: what asking gave, by how much of the text's end was seen before.

Asking takes a fixed time, whatever comes of it. Where a model's pass takes under a millisecond, that is a good part of
a pass. How long a suffix of the text was seen before is known in a few microseconds (``Drafter.known_suffix``). It says
most about what asking gives: a text that repeats another one for three tokens goes on repeating it.
"""

from __future__ import annotations

from bisect import bisect

SUFFIXES = (3, 8, 32)
"""Known suffixes from which a class begins, in tokens: where a copy may begin, a copy, and a long one."""
PRIOR_GAINS = (0.25, 1.0, 4.0, 8.0)
"""Tokens that asking is taken to give in each class before any was seen, with care for batches, where it gives less.
Measured alone: 0.5, 2.8, 11 and 15 with the bundled model, 0.2, 1.0 and 8 with SmolLM2."""
PRIOR_TREES, RECENT_TREES = 20, 100
"""How many trees the prior counts for, and how many of the last ones count. What a tree gives varies by three times its
mean, so it takes that many to know it. With 4 and 20, SmolLM2 stopped asking at temperature 0.8, where it pays."""


class AskGain:
    """Mean tokens that a row's tree gives beyond the one that each pass gives, less what its nodes cost."""

    def __init__(self) -> None:
        self._gains = list(PRIOR_GAINS)
        self._counts = [PRIOR_TREES] * len(PRIOR_GAINS)

    def expected(self, known: int) -> float:
        """Tokens that asking is expected to give where a suffix of ``known`` tokens was seen before."""
        return self._gains[bisect(SUFFIXES, known)]

    def record(self, known: int, tokens: float) -> None:
        """Asking gave ``tokens``."""
        kind = bisect(SUFFIXES, known)
        self._counts[kind] = min(self._counts[kind] + 1, RECENT_TREES)
        self._gains[kind] += (tokens - self._gains[kind]) / self._counts[kind]
