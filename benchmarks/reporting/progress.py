"""Progress lines of slow work."""

from __future__ import annotations

import time
from collections.abc import Callable

from forerun.cli.terminal import say

SILENCE = 10.0
"""Seconds between progress lines of slow work."""


def progress_lines(what: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """A function to call with tokens done and to do. Every ``SILENCE`` seconds it prints a line on stderr that begins
    with ``what``."""
    last = clock()

    def show(done: int, total: int) -> None:
        nonlocal last
        if clock() - last > SILENCE:
            last = clock()
            say(f"  {what}: {done:,} of {total:,} tokens")

    return show
