"""Counts of what followed a context, and their removal.

A context with one follower has it in its slot. With several, it has a block of 4 to 64 rows, a power of two: a header,
then one row per follower. A count that grows moves its row up by at most one place, so rows stay nearly sorted, most
frequent first. A full block moves to one of twice its size.

Beyond ``KEPT_FOLLOWERS``, a new one replaces one of the rarest, whose count stays in the total. So counting costs the
same however many tokens follow a context.
"""

from __future__ import annotations

import numpy as np

from forerun.core.compiling import compiled
from forerun.trie.arrays import SIZE_CLASSES, Index, add_slot, drop_slot, find

FIRST_SIZE_CLASS = 2
"""Size class of a first block: four rows, for a header and two followers."""

KEPT_FOLLOWERS = 63
"""Maximum followers of a context: with the header, a block of 64 rows. Drafting reads the first 24."""


@compiled
def _size_class(entries: int) -> int:
    """Return the size class (rows = 2 ** class) of a block with ``entries`` followers."""
    size_class = 1
    while (1 << size_class) <= entries:
        size_class += 1
    return size_class


@compiled
def _release(index: Index, block: int, size_class: int) -> None:
    index.blocks[block].free = index.free_blocks[size_class]
    index.free_blocks[size_class] = block
    index.state[0].rows -= 1 << size_class


@compiled
def _allocate(index: Index, size_class: int) -> int:
    """Return a free block of this size, else unused rows, else half of a larger free block; 0 if there is none."""
    state, blocks = index.state[0], index.blocks
    block, found = index.free_blocks[size_class], size_class
    if block == 0 and state.block_top + (1 << size_class) <= len(blocks):
        block = state.block_top
        state.block_top += 1 << size_class
        state.rows += 1 << size_class
        return int(block)
    while block == 0 and found < SIZE_CLASSES - 1:
        found += 1
        block = index.free_blocks[found]
    if block == 0:
        return 0
    index.free_blocks[found] = blocks[block].free
    state.rows += 1 << found
    while found > size_class:  # return the unneeded half
        found -= 1
        _release(index, block + (1 << found), found)
    return int(block)


@compiled
def _move(index: Index, to: int, start: int, rows: int) -> None:
    """Copy rows, first to last; ``to`` may overlap if it is lower."""
    for row in range(rows):
        index.blocks[to + row] = index.blocks[start + row]


@compiled
def _relocate(index: Index, slot: int, rows: int, old: int, new: int) -> int:
    """Move the first rows of a context's block to another size class; return the new block, or 0."""
    block, moved = -1 - index.slots[slot].value, _allocate(index, new)
    if moved != 0:
        _move(index, moved, block, rows)
        _release(index, block, old)
        index.slots[slot].value = -1 - moved
    return moved


@compiled
def _pair(index: Index, slot: int, token: int) -> bool:
    slots, blocks = index.slots, index.blocks
    block = _allocate(index, FIRST_SIZE_CLASS)
    if block == 0:
        return False
    blocks[block].followers, blocks[block].last = 2, 2
    blocks[block + 1].token, blocks[block + 1].count = slots[slot].value, slots[slot].total
    blocks[block + 2].token, blocks[block + 2].count = token, 1
    slots[slot].value = -1 - block
    return True


@compiled
def _replace_rarest(index: Index, block: int, token: int, turn: int) -> None:
    """Replace one of the rarest followers; equals in the second half take turns."""
    blocks = index.blocks
    first = KEPT_FOLLOWERS // 2 + turn % (KEPT_FOLLOWERS // 2)
    rarest = 1 + first
    for number in range(1, KEPT_FOLLOWERS):
        entry = 1 + (first + number) % KEPT_FOLLOWERS
        if blocks[block + entry].count < blocks[block + rarest].count:
            rarest = entry
    blocks[block + rarest].token, blocks[block + rarest].count = token, 1
    blocks[block].last = rarest


@compiled
def _append(index: Index, slot: int, token: int) -> bool:
    """Add a follower to a block, moving it if full; return False if there is no room."""
    blocks = index.blocks
    block = -1 - index.slots[slot].value
    size = blocks[block].followers
    if size == KEPT_FOLLOWERS:
        _replace_rarest(index, block, token, index.slots[slot].total)
        return True
    old, new = _size_class(size), _size_class(size + 1)
    if new != old:
        block = _relocate(index, slot, size + 1, old, new)
        if block == 0:
            return False
    size += 1
    blocks[block + size].token, blocks[block + size].count = token, 1
    blocks[block].followers, blocks[block].last = size, size
    return True


