"""The merged tree: best first by estimated probability, over all context lengths and both texts at once.

Every node keeps where it stands: the hashes and slots of its contexts and what each copy says next. A node whose
children could not enter the draft any more is not expanded, or from its longer contexts only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.contexts import CHUNK, ORDERS, TOKENS, TOTAL, HashArray, Index, Int32Array, compiled, count, find, mix, uncount
from forerun.history import (
    FAR,
    REACH,
    UNWRITTEN,
    advance,
    agreement,
    append,
    following,
    free,
    hint,
    opening,
    read,
    remember,
    set_hint,
)
from forerun.mixing import (
    AGREED,
    ALONE,
    COMMON,
    ELSE,
    ENOUGH,
    LIKELY,
    NONE,
    OWN,
    RANKS,
    ROOM,
    SAID,
    SHARED,
    SIZE,
    STRETCHED,
    TOKEN,
    TOKEN_CELLS,
    Board,
    Facts,
    FloatArray,
    Mixer,
    candidate,
    clear,
    complete,
    copy_cell,
    corrected,
    gather,
    odds_alone,
    teach,
    weigh,
)
from forerun.tree import ROOT, IntArray

CUT_ALONE, CUT_SHORT, CUT = 0.04, 0.2, 0.9
"""A node is expanded without the tokens that only their frequency speaks for, without contexts of one token, or not at
all, when the least of the nodes that the draft would take otherwise is likelier than this share of it."""
POSITION, LENGTH, WRONG, DEPTH = range(4)
"""Columns of ``Place.copies``: where the copy continues (0: no copy), tokens that agreed before, and a bit for each of
the last eight predictions that was wrong."""
MOST_WRONG = 0b1111
"""A copy that was wrong this often in a row ends."""


class Place(NamedTuple):
    """Where a text stands.

    Attributes:
        hashes: of its last tokens, own text and shared text; uint64 ``[2, REACH + 1]``.
        copies: int64 ``[1, 2, 3]``.
        ends: position of its last token in own and shared text (-1: no longer written), and the first chunks;
            int64 ``[4]``.
    """

    hashes: HashArray
    copies: IntArray
    ends: IntArray

    @classmethod
    def start(cls) -> Place:
        """Before a text."""
        place = cls(np.zeros((2, REACH + 1), np.uint64), np.zeros((1, 2, 3), np.int64), np.zeros(4, np.int64))
        opening(place.hashes)
        return place


class Desk(NamedTuple):
    """Where drafts are worked out; what the functions here leave on it means nothing to the next.

    Attributes:
        hashes: of the contexts at the root (row 0) and each node, uint64 ``[n + 1, 2, ORDERS + 1]``.
        slots: of the same contexts, int32 ``[n + 1, 2, ORDERS + 1]``.
        copies: where copies stand, and in ``[:, 0, DEPTH]`` the node's depth; int64 ``[n + 1, 2, 4]``.
        chances: of the frontier's candidates, likeliest first from ``ends[0]`` to ``ends[1]``; float64 ``[2 n + 1]``.
        entries: token, parent and best orders of each, packed; int64 ``[2 n + 1]``.
        ends: int64 ``[2]``.
        found: candidates of the node at hand.
        alone: tokens seen last, whose place does not depend on the node.
        facts: of the node at hand.
    """

    hashes: HashArray
    slots: Int32Array
    copies: IntArray
    chances: FloatArray
    entries: IntArray
    ends: IntArray
    found: Board
    alone: Board
    facts: Facts

    @classmethod
    def allocate(cls, budget: int) -> Desk:
        """Room for drafts of up to ``budget`` nodes."""
        return cls(
            np.zeros((budget + 1, 2, ORDERS + 1), np.uint64),
            np.zeros((budget + 1, 2, ORDERS + 1), np.int32),
            np.zeros((budget + 1, 2, 4), np.int64),
            np.zeros(2 * budget + 1),
            np.zeros(2 * budget + 1, np.int64),
            np.zeros(2, np.int64),
            Board.allocate(),
            Board.allocate(),
            Facts.allocate(),
        )


class Draft(NamedTuple):
    """The draft: int64, int64 and float64, ``[budget]``; ``ROOT`` marks what follows the context directly."""

    tokens: IntArray
    parents: IntArray
    probability: npt.NDArray[np.float64]


@compiled
def follow_copy(index: Index, copies: IntArray, at: int, source: int, token: int, again: int) -> None:
    """Move a copy on by a token; at the text's end it goes on at ``again``, as in LZ77."""
    position = copies[at, source, POSITION]
    if position == 0:
        return
    if read(index, position) == token:
        copies[at, source, LENGTH] = min(copies[at, source, LENGTH] + 1, FAR)
        copies[at, source, WRONG] = copies[at, source, WRONG] << 1 & 255
    else:
        copies[at, source, LENGTH] = 0
        copies[at, source, WRONG] = (copies[at, source, WRONG] << 1 | 1) & 255
    position = following(index, position)
    if position != 0 and read(index, position) == UNWRITTEN:
        position = again
    if copies[at, source, WRONG] & MOST_WRONG == MOST_WRONG:
        position = 0
    copies[at, source, POSITION] = position


