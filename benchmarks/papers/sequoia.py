"""Draft trees that the target fills over its sparse cache, among them Sequoia's (Chen et al., 2024, arXiv 2402.12374).

A tree's shape says which node has which parent, before their tokens are known. A node is its parent's candidate of some
rank: 0 for the likeliest next token by the drafter, 1 for the second.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.sampling import Salt, Sampler, gumbel
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter
from forerun.kv.cache import Cache
from forerun.models.forward.level import CacheFactory, Level
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer


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


class ShapedDrafter(Drafter):
    """Fills a tree of a given shape with the model's best candidates, level by level, by greedy or coupled sampling.

    Each pass reads the whole tree so far, and nothing of it stays in the cache.

    Args:
        cache: makes each request's cache.
        shape: of the trees.
        draft: the scorer that drafts; the target's own if there is none.
    """

    sized = True

    def __init__(self, cache: CacheFactory, shape: Shape, draft: Scorer | None = None) -> None:
        self.shape, self.draft = shape, draft
        self._cache = cache

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        self._level = Level(self.draft or target, self._cache)

    def prefilled(self, request: Request, cache: Cache) -> None:
        self._level.begin(request, cache)

    def catch_up(self, request: Request, tokens: int) -> bool:
        return self._level.catch_up(request, tokens)

    def propose(self, context: PassContext) -> list[DraftTree]:
        return [self._draft(request, budget) for request, budget in context]

    def _draft(self, request: Request, budget: int) -> DraftTree:
        """The shape's first ``budget`` nodes, as far as candidates can come and the text goes on."""
        fork, tree, nodes = request.fork(), DraftTree.empty(), list[int]()
        depth = min(request.max_draft_depth, self._level.room(fork))
        if depth >= 1:
            self._level.follow(fork)
        for level in self.shape.levels[: max(0, depth)]:
            [(block, logits)] = self._level.score([fork], [tree])
            self._level.commit(fork, block, [])
            tree, nodes = self._grown(fork, tree, nodes, [node for node in level if node < budget], logits)
        return tree

    def _grown(
        self, fork: Request, tree: DraftTree, nodes: list[int], level: Sequence[int], logits: torch.Tensor
    ) -> tuple[DraftTree, list[int]]:
        """The tree with another level, and the shape's number of each of its nodes."""
        index = {ROOT: ROOT} | {node: i for i, node in enumerate(nodes)}
        tokens, parents, nodes = tree.tokens.tolist(), tree.parents.tolist(), list(nodes)
        for node in level:
            parent, rank = index.get(self.shape.parents[node]), self.shape.ranks[node]
            if parent is None or (parent != ROOT and tokens[parent] in fork.eos_token_ids):
                continue
            path = _path(tree, parent)
            scores = fork.scores(logits[parent + 1], path)
            found = candidates(fork.sampler, scores, len(fork) + len(path), rank + 1)
            if rank < len(found):
                tokens.append(found[rank])
                parents.append(parent)
                nodes.append(node)
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64)), nodes

    def observe(self, request: Request, outcome: Outcome) -> None:
        self._level.verified(request, outcome)

    def needs(self, tokens: int) -> int:
        return self._level.needs(tokens)

    def finish(self, request: Request) -> None:
        self._level.finish(request)


def candidates(sampler: Sampler, scores: torch.Tensor, position: int, count: int) -> list[int]:
    """The ``count`` best tokens of scores ``[V]``, best first, or as many as can come, with the target's own noise. The
    first is the one that the sampler takes, so that a wider tree is more often right."""
    if sampler.method != "greedy":
        scores = scores.double() + gumbel(sampler.seed, position, len(scores), Salt.TARGET, scores.device)
    best = scores.topk(min(count, len(scores)))
    return best.indices[best.values > -torch.inf].tolist()


def _path(tree: DraftTree, node: int) -> list[int]:
    """The tokens from the root down to a node."""
    tokens: list[int] = []
    while node != ROOT:
        tokens.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tokens[::-1]
