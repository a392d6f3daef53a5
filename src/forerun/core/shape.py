"""Shapes of draft trees that a model fills: which node has which parent, before their tokens are known.

A node is its parent's candidate of some rank: 0 for the likeliest next token by the drafter, 1 for the second.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from forerun.core.tree import ROOT


@dataclass(frozen=True)
class Shape:
    """Nodes, stored parents first.

    Attributes:
        parents: index of each node's parent, or ``ROOT``.
        ranks: which of the parent's candidates each node is.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def chain(cls, length: int) -> Shape:
        """One branch of best candidates."""
        return cls(tuple(range(-1, length - 1)), (0,) * length)

    @classmethod
    def independent(cls, count: int, length: int) -> Shape:
        """``count`` chains from the root that share nothing (``Independent Sequences`` in the Sequoia paper)."""
        parents = [*([ROOT] * count), *range(count * (length - 1))]
        return cls(tuple(parents), (*range(count), *([0] * (count * (length - 1)))))

    @classmethod
    def sequoia(cls, size: int, depth: int, rates: Sequence[float]) -> Shape:
        """The tree of ``size`` nodes with the most expected accepted tokens (Chen et al., 2024, section 3.1).

        The paper uses a dynamic program; taking the likeliest node each time gives the same. A node's chance is the
        product of the rates on its path, so it never exceeds its parent's. So the likeliest nodes always form a tree.

        Args:
            size: nodes.
            depth: of the deepest, at most.
            rates: acceptance rate of the candidate of each rank, given an accepted parent; they may not rise.

        Raises:
            ValueError: for rates that rise, or exceed 1 in sum.
        """
        if sum(rates) > 1 + 1e-9 or any(a < b for a, b in pairwise(rates)):
            raise ValueError(f"rates are {list(rates)}; they must fall and sum up to at most 1")
        parents: list[int] = []
        ranks: list[int] = []
        heap = [(-rate, 0, ROOT, rank, 1) for rank, rate in enumerate(rates) if rate]
        heapq.heapify(heap)
        while heap and len(parents) < size:
            chance, _, parent, rank, level = heapq.heappop(heap)
            node = len(parents)
            parents.append(parent)
            ranks.append(rank)
            if level < depth:
                for below, rate in enumerate(rates):
                    if rate:
                        heapq.heappush(heap, (chance * rate, node + 1, node, below, level + 1))
        return cls(tuple(parents), tuple(ranks))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes by depth, children of the root first."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(
            tuple(node for node, at in enumerate(depths) if at == depth) for depth in range(max(depths, default=-1) + 1)
        )
