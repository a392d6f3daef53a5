"""The compiled functions of each step: index new tokens, then draft. Addresses replace arrays, which is faster."""

from __future__ import annotations

from functools import partial

import numpy as np

from forerun.core.array_handles import reader
from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.core.tree import Int8Array, IntArray
from forerun.trie import text_cursor
from forerun.trie.arrays import FloatArray, Index, Int32Array, tight
from forerun.trie.best_first import grow
from forerun.trie.draft_workspace import Draft, DraftWorkspace, set_root
from forerun.trie.evidence import ENOUGH_CANDIDATES, complete, gather, gather_recent
from forerun.trie.logistic_mixer import Mixer, blank, teach, weigh
from forerun.trie.namespace import PIECE_TOKENS
from forerun.trie.recycled import Float32Array, RecycledRows, keep
from forerun.trie.tables import OWN, SHARED
from forerun.trie.text_cursor import TextCursor, append_generated, peek

index_at = reader(Index.allocate(0, 0, 0))
cursor_at = reader(TextCursor.start())
mixer_at = reader(blank())
workspace_at = reader(DraftWorkspace.allocate(1))
_known_suffix = text_cursor.known_suffix


OWN_ROOM, OWN_HINTS, SHARED_ROOM = 1, 2, 4
"""What indexing needs, as a sum: room or hints in the request's index, and either in the namespace."""


@compiled
def _set_noise(workspace: DraftWorkspace, text: np.record, ahead: int) -> None:
    noise = workspace.noise[0]
    noise.seed, noise.temperature, noise.position = text.seed, text.temperature, text.position + ahead


@compiled
def _learn_evidence(
    own: Index, shared: Index, cursor: TextCursor, mixer: Mixer, workspace: DraftWorkspace, token: int, rate: float
) -> None:
    """Train the mixer on the token that came; on recent tokens every other time, which halves their cost."""
    table, evidence = workspace.table, workspace.evidence
    set_root(own, shared, cursor, workspace)
    gather(own, shared, workspace, 0, 0.0)
    if table.size[0] < ENOUGH_CANDIDATES and own.state[0].tokens & 1:
        gather_recent(own, shared, table)
    complete(table, evidence, workspace.noise, 0)
    weigh(mixer, table, evidence)
    teach(mixer, table, evidence.inputs[0], token, rate)


@compiled
def _extend(
    own: Index,
    shared: Index,
    cursor: TextCursor,
    mixer: Mixer,
    workspace: DraftWorkspace,
    tokens: IntArray,
    rate: float,
) -> int:
    """Index generated tokens in both sources, with ``rate`` train the mixer; return what the next call needs, or 0."""
    for token in tokens:
        if rate > 0:
            _learn_evidence(own, shared, cursor, mixer, workspace, token, rate)
        append_generated(own, OWN, own, cursor, token)
        append_generated(shared, SHARED, own, cursor, token)
        workspace.noise[0].position += 1
    needs = OWN_HINTS if own.state[0].tokens > len(own.hints) else 0
    return needs + (SHARED_ROOM if tight(shared) or shared.state[0].tokens > len(shared.hints) else 0)


@compiled
def _learn(
    text: np.record, tokens: IntArray, kept_at: IntArray, lists: RecycledRows, workspace: DraftWorkspace, rate: float
) -> int:
    """Index a sequence's new tokens and recycled lists, piece by piece; return what it needs to go on, or 0."""
    own, shared = index_at(text.own), index_at(text.shared)
    if own.state[0].tokens + text.new_end - text.at > text.room:
        return OWN_ROOM
    while True:
        while text.list_at < text.list_end and kept_at[text.list_at] <= text.position:
            keep(own, shared, lists, text.list_at)
            text.list_at += 1
        if text.at == text.new_end:
            return 0
        first, end = text.at, min(text.at + PIECE_TOKENS, text.new_end)
        if text.list_at < text.list_end:
            end = min(end, first + kept_at[text.list_at] - text.position)
        taught = first < text.taught_end
        end = min(end, text.taught_end) if taught else end
        _set_noise(workspace, text, 0)
        cursor, mixer = cursor_at(text.cursor), mixer_at(text.mixer)
        needs = _extend(own, shared, cursor, mixer, workspace, tokens[first:end], rate if taught else 0.0)
        text.position += end - first
        text.at, text.piece = end, end - first
        if needs:
            return needs


@compiled
def _draft(text: np.record, tokens: IntArray, workspace: DraftWorkspace, scratch: TextCursor, draft: Draft) -> int:
    own, shared, cursor = index_at(text.own), index_at(text.shared), cursor_at(text.cursor)
    if text.pending_end > text.new_end:
        peek(own, shared, cursor, scratch, tokens[text.new_end : text.pending_end])
        cursor = scratch
    _set_noise(workspace, text, text.pending_end - text.new_end)
    return grow(own, shared, cursor, mixer_at(text.mixer), workspace, draft, text.max_depth, text.least)


@partial(compiled, nogil=True)
def step(
    steps: RecordArray,
    tokens: IntArray,
    kept_at: IntArray,
    before: IntArray,
    last: IntArray,
    best: Int32Array,
    scores: Float32Array,
    workspace: int,
    scratch: int,
    rate: float,
    drafted: IntArray,
    parents: IntArray,
    probability: FloatArray,
    origins: Int8Array,
) -> tuple[int, int]:
    """Index the new tokens of all sequences, then draft after each, without the GIL.

    Args:
        steps: one per sequence; ``TEXT_STEP`` ``[n]``; records the progress of the call.
        tokens: of all sequences, concatenated, new tokens before tentative ones.
        kept_at: by list, the length of its sequence at which it is kept, ascending per sequence.
        before, last, best, scores: lists of all sequences, concatenated; see ``RecycledRows``.
        workspace, scratch: addresses.
        drafted, parents, probability, origins: filled with nodes, sequence by sequence; see ``Draft``.

    Returns:
        The sequence that needs something before the call is repeated, and what; zeros when done.
    """
    memory, lists = workspace_at(workspace), RecycledRows(before, last, best, scores)
    for number in range(len(steps)):
        needs = _learn(steps[number], tokens, kept_at, lists, memory, rate)
        if needs:
            return number, needs
    begin = 0
    for number in range(len(steps)):
        text = steps[number]
        if text.budget > 0 and text.max_depth > 0:
            end = begin + text.budget
            part = Draft(drafted[begin:end], parents[begin:end], probability[begin:end], origins[begin:end])
            text.nodes = _draft(text, tokens, memory, cursor_at(scratch), part)
            begin += text.nodes
    return 0, 0


@compiled
def known_suffix(own: int, shared: int, cursor: int, scratch: int, tokens: IntArray) -> int:
    """Call ``text_cursor.known_suffix`` by addresses."""
    return _known_suffix(index_at(own), index_at(shared), cursor_at(cursor), cursor_at(scratch), tokens)
