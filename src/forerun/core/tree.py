"""Draft trees: the tokens that one verifying pass may accept.

The root, the last committed token, is not a node. Nodes are stored parents first, so indices grow along every path. A
chain is a tree; an empty tree is plain decoding. The Lookahead paper's hierarchical multi-branch draft (section 4.2.2)
is such a tree; in its parallel form, branches share no prefixes. Only ``q`` needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from forerun.core.compiling import compiled
from forerun.core.origin import Origin

if TYPE_CHECKING:
    import torch

ROOT = -1
"""Parent index of nodes that directly follow the last committed token."""

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Int8Array = npt.NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Draft tokens, their parents, and the drafter's estimates.

    Attributes:
        parents: index of each node's parent, or ``ROOT``; int64 ``[n]``, ``parents[i] < i``.
        q: distribution that each node was sampled from, ``[n, vocabulary]``; for rejection sampling.
        probability: estimated probability that a node is accepted, float64 ``[n]``.
        origins: the ``Origin`` of each node, int8 ``[n]``; None if unknown.
    """

    tokens: IntArray
    parents: IntArray
    q: torch.Tensor | None = None
    probability: npt.NDArray[np.float64] | None = None
    origins: Int8Array | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", np.ascontiguousarray(self.tokens, dtype=np.int64))
        object.__setattr__(self, "parents", np.ascontiguousarray(self.parents, dtype=np.int64))
        _check(self)

    @classmethod
    def empty(cls) -> DraftTree:
        """Return a tree without nodes, for plain decoding."""
        return _EMPTY

    @classmethod
    def unchecked(
        cls,
        tokens: IntArray,
        parents: IntArray,
        probability: npt.NDArray[np.float64] | None = None,
        origins: Int8Array | None = None,
    ) -> DraftTree:
        """Build a tree of arrays from compiled code, without checks, which cost as much as choosing a dozen nodes."""
        tree = object.__new__(cls)
        tree.__dict__.update(tokens=tokens, parents=parents, q=None, probability=probability, origins=origins)
        return tree

    @classmethod
    def chain(
        cls, tokens: Sequence[int] | IntArray, q: torch.Tensor | None = None, origins: Int8Array | None = None
    ) -> DraftTree:
        """Build a single branch."""
        return cls(np.asarray(tokens, np.int64), np.arange(-1, len(tokens) - 1), q=q, origins=origins)

    @classmethod
    def from_branches(cls, branches: Iterable[Sequence[int]], budget: int) -> DraftTree:
        """Merge branches on their shared prefixes, in order, up to ``budget`` nodes."""
        tokens: list[int] = []
        parents: list[int] = []
        index: dict[tuple[int, int], int] = {}
        for branch in branches:
            node = ROOT
            for token in branch:
                child = index.get((node, token))
                if child is None:
                    if len(tokens) >= budget:
                        break
                    child = index[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child
        return cls(np.array(tokens, np.int64), np.array(parents, np.int64))

    def merged(self, other: DraftTree, budget: int) -> DraftTree:
        """Add the nodes of ``other`` up to ``budget`` in all; drop ``q`` and estimates."""
        tokens, parents, origins = self.tokens.tolist(), self.parents.tolist(), self.sources.tolist()
        index = {ROOT: ROOT}
        for node, (parent, token) in enumerate(zip(other.parents.tolist(), other.tokens.tolist(), strict=True)):
            if (above := index.get(parent)) is None:
                continue
            if (same := self.children.get((above, token))) is not None:
                index[node] = same
            elif len(tokens) < budget:
                index[node] = len(tokens)
                tokens.append(token)
                parents.append(above)
                origins.append(int(other.sources[node]))
        return DraftTree(
            np.array(tokens[:budget], np.int64),
            np.array(parents[:budget], np.int64),
            origins=np.array(origins[:budget], np.int8),
        )

    def by(self, origin: Origin) -> DraftTree:
        """Set the origin of all nodes."""
        return replace(self, origins=np.full(len(self), origin, np.int8))

    def under(self, tokens: Sequence[int]) -> DraftTree:
        """Put this tree under a chain of certain tokens, whose nodes come first."""
        if not tokens:
            return self
        chain = DraftTree.chain(tokens).by(Origin.FORCED)
        if not len(self):
            return chain
        return DraftTree(
            np.concatenate([chain.tokens, self.tokens]),
            np.concatenate([chain.parents, self.parents + len(chain)]),
            q=None if self.q is None else _under_certain(tokens, self.q),
            probability=None if self.probability is None else np.concatenate([np.ones(len(chain)), self.probability]),
            origins=np.concatenate([chain.sources, self.sources]),
        )

    def behind(self, count: int) -> DraftTree:
        """Remove a chain of ``count`` nodes that ``under`` added."""
        return self._part(slice(count, None), self.parents[count:] - count)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> IntArray:
        """Distance from the root, 1 for its children; int64 ``[n]``."""
        depths = np.empty(len(self), np.int64)
        _write_depths(self.parents, depths)
        return depths

    @cached_property
    def sources(self) -> Int8Array:
        """``origins``, or ``Origin.DRAFTER`` where unknown; int8 ``[n]``."""
        return np.full(len(self), Origin.DRAFTER, np.int8) if self.origins is None else self.origins

    @cached_property
    def children(self) -> Mapping[tuple[int, int], int]:
        """Node index by (parent index, token id); of equal siblings, the first."""
        index: dict[tuple[int, int], int] = {}
        for i, key in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True)):
            index.setdefault(key, i)
        return index

    @cached_property
    def ancestors(self) -> BoolArray:
        """Which nodes each node attends to, itself and its ancestors; bool ``[n, n]``."""
        mask = np.eye(len(self), dtype=np.bool_)
        for i, parent in enumerate(self.parents.tolist()):
            if parent != ROOT:
                mask[i, : parent + 1] |= mask[parent, : parent + 1]
        return mask

    def matches(self, tokens: Sequence[int]) -> int:
        """Count the first of these tokens that form a path from the root."""
        node = ROOT
        for depth, token in enumerate(tokens):
            if (node := self.children.get((node, token), ROOT)) == ROOT:
                return depth
        return len(tokens)

    @property
    def expected(self) -> float:
        """Expected number of accepted nodes; 0 without estimates."""
        return 0.0 if self.probability is None else float(self.probability.sum())

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return not len(self) or bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def select(self, keep: BoolArray) -> DraftTree:
        """Return the tree of the nodes marked in ``keep``, which must include their parents."""
        new_index = np.cumsum(keep) - 1
        parents = self.parents[keep]
        inner = parents != ROOT
        if not keep[parents[inner]].all():
            raise ValueError("a kept node's parent is not kept")
        parents[inner] = new_index[parents[inner]]
        return self._part(np.flatnonzero(keep).tolist(), parents)

    def _part(self, nodes: slice | list[int], parents: IntArray) -> DraftTree:
        known: list[Any] = [self.q, self.probability, self.origins]
        return DraftTree(self.tokens[nodes], parents, *(None if each is None else each[nodes] for each in known))

    def cut(self, count: int, max_depth: int, vocabulary: int) -> DraftTree:
        """Drop nodes from number ``count`` on, below ``max_depth`` or outside the vocabulary, and their descendants."""
        if _fits(self.tokens, self.depths, count, max_depth, vocabulary):
            return self
        keep = (np.arange(len(self)) < count) & (self.depths <= max_depth)
        unknown = (self.tokens < 0) | (self.tokens >= vocabulary)
        if unknown.any():
            keep &= ~(self.ancestors & unknown).any(1)
        return self.select(keep)