@compiled
def _entry(index: Index, block: int, token: int) -> int:
    blocks = index.blocks
    for entry in range(1, blocks[block].followers + 1):
        if blocks[block + entry].token == token:
            return entry
    return 0


@compiled
def _swap(index: Index, block: int, one: int, other: int) -> None:
    one_row, other_row = index.blocks[block + one], index.blocks[block + other]
    one_row.token, other_row.token = other_row.token, one_row.token
    one_row.count, other_row.count = other_row.count, one_row.count


@compiled
def _count_in(index: Index, block: int, entry: int) -> None:
    blocks = index.blocks
    blocks[block + entry].count += 1
    if entry > 1 and blocks[block + entry - 1].count <= blocks[block + entry].count:
        _swap(index, block, entry, entry - 1)
        entry -= 1
    blocks[block].last = entry


@compiled
def count(index: Index, hashed: np.uint64, token: int) -> bool:
    """Count ``token`` after a context; return False if there is no room."""
    slots = index.slots
    slot = find(index, hashed)
    if slot == 0:
        return add_slot(index, hashed, token)
    value, counted = slots[slot].value, True
    if value < 0:
        entry = _entry(index, -1 - value, token)
        if entry != 0:
            _count_in(index, -1 - value, entry)
        else:
            counted = _append(index, slot, token)
    elif value != token:
        counted = _pair(index, slot, token)
    if counted:
        slots[slot].total += 1
    return counted


@compiled
def times(index: Index, hashed: np.uint64, token: int) -> int:
    """Return how often ``token`` was counted after a context."""
    slot = find(index, hashed)
    if slot == 0:
        return 0
    value = index.slots[slot].value
    if value >= 0:
        return int(index.slots[slot].total) if value == token else 0
    entry = _entry(index, -1 - value, token)
    return int(index.blocks[-1 - value + entry].count) if entry != 0 else 0


@compiled
def _counted(index: Index, block: int) -> int:
    total = 0
    for entry in range(1, index.blocks[block].followers + 1):
        total += index.blocks[block + entry].count
    return total


@compiled
def _erase(index: Index, slot: int, entry: int) -> None:
    """Remove a follower. A half-empty block moves to a smaller one; a single remaining follower returns to the slot."""
    blocks = index.blocks
    block = -1 - index.slots[slot].value
    header = blocks[block]
    size = header.followers
    if header.last >= entry:
        header.last = 0 if header.last == entry else header.last - 1
    _move(index, block + entry, block + entry + 1, size - entry)
    header.followers = size - 1
    old, new = _size_class(size), _size_class(size - 1)
    if size == 2:  # the block keeps what replaced followers left in the total
        index.slots[slot].value, index.slots[slot].total = blocks[block + 1].token, blocks[block + 1].count
        _release(index, block, old)
    elif new != old and _relocate(index, slot, size, old, new) == 0:
        _release(index, block + (1 << new), new)  # no smaller block is free: keep the first half of this one


@compiled
def _uncount_in(index: Index, slot: int, token: int) -> None:
    blocks = index.blocks
    block = -1 - index.slots[slot].value
    entry = _entry(index, block, token)
    if entry == 0:
        index.slots[slot].total = max(index.slots[slot].total - 1, _counted(index, block))
        return
    header, row = blocks[block], blocks[block + entry]
    row.count -= 1
    index.slots[slot].total -= 1
    if row.count == 0:
        _erase(index, slot, entry)
    elif entry < header.followers and row.count < blocks[block + entry + 1].count:
        _swap(index, block, entry, entry + 1)
        if header.last == entry:
            header.last = entry + 1
        elif header.last == entry + 1:
            header.last = entry


@compiled
def uncount(index: Index, hashed: np.uint64, token: int) -> None:
    """Undo one count of ``token`` after a context, if any."""
    slots = index.slots
    slot = find(index, hashed)
    if slot == 0:
        return
    if slots[slot].value < 0:
        _uncount_in(index, slot, token)
    elif slots[slot].value == token:
        slots[slot].total -= 1
        if slots[slot].total == 0:
            drop_slot(index, slot)
