"""Gathers the candidates for the next token, and the evidence for each.

Candidates are the followers of the last one to ``ORDERS`` tokens in both sources, what copies and gapped matches
predict, substitutes, recycled logits and, if these are few, recent tokens.
"""

from __future__ import annotations

import math

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.core.sampling_kernels import gumbel_of
from forerun.trie.arrays import ORDERS, Index, find, mix
from forerun.trie.candidates import (
    AGREED_CLASSES,
    BIAS,
    CAME_LAST,
    COPIED,
    COPY_CELLS,
    COUNT_CLASSES,
    FREQUENCY_CLASSES,
    MATCH_CELLS,
    MATCHED,
    MISS_CLASSES,
    NONE,
    ONLY_ONE,
    OTHERS_SINCE,
    RECENCY_CLASSES,
    RECYCLED,
    RECYCLED_ORDERS,
    SKIP_GROUP,
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
from forerun.trie.draft_workspace import DraftWorkspace
from forerun.trie.gapped_match import (
    INSIDE_SPELLING,
    MIN_RESUMED,
    NEXT,
    OTHER,
    OUTSIDE_SPELLING,
    PROMPT_LOOKAHEAD,
    SKIPS,
    SPELT,
    SPELT_AHEAD,
    UNPREDICTED,
    active,
    current_substitute_hash,
    match_cell,
    next_on,
    skip_hash,
)
from forerun.trie.recycled import recall
from forerun.trie.spelling import spelled
from forerun.trie.tables import OUTPUT_MATCH, OWN, PROMPT_MATCH, SHARED
from forerun.trie.token_store import MAX_AGREED, UNWRITTEN, following, read

MAX_FOLLOWERS = 24
"""Followers read per context: the most frequent ones, and the last one."""

ENOUGH_CANDIDATES = 24
"""With this many candidates, recent tokens are left out."""

EULER = 0.5772156649015329
"""Mean of Gumbel noise."""


@compiled
def _note(table: CandidateTable, at: int, source: int, order: int, token: int, cell: int, add: bool) -> None:
    number = candidate(table, token, add)
    if number == NONE:
        return
    table.cells[number, at] = cell
    noted = table.candidates[number]
    if at == SUBSTITUTE:
        noted.match_class = max(noted.match_class, 1)
    elif noted.longest[source] < order:
        noted.longest[source] = order


@compiled
def _add_followers(
    index: Index, slot: int, source: int, order: int, evidence: PositionEvidence, table: CandidateTable, least: float
) -> None:
    """Make candidates of a context's followers whose share of its total exceeds ``least``; the last follower adds
    evidence to an existing candidate whatever its share. The substitute's context has order ``ORDERS + 1``."""
    is_substitute = order > ORDERS
    group = SUBSTITUTE_GROUP if is_substitute else context_input(source, order)
    at = SUBSTITUTE if is_substitute else group
    value, total = index.slots[slot].value, index.slots[slot].total
    total_class = class_of_total(total)
    absent = evidence.absent[source, order - 1]
    absent.shorter = cell_of(group, 0, total_class, OTHERS_SINCE)
    absent.unknown = cell_of(group, COUNT_CLASSES - 1, total_class, OTHERS_SINCE)
    absent.rare = cell_of(group, 1, total_class, OTHERS_SINCE)
    if value >= 0:
        _note(table, at, source, order, value, cell_of(group, class_of_count(total), total_class, ONLY_ONE), True)
        return
    block, blocks = -1 - value, index.blocks
    last = blocks[block].last
    for entry in range(1, min(blocks[block].followers, MAX_FOLLOWERS) + 1):
        count = blocks[block + entry].count
        if count <= least * total and entry != last:  # the remaining ones are rarer still
            break
        cell = cell_of(group, class_of_count(count), total_class, CAME_LAST if entry == last else OTHERS_SINCE)
        _note(table, at, source, order, blocks[block + entry].token, cell, count > least * total)
    if last > MAX_FOLLOWERS:
        cell = cell_of(group, class_of_count(blocks[block + last].count), total_class, CAME_LAST)
        _note(table, at, source, order, blocks[block + last].token, cell, True)


@compiled
def _add_substitutes(
    own: Index, match: np.record, evidence: PositionEvidence, table: CandidateTable, least: float
) -> None:
    substitutes = current_substitute_hash(own, match)
    slot = find(own, substitutes) if substitutes != 0 else 0
    evidence.absent[OWN, ORDERS].shorter = NONE
    if slot != 0:
        _add_followers(own, slot, OWN, ORDERS + 1, evidence, table, least)


@compiled
def _note_skip(evidence: PositionEvidence, row: int, skip: int, count: int, total: int, state: int) -> None:
    if skip <= SKIPS:  # otherwise a token: another context has this hash
        group = SKIP_GROUP + 2 * row + (1 if skip == SKIPS else 0)
        evidence.skips[row, skip] = cell_of(group, class_of_count(count), class_of_total(total), state)


@compiled
def count_skips(own: Index, match: np.record, row: int, hashed: np.uint64, evidence: PositionEvidence) -> None:
    """Fill in ``PositionEvidence.skips`` from how often each skip followed the last two tokens."""
    skipped = skip_hash(match, row, hashed)
    slot = find(own, skipped) if skipped != 0 else 0
    if slot == 0:
        evidence.skips[row] = NONE
        return
    total, value, blocks = own.slots[slot].total, own.slots[slot].value, own.blocks
    for skip in range(SKIPS + 1):
        _note_skip(evidence, row, skip, 0, total, OTHERS_SINCE)
    if value >= 0:
        _note_skip(evidence, row, value, total, total, ONLY_ONE)
        return
    block = -1 - value
    for entry in range(1, blocks[block].followers + 1):
        state = CAME_LAST if entry == blocks[block].last else OTHERS_SINCE
        _note_skip(evidence, row, blocks[block + entry].token, blocks[block + entry].count, total, state)


@compiled
def _add_predicted(match: np.record, row: int, table: CandidateTable, token: int, kind: int, skip_cell: int) -> None:
    """Make a predicted token a candidate, unless the match predicts it at a nearer place."""
    number = candidate(table, token, True)
    if number == NONE or table.cells[number, MATCHED + row] != NONE:
        return
    sure = kind in (0, INSIDE_SPELLING, NEXT) and match.resumed > MIN_RESUMED
    table.cells[number, SKIPPED + row] = skip_cell
    table.cells[number, MATCHED + row] = MATCH_CELLS + match_cell(kind, match.resumed, match.gap)
    table.candidates[number].match_class = max(table.candidates[number].match_class, 2 if sure else 1)


@compiled
def _add_predictions(own: Index, match: np.record, row: int, evidence: PositionEvidence, table: CandidateTable) -> int:
    """Make candidates of a match's predictions; return the kind of evidence for all other tokens."""
    position = match.position
    if match.spelled != 0:
        inside = spelled(own.spelling, read(own, position), match.spelled)
        _add_predicted(match, row, table, inside, INSIDE_SPELLING, NONE)
        return OUTSIDE_SPELLING
    for ahead in range(PROMPT_LOOKAHEAD if row == PROMPT_MATCH else 1):
        predicted = next_on(own, match, row, position)
        if predicted == UNWRITTEN:
            break
        _add_predicted(match, row, table, predicted, ahead if row == PROMPT_MATCH else NEXT, evidence.skips[row, ahead])
        spelt = spelled(own.spelling, predicted, 0) if row == PROMPT_MATCH else UNWRITTEN
        if spelt != UNWRITTEN:
            kind = SPELT if ahead == 0 else SPELT_AHEAD
            _add_predicted(match, row, table, spelt, kind, evidence.skips[row, PROMPT_LOOKAHEAD + ahead])
        position = following(own, position)
    return UNPREDICTED if row == PROMPT_MATCH else OTHER


@compiled
def _add_matches(
    own: Index, matches: RecordArray, node: int, hashed: np.uint64, evidence: PositionEvidence, table: CandidateTable
) -> None:
    evidence.inputs[0] = SUBSTITUTE
    for row in range(2):
        match = matches[node, row]
        evidence.unpredicted[row], evidence.skips[row, SKIPS] = NONE, NONE
        if active(match):
            evidence.inputs[0] = BIAS
            count_skips(own, match, row, hashed, evidence)
            rest = _add_predictions(own, match, row, evidence, table)
            evidence.unpredicted[row] = MATCH_CELLS + match_cell(rest, match.resumed, match.gap)


@compiled
def _copy_cell(source: int, agreed: int, wrong: int) -> int:
    """Return a copy's cell for tokens that it does not predict; the next cell is for the predicted one."""
    misses = 0
    for bit in range(8):
        misses += (wrong >> bit) & 1
    if agreed < 16:
        length = 0 if agreed < 3 else 1 if agreed < 6 else 2 if agreed < 9 else 3 if agreed < 12 else 4
    else:
        length = 5 if agreed < 24 else 6 if agreed < MAX_AGREED else 7
    return COPY_CELLS + ((source * AGREED_CLASSES + length) * MISS_CLASSES + min(misses, MISS_CLASSES - 1)) * 2


@compiled
def _add_copy(
    index: Index, copies: RecordArray, node: int, source: int, evidence: PositionEvidence, table: CandidateTable
) -> None:
    copy, predicted = copies[node, source], evidence.copies[source]
    predicted.token = UNWRITTEN if copy.position == 0 else read(index, copy.position)
    predicted.cell = _copy_cell(source, copy.agreed, copy.wrong)
    predicted.agreed = copy.agreed
    if predicted.token != UNWRITTEN:
        candidate(table, predicted.token, True)


@compiled
def gather(own: Index, shared: Index, workspace: DraftWorkspace, node: int, least: float) -> None:
    """Fill the table for a node; for ``least``, see ``_add_followers``."""
    hashes, copies, matches = workspace.hashes, workspace.copies, workspace.matches
    table, evidence = workspace.table, workspace.evidence
    clear(table)
    recall(own, shared, hashes, node, evidence, table, least)
    _add_matches(own, matches, node, hashes[node, OWN, 2], evidence, table)
    _add_substitutes(own, matches[node, PROMPT_MATCH], evidence, table, least)
    _add_copy(own, copies, node, OWN, evidence, table)
    _add_copy(shared, copies, node, SHARED, evidence, table)
    for order in range(ORDERS, 0, -1):
        for source in range(2):
            slot = workspace.slots[node, source, order]
            if slot == 0:
                absent = evidence.absent[source, order - 1]
                absent.shorter, absent.unknown, absent.rare = NONE, NONE, NONE
            elif source == OWN:
                _add_followers(own, slot, OWN, order, evidence, table, least)
            else:
                _add_followers(shared, slot, SHARED, order, evidence, table, least)


@compiled
def noise_of(noise: RecordArray, ahead: int, token: int) -> float:
    """Return T times a token's noise above its mean, ``ahead`` tokens after ``NOISE.position``; 0 if unknown.

    Coupled sampling chooses the largest log p + T g, where the Gumbel noise g is a pure function of seed, position and
    token (``core/sampling_kernels.py``). So of equally likely tokens, the one with the most noise wins. The mixer adds
    T g, less its mean, to the log-odds with a learned weight.
    """
    text = noise[0]
    if text.temperature == 0:
        return 0.0
    return float(text.temperature) * (gumbel_of(text.seed, text.position + ahead, token) - EULER)


@compiled
def _complete_texts(table: CandidateTable, evidence: PositionEvidence) -> None:
    for number in range(table.size[0]):
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


@compiled
def _complete_matches(table: CandidateTable, evidence: PositionEvidence) -> None:
    for number in range(table.size[0]):
        cells = table.cells[number]
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
def complete(table: CandidateTable, evidence: PositionEvidence, noise: RecordArray, ahead: int) -> None:
    """Fill in the inputs that ``gather`` left out: evidence against each candidate, copies, and known noise."""
    _complete_texts(table, evidence)
    if evidence.inputs[0] != SUBSTITUTE:
        _complete_matches(table, evidence)
    for number in range(table.size[0]):
        table.candidates[number].noise = noise_of(noise, ahead, table.candidates[number].token)
        for order in range(RECYCLED_ORDERS):
            if table.cells[number, RECYCLED + order] == NONE:
                table.cells[number, RECYCLED + order] = evidence.unlisted[order]


@compiled
def _frequency_class(index: Index, token: int) -> int:
    """Return the log-scale class of a token's frequency, in steps of ``e ** (1 / 1.5)``; 0 if it never occurred."""
    slot = find(index, mix(np.uint64(0), token))
    if slot == 0:
        return 0
    share = 8000 * index.slots[slot].total / (index.state[0].tokens + 10)
    return min(max(int(1.5 * math.log(share)) + 2, 1), FREQUENCY_CLASSES - 1)


@compiled
def _recency_class(rank: int) -> int:
    return 0 if rank < 2 else 1 if rank < 6 else 2 if rank < 12 else 3 if rank < 24 else 4


@compiled
def _add_recent(index: Index, source: int, table: CandidateTable, first: int) -> None:
    """Make candidates of a source's recent tokens; store the recency of those from number ``first`` on."""
    for rank in range(len(index.recent)):
        if index.recent[rank] < 0:
            break
        number = candidate(table, index.recent[rank], True)
        if number >= first:
            table.cells[number, UNIGRAM + source] = _recency_class(rank)


@compiled
def gather_recent(own: Index, shared: Index, table: CandidateTable) -> None:
    """Add recent tokens, with frequency and recency; earlier candidates have better evidence and keep it."""
    first = table.size[0]
    _add_recent(own, OWN, table, first)
    _add_recent(shared, SHARED, table, first)
    for number in range(first, table.size[0]):
        for source in range(2):
            token, rank = table.candidates[number].token, table.cells[number, UNIGRAM + source]
            frequency = _frequency_class(own, token) if source == OWN else _frequency_class(shared, token)
            rank = RECENCY_CLASSES - 1 if rank == NONE else rank
            table.cells[number, UNIGRAM + source] = (
                UNIGRAM_CELLS + (source * FREQUENCY_CLASSES + frequency) * RECENCY_CLASSES + rank
            )
