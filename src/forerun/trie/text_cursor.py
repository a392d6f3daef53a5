"""Where a text stands, and what happens when a token is added to it or taken back.

A token that is added is counted behind its contexts, appended to the text, and told to the copies and trails.

A copy points behind an earlier occurrence of the text's last tokens and predicts that the text goes on as it did there.
It survives a wrong prediction, because one word of a repeated passage is often replaced. It ends when it is wrong too
often in a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.tree import IntArray
from forerun.trie.arrays import ORDERS, HashArray, Index
from forerun.trie.contexts import count, uncount
from forerun.trie.gapped_match import crossing, follow_trails, lay_trail, turn, way_on
from forerun.trie.tables import CHUNK, COPY, END, OUTPUT, OWN, PROMPT, SHARED, TRAIL, RecordArray
from forerun.trie.token_store import (
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

MOST_WRONG = 0b1111
"""A copy ends when these bits of ``COPY.wrong`` are set: its last four predictions were wrong."""

REMEMBERED = 512
"""Tokens of a prompt, the last ones, that count as seen last."""


class TextCursor(NamedTuple):
    """Where a text stands.

    Attributes:
        hashes: of the contexts at its end, by source and length; uint64 ``[2, LONGEST + 1]``.
        copies: one in each source; ``COPY`` ``[1, 2]``.
        trails: through prompt and output; ``TRAIL`` ``[1, 2]``.
        ends: where it is written in each source; ``END`` ``[2]``.
    """

    hashes: HashArray
    copies: RecordArray
    trails: RecordArray
    ends: RecordArray

    @classmethod
    def start(cls) -> TextCursor:
        """Before a text."""
        hashes, copies = np.zeros((2, LONGEST + 1), np.uint64), np.zeros((1, 2), COPY)
        place = cls(hashes, copies, np.zeros((1, 2), TRAIL), np.zeros(2, END))
        opening(place.hashes)
        return place

    @property
    def first_chunk(self) -> int:
        """The text's first chunk in the shared source, or 0."""
        return int(self.ends["chunk"][SHARED])

    def leave_shared(self) -> None:
        """Stop copying from and writing to the shared source, whose texts are replaced.

        The rest of this text is not written there: without its beginning it would be another text.
        """
        self.copies[0, SHARED].position = 0
        self.ends[SHARED].position, self.ends[SHARED].chunk = -1, 0


@compiled
def follow_copy(index: Index, copies: RecordArray, node: int, source: int, token: int, again: int) -> None:
    """Tell a copy which token came. Where its text ends, it goes on at position ``again``, as in LZ77."""
    copy = copies[node, source]
    position = copy.position
    if position == 0:
        return
    if read(index, position) == token:
        copy.agreed = min(copy.agreed + 1, FAR)
        copy.wrong = copy.wrong << 1 & 255
    else:
        copy.agreed = 0
        copy.wrong = (copy.wrong << 1 | 1) & 255
    position = following(index, position)
    if position != 0 and read(index, position) == UNWRITTEN:
        position = again
    if copy.wrong & MOST_WRONG == MOST_WRONG:
        position = 0
    copy.position = position


@compiled
def seek_copy(index: Index, copy: np.record, hashed: np.uint64, own: Index, end: int) -> None:
    """Move a copy behind the latest occurrence of the last tokens, if at least as many tokens agree there.

    ``hashed`` is of the n-gram to look for, and ``end`` is the position of the text's last token in ``own``.
    """
    if copy.agreed >= FAR:
        return
    found = hint(index, hashed)
    if found == 0 or found == copy.position:
        return
    agreed = agreement(index, found, own, end)
    if agreed >= REACH and agreed >= copy.agreed:
        copy.position, copy.agreed, copy.wrong = found, agreed, 0


@compiled
def seek_copies(index: Index, place: TextCursor, source: int, own: Index) -> None:
    """Look for a better copy by the longer n-gram, then by the shorter one."""
    copy, end = place.copies[0, source], place.ends[OWN].position
    seek_copy(index, copy, place.hashes[source, LONGEST], own, end)
    seek_copy(index, copy, place.hashes[source, REACH], own, end)


