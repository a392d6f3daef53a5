"""Progress lines, so that nobody waits for minutes without one."""

from __future__ import annotations

import time
from collections.abc import Callable

Say = Callable[[str], None]
"""Receives a progress line."""

SILENCE = 10.0
"""Seconds between progress lines of slow work."""


def quietly(line: str) -> None:
    """Say nothing."""


def telling(say: Say, what: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """A function to call with tokens done and to do; now and then it says so, in a line that begins with ``what``."""
    told = clock()

    def tell(done: int, total: int) -> None:
        nonlocal told
        if clock() - told > SILENCE:
            told = clock()
            say(f"  {what}: {done:,} of {total:,} tokens")

    return tell
