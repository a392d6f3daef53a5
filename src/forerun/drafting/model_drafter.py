"""A model drafts: a small one (Leviathan et al., 2023), or the target itself over a sparse cache (TriForce)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forerun.core.origin import Origin
from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.transfers import carried, elsewhere
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter
from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.models.forward.level import CacheFactory, Level
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer


class ModelDrafter(Drafter):
    """Drafts a chain of what the request's sampler would choose from this model.

    With coupled sampling it draws with the target's own noise, and with greedy decoding it takes its best tokens. Under
    rejection sampling it draws a chain independently and hands out ``q``, the distribution each token was drawn from.

    Args:
        cache: makes each request's cache.
        gamma: tokens of a chain.
        draft: the scorer that drafts; the target's own if there is none.

    Raises:
        ValueError: for ``gamma`` under 1.
    """

    sized = True

    def __init__(self, cache: CacheFactory, gamma: int, draft: Scorer | None = None) -> None:
        if gamma < 1:
            raise ValueError(f"gamma is {gamma}; it must be at least 1")
        self.gamma = gamma
        self.draft = self.small_model = draft
        self._cache = cache

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        """A draft model may know fewer tokens than the target, never more."""
        if self.draft is not None and self.draft.vocabulary > target.vocabulary:
            raise ValueError(
                f"the draft model knows {self.draft.vocabulary} tokens and the target {target.vocabulary}: "
                "their tokenizers differ; the draft's vocabulary must equal the target's or be its beginning"
            )
        self._level = Level(self.draft or target, self._cache)
        if self.draft is not None:
            self._cache(self.draft, FullCache())  # a model's first one finds out how its positions rotate

    def prefilled(self, request: Request, cache: Cache) -> None:
        """Make the request's cache."""
        self._level.begin(request, cache)

    def catch_up(self, request: Request, tokens: int) -> bool:
        return self._level.catch_up(request, tokens)

    def propose(self, context: PassContext) -> list[DraftTree]:
        """Draft a chain for each row; the rows share the forward passes."""
        drafts = [self._begin(request, budget, context.stop is not None) for request, budget in context]
        while active := [draft for draft in drafts if not draft.done]:
            scored = self._level.score([draft.fork for draft in active], [DraftTree.empty()] * len(active))
            for draft, (block, _) in zip(active, scored, strict=True):
                self._level.commit(draft.fork, block, [])
            _extend(active, [logits for _, logits in scored])
            if context.stop is not None:
                for draft in active:
                    draft.ended = context.stop(draft.fork, draft.probability)
        origin = Origin.SELF if self.draft is None else Origin.MODEL
        return [draft.tree().by(origin) for draft in drafts]

    def _begin(self, request: Request, budget: int, states_probability: bool) -> _Chain:
        fork = request.fork()
        depth = min(self.gamma, request.max_draft_depth, self._level.room(fork))
        if depth < 1:
            return _Chain(fork, 0)
        self._level.follow(fork)
        return _Chain(fork, min(depth, budget), states_probability)

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Let a sparse cache choose anew."""
        self._level.verified(request, outcome)

    def needs(self, tokens: int) -> int:
        return self._level.needs(tokens)

    def finish(self, request: Request) -> None:
        """Free the request's cache."""
        self._level.finish(request)


def _extend(drafts: Sequence[_Chain], logits: Sequence[torch.Tensor]) -> None:
    """Extend every chain by a token: on a CPU one by one, elsewhere with one transfer for all."""
    if not elsewhere(logits[0]):
        for draft, own in zip(drafts, logits, strict=True):
            draft.extend(own)
        return
    choices = [draft.choice(own) for draft, own in zip(drafts, logits, strict=True)]
    for draft, choice in zip(drafts, carried(choices), strict=True):
        draft.extend_by(choice)


class _Chain:
    """Grows by a token a pass, each read into the cache.

    Args:
        fork: of the request; the tokens are appended to it.
        length: of the chain, at most.
        states_probability: whether ``probability`` is wanted, too.
    """

    def __init__(self, fork: Request, length: int, states_probability: bool = False) -> None:
        self.fork = fork
        self.ended = False
        """Whether it is complete before it has its length."""
        self.probability = 1.0
        """The model's probability of the last token, before any processor."""
        self._states_probability = states_probability
        self._length = length
        self._tokens: list[int] = []
        self._q: list[torch.Tensor] = []

    @property
    def done(self) -> bool:
        """Whether no pass is needed any more."""
        full = self.ended or len(self._tokens) >= self._length
        return full or (bool(self._tokens) and self.fork.finish_reason is not None)

    def extend(self, logits: torch.Tensor) -> None:
        """Append the token chosen by the logits after the text, ``[1, V]``."""
        sampler, scores = self.fork.sampler, self._scores(logits)
        token = sampler.choose(scores, len(self.fork), sampler.draft_salt())
        if self._states_probability:
            self.probability = float(sampler.chances(logits, torch.tensor([token], device=logits.device)))
        self._append(token)

    def choice(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose a token on the device of the logits, without waiting for it: an int64 vector for ``extend_by``."""
        sampler, scores = self.fork.sampler, self._scores(logits)
        token = sampler.choices(scores[None], [len(self.fork)], sampler.draft_salt())
        if not self._states_probability:
            return token
        return torch.cat([token, sampler.chances(logits, token).view(torch.int64)])

    def extend_by(self, choice: IntArray) -> None:
        """Append the token of a ``choice`` that was brought to the CPU."""
        if self._states_probability:
            self.probability = float(choice.view(np.float64)[1])
        self._append(int(choice[0]))

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores ``[V]`` for the next token; ``q`` is kept where it is needed."""
        scores = self.fork.scores(logits[0])
        if self.fork.sampler.method == "rejection":
            self._q.append(scores.double().softmax(-1))
        return scores

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        self.fork.append(token)

    def tree(self) -> DraftTree:
        """The chain."""
        return DraftTree.chain(self._tokens, torch.stack(self._q) if self._q else None)
