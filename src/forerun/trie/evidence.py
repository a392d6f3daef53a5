"""Gathering the candidates for the next token, and the evidence for each.

Candidates are the followers of the last one to ``ORDERS`` tokens in both sources, what the two copies predict, what the
matches predict and what stands in for it, and, where there are few of these, the tokens seen last.
"""

from __future__ import annotations

import math

import numpy as np

from forerun.core.compiling import compiled
from forerun.trie.arrays import ORDERS, HashArray, Index, Int32Array, find, mix
from forerun.trie.candidates import (
    CAME_LAST,
    COPIED,
    COPY_CELLS,
    COUNTS,
    FREQUENCY_CLASSES,
    LENGTHS,
    MATCHED,
    MISSES,
    NONE,
    ONLY_ONE,
    OTHERS_SINCE,
    RECENCY_CLASSES,
    RECYCLED,
    RECYCLED_ORDERS,
    SKIPPED,
    SUBSTITUTE,
    SUBSTITUTE_GROUP,
    UNIGRAM,
    UNIGRAM_CELLS,
    CandidateTable,
    PositionEvidence,
    candidate,
    cell_of,
    class_of_count,
    class_of_total,
    clear,
    context_input,
)
from forerun.trie.gapped_match import SKIPS, current_substitute_hash
from forerun.trie.gapped_match_features import predict
from forerun.trie.recycled import recall
from forerun.trie.tables import OUTPUT_MATCH, OWN, PROMPT_MATCH, SHARED, RecordArray
from forerun.trie.token_store import MAX_AGREED, UNWRITTEN

MAX_FOLLOWERS = 24
"""Followers of one context that are read, the most frequent ones and the last one."""

ENOUGH_CANDIDATES = 24
"""With so many candidates, the tokens seen last are left out."""


@compiled
def _note(table: CandidateTable, at: int, source: int, order: int, token: int, cell: int, fresh: bool) -> None:
    """Write a follower's cell into input ``at`` of its candidate."""
    number = candidate(table, token, fresh)
    if number == NONE:
        return
    table.cells[number, at] = cell
    noted = table.candidates[number]
    if at == SUBSTITUTE:
        noted.match_class = max(noted.match_class, 1)
    elif noted.longest[source] < order:
        noted.longest[source] = order


@compiled
def _followers(
    index: Index, slot: int, source: int, order: int, evidence: PositionEvidence, table: CandidateTable, least: float
) -> None:
    """Make the followers of a context candidates.

    A follower becomes a candidate only if its share of the context's total exceeds ``least``. The one that came last
    adds evidence in any case, if it is a candidate already. The substitute's context has order ``ORDERS + 1``.
    """
    is_substitute = order > ORDERS
    group = SUBSTITUTE_GROUP if is_substitute else context_input(source, order)
    at = SUBSTITUTE if is_substitute else group
    value, total = index.slots[slot].value, index.slots[slot].total
    total_class = class_of_total(total)
    absent = evidence.absent[source, order - 1]
    absent.shorter = cell_of(group, 0, total_class, OTHERS_SINCE)
    absent.unknown = cell_of(group, COUNTS - 1, total_class, OTHERS_SINCE)
    absent.rare = cell_of(group, 1, total_class, OTHERS_SINCE)
    if value >= 0:
        _note(table, at, source, order, value, cell_of(group, class_of_count(total), total_class, ONLY_ONE), True)
        return
    block, blocks = -1 - value, index.blocks
    last = blocks[block].last
    for entry in range(1, min(blocks[block].followers, MAX_FOLLOWERS) + 1):
        count = blocks[block + entry].count
        if count <= least * total and entry != last:  # all further ones are rarer still
            break
        cell = cell_of(group, class_of_count(count), total_class, CAME_LAST if entry == last else OTHERS_SINCE)
        _note(table, at, source, order, blocks[block + entry].token, cell, count > least * total)
    if last > MAX_FOLLOWERS:
        cell = cell_of(group, class_of_count(blocks[block + last].count), total_class, CAME_LAST)
        _note(table, at, source, order, blocks[block + last].token, cell, True)


@compiled
def _substitutes(own: Index, match: np.record, evidence: PositionEvidence, table: CandidateTable, least: float) -> None:
    """Make substitutes for the next token of the prompt's match candidates."""
    substitutes = current_substitute_hash(own, match)
    slot = find(own, substitutes) if substitutes != 0 else 0
    evidence.absent[OWN, ORDERS].shorter = NONE
    if slot != 0:
        _followers(own, slot, OWN, ORDERS + 1, evidence, table, least)


