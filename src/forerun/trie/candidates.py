"""Candidates for the next token, and the cells that rate the evidence for each.

All candidates have equal *inputs*: a context of each order in each source, two copies, and so on. An input's evidence
falls into a *cell*, such as "followed this context three times out of four, and last". A cell tracks how often such
evidence was accepted; ``logistic_mixer`` trains cells and mixes inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.core.tree import IntArray
from forerun.trie.arrays import ORDERS, Int32Array
from forerun.trie.gapped_match import GAPPED_MATCH_CELLS, SKIPS
from forerun.trie.tables import ABSENT, CANDIDATE, CHANCE_CLASSES, LISTED, PREDICTION

COPIED, UNIGRAM, RECYCLED, NOISY, SUBSTITUTE, SKIPPED, MATCHED = (
    2 * ORDERS + start for start in (0, 2, 4, 6, 7, 8, 10)
)
"""First input of each kind after the ``2 * ORDERS`` contexts: two copies, by source; frequency and recency, by source;
two recycled lists, by order; known noise; the substitute; two skips; two gapped matches."""

BIAS = MATCHED + 2
"""Number of inputs, and the constant's column in ``Mixer.weights``. The constant and ``NOISY`` have no cell."""

COUNT_CLASSES, TOTAL_CLASSES, FOLLOWER_STATES = 9, 10, 3
"""Classes of a follower's count (the last: it did not follow the shorter context either) and of a context's total, and
states of a follower."""

OTHERS_SINCE, CAME_LAST, ONLY_ONE = range(FOLLOWER_STATES)
"""Others came later; it came last; nothing else ever came."""

CLASS_BY_COUNT = np.searchsorted([0, 1, 2, 3, 5, 10, 30], np.arange(32))
CLASS_BY_TOTAL = np.searchsorted([0, 1, 2, 3, 4, 6, 10, 20, 60], np.arange(62))

AGREED_CLASSES, MISS_CLASSES = 8, 4
"""Classes of ``COPY.agreed`` and of the number of bits in ``COPY.wrong``."""

FREQUENCY_CLASSES, RECENCY_CLASSES = 16, 6

CONTEXT_CELLS = COUNT_CLASSES * TOTAL_CLASSES * FOLLOWER_STATES

SUBSTITUTE_GROUP, SKIP_GROUP = 2 * ORDERS, 2 * ORDERS + 1
"""Groups of ``CONTEXT_CELLS`` cells: one for substitutes, two for each match's skips (predicted, and ``SKIPS``)."""

COPY_CELLS = (2 * ORDERS + 5) * CONTEXT_CELLS

UNIGRAM_CELLS = COPY_CELLS + 2 * AGREED_CLASSES * MISS_CLASSES * 2

MATCH_CELLS = UNIGRAM_CELLS + 2 * FREQUENCY_CLASSES * RECENCY_CLASSES

RECYCLED_ORDERS = 2
"""Length of the longest context of recycled logits, in tokens."""

STATIC_GROUP = 2 * RECYCLED_ORDERS
LIST_GROUPS = STATIC_GROUP + 1
"""Groups of cells for recycled lists: by order and source, and one for static lists."""

RECYCLED_CELLS = MATCH_CELLS + GAPPED_MATCH_CELLS

CELLS = RECYCLED_CELLS + LIST_GROUPS * (LISTED + 1) * CHANCE_CLASSES
"""Number of cells; the constants above are the first cell of each kind of input."""

MAX_CANDIDATES = 64

NONE = -1
"""No candidate, or no cell."""

BUCKETS = 256


class CandidateTable(NamedTuple):
    """The candidates of one position.

    Attributes:
        cells: cell of each input, or ``NONE``; int32 ``[MAX_CANDIDATES, BIAS]``.
        buckets: hash table with open addressing: a candidate's number plus one, by token; int32 ``[BUCKETS]``.
    """

    candidates: RecordArray
    cells: Int32Array
    buckets: Int32Array
    size: Int32Array

    @classmethod
    def allocate(cls) -> CandidateTable:
        cells = np.zeros((MAX_CANDIDATES, BIAS), np.int32)
        return cls(np.zeros(MAX_CANDIDATES, CANDIDATE), cells, np.zeros(BUCKETS, np.int32), np.zeros(1, np.int32))


class PositionEvidence(NamedTuple):
    """Evidence that all candidates of one position share.

    Attributes:
        absent: cells of contexts that the candidate did not follow, by source and order less one; ``ABSENT`` ``[2,
            ORDERS + 1]``. ``[OWN, ORDERS].shorter`` is for a candidate that is no substitute.
        skips: cells of each match's skips, or ``NONE``; int32 ``[2, SKIPS + 1]``.
        copies: each source's copy; ``PREDICTION`` ``[2]``.
        unpredicted: each match's cell of tokens that it does not predict, or ``NONE``; int64 ``[2]``.
        inputs: number in use: ``BIAS``, or ``SUBSTITUTE`` while no match is active; int64 ``[1]``.
        unlisted: by order of recycled logits, the cell of unlisted tokens, or ``NONE``; int32 ``[RECYCLED_ORDERS]``.
    """

    absent: RecordArray
    skips: Int32Array
    copies: RecordArray
    unpredicted: IntArray
    inputs: IntArray
    unlisted: Int32Array

    @classmethod
    def allocate(cls) -> PositionEvidence:
        return cls(
            absent=np.zeros((2, ORDERS + 1), ABSENT),
            skips=np.full((2, SKIPS + 1), NONE, np.int32),
            copies=np.zeros(2, PREDICTION),
            unpredicted=np.full(2, NONE, np.int64),
            inputs=np.zeros(1, np.int64),
            unlisted=np.full(RECYCLED_ORDERS, NONE, np.int32),
        )


@compiled
def context_input(source: int, order: int) -> int:
    """Return the input, and cell group, of a source's context of ``order`` tokens."""
    return source * ORDERS + order - 1


@compiled
def class_of_count(count: int) -> int:
    """Return the class of a follower's count."""
    return int(CLASS_BY_COUNT[min(count, len(CLASS_BY_COUNT) - 1)])


@compiled
def class_of_total(total: int) -> int:
    """Return the class of a context's total."""
    return int(CLASS_BY_TOTAL[min(total, len(CLASS_BY_TOTAL) - 1)])


@compiled
def cell_of(group: int, count_class: int, total_class: int, state: int) -> int:
    """Return the cell of count-based evidence in the group of a context, substitute or skip."""
    return ((group * COUNT_CLASSES + count_class) * TOTAL_CLASSES + total_class) * FOLLOWER_STATES + state


@compiled
def clear(table: CandidateTable) -> None:
    """Remove all candidates."""
    table.size[0] = 0
    for bucket in range(BUCKETS):
        table.buckets[bucket] = 0


@compiled
def candidate(table: CandidateTable, token: int, add: bool) -> int:
    """Return the number of a token's candidate, or ``NONE``; with ``add``, create it if there is room."""
    bucket = (token * 40503 >> 4) & (BUCKETS - 1)
    while table.buckets[bucket] != 0:
        if table.candidates[table.buckets[bucket] - 1].token == token:
            return int(table.buckets[bucket] - 1)
        bucket = (bucket + 1) & (BUCKETS - 1)
    number = table.size[0]
    if not add or number == MAX_CANDIDATES:
        return NONE
    table.buckets[bucket] = number + 1
    table.size[0] += 1
    added = table.candidates[number]
    added.token, added.match_class, added.listed, added.noise = token, 0, 0, 0.0
    added.longest[0] = added.longest[1] = 0
    for at in range(BIAS):
        table.cells[number, at] = NONE
    return int(number)
