"""Counting what followed a context, and taking it back.

While one token only has followed a context, its slot is all there is; of several, tokens and counts lie side by side in
a block, most frequent first as far as swapping neighbours keeps them so. Blocks come in powers of two.
"""

from __future__ import annotations

import numpy as np

from forerun.index.arrays import (
    BLOCK_FREE,
    BLOCK_TOP,
    CLASSES,
    COUNT,
    FOLLOWER,
    ROWS,
    TOTAL,
    VALUE,
    Index,
    add_slot,
    drop_slot,
    find,
)
from forerun.index.compiling import compiled


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
        return add_slot(index, hashed, token)
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
    return bool(done)


@compiled
def times(index: Index, hashed: np.uint64, token: int) -> int:
    """How often ``token`` was counted behind a context."""
    slot = find(index, hashed)
    if slot == 0:
        return 0
    value = index.slots[slot, VALUE]
    if value >= 0:
        return int(index.slots[slot, TOTAL]) if value == token else 0
    entry = _entry(index, -1 - value, token)
    return int(index.blocks[-1 - value + entry, COUNT]) if entry != 0 else 0


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
        drop_slot(index, slot)
