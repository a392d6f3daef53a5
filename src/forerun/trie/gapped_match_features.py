"""The evidence of gapped matches: the candidates that they predict, and how often each skip was right."""

from __future__ import annotations

import numpy as np

from forerun.core.compiling import compiled
from forerun.trie.arrays import Index, find
from forerun.trie.candidates import (
    BIAS,
    CAME_LAST,
    MATCH_CELLS,
    MATCHED,
    NONE,
    ONLY_ONE,
    OTHERS_SINCE,
    SKIP_GROUP,
    SKIPPED,
    SUBSTITUTE,
    CandidateTable,
    PositionEvidence,
    candidate,
    cell_of,
    class_of_count,
    class_of_total,
)
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
    match_cell,
    next_on,
    skip_hash,
)
from forerun.trie.spelling import spelled
from forerun.trie.tables import PROMPT_MATCH, RecordArray
from forerun.trie.token_store import UNWRITTEN, following, read


@compiled
def _skip_cell(row: int, skip: int, count: int, total: int, state: int) -> int:
    group = SKIP_GROUP + 2 * row + (1 if skip == SKIPS else 0)
    return cell_of(group, class_of_count(count), class_of_total(total), state)


@compiled
def count_skips(own: Index, match: np.record, row: int, hashed: np.uint64, evidence: PositionEvidence) -> None:
    """Fill in ``PositionEvidence.skips``: how often each skip was taken after the last two tokens, whose hash is
    ``hashed``."""
    skipped = skip_hash(match, row, hashed)
    slot = find(own, skipped) if skipped != 0 else 0
    total, value = own.slots[slot].total, own.slots[slot].value
    for skip in range(SKIPS + 1):
        evidence.skips[row, skip] = NONE if slot == 0 else _skip_cell(row, skip, 0, total, OTHERS_SINCE)
    if slot == 0:
        return
    block = -1 - value
    for entry in range(1, 2 if value >= 0 else own.blocks[block].followers + 1):
        skip = value if value >= 0 else own.blocks[block + entry].token
        count = total if value >= 0 else own.blocks[block + entry].count
        state = ONLY_ONE if value >= 0 else CAME_LAST if entry == own.blocks[block].last else OTHERS_SINCE
        if skip <= SKIPS:  # otherwise it is a token: another context has the same hash
            evidence.skips[row, skip] = _skip_cell(row, skip, count, total, state)


@compiled
def _add_predicted(match: np.record, row: int, table: CandidateTable, token: int, kind: int, skip_cell: int) -> None:
    """Make a predicted token a candidate, unless the match predicted it nearer already."""
    number = candidate(table, token, True)
    if number == NONE or table.cells[number, MATCHED + row] != NONE:
        return
    sure = kind in (0, INSIDE_SPELLING, NEXT) and match.resumed > MIN_RESUMED
    table.cells[number, SKIPPED + row] = skip_cell
    table.cells[number, MATCHED + row] = MATCH_CELLS + match_cell(kind, match.resumed, match.gap)
    table.candidates[number].match_class = max(table.candidates[number].match_class, 2 if sure else 1)


@compiled
def _predict_row(own: Index, match: np.record, row: int, evidence: PositionEvidence, table: CandidateTable) -> int:
    """Make what a match predicts candidates; the kind of evidence that it is for all other tokens."""
    position, ahead = match.position, 0
    if match.spelled != 0:
        inside = spelled(own.spelling, read(own, position), match.spelled)
        _add_predicted(match, row, table, inside, INSIDE_SPELLING, NONE)
        return OUTSIDE_SPELLING
    while ahead < (PROMPT_LOOKAHEAD if row == PROMPT_MATCH else 1):
        predicted = next_on(own, match, row, position)
        if predicted == UNWRITTEN:
            break
        _add_predicted(match, row, table, predicted, ahead if row == PROMPT_MATCH else NEXT, evidence.skips[row, ahead])
        spelt = spelled(own.spelling, predicted, 0) if row == PROMPT_MATCH else UNWRITTEN
        if spelt != UNWRITTEN:
            kind = SPELT if ahead == 0 else SPELT_AHEAD
            _add_predicted(match, row, table, spelt, kind, evidence.skips[row, PROMPT_LOOKAHEAD + ahead])
        position = following(own, position)
        ahead += 1
    return UNPREDICTED if row == PROMPT_MATCH else OTHER


@compiled
def predict(
    own: Index, matches: RecordArray, node: int, hashed: np.uint64, evidence: PositionEvidence, table: CandidateTable
) -> None:
    """Make what a node's matches predict candidates; ``hashed`` is of its last two tokens."""
    evidence.inputs[0] = SUBSTITUTE
    for row in range(2):
        match = matches[node, row]
        evidence.unpredicted[row], evidence.skips[row, SKIPS] = NONE, NONE
        if active(match):
            evidence.inputs[0] = BIAS
            count_skips(own, match, row, hashed, evidence)
            rest = _predict_row(own, match, row, evidence, table)
            evidence.unpredicted[row] = MATCH_CELLS + match_cell(rest, match.resumed, match.gap)
