"""How much work on prompts a step does beside rows that decode, so that a long prompt does not hold them up.

A chunk takes longer the more text lies before it, because its tokens attend to all of that. So the limit is a time,
and each prompt has a number of tokens of its own. A step may take ``STEPS_BESIDE`` times as long as one that only
decodes. What it takes beyond such a step is proportional to the tokens that it reads, and so the next step's follow.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

STEPS_BESIDE = 4.0
"""A step that also reads prompts may take as long as 4 that only decode. Less holds the others up less, and the prompt
takes longer: in simulation half as much lets others step nearly twice as fast, and a prompt of 4,000 tokens take
1.7 times as long."""
MIN_CHUNK_TOKENS = 16
"""Minimum prompt tokens of a step that works on prompts. A pass reads all keys and values once, whatever it reads of
the prompt: at 60,000 tokens of the bundled model, passes over 1, 8, 16, 32 and 256 took 20, 21, 32, 57 and 412 ms. So a
token costs little more in passes over 16 than in long ones. With 32, the others wait half as long again for their
slowest tokens, and the prompt is read in 6 % less time."""
RECENT_STEPS = 32
"""The last steps that only decode, whose median counts. After as many steps that work on prompts, one does not, to
measure anew."""
MAX_CHANGE = 2.0
"""The most by which a prompt's tokens grow or shrink from step to step, as a ratio. One slow step says little. Doubled,
it changes nothing in simulation."""
LEAST_USED = 0.5
"""A step that read a smaller part of what it might says too little to read more or less. Halved and doubled, it changes
nothing in simulation."""


class PrefillPacing:
    """When steps work on prompts, and for how many tokens: reading them, or preparing drafts for them.

    Args:
        clock: gives seconds.
        beside: how many times as long as a step that only decodes one may take that also reads prompts.

    Attributes:
        first: tokens of a new prompt that a step reads at first: as many as it read of the last one. None before any.
            Else many short prompts, one after the other, would be read whole.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, beside: float = STEPS_BESIDE) -> None:
        self.clock, self._beside = clock, beside
        self.first: int | None = None
        self._decoding: deque[float] = deque(maxlen=RECENT_STEPS)
        self._since = RECENT_STEPS  # steps that worked

    def works(self, beside: bool) -> bool:
        """Whether the next step may work on prompts, beside rows that decode or alone."""
        return not beside or self._since < RECENT_STEPS

    @property
    def decoding(self) -> float:
        """Seconds of a step that only decodes."""
        return median(self._decoding)

    @property
    def allowed(self) -> float:
        """Seconds that a step may take that works beside others."""
        return self._beside * self.decoding

    def learn(self, seconds: float, worked: bool) -> None:
        """A step beside others took ``seconds``; ``worked``: whether it worked on prompts."""
        if worked:
            self._since += 1
        else:
            self._decoding.append(seconds)
            self._since = 0

    def adjusted(self, tokens: int, extra: float, most: int, used: float = 1.0) -> int:
        """How many tokens of a prompt the next step works on.

        Args:
            tokens: the limit of the last step.
            extra: what that took longer than a step that only decodes, in seconds.
            most: the highest limit.
            used: how much the last step used of what it might read, of all prompts together.
        """
        room = self.allowed - self.decoding
        if used < LEAST_USED and extra <= room:
            return tokens
        change = min(MAX_CHANGE, max(1 / MAX_CHANGE, room * used / extra)) if extra > 0 else MAX_CHANGE
        return max(min(MIN_CHUNK_TOKENS, most), min(most, round(tokens * change)))
