"""How much work on prompts a step does beside rows that decode, so that a long prompt does not hold these up.

There are two works: the target reads the prompt, and drafters prepare for it. A chunk takes the longer the more text
lies before it: its tokens attend to all of that. So what counts is the time. A step that works may take ``BESIDE``
times one that only decodes; if it took longer, the next one does half as much, and if it took less than half of that,
twice as much.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from statistics import median
from typing import Literal, get_args

BESIDE = 4.0
"""Steps that only decode in the time of one that works on prompts as well. Less holds the others up less, and the
prompt takes longer. No other value was measured."""
LEAST = 32
"""Tokens of a prompt for which a step works in any case. A pass reads all keys and values once, whatever it reads of
the prompt. For the bundled model at 60,000 tokens that takes, by reckoning, as long as 32 tokens do. Not measured at
other values."""
RECENT = 32
"""Steps that only decode whose median counts; and after so many that work, one does not, to measure it anew."""


Work = Literal["reading", "preparing"]


class Pace:
    """The tokens of prompts that a step may read, or prepare drafts for.

    Args:
        most: where no row decodes.
        clock: gives seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.most = most
        self.clock = clock
        self._now = dict.fromkeys(get_args(Work), most)
        self._decoding: deque[float] = deque(maxlen=RECENT)
        self._since = RECENT  # steps that worked

    def tokens(self, work: Work, decoding: bool) -> int:
        """How many the next step may do, beside rows that decode or alone; 0 if it should only decode."""
        if not decoding:
            return self.most
        return 0 if self._since >= RECENT else self._now[work]

    def learn(self, seconds: float, decoding: bool, works: Collection[Work]) -> None:
        """A step decoded, did these works, or both, and took so long."""
        if not decoding:
            return
        if not works:
            self._decoding.append(seconds)
            self._since = 0
            return
        self._since += 1
        allowed = BESIDE * median(self._decoding)
        for work in works:
            if seconds > allowed:
                self._now[work] = max(min(LEAST, self.most), self._now[work] // 2)
            elif 2 * seconds < allowed:
                self._now[work] = min(self.most, 2 * self._now[work])
