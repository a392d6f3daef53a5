"""How much of prompts a step reads beside rows that decode, so that a long prompt does not hold these up.

A chunk takes the longer the more text lies before it: its tokens attend to all of that. So what counts is the time. A
step that reads may take ``BESIDE`` times one that only decodes; if it took longer, the next one reads half as much, and
if it took less than half of that, twice as much.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

BESIDE = 4.0
"""Steps that only decode in the time of one that reads as well. Less holds the others up less, and the prompt takes
longer. No other value was measured."""
LEAST = 32
"""Tokens that are read in any case. A pass reads all keys and values once, whatever it reads of the prompt. For the
bundled model at 60,000 tokens that takes, by reckoning, as long as 32 tokens do. Not measured at other values."""
RECENT = 32
"""Steps that only decode whose median counts; and after so many that read, one does not, to measure it anew."""


class Pace:
    """The tokens of prompts that a step may read.

    Args:
        most: where no row decodes.
        clock: gives seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.most = self._now = most
        self.clock = clock
        self._decoding: deque[float] = deque(maxlen=RECENT)
        self._since = RECENT  # steps that read

    def tokens(self, decoding: bool) -> int:
        """How many the next step may read, beside rows that decode or alone; 0 if it should only decode."""
        if not decoding:
            return self.most
        return 0 if self._since >= RECENT else self._now

    def learn(self, decoding: bool, read: bool, seconds: float) -> None:
        """A step decoded, read, or both, and took so long."""
        if not decoding:
            return
        if not read:
            self._decoding.append(seconds)
            self._since = 0
            return
        self._since += 1
        allowed = BESIDE * median(self._decoding)
        if seconds > allowed:
            self._now = max(min(LEAST, self.most), self._now // 2)
        elif 2 * seconds < allowed:
            self._now = min(self.most, 2 * self._now)
