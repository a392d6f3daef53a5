"""The merged tree: best first by estimated probability, over all context lengths and both texts at once.

Every node keeps where it stands: the hashes and slots of its contexts and what each copy says next. A node whose
children could not enter the draft any more is not expanded, or from its longer contexts only.
"""

from __future__ import annotations

import numpy as np

from forerun.index.arrays import ORDERS, Index, mix
from forerun.index.board import ALONE, NONE, OWN, SHARED, SIZE, TOKEN, Board, candidate, clear
from forerun.index.compiling import compiled
from forerun.index.desk import Desk, Draft, hear, look, stand
from forerun.index.evidence import ENOUGH, complete, gather, gather_alone
from forerun.index.mixing import LIKELY, STRETCHED, Mixer, corrected, odds_alone, weigh
from forerun.index.place import DEPTH, POSITION, Place, follow_copy
from forerun.index.trail import branch, follow_trails

CUT_ALONE, CUT_SHORT, CUT = 0.01, 0.15, 0.35
"""When the least of the nodes that the draft would take otherwise is likelier than this share of a node's chance, the
node is expanded without the tokens that only their frequency speaks for, without contexts of one token, or not at all.
A token is looked for behind a context if it is at least as large a share of what followed it."""


@compiled
def offer(desk: Desk, bound: int, chance: float, entry: int) -> None:
    """Sort a candidate in, unless ``bound`` are likelier."""
    chances, entries, head, at = desk.chances, desk.entries, desk.ends[0], desk.ends[1]
    if at - head >= bound:
        at = head + bound - 1
        if chance <= chances[at]:
            return
    desk.ends[1] = at + 1
    while at > head and chances[at - 1] < chance:
        chances[at] = chances[at - 1]
        entries[at] = entries[at - 1]
        at -= 1
    chances[at] = chance
    entries[at] = entry


@compiled
def least(desk: Desk, bound: int) -> float:
    """What a candidate must exceed to be drafted."""
    return desk.chances[desk.ends[0] + bound - 1] if desk.ends[1] - desk.ends[0] >= bound else 0.0


@compiled
def _expand(
    own: Index, shared: Index, mixer: Mixer, desk: Desk, at: int, bound: int, chance: float, share: float
) -> None:
    """Offer what may follow a node."""
    found, facts = desk.found, desk.facts
    hear(own, 0, desk.copies, at, facts)
    hear(shared, 1, desk.copies, at, facts)
    gather(own, shared, desk.hashes, desk.slots, desk.trails, at, facts, found, share)
    for number in range(found.seen[SIZE]):
        complete(found, number, facts)
        likely = chance * weigh(mixer, found, number, facts)
        names = found.names
        orders = names[number, OWN] << 3 | names[number, SHARED]
        offer(desk, bound, likely, names[number, TOKEN] << 26 | at << 6 | orders)
    if share <= CUT_ALONE and found.seen[SIZE] < ENOUGH:
        _expand_alone(mixer, desk, at, bound, chance)


@compiled
def _expand_alone(mixer: Mixer, desk: Desk, at: int, bound: int, chance: float) -> None:
    """Offer the tokens seen last, as far as they are likely enough."""
    alone, odds = desk.alone, odds_alone(mixer, desk.facts)
    for number in range(alone.seen[SIZE]):
        likely = chance * corrected(mixer, 0, odds + alone.result[number, LIKELY])
        if likely <= least(desk, bound):
            break
        token = alone.names[number, TOKEN]
        if candidate(desk.found, token, False) == NONE:
            offer(desk, bound, likely, token << 26 | at << 6)


@compiled
def rank_alone(own: Index, shared: Index, mixer: Mixer, alone: Board) -> None:
    """Sort the tokens seen last by what their frequency adds to the log-odds."""
    clear(alone)
    gather_alone(own, shared, alone)
    names, result = alone.names, alone.result
    for number in range(alone.seen[SIZE]):
        odds, token, at = 0.0, names[number, TOKEN], number
        for source in range(2):
            odds += mixer.weights[0, ALONE + source] * mixer.cells[STRETCHED, alone.cells[number, ALONE + source]]
        while at > 0 and result[at - 1, LIKELY] < odds:
            result[at, LIKELY], names[at, TOKEN] = result[at - 1, LIKELY], names[at - 1, TOKEN]
            at -= 1
        result[at, LIKELY], names[at, TOKEN] = odds, token


@compiled
def _enter(own: Index, shared: Index, desk: Desk, above: int, at: int, token: int, orders: int, share: float) -> None:
    """Where node ``at`` stands, which follows ``above`` with a token."""
    hashes, copies = desk.hashes, desk.copies
    for source in range(2):
        hashes[at, source, 0] = np.uint64(0)
        for order in range(1, ORDERS + 1):
            hashes[at, source, order] = mix(hashes[above, source, order - 1], token)
        for column in range(3):
            copies[at, source, column] = copies[above, source, column]
    lowest = 2 if share > CUT_SHORT else 1
    look(own, shared, hashes, desk.slots, at, lowest, (orders >> 3) + 1, (orders & 7) + 1)
    follow_copy(own, copies, at, 0, token, copies[0, 0, POSITION])
    follow_copy(shared, copies, at, 1, token, 0)
    branch(desk.trails, above, at)
    follow_trails(own, desk.trails, at, token)
    copies[at, 0, DEPTH] = copies[above, 0, DEPTH] + 1


@compiled
def grow(own: Index, shared: Index, place: Place, mixer: Mixer, desk: Desk, draft: Draft, deepest: int) -> int:
    """Fill a draft; the number of its nodes."""
    budget, ends = len(draft.tokens), desk.ends
    rank_alone(own, shared, mixer, desk.alone)
    stand(own, shared, place, desk)
    ends[0], ends[1] = 0, 0
    _expand(own, shared, mixer, desk, 0, budget, 1.0, 0.0)
    size = 0
    while ends[0] < ends[1] and size < budget:
        chance, entry = desk.chances[ends[0]], desk.entries[ends[0]]
        ends[0] += 1
        token, above = entry >> 26, entry >> 6 & 0xFFFFF
        draft.tokens[size], draft.parents[size], draft.probability[size] = token, above - 1, chance
        size += 1
        if size < budget and desk.copies[above, 0, DEPTH] + 1 < deepest:
            share = least(desk, budget - size) / chance
            if share <= CUT:
                _enter(own, shared, desk, above, size, token, entry & 63, share)
                _expand(own, shared, mixer, desk, size, budget - size, chance, share)
    return size
