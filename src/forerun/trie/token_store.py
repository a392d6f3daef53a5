"""The token sequences that copies read from, and hints to passages in them.

A sequence is a linked list of chunks. The *position* of a token is ``chunk * CHUNK_TOKENS + place in the chunk``, so
the next position is the next cell, except at a chunk's end. ``hints`` maps an n-gram's hash to the position after its
latest occurrence. Entries overwrite each other, so the tokens before a hint are compared.
"""

from __future__ import annotations

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.core.tree import IntArray
from forerun.trie.arrays import HashArray, Index, Int32Array, mix, table_row
from forerun.trie.tables import CHUNK_TOKENS

SHORT_NGRAM, LONG_NGRAM = 3, 5
"""Lengths of the two hinted n-grams; a copy needs ``SHORT_NGRAM`` agreeing tokens, and contexts are hashed up to
``LONG_NGRAM``. With few distinct tokens, the latest occurrence of five is useful more often than that of three."""

MAX_AGREED = 32

UNWRITTEN = -1
"""Fills cells without a token."""

START = -1
"""Precedes the first token of a sequence in its contexts."""


@compiled
def read(index: Index, position: int) -> int:
    """Return the token at a position."""
    return int(index.text[position // CHUNK_TOKENS].tokens[position % CHUNK_TOKENS])


@compiled
def following(index: Index, position: int) -> int:
    """Return the next position, or 0."""
    if position % CHUNK_TOKENS < CHUNK_TOKENS - 1:
        return position + 1
    return int(index.text[position // CHUNK_TOKENS].after) * CHUNK_TOKENS


@compiled
def preceding(index: Index, position: int) -> int:
    """Return the previous position, or 0."""
    if position % CHUNK_TOKENS > 0:
        return position - 1
    before = int(index.text[position // CHUNK_TOKENS].before)
    return before * CHUNK_TOKENS + CHUNK_TOKENS - 1 if before != 0 else 0


@compiled
def _blank(index: Index, chunk: int) -> None:
    for cell in range(CHUNK_TOKENS):
        index.text[chunk].tokens[cell] = UNWRITTEN


@compiled
def _chunk(index: Index, before: int) -> int:
    """Return a new chunk after another (0: the first of a sequence), or 0 if none is free."""
    text, state = index.text, index.state[0]
    chunk = state.chunk_free
    if chunk != 0:
        state.chunk_free = text[chunk].after
    elif state.chunk_top < len(text):
        chunk = state.chunk_top
        state.chunk_top += 1
    else:
        return 0
    state.chunks += 1
    _blank(index, chunk)
    text[chunk].after, text[chunk].before = 0, before
    if before != 0:
        text[before].after = chunk
    return int(chunk)


@compiled
def append(index: Index, end: int, token: int) -> int:
    """Write a token after position ``end`` (0: the first of a sequence); return its position, or 0 without room."""
    inside = end != 0 and end % CHUNK_TOKENS < CHUNK_TOKENS - 1
    position = end + 1 if inside else _chunk(index, end // CHUNK_TOKENS) * CHUNK_TOKENS
    if position != 0:
        index.text[position // CHUNK_TOKENS].tokens[position % CHUNK_TOKENS] = token
    return position


@compiled
def free(index: Index, chunk: int) -> None:
    """Free a chunk."""
    state = index.state[0]
    _blank(index, chunk)
    index.text[chunk].after = state.chunk_free
    state.chunk_free = chunk
    state.chunks -= 1


@compiled
def agreement(index: Index, position: int, other: Index, end: int) -> int:
    """Count the tokens before ``position`` that equal those up to ``end`` in ``other``, up to ``MAX_AGREED``."""
    length = 0
    position = preceding(index, position)
    while length < MAX_AGREED and position != 0 and end != 0 and read(index, position) == read(other, end):
        length += 1
        position, end = preceding(index, position), preceding(other, end)
    return length


@compiled
def agreement_with_pending(index: Index, position: int, other: Index, end: int, tokens: IntArray) -> int:
    """Count ``agreement`` with a sequence in ``other`` followed by ``tokens``, which are not written there yet."""
    length = 0
    while length < len(tokens):
        before = preceding(index, position)
        if before == 0 or read(index, before) != tokens[len(tokens) - 1 - length]:
            return min(length, MAX_AGREED)
        length, position = length + 1, before
    return min(length + agreement(index, position, other, end), MAX_AGREED)


@compiled
def hint(index: Index, hashed: np.uint64) -> int:
    """Return the position after what may be the latest occurrence of an n-gram, or 0."""
    return int(index.hints[table_row(hashed, len(index.hints))])


@compiled
def set_hint(index: Index, hashed: np.uint64, position: int) -> None:
    """Store the position after an n-gram."""
    index.hints[table_row(hashed, len(index.hints))] = position


@compiled
def collect(text: RecordArray, firsts: IntArray, out: Int32Array, ends: IntArray) -> None:
    """Concatenate sequences, given by first chunks, int64 ``[n]``, into ``out``, int32 with room for all chunks; fill
    ``ends``, int64 ``[n]``."""
    at = 0
    for number in range(len(firsts)):
        chunk = firsts[number]
        while chunk != 0:
            for cell in range(CHUNK_TOKENS):
                if text[chunk].tokens[cell] != UNWRITTEN:
                    out[at] = text[chunk].tokens[cell]
                    at += 1
            chunk = text[chunk].after
        ends[number] = at


@compiled
def remember(recent: Int32Array, token: int) -> None:
    """Move a token to the front of the recent ones."""
    at = 0
    while at < len(recent) - 1 and recent[at] != token:
        at += 1
    while at > 0:
        recent[at] = recent[at - 1]
        at -= 1
    recent[0] = token


@compiled
def start_hashes(hashes: HashArray) -> None:
    """Fill in the hashes before a sequence, uint64 ``[2, LONG_NGRAM + 1]``; column n is of n tokens."""
    for source in range(2):
        hashes[source, 0] = np.uint64(0)
        for length in range(1, LONG_NGRAM + 1):
            hashes[source, length] = mix(hashes[source, length - 1], START)


@compiled
def advance(hashes: HashArray, source: int, token: int) -> None:
    """Update the hashes of a source's contexts for one more token."""
    for length in range(LONG_NGRAM, 0, -1):
        hashes[source, length] = mix(hashes[source, length - 1], token)
