"""The arrays of one index, and the hash table from contexts to slots; ``tables`` describes the columns.

A context is one to ``ORDERS`` consecutive tokens, identified by a hash; each has one row of ``slots``. Linear hashing
(Litwin, 1980) grows the table one bucket at a time, so no insertion rehashes everything.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.core.tree import IntArray
from forerun.trie.tables import CHUNK_TOKENS, ENTRY, INDEX_STATE, RECYCLED_LIST, SLOT, TEXT_CHUNK

Int32Array = npt.NDArray[np.int32]

FloatArray = npt.NDArray[np.float64]

HashArray = npt.NDArray[np.uint64]

ORDERS = 4
"""Length of the longest context, in tokens."""

SIZE_CLASSES = 7
"""Block sizes: 1, 2, 4, ... 64 rows."""

FIRST_HINTS = 1 << 8

LARGE_BYTES = 1 << 20
"""Arrays from this size get a separate memory mapping."""

BYTES_PER_TOKEN = 72
"""Bytes reserved per token of a namespace's capacity; actual use is lower, and depends on repetition."""

RECYCLED_SHARE = 1 / 16
"""Share of a namespace's bytes for recycled logits; 1/1024 to 1/4 of 64 MiB change 16-token drafts by 1 %."""

OWN_LISTS = 1 << 14
"""Recycled lists per request, 80 bytes each; a step with a 64-node draft keeps 130."""

RECENT_TOKENS = 48


