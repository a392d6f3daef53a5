"""The state at the end of a sequence, and its update when a token is added or removed.

An added token is counted after its contexts, appended, and moves the copies and matches. A copy points after an earlier
occurrence of the last tokens and predicts that the sequence continues as it did there. It survives a wrong prediction,
because repeated passages often replace one word, and ends after several in a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.core.tree import IntArray
from forerun.trie.arrays import ORDERS, HashArray, Index
from forerun.trie.contexts import count, uncount
from forerun.trie.gapped_match import current_substitute_hash, follow_matches, skip_hash, skip_to, start_match
from forerun.trie.tables import CHUNK_TOKENS, COPY, GAPPED_MATCH, OUTPUT_MATCH, OWN, PROMPT_MATCH, SHARED, TEXT_END
from forerun.trie.token_store import (
    LONG_NGRAM,
    MAX_AGREED,
    SHORT_NGRAM,
    UNWRITTEN,
    advance,
    agreement,
    agreement_with_pending,
    append,
    following,
    free,
    hint,
    read,
    remember,
    set_hint,
    start_hashes,
)

MOST_WRONG = 0b1111
"""A copy ends when its last four predictions were wrong: these bits of ``COPY.wrong``."""

REMEMBERED = 512
"""Tokens at the end of a prompt that count as recent."""


EXPECTED_AGREED = 16
"""Assumed agreement where the sequence is expected to repeat another one: that of a long copy."""


class TextCursor(NamedTuple):
    """The state at the end of a sequence.

    Attributes:
        hashes: of its contexts, by source and length; uint64 ``[2, LONG_NGRAM + 1]``.
        copies: one per source; ``COPY`` ``[1, 2]``.
        matches: through prompt and output; ``GAPPED_MATCH`` ``[1, 2]``.
        ends: where it is written in each source; ``TEXT_END`` ``[2]``.
    """

    hashes: HashArray
    copies: RecordArray
    matches: RecordArray
    ends: RecordArray

    @classmethod
    def start(cls) -> TextCursor:
        hashes, copies = np.zeros((2, LONG_NGRAM + 1), np.uint64), np.zeros((1, 2), COPY)
        cursor = cls(hashes, copies, np.zeros((1, 2), GAPPED_MATCH), np.zeros(2, TEXT_END))
        start_hashes(cursor.hashes)
        return cursor

    @property
    def first_chunk(self) -> int:
        """The first chunk in the shared source, or 0."""
        return int(self.ends["chunk"][SHARED])

    def expect_copy(self, position: int) -> None:
        """Predict that the request's sequence continues as it did from ``position``."""
        copy = self.copies[0, OWN]
        copy.position, copy.agreed, copy.wrong = position, EXPECTED_AGREED, 0

    @property
    def cut(self) -> bool:
        """Whether writing to the shared source has stopped."""
        return bool(self.ends["position"][SHARED] < 0)

    def leave_shared(self) -> None:
        """Leave the shared source, whose content is replaced: without its start, the rest would be another sequence."""
        self.copies[0, SHARED].position = 0
        self.ends[SHARED].position, self.ends[SHARED].chunk = -1, 0


@compiled
def follow_copy(index: Index, copies: RecordArray, node: int, source: int, token: int, again: int) -> None:
    """Move a copy by a token. Where its sequence ends, it continues at position ``again``, as in LZ77."""
    copy = copies[node, source]
    position = copy.position
    if position == 0:
        return
    if read(index, position) == token:
        copy.agreed = min(copy.agreed + 1, MAX_AGREED)
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
def _seek_copy(index: Index, cursor: TextCursor, source: int, own: Index) -> None:
    """Move a copy after the latest occurrence of the last n-gram, longer first, if as many tokens agree."""
    copy = cursor.copies[0, source]
    for length in (LONG_NGRAM, SHORT_NGRAM):
        if copy.agreed >= MAX_AGREED:
            return
        found = hint(index, cursor.hashes[source, length])
        if found != 0 and found != copy.position:
            agreed = agreement(index, found, own, cursor.ends[OWN].position)
            if agreed >= SHORT_NGRAM and agreed >= copy.agreed:
                copy.position, copy.agreed, copy.wrong = found, agreed, 0


@compiled
def _write(index: Index, hashes: HashArray, source: int, end: int, token: int) -> int:
    """Append a token to a sequence and count it; return its position, or -1 if there is no room."""
    position = append(index, end, token)
    if position == 0:
        return -1
    for order in range(1, ORDERS + 1):
        count(index, hashes[source, order], token)
    set_hint(index, hashes[source, LONG_NGRAM], position)
    set_hint(index, hashes[source, SHORT_NGRAM], position)
    index.state[0].tokens += 1
    return position


