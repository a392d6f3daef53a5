"""What followed every context of one to ``ORDERS`` tokens, counted in flat arrays: the index behind the trie drafter.

A context is known by a hash of its tokens and owns one slot. While one token only has followed it, slot and token are
all there is; of several, tokens and counts lie side by side in a block, most frequent first as far as swapping
neighbours keeps them so. Slots are found by linear hashing (Litwin, 1980), which grows by one bucket at a time, and
blocks come in powers of two, so nothing here ever stops to move the whole index.

The functions are compiled; 0 stands for "none" in every link. The compiler's cache sees changes in a function's own file
only: who edits this one deletes the cache of the modules that import it (``__pycache__``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from forerun.tree import IntArray

Int32Array = npt.NDArray[np.int32]
HashArray = npt.NDArray[np.uint64]
F = TypeVar("F", bound=Callable[..., Any])

ORDERS = 4
"""Tokens of the longest context that is counted."""
KEY, CHAIN, TOTAL, VALUE = range(4)
"""Columns of ``slots``: hash, next slot of the bucket or next free one, count of all followers, and the only follower
or, if there are more, -1 minus its block."""
FOLLOWER, COUNT = range(2)
"""Columns of ``blocks``. A block's first row holds its entries and the one seen last; entries follow."""
MASK, SPLIT, LIVE, TOP, FREE, BLOCK_TOP, TEXT_TOP, TEXT_FREE, ROWS, CHUNKS, TOKENS, BLOCK_FREE = range(12)
"""Entries of ``state``: of the hash table and its slots, first rows never used, free ones, rows and chunks and tokens in
use; from the last on, the first free block of 1, 2, 4, ... rows."""
CLASSES = 26
FIRST_HINTS = 1 << 8
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
        state: int64 ``[BLOCK_FREE + CLASSES]``.
    """

    slots: Int32Array
    heads: Int32Array
    blocks: Int32Array
    text: Int32Array
    hints: Int32Array
    recent: Int32Array
    state: IntArray

    @classmethod
    def allocate(cls, slots: int, rows: int, chunks: int) -> Index:
        """An empty index; pages of memory that it never touches are never backed."""
        state = np.zeros(BLOCK_FREE + CLASSES, np.int64)
        state[MASK], state[TOP], state[BLOCK_TOP], state[TEXT_TOP] = 15, 1, 1, 1
        shapes = ((slots + 1, 4), (slots + 16,), (rows + 1, 2), (chunks + 1, CHUNK + 2), (FIRST_HINTS,))
        return cls(*(np.zeros(shape, np.int32) for shape in shapes), np.full(RECENT, -1, np.int32), state)

    @classmethod
    def for_tokens(cls, tokens: int) -> Index:
        """An empty index that any text of so many tokens fits."""
        return cls.allocate(ORDERS * tokens, 5 * ORDERS * tokens, tokens // CHUNK + 2)

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

    @property
    def tight(self) -> bool:
        """Whether a few hundred tokens more may not fit."""
        state = self.state
        used = (state[LIVE], len(self.slots)), (state[ROWS], len(self.blocks)), (state[CHUNKS], len(self.text))
        return any(part > whole - whole // 16 - 1 for part, whole in used)

    def with_hints(self) -> Index:
        """With a table of hints as large as the text; a hint is found again in each half."""
        if self.state[TOKENS] <= len(self.hints):
            return self
        return self._replace(hints=np.concatenate([self.hints, self.hints]))

    def grown(self) -> Index:
        """Twice the room, the same content."""
        more = [np.concatenate([part, np.zeros_like(part)]) for part in self[:4]]
        return self._replace(slots=more[0], heads=more[1], blocks=more[2], text=more[3])


def compiled(function: F) -> F:
    """Compile on the first call and keep the machine code beside the module, or for the process where none can be.

    Without numba's reference counts (``_nrt``), which took more time than the work: such functions allocate nothing.
    """
    try:
        return cast(F, numba.njit(cache=True, _nrt=False)(function))
    except RuntimeError:  # no folder for the cache can be written
        return cast(F, numba.njit(function, _nrt=False))


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
    key = np.int64(hashed >> np.uint64(33))
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
def _add(index: Index, hashed: np.uint64, token: int) -> bool:
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
    key = np.int64(hashed >> np.uint64(33))
    bucket = _bucket(index, key)
    slots[slot, KEY], slots[slot, TOTAL], slots[slot, VALUE] = key, 1, token
    slots[slot, CHAIN] = index.heads[bucket]
    index.heads[bucket] = slot
    return True


@compiled
def _drop(index: Index, slot: int) -> None:
    """Give a slot back."""
    slots, state = index.slots, index.state
    bucket = _bucket(index, slots[slot, KEY])
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
def _size_class(entries: int) -> int:
    """Exponent of the rows of a block with so many entries."""
    size_class = 1
    while (1 << size_class) <= entries:
        size_class += 1
    return size_class


@compiled
def _release(index: Index, block: int, size_class: int) -> None:
    index.blocks[block, COUNT] = index.state[BLOCK_FREE + size_class]
    index.state[BLOCK_FREE + size_class] = block
    index.state[ROWS] -= 1 << size_class


@compiled
def _allocate(index: Index, size_class: int) -> int:
    """A block, or 0 if none is free."""
    state, blocks = index.state, index.blocks
    block, found = state[BLOCK_FREE + size_class], size_class
    if block == 0 and state[BLOCK_TOP] + (1 << size_class) <= len(blocks):
        block = state[BLOCK_TOP]
        state[BLOCK_TOP] += 1 << size_class
        state[ROWS] += 1 << size_class
        return int(block)
    while block == 0 and found < CLASSES - 1:
        found += 1
        block = state[BLOCK_FREE + found]
    if block == 0:
        return 0
    state[BLOCK_FREE + found] = blocks[block, COUNT]
    state[ROWS] += 1 << found
    while found > size_class:  # give back the half that is not needed
        found -= 1
        _release(index, block + (1 << found), found)
    return int(block)


@compiled
def _move(index: Index, to: int, start: int, rows: int) -> None:
    """Copy rows of blocks downwards or apart."""
    for row in range(rows):
        index.blocks[to + row, FOLLOWER] = index.blocks[start + row, FOLLOWER]
        index.blocks[to + row, COUNT] = index.blocks[start + row, COUNT]


@compiled
def _pair(index: Index, slot: int, token: int) -> bool:
    """Make room for a second follower; False if there is none."""
    slots, blocks = index.slots, index.blocks
    block = _allocate(index, 2)
    if block == 0:
        return False
    blocks[block, FOLLOWER], blocks[block, COUNT] = 2, 2
    blocks[block + 1, FOLLOWER], blocks[block + 1, COUNT] = slots[slot, VALUE], slots[slot, TOTAL]
    blocks[block + 2, FOLLOWER], blocks[block + 2, COUNT] = token, 1
    slots[slot, VALUE] = -1 - block
    return True


@compiled
def _append(index: Index, slot: int, token: int) -> bool:
    """One more entry in a block, which moves when it is full; False if there is no room."""
    blocks = index.blocks
    block = -1 - index.slots[slot, VALUE]
    size = blocks[block, FOLLOWER]
    old, new = _size_class(size), _size_class(size + 1)
    if new != old:
        moved = _allocate(index, new)
        if moved == 0:
            return False
        _move(index, moved, block, size + 1)
        _release(index, block, old)
        index.slots[slot, VALUE] = -1 - moved
        block = moved
    size += 1
    blocks[block + size, FOLLOWER], blocks[block + size, COUNT] = token, 1
    blocks[block, FOLLOWER], blocks[block, COUNT] = size, size
    return True


@compiled
def _entry(index: Index, block: int, token: int) -> int:
    """Number of a follower in a block, or 0."""
    blocks = index.blocks
    for entry in range(1, blocks[block, FOLLOWER] + 1):
        if blocks[block + entry, FOLLOWER] == token:
            return entry
    return 0


@compiled
def _swap(index: Index, block: int, one: int, other: int) -> None:
    blocks = index.blocks
    for column in range(2):
        kept = blocks[block + one, column]
        blocks[block + one, column] = blocks[block + other, column]
        blocks[block + other, column] = kept


@compiled
def count(index: Index, hashed: np.uint64, token: int) -> bool:
    """Count ``token`` behind a context once more; False if there is no room for it."""
    slots, blocks = index.slots, index.blocks
    slot = find(index, hashed)
    if slot == 0:
        return _add(index, hashed, token)
    done = slots[slot, VALUE] == token
    if not done and slots[slot, VALUE] >= 0:
        done = _pair(index, slot, token)
    elif not done:
        block = -1 - slots[slot, VALUE]
        entry = _entry(index, block, token)
        if entry == 0:
            done = _append(index, slot, token)
        else:
            done = True
            blocks[block + entry, COUNT] += 1
            if entry > 1 and blocks[block + entry - 1, COUNT] <= blocks[block + entry, COUNT]:
                _swap(index, block, entry, entry - 1)
                entry -= 1
            blocks[block, COUNT] = entry
    if done:
        slots[slot, TOTAL] += 1
    return done


@compiled
def _erase(index: Index, slot: int, entry: int) -> None:
    """Take an entry out of a block; the block shrinks, and the last follower returns to the slot."""
    blocks = index.blocks
    block = -1 - index.slots[slot, VALUE]
    size = blocks[block, FOLLOWER]
    if blocks[block, COUNT] >= entry:
        blocks[block, COUNT] = 0 if blocks[block, COUNT] == entry else blocks[block, COUNT] - 1
    _move(index, block + entry, block + entry + 1, size - entry)
    blocks[block, FOLLOWER] = size - 1
    old, new = _size_class(size), _size_class(size - 1)
    if size == 2:
        index.slots[slot, VALUE] = blocks[block + 1, FOLLOWER]
        _release(index, block, old)
    elif new != old:
        moved = _allocate(index, new)
        if moved == 0:  # keep the half that is needed
            moved = block
            _release(index, block + (1 << new), new)
        else:
            _move(index, moved, block, size)
            _release(index, block, old)
        index.slots[slot, VALUE] = -1 - moved


@compiled
def uncount(index: Index, hashed: np.uint64, token: int) -> None:
    """Take one count of ``token`` behind a context back, if it is there."""
    slots, blocks = index.slots, index.blocks
    slot = find(index, hashed)
    if slot == 0:
        return
    if slots[slot, VALUE] < 0:
        block = -1 - slots[slot, VALUE]
        entry = _entry(index, block, token)
        if entry == 0:
            return
        blocks[block + entry, COUNT] -= 1
        if blocks[block + entry, COUNT] == 0:
            _erase(index, slot, entry)
        elif entry < blocks[block, FOLLOWER] and blocks[block + entry, COUNT] < blocks[block + entry + 1, COUNT]:
            _swap(index, block, entry, entry + 1)
            if blocks[block, COUNT] == entry:
                blocks[block, COUNT] = entry + 1
            elif blocks[block, COUNT] == entry + 1:
                blocks[block, COUNT] = entry
    elif slots[slot, VALUE] != token:
        return
    slots[slot, TOTAL] -= 1
    if slots[slot, TOTAL] == 0:
        _drop(index, slot)
