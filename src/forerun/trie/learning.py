"""Taking in what was generated: each kind of evidence learns what it was worth, then the token is written."""

from __future__ import annotations

from forerun.core.compiling import compiled
from forerun.core.tree import IntArray
from forerun.trie.arrays import Index, tight
from forerun.trie.draft_workspace import DraftWorkspace, hear, stand
from forerun.trie.evidence import ENOUGH, complete, gather, gather_recent
from forerun.trie.logistic_mixer import Mixer, teach, weigh
from forerun.trie.tables import OWN, SHARED
from forerun.trie.text_cursor import TextCursor, take


@compiled
def learn(
    own: Index, shared: Index, place: TextCursor, mixer: Mixer, desk: DraftWorkspace, token: int, rate: float
) -> None:
    """Learn what the evidence for each candidate was worth, now that ``token`` came.

    The tokens seen last take part at every other token only, which halves what they cost.
    """
    found, facts = desk.found, desk.facts
    stand(own, shared, place, desk)
    hear(own, OWN, desk.copies, 0, facts)
    hear(shared, SHARED, desk.copies, 0, facts)
    gather(own, shared, desk.hashes, desk.slots, desk.trails, 0, facts, found, 0.0)
    if found.size[0] < ENOUGH and own.state[0].tokens & 1:
        gather_recent(own, shared, found)
    for number in range(found.size[0]):
        complete(found, number, facts)
        weigh(mixer, found, number, facts)
    teach(mixer, found, facts.inputs[0], token, rate)


OWN_HINTS, SHARED_TIGHT, SHARED_HINTS = 1, 2, 4
"""What ``extend`` may ask for: more hints for the own text, room in the namespace, more hints for the namespace."""


@compiled
def extend(
    own: Index, shared: Index, place: TextCursor, mixer: Mixer, desk: DraftWorkspace, tokens: IntArray, rate: float
) -> int:
    """Take in generated tokens: learn from them if ``rate`` is above 0, then write them in both sources.

    Returns:
        What is needed before the next call, as a sum of the three names above.
    """
    for token in tokens:
        if rate > 0:
            learn(own, shared, place, mixer, desk, token, rate)
        take(own, OWN, own, place, token)
        take(shared, SHARED, own, place, token)
    needs = OWN_HINTS if own.state[0].tokens > len(own.hints) else 0
    needs += SHARED_TIGHT if tight(shared) else 0
    return needs + (SHARED_HINTS if shared.state[0].tokens > len(shared.hints) else 0)
