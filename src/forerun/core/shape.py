"""Shapes of draft trees that a model fills: which node hangs where, before it is known which tokens they are.

A node is the parent's candidate of some rank: 0 for the token that the drafter likes best there, 1 for the second.
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
    """Nodes, parents first.

    Attributes:
        parents: index of each node's parent, or ``ROOT``.
        ranks: which of the parent's candidates each node is.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def chain(cls, length: int) -> Shape:
        """The best candidate each time."""
        return cls(tuple(range(-1, length - 1)), (0,) * length)

    @classmethod
    def independent(cls, count: int, length: int) -> Shape:
        """``count`` chains from the root that share nothing (``Independent Sequences`` in the Sequoia paper)."""
        parents = [*([ROOT] * count), *range(count * (length - 1))]
        return cls(tuple(parents), (*range(count), *([0] * (count * (length - 1)))))

    @classmethod
    def sequoia(cls, size: int, depth: int, rates: Sequence[float]) -> Shape:
        """The tree of ``size`` nodes with the most accepted tokens expected (Chen et al., 2024, section 3.1).

        The paper's dynamic program, solved by taking the likeliest node each time: a node's chance is the product of
        the rates on its path, so it never exceeds its parent's, and the best set of nodes is a tree by itself.

        Args:
            size: nodes.
            depth: of the deepest, at most.
            rates: how often the candidate of each rank is accepted where its parent was; they may not rise.

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
        """Nodes by depth, those under the root first."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(
            tuple(node for node, at in enumerate(depths) if at == depth) for depth in range(max(depths, default=-1) + 1)
        )
