"""Counted n-grams in flat arrays: the trie of the Lookahead paper (section 4.3) without an object per node.

A node stands for the tokens on its way from the root and counts how often they occurred in a row. Children are found
through one hash table over (parent, token) and listed most recently seen first. Nothing here allocates after
``Ngrams.allocate``: a full trie decays counts slot by slot, clock-wise, and reuses the leaves that fall below one, so
no insertion waits for more than ``PATIENCE`` slots per node.

The functions are compiled. Node 0 is the root, and 0 stands for "none" in every link. The compiler's cache sees changes
in a function's own file only: who edits this one deletes the cache of the modules that import it (``__pycache__``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from forerun.tree import IntArray

Int32Array = npt.NDArray[np.int32]
F = TypeVar("F", bound=Callable[..., Any])

TOKEN, COUNT, PARENT, CHILD, NEXT, PREVIOUS, CHAIN = range(7)
"""Columns of ``Ngrams.nodes``; CHAIN links the nodes of one hash bucket, NEXT also the free ones."""
LIVE, TOP, FREE, HAND, REMOVED = range(5)
"""Entries of ``Ngrams.state``: nodes in use, first slot never used, head of the free list, clock hand, removals."""

PATIENCE = 256
"""Slots that the clock hand visits at most to make room for one node; without success the node is left out."""
DEAD = -1
"""Cursor of a suffix that is no longer followed."""


class Ngrams(NamedTuple):
    """One trie.

    Attributes:
        nodes: one row per slot, int32 ``[capacity + 1, 7]``; row 0 is the root.
        table: first node of each hash bucket, int32 ``[power of two]``.
        state: int64 ``[5]``.
    """

    nodes: Int32Array
    table: Int32Array
    state: IntArray

    @classmethod
    def allocate(cls, capacity: int) -> Ngrams:
        """An empty trie; pages of memory that it never touches are never backed."""
        buckets = 1 << max(4, (capacity - 1).bit_length())
        state = np.zeros(5, np.int64)
        state[TOP] = 1
        return cls(np.zeros((capacity + 1, 7), np.int32), np.zeros(buckets, np.int32), state)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self.nodes.nbytes + self.table.nbytes + self.state.nbytes


def start(branch_length: int) -> Int32Array:
    """Cursors before a text: entry d is the node of the last d tokens; int32 ``[branch_length + 1]``."""
    cursors = np.full(branch_length + 1, DEAD, np.int32)
    cursors[0] = 0
    return cursors


def compiled(function: F) -> F:
    """Compile on the first call and keep the machine code beside the module, or for the process where none can be."""
    try:
        return cast(F, numba.njit(cache=True)(function))
    except RuntimeError:  # no folder for the cache can be written
        return cast(F, numba.njit(function))


@compiled
def _bucket(index: Ngrams, parent: int, token: int) -> int:
    key = ((np.uint64(parent) << np.uint64(32)) | np.uint64(token)) * np.uint64(0x9E3779B97F4A7C15)
    return int((key >> np.uint64(32)) & np.uint64(len(index.table) - 1))


@compiled
def find(index: Ngrams, parent: int, token: int) -> int:
    """The child of ``parent`` with ``token``, or 0."""
    nodes = index.nodes
    node = index.table[_bucket(index, parent, token)]
    while node != 0 and (nodes[node, PARENT] != parent or nodes[node, TOKEN] != token):
        node = nodes[node, CHAIN]
    return int(node)


@compiled
def locate(index: Ngrams, tokens: IntArray) -> int:
    """The node of ``tokens``, or 0."""
    node = 0
    for token in tokens:
        node = find(index, node, token)
        if node == 0:
            break
    return node


@compiled
def _attach(index: Ngrams, parent: int, node: int) -> None:
    """Make ``node`` the first child."""
    nodes = index.nodes
    first = nodes[parent, CHILD]
    nodes[node, NEXT], nodes[node, PREVIOUS] = first, 0
    if first != 0:
        nodes[first, PREVIOUS] = node
    nodes[parent, CHILD] = node


@compiled
def _detach(index: Ngrams, node: int) -> None:
    """Take ``node`` out of its parent's children."""
    nodes = index.nodes
    before, after = nodes[node, PREVIOUS], nodes[node, NEXT]
    if before == 0:
        nodes[nodes[node, PARENT], CHILD] = after
    else:
        nodes[before, NEXT] = after
    if after != 0:
        nodes[after, PREVIOUS] = before


@compiled
def _remove(index: Ngrams, node: int) -> None:
    """Give a leaf's slot back."""
    nodes, table, state = index.nodes, index.table, index.state
    _detach(index, node)
    bucket = _bucket(index, nodes[node, PARENT], nodes[node, TOKEN])
    link = table[bucket]
    if link == node:
        table[bucket] = nodes[node, CHAIN]
    else:
        while nodes[link, CHAIN] != node:
            link = nodes[link, CHAIN]
        nodes[link, CHAIN] = nodes[node, CHAIN]
    nodes[node, NEXT] = state[FREE]
    state[FREE] = node
    state[LIVE] -= 1
    state[REMOVED] += 1


@compiled
def _sweep(index: Ngrams, cursors: Int32Array, decay: float) -> None:
    """Advance the clock hand, decaying counts, until a leaf below one is removed; cursors' nodes are spared."""
    nodes, state = index.nodes, index.state
    for _ in range(PATIENCE):
        state[HAND] = state[HAND] % (len(nodes) - 1) + 1
        node = state[HAND]
        nodes[node, COUNT] = np.int32(nodes[node, COUNT] * decay)
        if nodes[node, COUNT] < 1 and nodes[node, CHILD] == 0 and not (cursors == node).any():
            _remove(index, node)
            return


