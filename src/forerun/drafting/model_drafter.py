"""A model drafts: a small one (Leviathan et al., 2023), or the target itself over a sparse cache (TriForce)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from forerun.core.origin import Origin
from forerun.core.request import Request
from forerun.core.shape import Shape
from forerun.core.transfers import carried, elsewhere
from forerun.core.tree import ROOT, DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter
from forerun.kv.cache import Cache
from forerun.models.forward.level import CacheFactory, Level
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer


class ModelDrafter(Drafter):
    """Drafts what the request's sampler would choose from this model: a chain, or a tree of its best candidates.

    With coupled sampling it draws with the target's own noise, and with greedy decoding it takes its best tokens. Under
    rejection sampling it draws a chain independently and hands out ``q``, the distribution each token was drawn from.

    Args:
        cache: makes each request's cache.
        gamma: tokens of a chain.
        draft: the scorer that drafts; the target's own if there is none.
        shape: a tree to fill instead, level by level; under rejection sampling a chain as deep as it is.

    Raises:
        ValueError: for ``gamma`` under 1.
    """

    sized = True

    def __init__(
        self, cache: CacheFactory, gamma: int, draft: Scorer | None = None, shape: Shape | None = None
    ) -> None:
        if gamma < 1:
            raise ValueError(f"gamma is {gamma}; it must be at least 1")
        self.gamma = gamma if shape is None else len(shape.levels)
        self.draft = draft
        self.shape = shape
        self._cache = cache

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        """A draft model may know fewer tokens than the target, never more."""
        if self.draft is not None and self.draft.vocabulary > target.vocabulary:
            raise ValueError(
                f"the draft model knows {self.draft.vocabulary} tokens and the target {target.vocabulary}: "
                "their tokenizers differ; the draft's vocabulary must equal the target's or be its beginning"
            )
        self._level = Level(self.draft or target, self._cache, runtime.self_test)

    def prefilled(self, request: Request, cache: Cache) -> None:
        """Make the request's cache."""
        self._level.begin(request, cache)

    def catch_up(self, request: Request, tokens: int) -> bool:
        """See ``Drafter.catch_up``."""
        return self._level.catch_up(request, tokens)

    def propose(self, request: Request, budget: int) -> DraftTree:
        """A chain of at most ``gamma`` tokens, or the shape's first ``budget`` nodes."""
        return self.propose_batch([request], budget)[0]

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """A draft for each row; the rows share the forward passes."""
        drafts = [self._begin(request, budget) for request in requests]
        while active := [draft for draft in drafts if not draft.done]:
            trees = [draft.unread() for draft in active]
            scored = self._level.score([draft.twin for draft in active], trees)
            for draft, (block, _) in zip(active, scored, strict=True):
                self._level.commit(draft.twin, block, [])
            _extend(active, [logits for _, logits in scored])
            for draft in active:
                if self.enough is not None and isinstance(draft, _Chain):
                    draft.ended = self.enough(draft.twin, draft.chance)
        origin = Origin.SELF if self.draft is None else Origin.MODEL
        return [draft.tree().by(origin) for draft in drafts]

    def _begin(self, request: Request, budget: int) -> _Draft:
        twin = request.fork()
        depth = min(self.gamma, request.max_draft_depth, self._level.room(twin))
        if depth < 1:
            return _Chain(twin, 0)
        self._level.follow(twin)
        if self.shape is None or request.sampler.method == "rejection":
            return _Chain(twin, min(depth, budget), self.enough is not None)
        return _Tree(twin, self.shape, min(budget, len(self.shape)), depth)

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Let a sparse cache choose anew."""
        self._level.verified(request, outcome)

    def needs(self, tokens: int) -> int:
        """See ``Drafter.needs``."""
        return self._level.needs(tokens)

    def finish(self, request: Request) -> None:
        """Free the request's cache."""
        self._level.finish(request)


class _Draft(ABC):
    """A draft under way for a fork of a request."""

    def __init__(self, twin: Request) -> None:
        self.twin = twin

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether no pass is needed any more."""

    @abstractmethod
    def unread(self) -> DraftTree:
        """What the next pass reads on trial, behind the fork's text."""

    @abstractmethod
    def extend(self, logits: torch.Tensor) -> None:
        """Take in the logits after the text (row 0) and at what was read on trial, ``[n + 1, V]``."""

    @abstractmethod
    def ask(self, logits: torch.Tensor) -> torch.Tensor:
        """What ``extend`` would read of these logits, int64, a vector on their device; nothing waits for that."""

    @abstractmethod
    def take(self, told: IntArray) -> None:
        """Do the same as ``extend``, by the values that were asked for."""

    @abstractmethod
    def tree(self) -> DraftTree:
        """What was drafted."""


def _extend(drafts: Sequence[_Draft], logits: Sequence[torch.Tensor]) -> None:
    """Take in a pass: on a CPU draft by draft, elsewhere with one transfer for all (which has not run on a GPU)."""
    if not elsewhere(logits[0]):
        for draft, own in zip(drafts, logits, strict=True):
            draft.extend(own)
        return
    asked = [draft.ask(own) for draft, own in zip(drafts, logits, strict=True)]
    for draft, told in zip(drafts, carried(asked), strict=True):
        draft.take(told)