class Index(NamedTuple):
    """Sequences, and what followed their contexts.

    Attributes:
        slots: one row per context; ``SLOT`` ``[slots]``.
        heads: first slot of each bucket, int32 ``[slots]``.
        blocks: followers of contexts that have several; ``ENTRY`` ``[rows]``.
        text: the tokens, in chunks; ``TEXT_CHUNK`` ``[chunks]``; see ``token_store``.
        hints: where an n-gram last continued, by its hash; int32 ``[power of two]``; see ``token_store``.
        recent: distinct tokens, most recent first, int32 ``[RECENT_TOKENS]``, padded with -1.
        spelling: tokens of each word without its leading space, int32 ``[vocabulary, n]``; see ``spelling``.
        recycled: recycled logits by the hash of their context; ``RECYCLED_LIST`` ``[power of two]``.
        static: such lists computed by the model without context; never written here.
    """

    slots: RecordArray
    heads: Int32Array
    blocks: RecordArray
    text: RecordArray
    hints: Int32Array
    recent: Int32Array
    spelling: Int32Array
    free_blocks: IntArray
    state: RecordArray
    recycled: RecordArray
    static: RecordArray

    @classmethod
    def allocate(cls, slots: int, rows: int, chunks: int) -> Index:
        """Return an empty index. The system backs pages on first write, so unused room costs nothing."""
        state = np.zeros(1, INDEX_STATE)
        state["mask"], state["slot_top"], state["block_top"], state["chunk_top"] = 15, 1, 1, 1
        return cls(
            slots=_zeros(slots + 1, SLOT),
            heads=_zeros(slots + 16, np.dtype(np.int32)),
            blocks=_zeros(rows + 1, ENTRY),
            text=_zeros(chunks + 1, TEXT_CHUNK),
            hints=np.zeros(FIRST_HINTS, np.int32),
            recent=np.full(RECENT_TOKENS, -1, np.int32),
            spelling=np.full((1, 1), -1, np.int32),
            free_blocks=np.zeros(SIZE_CLASSES, np.int64),
            state=state,
            recycled=np.zeros(1, RECYCLED_LIST),
            static=np.zeros(1, RECYCLED_LIST),
        )

    @classmethod
    def for_tokens(cls, tokens: int) -> Index:
        """Return an empty index for two sequences of ``tokens`` in all, counted after ``ORDERS + 2`` contexts."""
        index = cls.allocate((ORDERS + 2) * tokens, 5 * (ORDERS + 2) * tokens, tokens // CHUNK_TOKENS + 3)
        return index._replace(recycled=_zeros(OWN_LISTS, RECYCLED_LIST))

    @classmethod
    def for_bytes(cls, nbytes: int) -> Index:
        """Return an empty index of at most ``nbytes``, split among its arrays as typical sequences need it."""
        return cls.allocate(*_rows(nbytes))._replace(recycled=_zeros(_lists(nbytes), RECYCLED_LIST))

    def within(self, reserved: Index, nbytes: int) -> Index:
        """Move to the first rows of the large arrays of ``reserved``, up to ``nbytes``, with all rows in use."""
        slots, rows, chunks = _rows(nbytes)
        return self._replace(
            slots=reserved.slots[: slots + 1],
            heads=reserved.heads[: slots + 16],
            blocks=reserved.blocks[: rows + 1],
            text=reserved.text[: chunks + 1],
            recycled=reserved.recycled[: _lists(nbytes)],
        )

    @property
    def tokens(self) -> int:
        return int(self.state["tokens"].item())

    @property
    def nbytes(self) -> int:
        """Bytes ever used; untouched pages do not count."""
        state = self.state[0]
        used = SLOT.itemsize * state.slot_top + self.heads.itemsize * (state.mask + 1 + state.split)
        used += ENTRY.itemsize * state.block_top + TEXT_CHUNK.itemsize * state.chunk_top
        used += RECYCLED_LIST.itemsize * state.lists
        return int(used) + sum(part.nbytes for part in (self.hints, self.recent, self.free_blocks, self.state))

    def with_hints(self, more: int = 0) -> Index:
        """Return the index with a hint per token, ``more`` included; tiling keeps hints at their hashes."""
        factor = 1
        while len(self.hints) * factor < self.tokens + more:
            factor *= 2
        return self if factor == 1 else self._replace(hints=np.tile(self.hints, factor))

    def grown(self) -> Index:
        """Double the room."""
        slots, heads, blocks, text = map(_doubled, self[:4])
        return self._replace(slots=slots, heads=heads, blocks=blocks, text=text)


def _rows(nbytes: int) -> tuple[int, int, int]:
    """Return the slots, block rows and chunks that fit ``nbytes`` besides hints and recycled logits."""
    tokens = max(0, nbytes - RECYCLED_LIST.itemsize * _lists(nbytes)) / BYTES_PER_TOKEN
    return int(2.1 * tokens), int(2.1 * tokens), int(tokens / CHUNK_TOKENS)


def _lists(nbytes: int) -> int:
    return 1 << max(1, int(nbytes * RECYCLED_SHARE) // RECYCLED_LIST.itemsize).bit_length() - 1


def _doubled(part: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Double an array with zeros. (``np.concatenate`` would lose the record type.)"""
    longer = _zeros(2 * len(part), part.dtype)
    longer[: len(part)] = part
    return longer


def _zeros(rows: int, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return zeros, in a private memory mapping if large: ``calloc`` may clear heap memory, and so back it, at once."""
    size = kind.itemsize * rows
    if size < LARGE_BYTES:
        return np.zeros(rows, kind)
    return np.frombuffer(mmap.mmap(-1, size, **_PRIVATE), kind)


_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}


@compiled
def mix(hashed: np.uint64, token: int) -> np.uint64:
    """Extend the hash of a context by a token."""
    mixed = (hashed ^ np.uint64(token + 2)) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(29))


@compiled
def table_row(hashed: np.uint64, rows: int) -> int:
    """Return the row of a hash in a table of ``rows``, a power of two."""
    return int(np.int64(hashed >> np.uint64(20)) & (rows - 1))


@compiled
def _bucket(index: Index, key: int) -> int:
    state = index.state[0]
    bucket = key & state.mask
    if bucket < state.split:
        bucket = key & (2 * state.mask + 1)
    return int(bucket)


@compiled
def find(index: Index, hashed: np.uint64) -> int:
    """Return the slot of a context, or 0."""
    key = int(hashed >> np.uint64(33))
    slot = index.heads[_bucket(index, key)]
    while slot != 0 and index.slots[slot].key != key:
        slot = index.slots[slot].chain
    return int(slot)


@compiled
def _split(index: Index) -> None:
    slots, heads, state = index.slots, index.heads, index.state[0]
    low, high = state.split, state.split + state.mask + 1
    slot = heads[low]
    heads[low] = heads[high] = 0
    while slot != 0:
        after = slots[slot].chain
        bucket = high if slots[slot].key & (state.mask + 1) else low
        slots[slot].chain = heads[bucket]
        heads[bucket] = slot
        slot = after
    state.split += 1
    if state.split > state.mask:
        state.mask, state.split = 2 * state.mask + 1, 0


@compiled
def add_slot(index: Index, hashed: np.uint64, token: int) -> bool:
    """Add a context with its first follower; return False if no slot is free."""
    slots, state = index.slots, index.state[0]
    slot = state.slot_free
    if slot != 0:
        state.slot_free = slots[slot].chain
    elif state.slot_top < len(slots):
        slot = state.slot_top
        state.slot_top += 1
    else:
        return False
    state.slots += 1
    if state.slots > state.mask + state.split and state.mask + 1 + state.split < len(index.heads):
        _split(index)
    key = int(hashed >> np.uint64(33))
    bucket = _bucket(index, key)
    added = slots[slot]
    added.key, added.total, added.value, added.chain = key, 1, token, index.heads[bucket]
    index.heads[bucket] = slot
    return True


@compiled
def drop_slot(index: Index, slot: int) -> None:
    """Free a slot."""
    slots, state = index.slots, index.state[0]
    bucket = _bucket(index, int(slots[slot].key))
    link = index.heads[bucket]
    if link == slot:
        index.heads[bucket] = slots[slot].chain
    else:
        while slots[link].chain != slot:
            link = slots[link].chain
        slots[link].chain = slots[slot].chain
    slots[slot].chain = state.slot_free
    state.slot_free = slot
    state.slots -= 1


@compiled
def tight(index: Index) -> bool:
    """Return whether a few dozen more tokens may not fit."""
    state = index.state[0]
    slots, rows, chunks = len(index.slots), len(index.blocks), len(index.text)
    full = state.slots >= slots - slots // 16 - 1 or state.rows >= rows - rows // 16 - 1
    return bool(full or state.chunks >= chunks - chunks // 16 - 1)


@compiled
def valid(tokens: IntArray) -> bool:
    """Return whether all ids are in [0, 2**31)."""
    wrong = 0
    for token in tokens:
        wrong += token < 0 or token >= 1 << 31
    return wrong == 0
