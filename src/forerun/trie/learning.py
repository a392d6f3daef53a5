"""Taking in what was generated: each kind of evidence learns what it was worth, then the token is written."""

from __future__ import annotations

from forerun.core.compiling import compiled
from forerun.core.tree import IntArray
from forerun.trie.arrays import Index, tight
from forerun.trie.draft_workspace import DraftWorkspace, read_copy, set_root
from forerun.trie.evidence import ENOUGH_CANDIDATES, complete, gather, gather_recent
from forerun.trie.known_noise import noise_of
from forerun.trie.logistic_mixer import Mixer, teach, weigh
from forerun.trie.tables import OWN, SHARED
from forerun.trie.text_cursor import TextCursor, append_generated


@compiled
def learn(
    own: Index, shared: Index, cursor: TextCursor, mixer: Mixer, workspace: DraftWorkspace, token: int, rate: float
) -> None:
    """Learn what the evidence for each candidate was worth, now that ``token`` came.

    The tokens seen last take part at every other token only, which halves what they cost.
    """
    table, evidence = workspace.table, workspace.evidence
    set_root(own, shared, cursor, workspace)
    read_copy(own, OWN, workspace.copies, 0, evidence)
    read_copy(shared, SHARED, workspace.copies, 0, evidence)
    gather(own, shared, workspace.hashes, workspace.slots, workspace.matches, 0, evidence, table, 0.0)
    if table.size[0] < ENOUGH_CANDIDATES and own.state[0].tokens & 1:
        gather_recent(own, shared, table)
    for number in range(table.size[0]):
        complete(table, number, evidence)
        table.candidates[number].noise = noise_of(workspace.noise, 0, table.candidates[number].token)
        weigh(mixer, table, number, evidence)
    teach(mixer, table, evidence.inputs[0], token, rate)


OWN_HINTS, SHARED_TIGHT, SHARED_HINTS, OWN_ROOM = 1, 2, 4, 8
"""What learning may ask for: more hints for the own text, room in the namespace, more hints for the namespace, and room
for the own text."""


@compiled
def extend(
    own: Index,
    shared: Index,
    cursor: TextCursor,
    mixer: Mixer,
    workspace: DraftWorkspace,
    tokens: IntArray,
    rate: float,
) -> int:
    """Take in generated tokens: learn from them if ``rate`` is above 0, then write them in both sources.

    Returns:
        What is needed before the next call, as a sum of the first three names above.
    """
    for token in tokens:
        if rate > 0:
            learn(own, shared, cursor, mixer, workspace, token, rate)
        append_generated(own, OWN, own, cursor, token)
        append_generated(shared, SHARED, own, cursor, token)
        workspace.noise[0].position += 1
    needs = OWN_HINTS if own.state[0].tokens > len(own.hints) else 0
    needs += SHARED_TIGHT if tight(shared) else 0
    return needs + (SHARED_HINTS if shared.state[0].tokens > len(shared.hints) else 0)
