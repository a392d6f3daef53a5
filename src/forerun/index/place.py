"""Where a text stands, and writing it: contexts counted, tokens appended, copies followed; and taking a text back.

A copy points at what came after an earlier occurrence of the text's last tokens. It goes on after a token that it got
wrong, as after a name that was replaced, until it is wrong too often.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.tree import IntArray
from forerun.index.arrays import CHUNK, ORDERS, TOKENS, HashArray, Index
from forerun.index.compiling import compiled
from forerun.index.contexts import count, uncount
from forerun.index.history import (
    FAR,
    LONGEST,
    REACH,
    UNWRITTEN,
    advance,
    agreement,
    append,
    following,
    free,
    hint,
    opening,
    read,
    remember,
    set_hint,
)
from forerun.index.trail import COLUMNS, LIMIT, OUTPUT, PROMPT, crossing, follow_trails, lay_trail, turn, way_on

POSITION, LENGTH, WRONG, DEPTH = range(4)
"""Columns of ``Place.copies``: where the copy continues (0: no copy), tokens that agreed before, and a bit for each of
the last eight predictions that was wrong."""

MOST_WRONG = 0b1111
"""A copy that was wrong this often in a row ends."""


class Place(NamedTuple):
    """Where a text stands.

    Attributes:
        hashes: of its last tokens, own text and shared text; uint64 ``[2, LONGEST + 1]``.
        copies: of own and shared text, int64 ``[1, 2, 3]``.
        trails: through prompt and output (``trail.py``), int64 ``[1, 2, COLUMNS]``.
        ends: position of its last token in own and shared text (-1: no longer written), and the first chunks;
            int64 ``[4]``.
    """

    hashes: HashArray
    copies: IntArray
    trails: IntArray
    ends: IntArray

    @classmethod
    def start(cls) -> Place:
        """Before a text."""
        hashes, copies = np.zeros((2, LONGEST + 1), np.uint64), np.zeros((1, 2, 3), np.int64)
        place = cls(hashes, copies, np.zeros((1, 2, COLUMNS), np.int64), np.zeros(4, np.int64))
        opening(place.hashes)
        return place

    def copy(self) -> Place:
        """The same place, to move on from."""
        return Place(self.hashes.copy(), self.copies.copy(), self.trails.copy(), self.ends.copy())


@compiled
def follow_copy(index: Index, copies: IntArray, at: int, source: int, token: int, again: int) -> None:
    """Move a copy on by a token; at the text's end it goes on at ``again``, as in LZ77."""
    position = copies[at, source, POSITION]
    if position == 0:
        return
    if read(index, position) == token:
        copies[at, source, LENGTH] = min(copies[at, source, LENGTH] + 1, FAR)
        copies[at, source, WRONG] = copies[at, source, WRONG] << 1 & 255
    else:
        copies[at, source, LENGTH] = 0
        copies[at, source, WRONG] = (copies[at, source, WRONG] << 1 | 1) & 255
    position = following(index, position)
    if position != 0 and read(index, position) == UNWRITTEN:
        position = again
    if copies[at, source, WRONG] & MOST_WRONG == MOST_WRONG:
        position = 0
    copies[at, source, POSITION] = position


@compiled
def seek_copy(index: Index, copies: IntArray, source: int, hashed: np.uint64, own: Index, end: int) -> None:
    """Copy from the latest occurrence of the last tokens, if that agrees for at least as long."""
    if copies[0, source, LENGTH] >= FAR:
        return
    found = hint(index, hashed)
    if found == 0 or found == copies[0, source, POSITION]:
        return
    agreed = agreement(index, found, own, end)
    if agreed >= REACH and agreed >= copies[0, source, LENGTH]:
        copies[0, source, POSITION], copies[0, source, LENGTH], copies[0, source, WRONG] = found, agreed, 0


@compiled
def seek_copies(index: Index, place: Place, source: int, own: Index) -> None:
    """Look for a copy by the longer n-gram, then by the shorter one."""
    seek_copy(index, place.copies, source, place.hashes[source, LONGEST], own, place.ends[0])
    seek_copy(index, place.copies, source, place.hashes[source, REACH], own, place.ends[0])


@compiled
def write(index: Index, hashes: HashArray, source: int, end: int, token: int) -> int:
    """Count a text's next token and append it; its position, or -1 if there was no room."""
    position = append(index, end, token)
    if position == 0:
        return -1
    for order in range(1, ORDERS + 1):
        count(index, hashes[source, order], token)
    set_hint(index, hashes[source, LONGEST], position)
    set_hint(index, hashes[source, REACH], position)
    index.state[TOKENS] += 1
    return position


@compiled
def ingest(own: Index, place: Place, tokens: IntArray) -> None:
    """Take in a prompt."""
    for number in range(len(tokens)):
        token = tokens[number]
        place.ends[0] = write(own, place.hashes, 0, place.ends[0], token)
        advance(place.hashes, 0, token)
        if number >= len(tokens) - 512:
            remember(own.recent, token)
    seek_copies(own, place, 0, own)
    place.trails[0, PROMPT, LIMIT] = place.trails[0, OUTPUT, LIMIT] = place.ends[0]


@compiled
def take(index: Index, source: int, own: Index, place: Place, token: int) -> None:
    """Write a token in one text and follow its copy."""
    if source == 0:
        turned = turn(own, place.trails, 0)
        if turned != 0:
            count(own, turned, token)
        for row in range(2):
            crossed = crossing(place.trails, 0, row, place.hashes[0, 2])
            if crossed != 0:
                count(own, crossed, way_on(own, place.trails, 0, row, token))
    if place.ends[source] >= 0:
        fresh = place.ends[source] == 0
        place.ends[source] = write(index, place.hashes, source, place.ends[source], token)
        if fresh:
            place.ends[2 + source] = max(place.ends[source], 0) // CHUNK
        remember(index.recent, token)
    advance(place.hashes, source, token)
    follow_copy(index, place.copies, 0, source, token, 0)
    seek_copies(index, place, source, own)
    if source == 0:
        follow_trails(own, place.trails, 0, token)
        lay_trail(place.trails, place.copies[0, 0, POSITION], place.copies[0, 0, LENGTH])


@compiled
def publish(shared: Index, place: Place, tokens: IntArray) -> None:
    """Take in tokens that were generated before, without learning from them."""
    for token in tokens:
        take(shared, 1, shared, place, token)


@compiled
def withdraw(index: Index, place: Place, most: int) -> bool:
    """Take back up to ``most`` tokens of the text that ``place.ends`` is at the start of; whether that was all.

    ``place.hashes[1]`` moves along, and ``place.ends[1]`` is the position of the next token to go.
    """
    position = place.ends[1]
    for _ in range(most):
        token = read(index, position) if position != 0 else UNWRITTEN
        if token == UNWRITTEN:
            if position != 0:
                free(index, position // CHUNK)
            place.ends[1] = 0
            return True
        for order in range(1, ORDERS + 1):
            uncount(index, place.hashes[1, order], token)
        advance(place.hashes, 1, token)
        index.state[TOKENS] -= 1
        behind = following(index, position)
        if behind // CHUNK != position // CHUNK:
            free(index, position // CHUNK)
        position = behind
    place.ends[1] = position
    return False


@compiled
def skip(own: Index, shared: Index, place: Place, tokens: IntArray) -> None:
    """Move on by tokens that are not taken in."""
    for token in tokens:
        for source in range(2):
            advance(place.hashes, source, token)
        follow_copy(own, place.copies, 0, 0, token, 0)
        follow_copy(shared, place.copies, 0, 1, token, 0)
        follow_trails(own, place.trails, 0, token)