@compiled
def seek_copy(index: Index, copies: IntArray, source: int, hashed: np.uint64, own: Index, end: int) -> None:
    """Copy from the latest occurrence of the last tokens, if that agrees for at least as long."""
    if copies[0, source, LENGTH] >= FAR:
        return
    found = hint(index, hashed)
    if found == 0 or found == copies[0, source, POSITION]:
        return
    agreed = agreement(index, found, own, end)
    if agreed >= REACH and agreed >= copies[0, source, LENGTH]:
        copies[0, source, POSITION], copies[0, source, LENGTH], copies[0, source, WRONG] = found, agreed, 0


@compiled
def write(index: Index, hashes: HashArray, source: int, end: int, token: int) -> int:
    """Count a text's next token and append it; its position, or -1 if there was no room."""
    position = append(index, end, token)
    if position == 0:
        return -1
    for order in range(1, ORDERS + 1):
        count(index, hashes[source, order], token)
    set_hint(index, hashes[source, REACH], position)
    index.state[TOKENS] += 1
    return position


@compiled
def ingest(own: Index, place: Place, tokens: IntArray) -> None:
    """Take in a prompt."""
    for number in range(len(tokens)):
        token = tokens[number]
        place.ends[0] = write(own, place.hashes, 0, place.ends[0], token)
        advance(place.hashes, 0, token)
        if number >= len(tokens) - 512:
            remember(own.recent, token)
    seek_copy(own, place.copies, 0, place.hashes[0, REACH], own, place.ends[0])


@compiled
def _take(index: Index, source: int, own: Index, place: Place, token: int) -> None:
    """Write a token in one text and follow its copy."""
    if place.ends[source] >= 0:
        fresh = place.ends[source] == 0
        place.ends[source] = write(index, place.hashes, source, place.ends[source], token)
        if fresh:
            place.ends[2 + source] = max(place.ends[source], 0) // CHUNK
        remember(index.recent, token)
    advance(place.hashes, source, token)
    follow_copy(index, place.copies, 0, source, token, 0)
    seek_copy(index, place.copies, source, place.hashes[source, REACH], own, place.ends[0])


@compiled
def publish(shared: Index, place: Place, tokens: IntArray) -> None:
    """Take in tokens that were generated before, without learning from them."""
    for token in tokens:
        _take(shared, 1, shared, place, token)


