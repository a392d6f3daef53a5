"""A model drafts: a small one (Leviathan et al., 2023), or the target itself over a sparse cache (TriForce)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.caches.base import Cache
from forerun.drafters.base import Drafter
from forerun.model.level import CacheFactory, Level
from forerun.model.scorer import Scorer
from forerun.request import Request
from forerun.tree import DraftTree
from forerun.verify import Outcome


class ModelDrafter(Drafter):
    """Drafts a chain, token by token, as the request's sampler would choose from this model.

    With coupled sampling it draws with the target's own noise, and with greedy decoding it takes its best token. Under
    rejection sampling it draws independently and hands out ``q``, the distribution each token was drawn from.

    Args:
        cache: makes each request's cache.
        gamma: tokens drafted at a time.
        draft: the scorer that drafts; the target's own if there is none.

    Raises:
        ValueError: for ``gamma`` under 1.
    """

    def __init__(self, cache: CacheFactory, gamma: int, draft: Scorer | None = None) -> None:
        if gamma < 1:
            raise ValueError(f"gamma is {gamma}; it must be at least 1")
        self.gamma = gamma
        self.draft = draft
        self._cache = cache

    def bind(self, target: Scorer) -> None:
        """See ``Drafter.bind``. A draft model may know fewer tokens than the target, never more."""
        if self.draft is not None and self.draft.vocabulary > target.vocabulary:
            raise ValueError(
                f"the draft model knows {self.draft.vocabulary} tokens and the target {target.vocabulary}: "
                "their tokenizers differ; the draft's vocabulary must equal the target's or be its beginning"
            )
        self._level = Level(self.draft or target, self._cache)

    def prefilled(self, request: Request, cache: Cache) -> None:
        """Read the prompt."""
        self._level.begin(request, cache)

    def propose(self, request: Request, budget: int) -> DraftTree:
        """A chain of at most ``gamma`` tokens."""
        return self.propose_batch([request], budget)[0]

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """A chain for each row; the rows share the forward passes."""
        chains = [_Chain(request, min(self.gamma, budget, request.max_draft_depth)) for request in requests]
        for chain in chains:
            if chain.wanted > 0 and self._level.ready(chain.twin):
                self._level.follow(chain.twin)
            else:
                chain.wanted = 0
        while active := [chain for chain in chains if len(chain.tokens) < chain.wanted]:
            scored = self._level.score([chain.twin for chain in active], [DraftTree.empty()] * len(active))
            for chain, (block, logits) in zip(active, scored, strict=True):
                self._level.commit(chain.twin, block, [])
                chain.extend(logits[0])
        return [chain.tree() for chain in chains]

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Let a sparse cache choose anew."""
        self._level.verified(request, outcome)

    def finish(self, request: Request) -> None:
        """Free the request's cache."""
        self._level.finish(request)


class _Chain:
    """A draft under way."""

    def __init__(self, request: Request, wanted: int) -> None:
        self.twin = request.fork()
        self.wanted = wanted
        self.tokens: list[int] = []
        self._q: list[torch.Tensor] = []

    def extend(self, logits: torch.Tensor) -> None:
        """Draft the token after logits ``[V]``."""
        sampler, scores = self.twin.sampler, self.twin.scores(logits)
        if sampler.method == "rejection":
            self._q.append(scores.double().softmax(-1))
        self.tokens.append(sampler.choose(scores, len(self.twin), sampler.draft_salt()))
        if self.twin.append(self.tokens[-1]):
            self.wanted = 0

    def tree(self) -> DraftTree:
        """What was drafted."""
        return DraftTree.chain(self.tokens, torch.stack(self._q) if self._q else None)
