"""Returns freed memory to the operating system.

The GNU allocator keeps freed memory below memory in use, and up to 64 MiB above it, in up to eight arenas per core. So
an idle process may hold a hundred unused MiB.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any


def give_back() -> None:
    """Return the free pages of all arenas, with the GNU library: 10 to 50 ms for 90 MiB, without the GIL."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Any:
    if os.name != "posix":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