@compiled
def ingest(own: Index, cursor: TextCursor, tokens: IntArray, more: int) -> None:
    """Index a piece of a prompt, of which ``more`` tokens follow."""
    end = cursor.ends[OWN]
    for number in range(len(tokens)):
        token = tokens[number]
        end.position = _write(own, cursor.hashes, OWN, end.position, token)
        advance(cursor.hashes, OWN, token)
        if number >= len(tokens) + more - REMEMBERED:
            remember(own.recent, token)
    if more == 0:
        _seek_copy(own, cursor, OWN, own)
        cursor.matches[0, PROMPT_MATCH].prompt_end = cursor.matches[0, OUTPUT_MATCH].prompt_end = end.position


@compiled
def _count_beside(own: Index, cursor: TextCursor, token: int) -> None:
    """Count a token as a substitute and as a skip."""
    substitutes = current_substitute_hash(own, cursor.matches[0, PROMPT_MATCH])
    if substitutes != 0:
        count(own, substitutes, token)
    for row in range(2):
        match = cursor.matches[0, row]
        skipped = skip_hash(match, row, cursor.hashes[OWN, 2])
        if skipped != 0:
            count(own, skipped, skip_to(own, match, row, token))


@compiled
def append_generated(index: Index, source: int, own: Index, cursor: TextCursor, token: int) -> None:
    """Index a generated token in one source, ``index``; ``own`` is the request's index."""
    if source == OWN:
        _count_beside(own, cursor, token)
    end = cursor.ends[source]
    if end.position >= 0:
        fresh = end.position == 0
        end.position = _write(index, cursor.hashes, source, end.position, token)
        if fresh:
            end.chunk = max(end.position, 0) // CHUNK_TOKENS
        remember(index.recent, token)
    advance(cursor.hashes, source, token)
    follow_copy(index, cursor.copies, 0, source, token, 0)
    _seek_copy(index, cursor, source, own)
    if source == OWN:
        follow_matches(own, cursor.matches, 0, token)
        start_match(cursor.matches, cursor.copies[0, OWN].position, cursor.copies[0, OWN].agreed)


@compiled
def publish(shared: Index, cursor: TextCursor, tokens: IntArray) -> None:
    """Index an earlier output, without training on it."""
    for token in tokens:
        append_generated(shared, SHARED, shared, cursor, token)


@compiled
def withdraw(index: Index, cursor: TextCursor, most: int) -> bool:
    """Remove up to ``most`` tokens of a shared output, from ``cursor`` on; return whether nothing is left."""
    position = cursor.ends[SHARED].position
    for _ in range(most):
        token = read(index, position) if position != 0 else UNWRITTEN
        if token == UNWRITTEN:
            if position != 0:
                free(index, position // CHUNK_TOKENS)
            cursor.ends[SHARED].position = 0
            return True
        for order in range(1, ORDERS + 1):
            uncount(index, cursor.hashes[SHARED, order], token)
        advance(cursor.hashes, SHARED, token)
        index.state[0].tokens -= 1
        next_position = following(index, position)
        if next_position // CHUNK_TOKENS != position // CHUNK_TOKENS:
            free(index, position // CHUNK_TOKENS)
        position = next_position
    cursor.ends[SHARED].position = position
    return False


@compiled
def peek(own: Index, shared: Index, cursor: TextCursor, scratch: TextCursor, tokens: IntArray) -> None:
    """Set ``scratch`` to ``cursor`` advanced by tokens that are not indexed."""
    for source in range(2):
        for length in range(LONG_NGRAM + 1):
            scratch.hashes[source, length] = cursor.hashes[source, length]
        scratch.copies[0, source] = cursor.copies[0, source]
        scratch.matches[0, source] = cursor.matches[0, source]
        scratch.ends[source] = cursor.ends[source]
    for token in tokens:
        for source in range(2):
            advance(scratch.hashes, source, token)
        follow_copy(own, scratch.copies, 0, OWN, token, 0)
        follow_copy(shared, scratch.copies, 0, SHARED, token, 0)
        follow_matches(own, scratch.matches, 0, token)


@compiled
def known_suffix(own: Index, shared: Index, cursor: TextCursor, scratch: TextCursor, tokens: IntArray) -> int:
    """Return the length of the longest suffix seen before, as far as hints tell, up to ``MAX_AGREED``. ``tokens``
    follow the cursor without being indexed; ``scratch`` is overwritten."""
    longest, end = 0, cursor.ends[OWN].position
    for source in range(2):
        index = own if source == OWN else shared
        for length in range(LONG_NGRAM + 1):
            scratch.hashes[source, length] = cursor.hashes[source, length]
        for token in tokens:
            advance(scratch.hashes, source, token)
        for length in (SHORT_NGRAM, LONG_NGRAM):
            found = hint(index, scratch.hashes[source, length])
            if found != 0:
                longest = max(longest, agreement_with_pending(index, found, own, end, tokens))
    return longest