@compiled
def _slot(index: Ngrams, cursors: Int32Array, decay: float) -> int:
    """A free slot, or 0 if none could be made."""
    state = index.state
    if state[FREE] == 0 and state[TOP] < len(index.nodes):
        state[TOP] += 1
        return int(state[TOP]) - 1
    if state[FREE] == 0:
        _sweep(index, cursors, decay)
    slot = state[FREE]
    if slot != 0:
        state[FREE] = index.nodes[slot, NEXT]
    return int(slot)


@compiled
def _add(index: Ngrams, parent: int, token: int, count: int, slot: int) -> None:
    """Put a node into a free slot."""
    row = index.nodes[slot]
    bucket = _bucket(index, parent, token)
    row[TOKEN], row[COUNT], row[PARENT], row[CHILD] = token, count, parent, 0
    row[CHAIN] = index.table[bucket]
    index.table[bucket] = slot
    index.state[LIVE] += 1
    _attach(index, parent, slot)


@compiled
def _count(index: Ngrams, parent: int, token: int, cursors: Int32Array, decay: float) -> int:
    """Count ``token`` once more behind ``parent``; its node, or ``DEAD`` if there was no room for one."""
    node = find(index, parent, token)
    if node == 0:
        node = _slot(index, cursors, decay)
        if node == 0:
            return DEAD
        _add(index, parent, token, 1, node)
        return node
    index.nodes[node, COUNT] += 1
    if index.nodes[node, PREVIOUS] != 0:
        _detach(index, node)
        _attach(index, parent, node)
    return node


@compiled
def insert(index: Ngrams, cursors: Int32Array, tokens: IntArray, decay: float) -> None:
    """Count every n-gram that ends in ``tokens`` and starts where a cursor lives; the cursors move along.

    Args:
        index: receives the counts.
        cursors: int32 ``[branch_length + 1]``, see ``start``; with entry 0 ``DEAD`` no new n-gram starts.
        tokens: int64 ``[n]``, each in [0, 2**31).
        decay: factor on the counts that the clock hand passes, once the trie is full.
    """
    for token in tokens:
        for depth in range(len(cursors) - 1, 0, -1):
            parent = cursors[depth - 1]
            cursors[depth] = DEAD if parent == DEAD else _count(index, parent, token, cursors, decay)


@compiled
def _follow(index: Ngrams, cursors: Int32Array, recent: IntArray) -> None:
    """Set the cursors behind ``recent`` anew, after nodes were removed."""
    for depth in range(1, len(cursors)):
        node = locate(index, recent[len(recent) - depth :]) if depth <= len(recent) else 0
        cursors[depth] = node if node != 0 else DEAD


@compiled
def extend(
    index: Ngrams, cursors: Int32Array, recent: IntArray, known: int, removed: int, tokens: IntArray, decay: float
) -> None:
    """``insert`` for a text that shares the index with others; what it does not name is as there.

    Args:
        recent: the last tokens of the text, at its end, int64 ``[branch_length - 1]``; moves along.
        known: length of the text so far.
        removed: ``state[REMOVED]`` when the cursors were left.
    """
    if index.state[REMOVED] != removed:
        _follow(index, cursors, recent[max(0, len(recent) - known) :])
    insert(index, cursors, tokens, decay)
    for token in tokens:
        recent[:-1] = recent[1:]
        recent[-1] = token


@compiled
def valid(tokens: IntArray) -> bool:
    """Whether all ids are in [0, 2**31)."""
    wrong = 0
    for token in tokens:
        wrong += token < 0 or token >= 1 << 31
    return wrong == 0


@compiled
def dump(index: Ngrams) -> Int32Array:
    """Parents (as row numbers here plus one, 0 for the root), tokens and counts, by depth; int32 ``[3, nodes]``."""
    nodes = index.nodes
    size = index.state[LIVE]
    order = np.zeros(size + 1, np.int64)
    rows = np.empty((3, size), np.int32)
    end = 1
    for at in range(size + 1):
        child = nodes[order[at], CHILD]
        while child != 0 and nodes[child, NEXT] != 0:
            child = nodes[child, NEXT]
        while child != 0:  # last child first: inserting them again restores the order
            rows[0, end - 1], rows[1, end - 1], rows[2, end - 1] = at, nodes[child, TOKEN], nodes[child, COUNT]
            order[end] = child
            end += 1
            child = nodes[child, PREVIOUS]
    return rows


@compiled
def restore(index: Ngrams, rows: Int32Array, branch_length: int) -> bool:
    """Fill an empty trie with what ``dump`` gave, the shallow nodes first, as far as capacity and branch length go.

    Returns:
        False if the rows are no trie; the index is useless then.
    """
    depths = np.zeros(rows.shape[1] + 1, np.int64)
    for i in range(rows.shape[1]):
        parent, token, count = rows[0, i], rows[1, i], rows[2, i]
        if parent < 0 or parent > i or token < 0 or count < 0:
            return False
        depths[i + 1] = depths[parent] + 1
        if depths[i + 1] < depths[i]:
            return False
        if depths[i + 1] > branch_length or i + 1 >= len(index.nodes):
            break
        if find(index, parent, token) != 0:
            return False
        index.state[TOP] += 1
        _add(index, parent, token, count, i + 1)
    return True
