"""The frontier of a draft: candidates not drafted yet, in a short list sorted by probability. New entries are inserted
from the tail; those that can no longer enter the draft drop off."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.origin import Origin
from forerun.core.records import RecordArray
from forerun.core.tree import IntArray
from forerun.trie.arrays import FloatArray
from forerun.trie.tables import SPAN

ORDER_BITS, NODE_BITS = 3, 20
"""Bits of each order, and of the parent. An entry packs token, parent, longest context in request and in namespace."""

ABOVE_START = 2 * ORDER_BITS
TOKEN_START = ABOVE_START + NODE_BITS
"""First bits of parent and token."""

RECYCLED_ORDER = 7
"""Replaces the request context's order if only recycled logits predict the token."""

FROM_TEXT, FROM_EARLIER, FROM_LOGITS = int(Origin.TEXT), int(Origin.EARLIER), int(Origin.RECYCLED)


class Frontier(NamedTuple):
    """Probabilities, descending, float64 ``[2 n + 1]``; entries, int64 ``[2 n + 1]``; their ``SPAN`` ``[1]``."""

    chances: FloatArray
    entries: IntArray
    span: RecordArray

    @classmethod
    def allocate(cls, budget: int) -> Frontier:
        return cls(np.zeros(2 * budget + 1), np.zeros(2 * budget + 1, np.int64), np.zeros(1, SPAN))


@compiled
def packed(token: int, above: int, own_order: int, shared_order: int) -> int:
    """Pack a token, its parent's workspace row, and the longest context in each source."""
    return token << TOKEN_START | above << ABOVE_START | own_order << ORDER_BITS | shared_order


@compiled
def token_of(entry: int) -> int:
    """Return the token of an entry."""
    return entry >> TOKEN_START


@compiled
def above_of(entry: int) -> int:
    """Return the workspace row of an entry's parent."""
    return entry >> ABOVE_START & ((1 << NODE_BITS) - 1)


@compiled
def own_order_of(entry: int) -> int:
    """Return the length of the longest context in the request that the token followed."""
    order = entry >> ORDER_BITS & ((1 << ORDER_BITS) - 1)
    return 0 if order == RECYCLED_ORDER else order


@compiled
def shared_order_of(entry: int) -> int:
    """Return the length of the longest context in the namespace that the token followed."""
    return entry & ((1 << ORDER_BITS) - 1)


@compiled
def origin_of(entry: int) -> int:
    """Return the source with the longer context: request or namespace; or recycled logits."""
    if entry >> ORDER_BITS & ((1 << ORDER_BITS) - 1) == RECYCLED_ORDER:
        return FROM_LOGITS
    return FROM_EARLIER if shared_order_of(entry) > own_order_of(entry) else FROM_TEXT


@compiled
def offer(frontier: Frontier, bound: int, chance: float, entry: int) -> None:
    """Insert an entry, unless ``bound`` entries are at least as likely."""
    chances, entries, span = frontier.chances, frontier.entries, frontier.span[0]
    head, at = span.head, span.tail
    if at - head >= bound:
        at = head + bound - 1
        if chance <= chances[at]:
            return
    span.tail = at + 1
    while at > head and chances[at - 1] < chance:
        chances[at] = chances[at - 1]
        entries[at] = entries[at - 1]
        at -= 1
    chances[at] = chance
    entries[at] = entry


@compiled
def least(frontier: Frontier, bound: int) -> float:
    """Return the probability that a new entry must exceed to be among the first ``bound``."""
    span = frontier.span[0]
    return frontier.chances[span.head + bound - 1] if span.tail - span.head >= bound else 0.0