@compiled
def _fits(tokens: IntArray, depths: IntArray, count: int, max_depth: int, vocabulary: int) -> bool:
    for node in range(len(tokens)):
        if node >= count or depths[node] > max_depth or not 0 <= tokens[node] < vocabulary:
            return False
    return True


@compiled
def _write_depths(parents: IntArray, depths: IntArray) -> None:
    for i in range(len(parents)):
        depths[i] = 1 if parents[i] < 0 else depths[parents[i]] + 1


def _under_certain(tokens: Sequence[int], q: torch.Tensor) -> torch.Tensor:
    """Return ``q`` after one-hot distributions of each token; ``[n + rows of q, vocabulary]``."""
    both = q.new_zeros(len(tokens) + len(q), q.shape[-1])
    both[list(range(len(tokens))), list(tokens)] = 1.0
    both[len(tokens) :] = q
    return both


def _check(tree: DraftTree) -> None:
    n = len(tree.tokens)
    if tree.tokens.ndim != 1 or tree.parents.shape != tree.tokens.shape:
        raise ValueError(f"tokens {tree.tokens.shape} and parents {tree.parents.shape} must be equally long vectors")
    if np.count_nonzero((tree.parents - ROOT).view(np.uint64) > np.arange(n, dtype=np.uint64)):
        raise ValueError("parents must be ROOT (-1) or the index of an earlier node")
    for name in ("q", "probability", "origins"):
        value = getattr(tree, name)
        if value is not None and len(value) != n:
            raise ValueError(f"{name} has {len(value)} rows for {n} nodes")


_EMPTY = DraftTree(np.empty(0, np.int64), np.empty(0, np.int64))