@compiled
def gather(
    own: Index,
    shared: Index,
    hashes: HashArray,
    slots: Int32Array,
    matches: RecordArray,
    node: int,
    evidence: PositionEvidence,
    table: CandidateTable,
    least: float,
) -> None:
    """Fill the table for a node, from its matches, its copies and the followers of its contexts, ``slots[node]``.

    ``PositionEvidence.copies`` is filled in already. For ``least`` see ``_followers``.
    """
    clear(table)
    recall(shared, hashes, node, evidence, table, least)
    predict(own, matches, node, hashes[node, OWN, 2], evidence, table)
    _substitutes(own, matches[node, PROMPT_MATCH], evidence, table, least)
    for source in range(2):
        if evidence.copies[source].token != UNWRITTEN:
            candidate(table, evidence.copies[source].token, True)
    for order in range(ORDERS, 0, -1):
        for source in range(2):
            slot = slots[node, source, order]
            if slot == 0:
                absent = evidence.absent[source, order - 1]
                absent.shorter, absent.unknown, absent.rare = NONE, NONE, NONE
            elif source == OWN:
                _followers(own, slot, OWN, order, evidence, table, least)
            else:
                _followers(shared, slot, SHARED, order, evidence, table, least)


@compiled
def copy_cell(source: int, agreed: int, wrong: int) -> int:
    """The cell of a copy for tokens that it does not predict; the next cell is for the one that it does."""
    misses = 0
    for bit in range(8):
        misses += (wrong >> bit) & 1
    if agreed < 16:
        length = 0 if agreed < 3 else 1 if agreed < 6 else 2 if agreed < 9 else 3 if agreed < 12 else 4
    else:
        length = 5 if agreed < 24 else 6 if agreed < MAX_AGREED else 7
    return COPY_CELLS + ((source * LENGTHS + length) * MISSES + min(misses, MISSES - 1)) * 2


@compiled
def complete(table: CandidateTable, number: int, evidence: PositionEvidence) -> None:
    """Fill in the inputs of a candidate that ``gather`` left out: what speaks against it, and copies."""
    cells, token = table.cells[number], table.candidates[number].token
    for source in range(2):
        longest = table.candidates[number].longest[source]
        for order in range(1, ORDERS + 1):
            at = context_input(source, order)
            if cells[at] == NONE:
                absent = evidence.absent[source, order - 1]
                cells[at] = (
                    absent.rare if order < longest else absent.shorter if order == longest + 1 else absent.unknown
                )
        predicted = evidence.copies[source]
        if predicted.token != UNWRITTEN:
            cells[COPIED + source] = predicted.cell + (1 if predicted.token == token else 0)
    for order in range(RECYCLED_ORDERS):
        if cells[RECYCLED + order] == NONE:
            cells[RECYCLED + order] = evidence.unlisted[order]
    if evidence.inputs[0] == SUBSTITUTE:
        return
    for row in range(2):
        if cells[SKIPPED + row] == NONE:
            cells[SKIPPED + row] = evidence.skips[row, SKIPS]
    if cells[MATCHED + OUTPUT_MATCH] == NONE:
        cells[MATCHED + OUTPUT_MATCH] = evidence.unpredicted[OUTPUT_MATCH]
    if cells[SUBSTITUTE] == NONE:
        cells[SUBSTITUTE] = evidence.absent[OWN, ORDERS].shorter
        if cells[MATCHED + PROMPT_MATCH] == NONE:
            cells[MATCHED + PROMPT_MATCH] = evidence.unpredicted[PROMPT_MATCH]


@compiled
def _common(index: Index, token: int) -> int:
    """Class of a token's frequency in a source, on a logarithmic scale; 0 if it never occurred.

    Each class stands for frequencies ``e ** (1 / 1.5)`` times those of the class below, about twice.
    """
    slot = find(index, mix(np.uint64(0), token))
    if slot == 0:
        return 0
    share = 8000 * index.slots[slot].total / (index.state[0].tokens + 10)
    return min(max(int(1.5 * math.log(share)) + 2, 1), FREQUENCY_CLASSES - 1)


@compiled
def _rank_class(rank: int) -> int:
    return 0 if rank < 2 else 1 if rank < 6 else 2 if rank < 12 else 3 if rank < 24 else 4


@compiled
def _recent(index: Index, source: int, table: CandidateTable, first: int) -> None:
    """Make a source's tokens seen last candidates; note how long ago in those from number ``first`` on."""
    for rank in range(len(index.recent)):
        if index.recent[rank] < 0:
            break
        number = candidate(table, index.recent[rank], True)
        if number >= first:
            table.cells[number, UNIGRAM + source] = _rank_class(rank)


@compiled
def gather_recent(own: Index, shared: Index, table: CandidateTable) -> None:
    """Add the tokens seen last to the table, with the cells of their frequency and recency.

    Candidates that were on the table before keep their cells: they have better evidence.
    """
    first = table.size[0]
    _recent(own, OWN, table, first)
    _recent(shared, SHARED, table, first)
    for number in range(first, table.size[0]):
        for source in range(2):
            token, rank = table.candidates[number].token, table.cells[number, UNIGRAM + source]
            common = _common(own, token) if source == OWN else _common(shared, token)
            rank = RECENCY_CLASSES - 1 if rank == NONE else rank
            table.cells[number, UNIGRAM + source] = (
                UNIGRAM_CELLS + (source * FREQUENCY_CLASSES + common) * RECENCY_CLASSES + rank
            )
