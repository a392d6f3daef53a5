"""Lines about what is under way, so that nobody waits for minutes without one."""

from __future__ import annotations

import time
from collections.abc import Callable

Say = Callable[[str], None]
"""Takes a line."""

SILENCE = 10.0
"""Seconds after which something slow says how far it is."""


def quietly(line: str) -> None:
    """Say nothing."""


def telling(say: Say, what: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """Call it with tokens done and to do; it says so now and then, beginning with ``what``."""
    told = clock()

    def tell(done: int, total: int) -> None:
        nonlocal told
        if clock() - told > SILENCE:
            told = clock()
            say(f"  {what}: {done:,} of {total:,} tokens")

    return tell
