"""Best-first search for the draft tree over the candidates of all contexts in both sources.

The likeliest candidate of the frontier becomes a node, and its followers enter the frontier. A node whose followers are
unlikely to enter the draft is expanded only from its longer contexts, or not at all.
"""

from __future__ import annotations

import numpy as np

from forerun.core.compiling import compiled
from forerun.trie.arrays import ORDERS, Index, mix
from forerun.trie.candidates import NONE, UNIGRAM, CandidateTable, candidate, clear
from forerun.trie.draft_workspace import Draft, DraftWorkspace, find_slots, set_root
from forerun.trie.evidence import ENOUGH_CANDIDATES, complete, gather, gather_recent
from forerun.trie.frontier import (
    RECYCLED_ORDER,
    above_of,
    least,
    offer,
    origin_of,
    own_order_of,
    packed,
    shared_order_of,
    token_of,
)
from forerun.trie.gapped_match import follow_matches, inherit_matches
from forerun.trie.logistic_mixer import Mixer, corrected, odds_unmatched, unmatched_by_text, weigh, weights_unmatched
from forerun.trie.tables import OWN, SHARED
from forerun.trie.text_cursor import TextCursor, follow_copy

CUT_RECENT, CUT_SHORT, CUT = 0.01, 0.15, 0.35
"""How far to expand a node, by its *bar*: the probability of the least likely node that would be drafted now, divided
by this one's. Above ``CUT_RECENT``, recent tokens are skipped, above ``CUT_SHORT`` one-token contexts too; above
``CUT``, the node is not expanded. A follower becomes a candidate if its share of a context's total exceeds the bar."""


@compiled
def _expand(
    own: Index, shared: Index, mixer: Mixer, workspace: DraftWorkspace, node: int, bound: int, chance: float, bar: float
) -> None:
    """Offer a node's followers to the frontier; ``bound`` of its entries still fit the draft."""
    table, evidence = workspace.table, workspace.evidence
    gather(own, shared, workspace, node, bar)
    complete(table, evidence, workspace.noise, workspace.depths[node])
    weigh(mixer, table, evidence)
    for number in range(table.size[0]):
        offered = table.candidates[number]
        own_order = RECYCLED_ORDER if unmatched_by_text(offered.weights) else offered.longest[OWN]
        entry = packed(offered.token, node, own_order, offered.longest[SHARED])
        offer(workspace.frontier, bound, chance * offered.chance, entry)
    if bar <= CUT_RECENT and table.size[0] < ENOUGH_CANDIDATES:
        _expand_recent(mixer, workspace, node, bound, chance)


@compiled
def _expand_recent(mixer: Mixer, workspace: DraftWorkspace, node: int, bound: int, chance: float) -> None:
    recent, chosen = workspace.recent, weights_unmatched(workspace.evidence)
    odds = odds_unmatched(mixer, chosen, workspace.evidence)
    for number in range(recent.size[0]):
        likely = chance * corrected(mixer, chosen, odds + recent.candidates[number].odds)
        if likely <= least(workspace.frontier, bound):
            break
        token = recent.candidates[number].token
        if candidate(workspace.table, token, False) == NONE:
            offer(workspace.frontier, bound, likely, packed(token, node, 0, 0))


@compiled
def _rank_recent(own: Index, shared: Index, mixer: Mixer, recent: CandidateTable) -> None:
    clear(recent)
    gather_recent(own, shared, recent)
    ranked = recent.candidates
    for number in range(recent.size[0]):
        odds, token, at = 0.0, ranked[number].token, number
        for source in range(2):
            odds += mixer.weights[0, UNIGRAM + source] * mixer.cells.odds[recent.cells[number, UNIGRAM + source]]
        while at > 0 and ranked[at - 1].odds < odds:
            ranked[at].odds, ranked[at].token = ranked[at - 1].odds, ranked[at - 1].token
            at -= 1
        ranked[at].odds, ranked[at].token = odds, token


@compiled
def _enter(own: Index, shared: Index, workspace: DraftWorkspace, node: int, entry: int, bar: float) -> None:
    """Add a node: advance its parent's contexts, copies and matches by its token."""
    hashes, copies = workspace.hashes, workspace.copies
    above, token = above_of(entry), token_of(entry)
    for source in range(2):
        hashes[node, source, 0] = np.uint64(0)
        for order in range(1, ORDERS + 1):
            hashes[node, source, order] = mix(hashes[above, source, order - 1], token)
        copies[node, source] = copies[above, source]
    lowest = 2 if bar > CUT_SHORT else 1
    find_slots(own, shared, workspace, node, lowest, own_order_of(entry) + 1, shared_order_of(entry) + 1)
    follow_copy(own, copies, node, OWN, token, copies[0, OWN].position)
    follow_copy(shared, copies, node, SHARED, token, 0)
    inherit_matches(workspace.matches, above, node)
    follow_matches(own, workspace.matches, node, token)
    workspace.depths[node] = workspace.depths[above] + 1


@compiled
def grow(
    own: Index,
    shared: Index,
    cursor: TextCursor,
    mixer: Mixer,
    workspace: DraftWorkspace,
    draft: Draft,
    max_depth: int,
    lowest: float,
) -> int:
    """Fill a draft, likeliest nodes first, until they are less likely than ``lowest``; return their number."""
    budget, frontier, span = len(draft.tokens), workspace.frontier, workspace.frontier.span[0]
    _rank_recent(own, shared, mixer, workspace.recent)
    set_root(own, shared, cursor, workspace)
    span.head, span.tail = 0, 0
    _expand(own, shared, mixer, workspace, 0, budget, 1.0, 0.0)
    size = 0
    while span.head < span.tail and size < budget and frontier.chances[span.head] >= lowest:
        chance, entry = frontier.chances[span.head], frontier.entries[span.head]
        span.head += 1
        above = above_of(entry)
        draft.tokens[size], draft.parents[size], draft.probability[size] = token_of(entry), above - 1, chance
        draft.origins[size] = origin_of(entry)
        size += 1
        if size < budget and workspace.depths[above] + 1 < max_depth:
            bar = least(frontier, budget - size) / chance
            if bar <= CUT:
                _enter(own, shared, workspace, size, entry, bar)
                _expand(own, shared, mixer, workspace, size, budget - size, chance, bar)
    return size
