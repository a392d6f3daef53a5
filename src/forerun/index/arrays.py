"""What followed every context of one to ``ORDERS`` tokens, counted in flat arrays: the index behind the trie drafter.

A context is known by a hash of its tokens and owns one slot. While one token only has followed it, slot and token are
all there is; of several, tokens and counts lie side by side in a block, most frequent first as far as swapping
neighbours keeps them so. Slots are found by linear hashing (Litwin, 1980), which grows by one bucket at a time, and
blocks come in powers of two, so nothing here ever stops to move the whole index.

The functions are compiled; 0 stands for "none" in every link.
"""

from __future__ import annotations

import math
import mmap
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.core.tree import IntArray
from forerun.index.compiling import compiled

Int32Array = npt.NDArray[np.int32]

FloatArray = npt.NDArray[np.float64]

HashArray = npt.NDArray[np.uint64]

ORDERS = 4
"""Tokens of the longest context that is counted."""

KEY, CHAIN, TOTAL, VALUE = range(4)
"""Columns of ``slots``: hash, next slot of the bucket or next free one, count of all followers, and the only follower
or, if there are more, -1 minus its block."""

FOLLOWER, COUNT = range(2)
"""Columns of ``blocks``. A block's first row holds its entries and the one seen last; entries follow."""

MASK, SPLIT, LIVE, TOP, FREE, BLOCK_TOP, TEXT_TOP, TEXT_FREE, ROWS, CHUNKS, TOKENS, BLOCK_FREE = range(12)
"""Entries of ``state``: of the hash table and its slots, first rows never used, free ones, rows and chunks and tokens
in use; from the last on, the first free block of 1, 2, 4, ... rows."""

CLASSES = 26

FIRST_HINTS = 1 << 8
LARGE = 1 << 20

BYTES_PER_TOKEN = 72
"""Reserved for each token of a namespace's capacity; what is used is less, and depends on the text."""

RECENT = 48
"""Distinct tokens that are remembered as seen last."""

CHUNK = 32
"""Tokens of one row of text."""

AFTER, BEFORE = CHUNK, CHUNK + 1
"""Columns of ``text``: the chunks that follow and precede."""


class Index(NamedTuple):
    """Texts, and what followed their contexts.

    Attributes:
        slots: int32 ``[slots, 4]``; row 0 is unused.
        heads: first slot of each bucket, int32 ``[slots]``.
        blocks: int32 ``[rows, 2]``; row 0 is unused.
        text: int32 ``[chunks, CHUNK + 2]``; row 0 is unused; see ``history``.
        hints: int32 ``[power of two]``; see ``history``.
        recent: distinct tokens, those seen last first, int32 ``[RECENT]``; -1 for none.
        spelling: tokens of each word without the space before it; see ``spelling``; int32 ``[vocabulary, n]``.
        state: int64 ``[BLOCK_FREE + CLASSES]``.
    """

    slots: Int32Array
    heads: Int32Array
    blocks: Int32Array
    text: Int32Array
    hints: Int32Array
    recent: Int32Array
    spelling: Int32Array
    state: IntArray

    @classmethod
    def allocate(cls, slots: int, rows: int, chunks: int) -> Index:
        """An empty index; pages of memory that it never touches are never backed."""
        state = np.zeros(BLOCK_FREE + CLASSES, np.int64)
        state[MASK], state[TOP], state[BLOCK_TOP], state[TEXT_TOP] = 15, 1, 1, 1
        shapes = ((slots + 1, 4), (slots + 16,), (rows + 1, 2), (chunks + 1, CHUNK + 2), (FIRST_HINTS,))
        slots_, heads, blocks, text, hints = (_zeros(shape) for shape in shapes)
        recent, spelling = np.full(RECENT, -1, np.int32), np.full((1, 1), -1, np.int32)
        return cls(slots_, heads, blocks, text, hints, recent, spelling, state)

    @classmethod
    def for_tokens(cls, tokens: int) -> Index:
        """An empty index that any text of so many tokens fits, with two contexts more of each (``trail.py``)."""
        return cls.allocate((ORDERS + 2) * tokens, 5 * (ORDERS + 2) * tokens, tokens // CHUNK + 2)

    @classmethod
    def for_bytes(cls, nbytes: int) -> Index:
        """An empty index that never takes more bytes, shared out as common texts need them."""
        tokens = nbytes / BYTES_PER_TOKEN
        return cls.allocate(int(2.1 * tokens), int(2.1 * tokens), int(tokens / CHUNK))

    @property
    def nbytes(self) -> int:
        """Bytes in use or once used; memory that was never touched is not counted."""
        state = self.state
        used = 16 * state[TOP] + 4 * (state[MASK] + 1 + state[SPLIT])
        used += 8 * state[BLOCK_TOP] + 4 * (CHUNK + 2) * state[TEXT_TOP]
        return int(used) + self.hints.nbytes + self.recent.nbytes + state.nbytes

    def with_hints(self, more: int = 0) -> Index:
        """With a table of hints as large as the text and so many tokens more; a hint is found again in each copy."""
        factor = 1
        while len(self.hints) * factor < self.state[TOKENS] + more:
            factor *= 2
        return self if factor == 1 else self._replace(hints=np.tile(self.hints, factor))

    def grown(self) -> Index:
        """Twice the room, the same content."""
        more = [np.concatenate([part, np.zeros_like(part)]) for part in self[:4]]
        return self._replace(slots=more[0], heads=more[1], blocks=more[2], text=more[3])


def _zeros(shape: tuple[int, ...]) -> Int32Array:
    """An int32 array of zeros; a large one is mapped, for what ``calloc`` takes from the heap is cleared at once. A
    process that is forked has a copy of its own, as of all else."""
    size = 4 * math.prod(shape)
    if size < LARGE:
        return np.zeros(shape, np.int32)
    return np.frombuffer(mmap.mmap(-1, size, **_PRIVATE), np.int32).reshape(shape)


_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}


