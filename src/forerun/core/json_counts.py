"""Counts what a JSON text is made of before anything is made of it: the objects may take a hundred times its memory.

One pass of compiled code, during which other threads run Python. The text need not be valid: a parser says so later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.tree import IntArray


class JsonCounts(NamedTuple):
    """Strings, with the names of fields; objects and arrays; and all other values, such as numbers."""

    strings: int
    containers: int
    others: int


def count_json(text: bytes) -> JsonCounts:
    """Count the parts of a JSON text in UTF-8."""
    counts = np.zeros(3, np.int64)
    _count(np.frombuffer(text, np.uint8), counts)
    return JsonCounts(*map(int, counts))


def _count_bytes(text: IntArray, counts: IntArray) -> None:
    """Add to the counts of strings, containers and other values."""
    inside = escaped = word = False
    for i in range(len(text)):
        byte = text[i]
        if inside:
            if escaped:
                escaped = False
            elif byte == 92:  # backslash
                escaped = True
            elif byte == 34:  # quote
                inside = False
        elif byte == 34:
            inside, word = True, False
            counts[0] += 1
        elif byte == 91 or byte == 123:  # brackets that open
            word = False
            counts[1] += 1
        elif byte <= 32 or byte == 44 or byte == 58 or byte == 93 or byte == 125:  # space, comma, colon, closing
            word = False
        elif not word:
            word = True
            counts[2] += 1


_count = compiled(_count_bytes, nogil=True)
