"""From the scheduler's thread to an event loop, which is woken once for all that gathers meanwhile.

To wake a loop is a system call. A step has news for each of its rows, and the loop takes them all at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Post:
    """Calls to be made in a loop, in the order in which they were put.

    Args:
        loop: where they are made.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._woken = False

    def put(self, call: Callable[[], None]) -> None:
        """Let the loop make a call, soon; from any thread. Where the loop is closed, nobody listens any more."""
        self._waiting.append(call)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """In the loop. What is put from now on wakes it again, so nothing stays behind."""
        self._woken = False
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            if self._waiting:  # a call failed; the others are not its own
                self.loop.call_soon(self._deliver)
