"""How much prefill a step does alongside decoding rows, so that long prompts do not hold them up.

A chunk costs more the longer its context, so the limit is a time, and each prompt has its own chunk length. A step's
seconds beyond one that only decodes are proportional to its prompt tokens, and set the next step's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

STEPS_BESIDE = 4.0
"""A step with prefill may cost as much as 4 that only decode. Less delays others less and the prompt more: in
simulation, half lets others step nearly twice as fast, while a 4,000-token prompt needs 1.7 times as long."""
MIN_CHUNK_TOKENS = 16
"""Minimum prompt tokens of a step with prefill. A pass reads all keys and values whatever its chunk: after 60,000
tokens of the bundled model, passes over 1, 8, 16, 32 and 256 cost 20, 21, 32, 57 and 412 ms, so from 16 on a token
costs little more than in long passes. With 32, other rows' slowest tokens wait half as long again, and the prefill is 6
% faster."""
RECENT_STEPS = 32
"""Decode-only steps in the median. After as many steps with prefill, one goes without, to measure again."""
MAX_CHANGE = 2.0
"""Maximum ratio by which chunks change per step: one slow step says little. Simulated with 4, nothing changes."""
LEAST_USED = 0.5
"""A step that used a smaller share of its limit does not raise it. In simulation, 0.25 and 1 change nothing."""


class PrefillPacing:
    """When steps work on prompts, and for how many tokens: prefill, or preparing drafts.

    ``beside`` is the duration of a step with prefill, in decode-only steps. ``first`` is the chunk length of a new
    prompt, the last one's: otherwise each of many short prompts would be prefilled in one step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, beside: float = STEPS_BESIDE) -> None:
        self.clock, self._beside = clock, beside
        self.first: int | None = None
        self._decoding: deque[float] = deque(maxlen=RECENT_STEPS)
        self._since = RECENT_STEPS  # steps that worked on prompts

    def works(self, beside: bool) -> bool:
        """Return whether the next step may work on prompts; ``beside``: with rows that decode."""
        return not beside or self._since < RECENT_STEPS

    @property
    def decoding(self) -> float:
        """Seconds of a step that only decodes."""
        return median(self._decoding)

    @property
    def allowed(self) -> float:
        """Maximum seconds of a step with prefill alongside decoding rows."""
        return self._beside * self.decoding

    def learn(self, seconds: float, worked: bool) -> None:
        """Record a step alongside decoding rows that ran ``seconds``; ``worked``: on prompts."""
        if worked:
            self._since += 1
        else:
            self._decoding.append(seconds)
            self._since = 0

    def adjusted(self, tokens: int, extra: float, most: int, used: float = 1.0) -> int:
        """Return how many prompt tokens the next step works on.

        Args:
            tokens: the limit of the last step, of which all prompts together used the share ``used``.
            extra: its seconds beyond a step that only decodes.
            most: the highest limit.
        """
        room = self.allowed - self.decoding
        if used < LEAST_USED and extra <= room:
            return tokens
        change = min(MAX_CHANGE, max(1 / MAX_CHANGE, room * used / extra)) if extra > 0 else MAX_CHANGE
        return max(min(MIN_CHUNK_TOKENS, most), min(most, round(tokens * change)))