@compiled
def withdraw(index: Index, place: Place, most: int) -> bool:
    """Take back up to ``most`` tokens of the text that ``place.ends`` is at the start of; whether that was all.

    ``place.hashes[1]`` moves along, and ``place.ends[1]`` is the position of the next token to go.
    """
    position = place.ends[1]
    for _ in range(most):
        token = read(index, position) if position != 0 else UNWRITTEN
        if token == UNWRITTEN:
            if position != 0:
                free(index, position // CHUNK)
            place.ends[1] = 0
            return True
        for order in range(1, ORDERS + 1):
            uncount(index, place.hashes[1, order], token)
        advance(place.hashes, 1, token)
        index.state[TOKENS] -= 1
        behind = following(index, position)
        if behind // CHUNK != position // CHUNK:
            free(index, position // CHUNK)
        position = behind
    place.ends[1] = position
    return False


@compiled
def _common(index: Index, source: int, token: int) -> int:
    """Class of a token's frequency."""
    slot = find(index, mix(np.uint64(0), token))
    if slot == 0:
        return 0
    share = 8000 * index.slots[slot, TOTAL] / (index.state[TOKENS] + 10)
    return min(max(int(1.5 * math.log(share)) + 2, 1), COMMON - 1)


@compiled
def _rank_class(rank: int) -> int:
    return 0 if rank < 2 else 1 if rank < 6 else 2 if rank < 12 else 3 if rank < 24 else 4


@compiled
def _recent(index: Index, source: int, board: Board, first: int) -> None:
    for rank in range(len(index.recent)):
        if index.recent[rank] < 0:
            break
        number = candidate(board, index.recent[rank], True)
        if number >= first:
            board.cells[number, ALONE + source] = _rank_class(rank)


@compiled
def gather_alone(own: Index, shared: Index, board: Board) -> None:
    """Put the tokens seen last on the board, with what their frequency says."""
    first = board.seen[SIZE]
    _recent(own, 0, board, first)
    _recent(shared, 1, board, first)
    for number in range(first, board.seen[SIZE]):
        for source in range(2):
            token, rank = board.names[number, TOKEN], board.cells[number, ALONE + source]
            common = _common(own, 0, token) if source == 0 else _common(shared, 1, token)
            rank = RANKS - 1 if rank == NONE else rank
            board.cells[number, ALONE + source] = TOKEN_CELLS + (source * COMMON + common) * RANKS + rank


@compiled
def _look(own: Index, shared: Index, hashes: HashArray, slots: Int32Array, at: int, own_most: int, most: int) -> None:
    """The slots of a node's contexts up to the given orders."""
    for order in range(1, ORDERS + 1):
        slots[at, 0, order] = find(own, hashes[at, 0, order]) if order <= own_most else 0
        slots[at, 1, order] = find(shared, hashes[at, 1, order]) if order <= most else 0


@compiled
def _hear(index: Index, source: int, copies: IntArray, at: int, facts: Facts) -> None:
    """What a copy says."""
    position, length = copies[at, source, POSITION], copies[at, source, LENGTH]
    facts.copies[source, SAID] = UNWRITTEN if position == 0 else read(index, position)
    facts.copies[source, ELSE] = copy_cell(source, length, copies[at, source, WRONG])
    facts.copies[source, AGREED] = length


@compiled
def _stand(own: Index, shared: Index, place: Place, desk: Desk) -> None:
    """Make the text's end the root."""
    for source in range(2):
        for order in range(ORDERS + 1):
            desk.hashes[0, source, order] = place.hashes[source, order]
        for column in range(3):
            desk.copies[0, source, column] = place.copies[0, source, column]
    desk.copies[0, 0, DEPTH] = 0
    _look(own, shared, desk.hashes, desk.slots, 0, ORDERS, ORDERS)


@compiled
def learn(own: Index, shared: Index, place: Place, mixer: Mixer, desk: Desk, token: int, rate: float) -> None:
    """Learn what the evidence for each candidate was worth, now that ``token`` came."""
    found, facts = desk.found, desk.facts
    _stand(own, shared, place, desk)
    _hear(own, 0, desk.copies, 0, facts)
    _hear(shared, 1, desk.copies, 0, facts)
    gather(own, shared, desk.slots, 0, facts, found, 1, 0.0)
    if found.seen[SIZE] < ENOUGH:
        gather_alone(own, shared, found)
    for number in range(found.seen[SIZE]):
        complete(found, number, facts)
        weigh(mixer, found, number, facts)
    teach(mixer, found, token, rate)


@compiled
def extend(own: Index, shared: Index, place: Place, mixer: Mixer, desk: Desk, tokens: IntArray, rate: float) -> None:
    """Take in generated tokens: learn from them, count them in both texts, follow the copies."""
    for token in tokens:
        if rate > 0:
            learn(own, shared, place, mixer, desk, token, rate)
        _take(own, 0, own, place, token)
        _take(shared, 1, own, place, token)


@compiled
def skip(own: Index, shared: Index, place: Place, tokens: IntArray) -> None:
    """Move on by tokens that are not taken in."""
    for token in tokens:
        for source in range(2):
            advance(place.hashes, source, token)
        follow_copy(own, place.copies, 0, 0, token, 0)
        follow_copy(shared, place.copies, 0, 1, token, 0)


@compiled
def _offer(desk: Desk, bound: int, chance: float, entry: int) -> None:
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
def _least(desk: Desk, bound: int) -> float:
    """What a candidate must exceed to be drafted."""
    return desk.chances[desk.ends[0] + bound - 1] if desk.ends[1] - desk.ends[0] >= bound else 0.0


@compiled
def _expand(own: Index, shared: Index, mixer: Mixer, desk: Desk, at: int, bound: int, chance: float) -> None:
    """Offer what may follow a node."""
    found, facts = desk.found, desk.facts
    least = _least(desk, bound) / chance
    if least > CUT:
        return
    _hear(own, 0, desk.copies, at, facts)
    _hear(shared, 1, desk.copies, at, facts)
    gather(own, shared, desk.slots, at, facts, found, 2 if least > CUT_SHORT else 1, 0.3 * least)
    for number in range(found.seen[SIZE]):
        complete(found, number, facts)
        likely = chance * weigh(mixer, found, number, facts)
        names = found.names
        orders = names[number, OWN] << 3 | names[number, SHARED]
        _offer(desk, bound, likely, names[number, TOKEN] << 26 | at << 6 | orders)
    if least <= CUT_ALONE and found.seen[SIZE] < ENOUGH:
        _expand_alone(mixer, desk, at, bound, chance)


@compiled
def _expand_alone(mixer: Mixer, desk: Desk, at: int, bound: int, chance: float) -> None:
    """Offer the tokens seen last, as far as they are likely enough."""
    alone, odds = desk.alone, odds_alone(mixer, desk.facts)
    for number in range(alone.seen[SIZE]):
        likely = chance * corrected(mixer, 0, odds + alone.result[number, LIKELY])
        if likely <= _least(desk, bound):
            break
        token = alone.names[number, TOKEN]
        if candidate(desk.found, token, False) == NONE:
            _offer(desk, bound, likely, token << 26 | at << 6)


@compiled
def _rank_alone(own: Index, shared: Index, mixer: Mixer, alone: Board) -> None:
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
def _enter(own: Index, shared: Index, desk: Desk, above: int, at: int, token: int, orders: int) -> None:
    """Where node ``at`` stands, which follows ``above`` with a token."""
    hashes, copies = desk.hashes, desk.copies
    for source in range(2):
        hashes[at, source, 0] = np.uint64(0)
        for order in range(1, ORDERS + 1):
            hashes[at, source, order] = mix(hashes[above, source, order - 1], token)
        for column in range(4):
            copies[at, source, column] = copies[above, source, column]
    _look(own, shared, hashes, desk.slots, at, (orders >> 3) + 1, (orders & 7) + 1)
    follow_copy(own, copies, at, 0, token, copies[0, 0, POSITION])
    follow_copy(shared, copies, at, 1, token, 0)
    copies[at, 0, DEPTH] = copies[above, 0, DEPTH] + 1


@compiled
def grow(own: Index, shared: Index, place: Place, mixer: Mixer, desk: Desk, draft: Draft, deepest: int) -> int:
    """Fill a draft; the number of its nodes."""
    budget, ends = len(draft.tokens), desk.ends
    _rank_alone(own, shared, mixer, desk.alone)
    _stand(own, shared, place, desk)
    ends[0], ends[1] = 0, 0
    _expand(own, shared, mixer, desk, 0, budget, 1.0)
    size = 0
    while ends[0] < ends[1] and size < budget:
        chance, entry = desk.chances[ends[0]], desk.entries[ends[0]]
        ends[0] += 1
        token, above = entry >> 26, entry >> 6 & 0xFFFFF
        draft.tokens[size], draft.parents[size], draft.probability[size] = token, above - 1, chance
        size += 1
        if size < budget and desk.copies[above, 0, DEPTH] + 1 < deepest:
            _enter(own, shared, desk, above, size, token, entry & 63)
            _expand(own, shared, mixer, desk, size, budget - size, chance)
    return size