@compiled
def write(index: Index, hashes: HashArray, source: int, end: int, token: int) -> int:
    """Append a token to a text and count it; its position, or -1 if there was no room."""
    position = append(index, end, token)
    if position == 0:
        return -1
    for order in range(1, ORDERS + 1):
        count(index, hashes[source, order], token)
    set_hint(index, hashes[source, LONGEST], position)
    set_hint(index, hashes[source, REACH], position)
    index.state[0].tokens += 1
    return position


@compiled
def ingest(own: Index, place: TextCursor, tokens: IntArray) -> None:
    """Take in a prompt."""
    end = place.ends[OWN]
    for number in range(len(tokens)):
        token = tokens[number]
        end.position = write(own, place.hashes, OWN, end.position, token)
        advance(place.hashes, OWN, token)
        if number >= len(tokens) - REMEMBERED:
            remember(own.recent, token)
    seek_copies(own, place, OWN, own)
    place.trails[0, PROMPT].prompt_end = place.trails[0, OUTPUT].prompt_end = end.position


@compiled
def _count_beside(own: Index, place: TextCursor, token: int) -> None:
    """Count a token behind the two contexts that trails add: as a stand-in, and as the way on at a crossing."""
    turned = turn(own, place.trails[0, PROMPT])
    if turned != 0:
        count(own, turned, token)
    for row in range(2):
        trail = place.trails[0, row]
        crossed = crossing(trail, row, place.hashes[OWN, 2])
        if crossed != 0:
            count(own, crossed, way_on(own, trail, row, token))


@compiled
def take(index: Index, source: int, own: Index, place: TextCursor, token: int) -> None:
    """Take a generated token into one source; ``index`` is that source's, ``own`` the request's."""
    if source == OWN:
        _count_beside(own, place, token)
    end = place.ends[source]
    if end.position >= 0:
        fresh = end.position == 0
        end.position = write(index, place.hashes, source, end.position, token)
        if fresh:
            end.chunk = max(end.position, 0) // CHUNK
        remember(index.recent, token)
    advance(place.hashes, source, token)
    follow_copy(index, place.copies, 0, source, token, 0)
    seek_copies(index, place, source, own)
    if source == OWN:
        follow_trails(own, place.trails, 0, token)
        lay_trail(place.trails, place.copies[0, OWN].position, place.copies[0, OWN].agreed)


@compiled
def publish(shared: Index, place: TextCursor, tokens: IntArray) -> None:
    """Take in tokens that were generated before, without learning from them."""
    for token in tokens:
        take(shared, SHARED, shared, place, token)


@compiled
def withdraw(index: Index, place: TextCursor, most: int) -> bool:
    """Take back up to ``most`` tokens from the front of a shared text; whether that was all of it.

    ``place`` is where its front is: ``place.ends[SHARED].position`` is the position of the next token to go, and
    ``place.hashes[SHARED]`` are the contexts of that token.
    """
    position = place.ends[SHARED].position
    for _ in range(most):
        token = read(index, position) if position != 0 else UNWRITTEN
        if token == UNWRITTEN:
            if position != 0:
                free(index, position // CHUNK)
            place.ends[SHARED].position = 0
            return True
        for order in range(1, ORDERS + 1):
            uncount(index, place.hashes[SHARED, order], token)
        advance(place.hashes, SHARED, token)
        index.state[0].tokens -= 1
        behind = following(index, position)
        if behind // CHUNK != position // CHUNK:
            free(index, position // CHUNK)
        position = behind
    place.ends[SHARED].position = position
    return False


@compiled
def skip(own: Index, shared: Index, place: TextCursor, aside: TextCursor, tokens: IntArray) -> None:
    """Let ``aside`` be the place behind tokens that follow ``place`` and are not taken in."""
    for source in range(2):
        for length in range(LONGEST + 1):
            aside.hashes[source, length] = place.hashes[source, length]
        aside.copies[0, source] = place.copies[0, source]
        aside.trails[0, source] = place.trails[0, source]
        aside.ends[source] = place.ends[source]
    for token in tokens:
        for source in range(2):
            advance(aside.hashes, source, token)
        follow_copy(own, aside.copies, 0, OWN, token, 0)
        follow_copy(shared, aside.copies, 0, SHARED, token, 0)
        follow_trails(own, aside.trails, 0, token)
