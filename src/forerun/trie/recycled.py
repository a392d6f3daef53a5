"""Recycled logits: draft what the model considered before.

A verifying pass computes logits after every node of a draft, accepted or not. The top tokens of each row are stored
under the last two tokens before it, and under the last one; where these come again, they are candidates. This is Token
Recycling (Luo et al., 2024, arXiv 2408.08696) with two tokens of context, weighed by the mixer. A newer list overwrites
an older one in its slot, so the table has a fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.core.tree import IntArray
from forerun.trie.arrays import HashArray, Index, Int32Array, mix, table_row
from forerun.trie.candidates import (
    NONE,
    RECYCLED,
    RECYCLED_CELLS,
    RECYCLED_ORDERS,
    STATIC_GROUP,
    CandidateTable,
    PositionEvidence,
    candidate,
)
from forerun.trie.tables import CHANCE_CLASSES, LISTED, OWN, SHARED

Float32Array = npt.NDArray[np.float32]


class RecycledRows(NamedTuple):
    """The top tokens of rows of logits, and the tokens before each row.

    Attributes:
        before, last: the last two tokens before a row, int64 ``[n]``; ``before`` is -1 if there is only one.
        tokens: best first, padded with -1; int32 ``[n, LISTED]``.
        scores: their logits, float32 ``[n, LISTED]``.
    """

    before: IntArray
    last: IntArray
    tokens: Int32Array
    scores: Float32Array


NO_ROWS = RecycledRows(
    np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, LISTED), np.int32), np.empty((0, LISTED), np.float32)
)


class RowsToKeep(NamedTuple):
    """Rows to store once their sequence has ``at`` tokens, int64 ``[n]``: the mixer must not judge lists made from the
    answer."""

    at: IntArray
    rows: RecycledRows


NOTHING_TO_KEEP = RowsToKeep(np.empty(0, np.int64), NO_ROWS)


def joined(parts: Sequence[RowsToKeep]) -> RowsToKeep:
    """Concatenate rows; raise ValueError if the lengths of their arrays differ."""
    if not parts:
        return NOTHING_TO_KEEP
    both = parts[0]
    if len(parts) > 1:
        rows = RecycledRows(*map(np.concatenate, zip(*(part.rows for part in parts), strict=True)))
        both = RowsToKeep(np.concatenate([part.at for part in parts]), rows)
    lengths = [len(each) for each in (both.at, *both.rows)]
    if len(set(lengths)) > 1:
        raise ValueError(f"rows have {lengths} entries; all arrays must be equally long")
    return both


BLOCK_LOGITS = 64
"""Logits compared with the current worst at a time."""


@compiled
def best_of_rows(logits: Float32Array, tokens: Int32Array, scores: Float32Array) -> None:
    """Fill ``tokens`` (padded with -1) and ``scores``, ``[n, LISTED]``, with the best of logits ``[n, V]``."""
    rows, vocabulary = logits.shape
    for row in range(rows):
        tokens[row], scores[row] = -1, -np.inf
        aligned = vocabulary - vocabulary % BLOCK_LOGITS
        for first in range(0, aligned, BLOCK_LOGITS):
            if _any_above(logits[row], first, scores[row, LISTED - 1]):
                _best_between(logits[row], first, first + BLOCK_LOGITS, tokens[row], scores[row])
        _best_between(logits[row], aligned, vocabulary, tokens[row], scores[row])


@compiled
def _any_above(line: Float32Array, first: int, least: np.float32) -> bool:
    """Return whether a block has a logit above ``least``. Unsigned indices and sums let the loop vectorise."""
    found = np.uint32(0)
    for k in range(np.uint64(BLOCK_LOGITS)):
        found = np.uint32(found | np.uint32(line[np.uint64(first) + k] > least))
    return bool(found)


@compiled
def _best_between(line: Float32Array, first: int, end: int, tokens: Int32Array, scores: Float32Array) -> None:
    for token in range(first, end):
        score = line[token]
        if score > scores[LISTED - 1]:
            at = LISTED - 1
            while at > 0 and scores[at - 1] < score:
                scores[at], tokens[at] = scores[at - 1], tokens[at - 1]
                at -= 1
            scores[at], tokens[at] = score, token


@compiled
def _chance_class(chance: float) -> int:
    """Return the class of a probability: its log-odds, rounded down, from -7 to 6."""
    odds = math.log(max(chance, 1e-6) / max(1 - chance, 1e-6))
    return int(min(max(math.floor(odds) + CHANCE_CLASSES // 2, 0), CHANCE_CLASSES - 1))


@compiled
def _write(place: np.record, hashed: np.uint64, tokens: Int32Array, scores: Float32Array) -> None:
    place.key, total = hashed, 0.0
    for rank in range(LISTED):
        total += math.exp(scores[rank] - scores[0])
    for rank in range(LISTED):
        chance = math.exp(scores[rank] - scores[0]) / total
        place.tokens[rank], place.chances[rank] = tokens[rank], chance
        place.classes[rank] = _chance_class(chance)


@compiled
def _place(index: Index, hashed: np.uint64) -> int:
    row = table_row(hashed, len(index.recycled))
    if index.recycled[row].key == 0:
        index.state[0].lists += 1
    return row


@compiled
def _copy(index: Index, hashed: np.uint64, source: np.record) -> None:
    place = index.recycled[_place(index, hashed)]
    place.key = hashed
    for rank in range(LISTED):
        place.tokens[rank], place.chances[rank] = source.tokens[rank], source.chances[rank]
        place.classes[rank] = source.classes[rank]


@compiled
def keep(own: Index, shared: Index, rows: RecycledRows, row: int) -> None:
    """Store the top tokens of a row for its request and its namespace."""
    if rows.tokens[row, 0] < 0:
        return
    last, before = rows.last[row], rows.before[row]
    hashed = mix(np.uint64(0), last)
    written = own.recycled[_place(own, hashed)]
    _write(written, hashed, rows.tokens[row], rows.scores[row])
    _copy(shared, hashed, written)
    if before >= 0:
        pair = mix(mix(np.uint64(0), before), last)
        _copy(shared, pair, written)
        _copy(own, pair, written)


@compiled
def _listed_cell(group: int, rank: int, chance: int) -> int:
    return RECYCLED_CELLS + (group * (LISTED + 1) + rank) * CHANCE_CLASSES + int(chance)


@compiled
def _add_listed(
    lists: RecordArray,
    hashed: np.uint64,
    order: int,
    group: int,
    evidence: PositionEvidence,
    table: CandidateTable,
    least: float,
) -> bool:
    """Make candidates of tokens on a list with a probability above ``least``; return False without a list."""
    place = lists[table_row(hashed, len(lists))]
    if place.key != hashed or hashed == 0:
        return False
    evidence.unlisted[order - 1] = _listed_cell(group, LISTED, place.classes[0])
    for rank in range(LISTED):
        if place.tokens[rank] < 0:
            break
        number = candidate(table, place.tokens[rank], place.chances[rank] > least)
        if number != NONE:
            table.cells[number, RECYCLED + order - 1] = _listed_cell(group, rank, place.classes[rank])
            table.candidates[number].listed = max(table.candidates[number].listed, order)
    return True


@compiled
def recall(
    own: Index,
    shared: Index,
    hashes: HashArray,
    node: int,
    evidence: PositionEvidence,
    table: CandidateTable,
    least: float,
) -> None:
    """Make candidates from lists of a node's last tokens: the request's, else the namespace's, else the static one."""
    for order in range(RECYCLED_ORDERS, 0, -1):
        hashed, group = hashes[node, 0, order], 2 * (order - 1)
        evidence.unlisted[order - 1] = NONE
        if _add_listed(own.recycled, hashed, order, group + OWN, evidence, table, least):
            continue
        if _add_listed(shared.recycled, hashed, order, group + SHARED, evidence, table, least):
            continue
        if order == 1:
            _add_listed(own.static, hashed, order, STATIC_GROUP, evidence, table, least)
