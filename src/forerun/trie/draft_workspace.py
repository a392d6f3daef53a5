"""Memory for drafting, allocated once: the compiled functions allocate nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.core.tree import Int8Array, IntArray
from forerun.trie.arrays import ORDERS, FloatArray, HashArray, Index, Int32Array, find
from forerun.trie.candidates import CandidateTable, PositionEvidence
from forerun.trie.frontier import Frontier
from forerun.trie.tables import COPY, GAPPED_MATCH, NOISE, OWN, SHARED
from forerun.trie.text_cursor import TextCursor


class DraftWorkspace(NamedTuple):
    """Working memory of one call. Row 0 by node is the end of the sequence, row i + 1 is node i.

    Attributes:
        hashes: of each node's contexts, by source and order; uint64 ``[n + 1, 2, ORDERS + 1]``.
        copies: by node and source; ``COPY`` ``[n + 1, 2]``.
        matches: by node; ``GAPPED_MATCH`` ``[n + 1, 2]``.
        depths: int64 ``[n + 1]``.
        recent: recent tokens, whose evidence is equal at all nodes.
    """

    hashes: HashArray
    slots: Int32Array
    copies: RecordArray
    matches: RecordArray
    depths: IntArray
    frontier: Frontier
    table: CandidateTable
    recent: CandidateTable
    evidence: PositionEvidence
    noise: RecordArray

    @classmethod
    def allocate(cls, budget: int) -> DraftWorkspace:
        return cls(
            hashes=np.zeros((budget + 1, 2, ORDERS + 1), np.uint64),
            slots=np.zeros((budget + 1, 2, ORDERS + 1), np.int32),
            copies=np.zeros((budget + 1, 2), COPY),
            matches=np.zeros((budget + 1, 2), GAPPED_MATCH),
            depths=np.zeros(budget + 1, np.int64),
            frontier=Frontier.allocate(budget),
            table=CandidateTable.allocate(),
            recent=CandidateTable.allocate(),
            evidence=PositionEvidence.allocate(),
            noise=np.zeros(1, NOISE),
        )

    def holds(self, budget: int) -> bool:
        return len(self.depths) > budget


class Draft(NamedTuple):
    """A draft tree, parents first: tokens and parents int64 ``[n]``, ``ROOT`` for first tokens; estimated probability
    of acceptance, float64 ``[n]``; and ``Origin``, int8 ``[n]``."""

    tokens: IntArray
    parents: IntArray
    probability: FloatArray
    origins: Int8Array

    @classmethod
    def allocate(cls, budget: int) -> Draft:
        return cls(np.empty(budget, np.int64), np.empty(budget, np.int64), np.empty(budget), np.empty(budget, np.int8))

    def cut(self, end: int, begin: int = 0) -> Draft:
        return Draft(
            self.tokens[begin:end], self.parents[begin:end], self.probability[begin:end], self.origins[begin:end]
        )


@compiled
def find_slots(
    own: Index, shared: Index, workspace: DraftWorkspace, node: int, lowest: int, own_highest: int, shared_highest: int
) -> None:
    """Find the slots of a node's contexts of order ``lowest`` to each source's highest; clear the others."""
    hashes, slots = workspace.hashes, workspace.slots
    for order in range(1, ORDERS + 1):
        in_own, in_shared = lowest <= order <= own_highest, lowest <= order <= shared_highest
        slots[node, OWN, order] = find(own, hashes[node, OWN, order]) if in_own else 0
        slots[node, SHARED, order] = find(shared, hashes[node, SHARED, order]) if in_shared else 0


@compiled
def set_root(own: Index, shared: Index, cursor: TextCursor, workspace: DraftWorkspace) -> None:
    """Make the end of the sequence the root."""
    for source in range(2):
        for order in range(ORDERS + 1):
            workspace.hashes[0, source, order] = cursor.hashes[source, order]
        workspace.copies[0, source] = cursor.copies[0, source]
        workspace.matches[0, source] = cursor.matches[0, source]
    workspace.depths[0] = 0
    find_slots(own, shared, workspace, 0, 1, ORDERS, ORDERS)
