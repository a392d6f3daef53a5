"""A verifier over a drafter is itself a drafter: TriForce's hierarchy (algorithm 1), for any inner drafter.

The inner drafter proposes to the middle level, a model over a cheap cache, which verifies as the target would. What
comes out is distributed exactly as if the middle level had drawn it token by token, whatever the inner drafter did. So
``q`` for the target is the middle level's own distribution. (The authors' code hands on a distribution that its
tokens were not drawn from after a rejection.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from forerun.core.origin import Origin
from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.transfers import RowChoices, foresee, settle
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Outcome, Verdict, verify
from forerun.drafting.drafter import Drafter, OuterDrafter, trees_of
from forerun.kv.cache import Cache
from forerun.models.forward.level import CacheFactory, Level
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer


class HierarchyDrafter(OuterDrafter):
    """Lets a middle level verify an inner drafter's trees until a chain of ``gamma2`` tokens stands.

    While the middle level's cache holds all of a text, it could only do what the target does: the inner drafter's trees
    go to the target then, at once.

    Args:
        inner: proposes to the middle level.
        cache: makes the middle level's cache of a request.
        gamma1: maximum number of nodes of an inner tree.
        gamma2: tokens that the middle level verifies before the target is asked.
        middle: the middle level's model; the target itself if there is none.
        beyond: tokens of a text before which it is not asked.
        reads: how many of a row's cached tokens its pass reads.

    Raises:
        ValueError: for ``gamma1`` or ``gamma2`` under 1.
    """

    sized = True

    def __init__(
        self,
        inner: Drafter,
        cache: CacheFactory,
        gamma1: int,
        gamma2: int,
        middle: Scorer | None = None,
        beyond: int = 0,
        reads: Callable[[int], int] = lambda cached: cached,
    ) -> None:
        for name, value in (("gamma1", gamma1), ("gamma2", gamma2)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        super().__init__(inner)
        self.gamma1 = gamma1
        self.gamma2 = gamma2
        self.middle = middle
        self._cache, self._beyond, self._reads = cache, beyond, reads

    def pruned_by(self, prune: Callable[[Drafter], Drafter]) -> Drafter:
        """The middle level verifies what pays for it, too."""
        self.inner = self.inner.pruned_by(prune)
        return self

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        """To the inner drafter the middle level is the target."""
        self._clock = runtime.clock
        self._level = Level(self.middle or target, self._cache, self._beyond)
        super().bind(self._level.scorer, runtime)

    def prefilled(self, request: Request, cache: Cache) -> None:
        """Make the middle level's cache."""
        self._level.begin(request, cache)
        super().prefilled(request, cache)

    def needs(self, tokens: int) -> int:
        return self._level.needs(tokens) + super().needs(tokens)

    def catch_up(self, request: Request, tokens: int) -> bool:
        return self._level.catch_up(request, tokens) and super().catch_up(request, tokens)

    def propose(self, context: PassContext) -> list[DraftTree]:
        """Draft a chain for each row, or the inner drafter's tree; the rows share the passes of both levels."""
        direct = [n for n, row in enumerate(context.rows) if self.middle is None and self._level.whole(row)]
        long = [n for n in range(len(context)) if n not in direct]
        trees = dict(zip(long, self._draft(context.of(long)), strict=True))
        if direct:  # last, as the inner drafter learns from its last proposal
            inner = replace(context.of(direct).within(self.gamma1), stop=None)
            trees |= zip(direct, trees_of(self.inner, inner), strict=True)
        return [trees[n] for n in range(len(context))]

    def _draft(self, context: PassContext) -> list[DraftTree]:
        """Chains that the middle level has verified."""
        own = Origin.SELF if self.middle is None else Origin.MODEL
        drafts = [_VerifiedChain(row, min(self.gamma2, budget, row.max_draft_depth), own) for row, budget in context]
        for draft in drafts:
            draft.length = min(draft.length, self._level.room(draft.fork))
            if draft.missing > 0:
                self._level.follow(draft.fork)
        while active := [draft for draft in drafts if draft.missing > 0]:
            self._extend(active, context.stop)
        return [draft.tree() for draft in drafts]

    def _extend(self, drafts: Sequence[_VerifiedChain], stop: Callable[[Request, float], bool] | None) -> None:
        """One inner draft and one pass of the middle level for every row."""
        times = [self._clock()]
        context = PassContext.decoding([draft.fork for draft in drafts], self.gamma1)
        context = replace(context, cached=list(map(self._reads, context.cached)))
        known = self._level.scorer.vocabulary
        proposed = trees_of(self.inner, context)
        trees = [tree.trim(draft.missing - 1, known) for tree, draft in zip(proposed, drafts, strict=True)]
        times.append(self._clock())
        scored = self._level.score(context.rows, trees)
        every = foresee(trees, [logits for _, logits in scored], context.rows, chances=stop is not None)
        if every[-1].choices is None:
            settle(scored[-1][1].device)
        self.inner.scored()
        times.append(self._clock())
        for draft, tree, (block, logits), chosen in zip(drafts, trees, scored, every, strict=True):
            outcome = draft.extend(tree, logits, chosen.choices)
            self._level.commit(draft.fork, block, outcome.verdict.path)
            self.inner.verified(draft.fork, outcome)
            if stop is not None and any(stop(draft.fork, p) for p in _probabilities(draft.fork, outcome, chosen)):
                draft.length = 0
        times.append(self._clock())
        for fork in context.rows:
            fork.stats.add_seconds(*np.diff(times).tolist())

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Let the middle level's cache choose anew, and the inner drafter learn what was committed."""
        self._level.verified(request, outcome)
        super().observe(request, outcome)

    def finish(self, request: Request) -> None:
        """Free the request's caches."""
        self._level.finish(request)
        super().finish(request)