@compiled
def mix(hashed: np.uint64, token: int) -> np.uint64:
    """Hash of a context and the token behind it."""
    mixed = (hashed ^ np.uint64(token + 2)) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(29))


@compiled
def _bucket(index: Index, key: int) -> int:
    bucket = key & index.state[MASK]
    if bucket < index.state[SPLIT]:
        bucket = key & (2 * index.state[MASK] + 1)
    return int(bucket)


@compiled
def find(index: Index, hashed: np.uint64) -> int:
    """The slot of a context, or 0."""
    key = int(hashed >> np.uint64(33))
    slot = index.heads[_bucket(index, key)]
    while slot != 0 and index.slots[slot, KEY] != key:
        slot = index.slots[slot, CHAIN]
    return int(slot)


@compiled
def _split(index: Index) -> None:
    """Grow by one bucket."""
    slots, heads, state = index.slots, index.heads, index.state
    low, high = state[SPLIT], state[SPLIT] + state[MASK] + 1
    slot = heads[low]
    heads[low] = heads[high] = 0
    while slot != 0:
        after = slots[slot, CHAIN]
        bucket = high if slots[slot, KEY] & (state[MASK] + 1) else low
        slots[slot, CHAIN] = heads[bucket]
        heads[bucket] = slot
        slot = after
    state[SPLIT] += 1
    if state[SPLIT] > state[MASK]:
        state[MASK], state[SPLIT] = 2 * state[MASK] + 1, 0


@compiled
def add_slot(index: Index, hashed: np.uint64, token: int) -> bool:
    """A new context with its first follower; False if no slot is free."""
    slots, state = index.slots, index.state
    slot = state[FREE]
    if slot != 0:
        state[FREE] = slots[slot, CHAIN]
    elif state[TOP] < len(slots):
        slot = state[TOP]
        state[TOP] += 1
    else:
        return False
    state[LIVE] += 1
    if state[LIVE] > state[MASK] + state[SPLIT] and state[MASK] + 1 + state[SPLIT] < len(index.heads):
        _split(index)
    key = int(hashed >> np.uint64(33))
    bucket = _bucket(index, key)
    slots[slot, KEY], slots[slot, TOTAL], slots[slot, VALUE] = key, 1, token
    slots[slot, CHAIN] = index.heads[bucket]
    index.heads[bucket] = slot
    return True


@compiled
def drop_slot(index: Index, slot: int) -> None:
    """Give a slot back."""
    slots, state = index.slots, index.state
    bucket = _bucket(index, int(slots[slot, KEY]))
    link = index.heads[bucket]
    if link == slot:
        index.heads[bucket] = slots[slot, CHAIN]
    else:
        while slots[link, CHAIN] != slot:
            link = slots[link, CHAIN]
        slots[link, CHAIN] = slots[slot, CHAIN]
    slots[slot, CHAIN] = state[FREE]
    state[FREE] = slot
    state[LIVE] -= 1


@compiled
def tight(index: Index) -> bool:
    """Whether a few dozen tokens more may not fit."""
    state = index.state
    slots, rows, chunks = len(index.slots), len(index.blocks), len(index.text)
    full = state[LIVE] >= slots - slots // 16 - 1 or state[ROWS] >= rows - rows // 16 - 1
    return bool(full or state[CHUNKS] >= chunks - chunks // 16 - 1)


@compiled
def valid(tokens: IntArray) -> bool:
    """Whether all ids are in [0, 2**31)."""
    wrong = 0
    for token in tokens:
        wrong += token < 0 or token >= 1 << 31
    return wrong == 0
