"""Taking in what was generated: the evidence for each candidate learns what it was worth, then the token is written."""

from __future__ import annotations

from forerun.core.tree import IntArray
from forerun.index.arrays import TOKENS, Index, tight
from forerun.index.board import INPUTS, SIZE
from forerun.index.compiling import compiled
from forerun.index.desk import Desk, hear, stand
from forerun.index.evidence import ENOUGH, complete, gather, gather_alone
from forerun.index.mixing import Mixer, teach, weigh
from forerun.index.place import Place, take


@compiled
def learn(own: Index, shared: Index, place: Place, mixer: Mixer, desk: Desk, token: int, rate: float) -> None:
    """Learn what the evidence for each candidate was worth, now that ``token`` came."""
    found, facts = desk.found, desk.facts
    stand(own, shared, place, desk)
    hear(own, 0, desk.copies, 0, facts)
    hear(shared, 1, desk.copies, 0, facts)
    gather(own, shared, desk.hashes, desk.slots, desk.trails, 0, facts, found, 0.0)
    if found.seen[SIZE] < ENOUGH and own.state[TOKENS] & 1:
        gather_alone(own, shared, found)
    for number in range(found.seen[SIZE]):
        complete(found, number, facts)
        weigh(mixer, found, number, facts)
    teach(mixer, found, facts.trails[INPUTS], token, rate)


OWN_HINTS, SHARED_TIGHT, SHARED_HINTS = 1, 2, 4


@compiled
def extend(own: Index, shared: Index, place: Place, mixer: Mixer, desk: Desk, tokens: IntArray, rate: float) -> int:
    """Take in generated tokens: learn from them, count them in both texts, follow the copies.

    Returns:
        Which of the two need larger tables of hints, or room, before the next call; a sum of the names above.
    """
    for token in tokens:
        if rate > 0:
            learn(own, shared, place, mixer, desk, token, rate)
        take(own, 0, own, place, token)
        take(shared, 1, own, place, token)
    needs = OWN_HINTS if own.state[TOKENS] > len(own.hints) else 0
    needs += SHARED_TIGHT if tight(shared) else 0
    return needs + (SHARED_HINTS if shared.state[TOKENS] > len(shared.hints) else 0)
