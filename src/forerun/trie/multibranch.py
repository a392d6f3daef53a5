"""The Lookahead paper's multi-stage retrieval and its forms of a draft (sections 4.2 and 4.3.2), over the same index.

A stage takes the context of one length and adds the branches behind it, those of the largest weighted frequency first.
A branch that is longer than the index counts goes on from its last ``ORDERS`` tokens. If a stage yields too few nodes,
the next shorter context has a stage, too.
"""

from __future__ import annotations

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.tree import ROOT
from forerun.trie.arrays import ORDERS, Index, find, mix
from forerun.trie.candidates import NONE, CandidateTable, candidate, clear
from forerun.trie.draft_workspace import Draft, DraftWorkspace, set_root
from forerun.trie.evidence import MAX_FOLLOWERS
from forerun.trie.frontier import above_of, empty, offer, origin_of, packed, token_of
from forerun.trie.tables import OWN, SHARED
from forerun.trie.text_cursor import TextCursor

DISCOUNT, DOUBT, FADE = 0.75, 0.5, 0.8
"""Of the estimate in ``_chance``: subtracted from a node's weight, added to its context's, and the factor per level."""


@compiled
def _chance(weight: float, total: float, depth: int) -> float:
    """Estimate that a node of ``weight`` under a context of weight ``total`` is accepted.

    It is the relative frequency with an absolute discount, lower at each level. Without these it was three to six times
    too high.
    """
    share = max(weight - DISCOUNT, weight * (1 - DISCOUNT))
    return share / (max(total, weight) + DOUBT) * FADE ** (depth - 1)


@compiled
def _followers(index: Index, slot: int, source: int, factor: float, table: CandidateTable) -> float:
    """Add ``factor`` times the counts of a context's followers to their ``odds``, and note the source; ``factor`` times
    its total."""
    if slot == 0:
        return 0.0
    value, total = index.slots[slot].value, index.slots[slot].total
    block = -1 - value
    for entry in range(1, 2 if value >= 0 else min(index.blocks[block].followers, MAX_FOLLOWERS) + 1):
        token = value if value >= 0 else index.blocks[block + entry].token
        before = table.size[0]
        number = candidate(table, token, True)
        if number != NONE:
            weight = 0.0 if number == before else table.candidates[number].odds
            count = total if value >= 0 else index.blocks[block + entry].count
            table.candidates[number].odds = weight + factor * count
            table.candidates[number].longest[source] = 1
    return float(factor * total)


@compiled
def _expand(
    own: Index, shared: Index, weight: float, workspace: DraftWorkspace, node: int, order: int, chance: float
) -> float:
    """Offer what followed a node's last ``order`` tokens; the context's weight.

    ``chance`` is the node's own weight. It is 0 for a stage's context, whose followers weigh what they count.
    """
    table, frontier = workspace.table, workspace.frontier
    clear(table)
    total = _followers(own, find(own, workspace.hashes[node, OWN, order]), OWN, weight, table)
    total += _followers(shared, find(shared, workspace.hashes[node, SHARED, order]), SHARED, 1.0, table)
    factor = chance / total if chance > 0 else 1.0
    bound = len(frontier.chances) // 2
    for number in range(table.size[0]):
        offered = table.candidates[number]
        entry = packed(offered.token, node, offered.longest[OWN], offered.longest[SHARED])
        offer(frontier, bound, factor * offered.odds, entry)
    return total


@compiled
def _known(draft: Draft, size: int, parent: int, token: int) -> int:
    """The child of ``parent`` with ``token`` in the draft, or ``ROOT``."""
    for node in range(parent + 1, size):
        if draft.parents[node] == parent and draft.tokens[node] == token:
            return node
    return ROOT


@compiled
def _enter(workspace: DraftWorkspace, above: int, node: int, token: int) -> None:
    """Put a new node's contexts on the workspace."""
    for source in range(2):
        for order in range(1, ORDERS + 1):
            workspace.hashes[node, source, order] = mix(workspace.hashes[above, source, order - 1], token)
        workspace.hashes[node, source, 0] = np.uint64(0)
    workspace.depths[node] = workspace.depths[above] + 1


@compiled
def _stage(
    own: Index,
    shared: Index,
    weight: float,
    workspace: DraftWorkspace,
    draft: Draft,
    size: int,
    length: int,
    deepest: int,
    single: bool,
) -> int:
    """Add the branches behind the last ``length`` tokens to the draft; its new size."""
    frontier, span = workspace.frontier, workspace.frontier.span[0]
    empty(frontier)
    total = _expand(own, shared, weight, workspace, 0, length, 0.0)
    while span.head < span.tail and size < len(draft.tokens):
        heavy, entry = frontier.chances[span.head], frontier.entries[span.head]
        span.head = span.tail if single else span.head + 1
        if span.head > len(frontier.chances) // 2:
            break
        token, above = token_of(entry), above_of(entry)
        depth = workspace.depths[above] + 1
        node = _known(draft, size, above - 1, token)
        if node == ROOT:
            node = size
            size += 1
            draft.tokens[node], draft.parents[node], draft.origins[node] = token, above - 1, origin_of(entry)
            limit = 1.0 if above == 0 else draft.probability[above - 1]
            draft.probability[node] = min(_chance(heavy, total, depth), limit)
            _enter(workspace, above, node + 1, token)
        if depth < deepest:
            if single:
                empty(frontier)
            _expand(own, shared, weight, workspace, node + 1, min(length + depth, ORDERS), heavy)
    return size


@compiled
def retrieve(
    own: Index,
    shared: Index,
    cursor: TextCursor,
    weight: float,
    workspace: DraftWorkspace,
    draft: Draft,
    longest: int,
    enough: int,
    max_depth: int,
    branch_length: int,
    single: bool,
) -> int:
    """Fill a draft, from the longest context that matches to shorter ones until it has ``enough`` nodes.

    Args:
        own: index of the request's text, its counts weighted by ``weight``.
        shared: index of the namespace.
        cursor: where the request's text stands.
        weight: see ``own``.
        workspace: to work on.
        draft: receives the nodes; its length is the budget, at least one.
        longest: context to match, in tokens.
        enough: the paper's N_m.
        max_depth: of the draft, in tokens, at least one.
        branch_length: the most tokens of a context and a branch together (the paper's L_b).
        single: the likeliest branch only.

    Returns:
        The number of nodes in the draft.
    """
    set_root(own, shared, cursor, workspace)
    size = 0
    for length in range(longest, 0, -1):
        if workspace.slots[0, OWN, length] != 0 or workspace.slots[0, SHARED, length] != 0:
            deepest = min(max_depth, branch_length - length)
            size = _stage(own, shared, weight, workspace, draft, size, length, deepest, single)
        if size >= enough or (single and size > 0):
            break
    return size


def unmerge(draft: Draft, budget: int) -> Draft:
    """The draft's branches side by side, likeliest leaf first, as far as the budget goes (section 4.2.1)."""
    tokens, parents, probability, _ = (part.tolist() for part in draft)
    leaves = sorted(set(range(len(tokens))) - set(parents), key=lambda leaf: -probability[leaf])
    copied: list[int] = []
    above: list[int] = []
    for leaf in leaves:
        path, node = [], leaf
        while node != ROOT:
            path.append(node)
            node = parents[node]
        room = budget - len(copied)
        above += [ROOT if step == 0 else len(copied) + step - 1 for step in range(min(len(path), room))]
        copied += path[::-1][:room]
    order = np.array(copied, np.int64)
    return Draft(draft.tokens[order], np.array(above, np.int64), draft.probability[order], draft.origins[order])
