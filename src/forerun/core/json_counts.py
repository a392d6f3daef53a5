"""Counts the parts of JSON before parsing, without the GIL: parsed objects may need a hundred times its memory. Invalid
JSON is left to the parser."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.tree import IntArray


class JsonCounts(NamedTuple):
    """Strings, including field names; objects and arrays; and other values, such as numbers."""

    strings: int
    containers: int
    others: int


def count_json(text: bytes) -> JsonCounts:
    """Count the parts of a JSON text in UTF-8."""
    counts = np.zeros(3, np.int64)
    _count(np.frombuffer(text, np.uint8), counts)
    return JsonCounts(*map(int, counts))


def _count_bytes(text: IntArray, counts: IntArray) -> None:
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
        elif byte == 91 or byte == 123:  # opening brackets
            word = False
            counts[1] += 1
        elif byte <= 32 or byte == 44 or byte == 58 or byte == 93 or byte == 125:  # space, comma, colon, closing
            word = False
        elif not word:
            word = True
            counts[2] += 1


_count = compiled(_count_bytes, nogil=True)
