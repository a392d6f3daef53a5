"""For tests that start processes."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """A process started by one that runs in the background would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
