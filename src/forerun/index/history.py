"""Texts that can be copied from: tokens in linked chunks, and where n-grams of two lengths were continued last.

A position is the number of a token's cell, 0 for none. Hints are a lossy table: whoever reads one compares the text.
"""

from __future__ import annotations

import numpy as np

from forerun.index.arrays import (
    AFTER,
    BEFORE,
    CHUNK,
    CHUNKS,
    TEXT_FREE,
    TEXT_TOP,
    HashArray,
    Index,
    Int32Array,
    mix,
)
from forerun.index.compiling import compiled

REACH, LONGEST = 3, 5
"""Tokens that must agree before a copy starts, and tokens of the longest context that is hashed. Both have hints: the
latest place of few tokens is rarely the right one where the text has few different ones, that of more comes late."""

FAR = 32
"""Agreement beyond this many tokens is not counted."""

UNWRITTEN = -1

START = -1
"""Stands before a text's first token in its contexts."""


@compiled
def read(index: Index, position: int) -> int:
    """The token at a position."""
    return int(index.text[position // CHUNK, position % CHUNK])


@compiled
def following(index: Index, position: int) -> int:
    """The position behind another, or 0."""
    if position % CHUNK < CHUNK - 1:
        return position + 1
    return int(index.text[position // CHUNK, AFTER]) * CHUNK


@compiled
def preceding(index: Index, position: int) -> int:
    """The position before another, or 0."""
    if position % CHUNK > 0:
        return position - 1
    before = int(index.text[position // CHUNK, BEFORE])
    return before * CHUNK + CHUNK - 1 if before != 0 else 0


@compiled
def _blank(index: Index, chunk: int) -> None:
    for cell in range(CHUNK):
        index.text[chunk, cell] = UNWRITTEN


@compiled
def _chunk(index: Index, before: int) -> int:
    """A chunk behind another (0: a text's first), or 0 if none is free."""
    text, state = index.text, index.state
    chunk = state[TEXT_FREE]
    if chunk != 0:
        state[TEXT_FREE] = text[chunk, AFTER]
    elif state[TEXT_TOP] < len(text):
        chunk = state[TEXT_TOP]
        state[TEXT_TOP] += 1
    else:
        return 0
    state[CHUNKS] += 1
    _blank(index, chunk)
    text[chunk, AFTER], text[chunk, BEFORE] = 0, before
    if before != 0:
        text[before, AFTER] = chunk
    return int(chunk)


@compiled
def append(index: Index, end: int, token: int) -> int:
    """Write a token behind the one at ``end`` (0: a text's first); its position, or 0 if there is no room."""
    inside = end != 0 and end % CHUNK < CHUNK - 1
    position = end + 1 if inside else _chunk(index, end // CHUNK) * CHUNK
    if position != 0:
        index.text[position // CHUNK, position % CHUNK] = token
    return position


@compiled
def free(index: Index, chunk: int) -> None:
    """Give a text's chunk back."""
    _blank(index, chunk)
    index.text[chunk, AFTER] = index.state[TEXT_FREE]
    index.state[TEXT_FREE] = chunk
    index.state[CHUNKS] -= 1


@compiled
def agreement(index: Index, position: int, other: Index, end: int) -> int:
    """How many tokens before ``position`` are those up to ``end`` in ``other``, at most ``FAR``."""
    length = 0
    position = preceding(index, position)
    while length < FAR and position != 0 and end != 0 and read(index, position) == read(other, end):
        length += 1
        position, end = preceding(index, position), preceding(other, end)
    return length


@compiled
def hint(index: Index, hashed: np.uint64) -> int:
    """Where an n-gram may have been continued last, or 0."""
    return int(index.hints[np.int64(hashed >> np.uint64(20)) & (len(index.hints) - 1)])


@compiled
def set_hint(index: Index, hashed: np.uint64, position: int) -> None:
    """Remember where an n-gram was continued."""
    index.hints[np.int64(hashed >> np.uint64(20)) & (len(index.hints) - 1)] = position


@compiled
def remember(recent: Int32Array, token: int) -> None:
    """Move a token to the front of those seen last."""
    at = 0
    while at < len(recent) - 1 and recent[at] != token:
        at += 1
    while at > 0:
        recent[at] = recent[at - 1]
        at -= 1
    recent[0] = token


@compiled
def opening(hashes: HashArray) -> None:
    """The hashes of the contexts before a text, uint64 ``[2, LONGEST + 1]``; column n is of n tokens."""
    for source in range(2):
        hashes[source, 0] = np.uint64(0)
        for length in range(1, LONGEST + 1):
            hashes[source, length] = mix(hashes[source, length - 1], START)


@compiled
def advance(hashes: HashArray, source: int, token: int) -> None:
    """The hashes of a source after one more token."""
    for length in range(LONGEST, 0, -1):
        hashes[source, length] = mix(hashes[source, length - 1], token)