class _Chain(_Draft):
    """Grows by a token a pass, each read into the cache.

    Args:
        twin: the fork.
        wanted: tokens.
        weighed: whether ``chance`` is wanted, too.
    """

    def __init__(self, twin: Request, wanted: int, weighed: bool = False) -> None:
        super().__init__(twin)
        self.ended = False
        """Whether it is long enough, however much was wanted."""
        self.chance = 1.0
        """What the model gave the last token, before any processor."""
        self._weighed = weighed
        self._wanted = wanted
        self._tokens: list[int] = []
        self._q: list[torch.Tensor] = []

    @property
    def done(self) -> bool:
        full = self.ended or len(self._tokens) >= self._wanted
        return full or (bool(self._tokens) and self.twin.finish_reason is not None)

    def unread(self) -> DraftTree:
        return DraftTree.empty()

    def extend(self, logits: torch.Tensor) -> None:
        sampler, scores = self.twin.sampler, self._scores(logits)
        token = sampler.choose(scores, len(self.twin), sampler.draft_salt())
        if self._weighed:
            self.chance = float(logits[0].softmax(-1)[token])
        self._append(token)

    def ask(self, logits: torch.Tensor) -> torch.Tensor:
        sampler, scores = self.twin.sampler, self._scores(logits)
        token = sampler.choices(scores[None], [len(self.twin)], sampler.draft_salt())
        if not self._weighed:
            return token
        return torch.cat([token, logits[0].softmax(-1).gather(0, token).double().view(torch.int64)])

    def take(self, told: IntArray) -> None:
        if self._weighed:
            self.chance = float(told.view(np.float64)[1])
        self._append(int(told[0]))

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores ``[V]`` for the next token; ``q`` is kept where it is needed."""
        scores = self.twin.scores(logits[0])
        if self.twin.sampler.method == "rejection":
            self._q.append(scores.double().softmax(-1))
        return scores

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        self.twin.append(token)

    def tree(self) -> DraftTree:
        return DraftTree.chain(self._tokens, torch.stack(self._q) if self._q else None)


class _Question(NamedTuple):
    """A node whose children are looked for: its row of logits, the tokens down to it, its children in the shape, and
    how many of its best tokens they need."""

    row: int
    path: list[int]
    nodes: list[int]
    most: int


class _Tree(_Draft):
    """Grows by a level a pass; each pass reads the whole tree so far, and nothing of it stays in the cache."""

    def __init__(self, twin: Request, shape: Shape, size: int, depth: int) -> None:
        super().__init__(twin)
        self._shape = shape
        self._size = size
        levels = ([node for node in level if node < size] for level in shape.levels[:depth])
        self._levels = [level for level in levels if level]
        self._level = 0
        self._tokens: dict[int, int] = {}  # of the nodes so far
        self._paths: dict[int, list[int]] = {ROOT: []}  # the tokens down to each

    @property
    def done(self) -> bool:
        return self._level >= len(self._levels)

    def unread(self) -> DraftTree:
        nodes = sorted(self._tokens)
        index = {ROOT: ROOT} | {node: i for i, node in enumerate(nodes)}
        parents = [index[self._shape.parents[node]] for node in nodes]
        return DraftTree(np.array([self._tokens[node] for node in nodes], np.int64), np.array(parents, np.int64))

    def extend(self, logits: torch.Tensor) -> None:
        for each in self._questions():
            position = len(self.twin) + len(each.path)
            found = self.twin.sampler.candidates(self._scores(each, logits), position, each.most)
            self._add(each, found)
        self._level += 1

    def ask(self, logits: torch.Tensor) -> torch.Tensor:
        found = [torch.empty(0, dtype=torch.int64, device=logits.device)]
        for each in self._questions():
            position = len(self.twin) + len(each.path)
            found.append(self.twin.sampler.candidate_rows(self._scores(each, logits), position, each.most))
        self._ends = np.cumsum([len(row) for row in found])
        return torch.cat(found)

    def take(self, told: IntArray) -> None:
        parts = np.split(told, self._ends[:-1])[1:]
        for each, found in zip(self._questions(), parts, strict=True):
            self._add(each, found[found >= 0].tolist())
        self._level += 1

    def _questions(self) -> list[_Question]:
        """Where the next level's nodes go: below nodes that are there and do not end the text."""
        row = {ROOT: 0} | {node: i + 1 for i, node in enumerate(sorted(self._tokens))}
        children: dict[int, list[int]] = {}
        for node in self._levels[self._level]:
            if self._shape.parents[node] in row:
                children.setdefault(self._shape.parents[node], []).append(node)
        found = []
        for parent, nodes in children.items():
            path = self._paths[parent]
            if not path or path[-1] not in self.twin.eos_token_ids:
                found.append(_Question(row[parent], path, nodes, 1 + max(self._shape.ranks[node] for node in nodes)))
        return found

    def _scores(self, question: _Question, logits: torch.Tensor) -> torch.Tensor:
        return self.twin.scores(logits[question.row], question.path)

    def _add(self, question: _Question, found: list[int]) -> None:
        """Make nodes of the best tokens, as many as there are."""
        for node in question.nodes:
            if (rank := self._shape.ranks[node]) < len(found):
                self._tokens[node] = found[rank]
                self._paths[node] = [*question.path, found[rank]]

    def tree(self) -> DraftTree:
        return self.unread()