class _VerifiedChain:
    """A chain under way; ``own`` is the origin of tokens that the middle level chose itself."""

    def __init__(self, request: Request, length: int, own: Origin) -> None:
        self.fork = request.fork()
        self.fork.stats = request.stats.inner()
        self.length = length
        self._own = own
        self._tokens: list[int] = []
        self._origins: list[int] = []
        self._q: list[torch.Tensor] = []

    @property
    def missing(self) -> int:
        """Tokens still wanted."""
        return self.length - len(self._tokens)

    def extend(self, tree: DraftTree, logits: torch.Tensor, choices: IntArray | None) -> Outcome:
        """Verify a tree by the middle level's logits ``[n + 1, V]``, and keep the tokens that it commits. ``choices``
        are from ``foresee``."""
        rejecting = self.fork.sampler.method == "rejection"
        before = self.fork.fork() if rejecting else None
        verdict = verify(tree, logits, self.fork, choices)
        if before is not None:
            self._q += distributions(verdict, logits, before)
        self.fork.stats.record(len(tree), len(verdict.path), len(verdict.tokens))
        self._tokens += verdict.tokens
        outcome = Outcome(tree, verdict, logits)
        self._origins += outcome.origins
        if self.fork.finish_reason is not None:
            self.length = 0
        return outcome

    def tree(self) -> DraftTree:
        """What was verified."""
        origins = np.array([origin or self._own for origin in self._origins], np.int8)
        return DraftTree.chain(self._tokens, torch.stack(self._q) if self._q else None, origins)


def _probabilities(fork: Request, outcome: Outcome, choices: RowChoices) -> list[float]:
    """A model's probability of each token that a pass committed, before any processor. They are there already if they
    came with the choices."""
    tokens = outcome.verdict.tokens
    rows = [0, *(node + 1 for node in outcome.verdict.path)][: len(tokens)]
    if choices.chances is not None:
        return [float(chance) for chance in choices.chances[rows]]
    logits = outcome.logits[rows]
    chances: list[float] = fork.sampler.chances(logits, torch.tensor(tokens, device=logits.device)).tolist()
    return chances


def distributions(verdict: Verdict, logits: torch.Tensor, before: Request) -> list[torch.Tensor]:
    """The distribution that each token of a verdict was drawn from, ``[V]``; ``before`` is a fork from before it."""
    drawn_from = []
    for row, token in zip([0, *(node + 1 for node in verdict.path)], verdict.tokens, strict=False):
        drawn_from.append(before.scores(logits[row]).double().softmax(-1))
        before.append(token)
    return drawn_from
