"""A thread's clock for the cost of passes, which stops during one-time work such as recording a graph."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_made = threading.local()


def work_seconds() -> float:
    """Return this thread's seconds, without those inside ``made_once``."""
    return time.perf_counter() - getattr(_made, "seconds", 0.0)


@contextmanager
def made_once() -> Iterator[None]:
    """Stop this thread's clock in this context."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _made.seconds = getattr(_made, "seconds", 0.0) + time.perf_counter() - began
