"""Memory of rows that nobody reads again goes back to the operating system, while their addresses stay.

A layer with a sliding window sees the last tokens only. What lies before them stays a part of the cache's memory, so
that no kernel and no index has to know; but its pages are given back (``madvise``). Read again, they would be zeros.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

from forerun.kernels.attention.attention import Rows

MIN_SLACK_TOKENS = 512
"""The least number of tokens behind a window that are kept, so that a text can be taken back by as many. It is one
block of a prompt, and more than a block of attention, which is read whole where a window begins within it."""


def releases(device: str) -> bool:
    """Whether memory on this type of device can be given back in parts."""
    return device == "cpu" and sys.platform == "linux"


def slack(window: int) -> int:
    """Tokens behind a window that are kept: as many as it sees."""
    return max(window, MIN_SLACK_TOKENS)


def most_rows(window: int) -> int:
    """The most rows of a layer with this window that are kept: it grows by its slack before it releases as much, and a
    block of a prompt may come just then."""
    return window + 2 * slack(window) + MIN_SLACK_TOKENS


def release(rows: Rows, first: int, last: int, file: bool) -> None:
    """Give back the whole pages of rows ``first`` to ``last`` (not included).

    Args:
        rows: keys ``[1, Hkv, m, d]`` and values, in memory of this process.
        first, last: numbers of rows.
        file: whether the memory is that of a file that nobody else reads.
    """
    advice = mmap.MADV_REMOVE if file else mmap.MADV_DONTNEED
    for t in rows:
        width = t.element_size()
        for head in range(t.shape[1]):
            start = t.data_ptr() + width * head * t.stride(1)
            begin = _page(start + width * first * t.stride(2) + mmap.PAGESIZE - 1)
            end = _page(start + width * last * t.stride(2))
            if end > begin and _madvise()(begin, end - begin, advice) != 0:
                return  # then it is kept, as elsewhere


def _page(address: int) -> int:
    """Where the page of an address begins."""
    return address // mmap.PAGESIZE * mmap.PAGESIZE


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    found = ctypes.CDLL(None, use_errno=True).madvise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found
