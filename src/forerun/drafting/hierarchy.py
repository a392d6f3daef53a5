"""A verifier over a drafter is itself a drafter: TriForce's hierarchy (algorithm 1), for any inner drafter.

The inner drafter proposes to the middle level, a model over a cheap cache, which verifies as the target would. What
comes out is distributed exactly as if the middle level had drawn it token by token, whatever the inner drafter did. So
``q`` for the target is the middle level's own distribution. (The authors' code hands on a distribution that its
tokens were not drawn from after a rejection.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from forerun.core.origin import Origin
from forerun.core.request import Request
from forerun.core.transfers import settle
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome, Verdict, verify
from forerun.drafting.drafter import Drafter, OuterDrafter
from forerun.kv.cache import Cache
from forerun.models.forward.level import CacheFactory, Level
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer
from forerun.policy.cost_curve import CostCurve
from forerun.policy.pass_times import Growth
from forerun.policy.tree_pruning import Load, PrunedTrees, TreePruner


class HierarchyDrafter(OuterDrafter):
    """Lets a middle level verify an inner drafter's trees until a chain of ``gamma2`` tokens stands.

    While the middle level's cache holds all of a text, it could only do what the target does: the inner drafter's trees
    go to the target then, at once.

    Trees of an inner drafter that does not know how much to draft are cut to what pays: by what passes of the target
    cost over few keys, until it is known what those of the middle level cost.

    Args:
        inner: proposes to the middle level.
        cache: makes the middle level's cache of a request.
        gamma1: nodes of an inner tree, at most.
        gamma2: tokens that the middle level verifies before the target is asked.
        middle: the middle level's model; the target itself if there is none.

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
    ) -> None:
        for name, value in (("gamma1", gamma1), ("gamma2", gamma2)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        super().__init__(inner)
        self.gamma1 = gamma1
        self.gamma2 = gamma2
        self.middle = middle
        self._cutter: TreePruner | None = None  # of trees for the middle level
        self._passing: TreePruner | None = None  # of trees that go past it
        self._passes = Growth()  # of the middle level, by their tokens
        self._cache = cache
        self._past: _Past | None = None

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        self._clock = runtime.clock
        self._level = Level(self.middle or target, self._cache, runtime.self_test)
        super().bind(self._level.scorer, runtime)

    def fit(self, costs: CostCurve) -> None:
        """Cut the trees of an inner drafter that does not know how much to draft by these costs; by default all of each
        is verified."""
        if not self.inner.sized:
            costs = replace(costs, per_cached=0.0, per_tile=0.0)
            self._cutter, self._passing = TreePruner(costs), TreePruner(costs)
        super().fit(costs)

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        """See ``Drafter.weighs``: where it cuts the trees of its inner drafter."""
        return not self.inner.sized

    def prefilled(self, request: Request, cache: Cache) -> None:
        """Make the middle level's cache."""
        self._level.begin(request, cache)
        super().prefilled(request, cache)

    def needs(self, tokens: int) -> int:
        """See ``Drafter.needs``."""
        return self._level.needs(tokens) + super().needs(tokens)

    def catch_up(self, request: Request, tokens: int) -> bool:
        """See ``Drafter.catch_up``."""
        return self._level.catch_up(request, tokens) and super().catch_up(request, tokens)

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """A chain for each row, or the inner drafter's tree; the rows share the passes of both levels."""
        short = [request for request in requests if self.middle is None and self._level.whole(request)]
        past = dict(zip([request.id for request in short], self._pass_by(short, budget), strict=True))
        long = [request for request in requests if request.id not in past]
        drafted = dict(zip([request.id for request in long], self._draft(long, budget), strict=True))
        return [(past | drafted)[request.id] for request in requests]

    def _pass_by(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """The inner drafter's trees, for the target itself."""
        self._past = None
        if not requests:
            return []
        known = self._level.scorer.vocabulary
        proposed = self.inner.propose_batch(requests, min(self.gamma1, budget) if self.inner.sized else self.gamma1)
        trees = [tree.trim(min(budget, r.max_draft_depth), known) for tree, r in zip(proposed, requests, strict=True)]
        if self._passing is None:
            return trees
        cut = self._passing.cut(requests, trees, _decoding(requests))
        self._past = _Past(cut, {request.id: row for row, request in enumerate(requests)})
        return cut.trees

    def _draft(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """Chains that the middle level has verified."""
        own = Origin.SELF if self.middle is None else Origin.MODEL
        drafts = [_Draft(request, min(self.gamma2, budget, request.max_draft_depth), own) for request in requests]
        for draft in drafts:
            draft.wanted = min(draft.wanted, self._level.room(draft.twin))
            if draft.missing > 0:
                self._level.follow(draft.twin)
        while active := [draft for draft in drafts if draft.missing > 0]:
            self._extend(active)
        return [draft.tree() for draft in drafts]

    def _extend(self, drafts: Sequence[_Draft]) -> None:
        """One inner draft and one pass of the middle level for every row."""
        clock = [self._clock()]
        twins = [draft.twin for draft in drafts]
        known = self._level.scorer.vocabulary
        proposed = self.inner.propose_batch(twins, self.gamma1)
        trees = [tree.trim(draft.missing - 1, known) for tree, draft in zip(proposed, drafts, strict=True)]
        cut = None if self._cutter is None else self._cut(self._cutter, twins, trees)
        trees = trees if cut is None else cut.trees
        clock.append(self._clock())
        scored = self._level.score(twins, trees)
        settle(scored[-1][1].device)
        clock.append(self._clock())
        tokens = 0
        for row, (draft, tree, (block, logits)) in enumerate(zip(drafts, trees, scored, strict=True)):
            verdict = draft.extend(tree, logits)
            self._level.commit(draft.twin, block, verdict.path)
            tokens += len(verdict.tokens)
            if self._cutter is not None:
                self._cutter.learn(row, Outcome(tree, verdict, logits), tree.q is not None)
            if self.enough is not None and any(self.enough(draft.twin, p) for p in likely(verdict, logits)):
                draft.wanted = 0
        if self._cutter is not None and cut is not None:
            self._cutter.end(cut, tokens)
            self._passes.learn(len(trees) + cut.nodes, clock[2] - clock[1])
        clock.append(self._clock())
        self.inner.took(tokens, clock[-1] - clock[0])
        for twin in twins:
            twin.stats.add_seconds(*np.diff(clock).tolist())

    def _cut(self, cutter: TreePruner, requests: Sequence[Request], trees: Sequence[DraftTree]) -> PrunedTrees:
        """The best part of each tree, by what the middle level's passes lately took. Its cache chooses keys for every
        token, so a token may add far more to a pass than to one of the target's."""
        if (curve := self._passes.curve) is not None and curve != cutter.costs:
            cutter.fit(curve)
        return cutter.cut(requests, trees, _decoding(requests))

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Let the middle level's cache choose anew, and the inner drafter learn what was committed."""
        if self._past is None or not self._past.learn(self._passing, request, outcome):
            self._level.verified(request, outcome)
        super().observe(request, outcome)

    def finish(self, request: Request) -> None:
        """Free the request's caches."""
        self._level.finish(request)
        super().finish(request)


@dataclass
class _Past:
    """Trees that went past the middle level, and the rows of those that nothing was heard of."""

    cut: PrunedTrees
    rows: dict[int, int]
    tokens: int = 0

    def learn(self, cutter: TreePruner | None, request: Request, outcome: Outcome) -> bool:
        """Whether a tree of this request was among them; what became of it is taken in."""
        row = self.rows.pop(request.id, None)
        if row is None or cutter is None:
            return False
        self.tokens += len(outcome.verdict.tokens)
        cutter.learn(row, outcome, outcome.tree.q is not None)
        if not self.rows:
            cutter.end(self.cut, self.tokens)
        return True


def _decoding(requests: Sequence[Request]) -> Load:
    """Each row reads one token, and few keys."""
    return Load([1] * len(requests), [0] * len(requests))


class _Draft:
    """A chain under way; ``own`` is the origin of tokens that the middle level chose itself."""

    def __init__(self, request: Request, wanted: int, own: Origin) -> None:
        self.twin = request.fork()
        self.twin.stats = request.stats.inner()
        self.wanted = wanted
        self._own = own
        self._tokens: list[int] = []
        self._origins: list[int] = []
        self._q: list[torch.Tensor] = []

    @property
    def missing(self) -> int:
        """Tokens still wanted."""
        return self.wanted - len(self._tokens)

    def extend(self, tree: DraftTree, logits: torch.Tensor) -> Verdict:
        """Verify a tree by the middle level's logits ``[n + 1, V]`` and take what it gives."""
        rejecting = self.twin.sampler.method == "rejection"
        before = self.twin.fork() if rejecting else None
        verdict = verify(tree, logits, self.twin)
        if before is not None:
            self._q += distributions(verdict, logits, before)
        self.twin.stats.record(len(tree), len(verdict.path), len(verdict.tokens))
        self._tokens += verdict.tokens
        self._origins += Outcome(tree, verdict, logits).origins
        if self.twin.finish_reason is not None:
            self.wanted = 0
        return verdict

    def tree(self) -> DraftTree:
        """What was verified."""
        origins = np.array([origin or self._own for origin in self._origins], np.int8)
        return DraftTree.chain(self._tokens, torch.stack(self._q) if self._q else None, origins)


def likely(verdict: Verdict, logits: torch.Tensor) -> list[float]:
    """How likely a model found each token of a verdict by its logits ``[n + 1, V]``, before any processor."""
    rows = [0, *(node + 1 for node in verdict.path)][: len(verdict.tokens)]
    found: list[float] = logits[rows].softmax(-1)[range(len(rows)), verdict.tokens].tolist()
    return found


def distributions(verdict: Verdict, logits: torch.Tensor, before: Request) -> list[torch.Tensor]:
    """What each token of a verdict was drawn from, ``[V]`` each; ``before`` is a fork from before the verdict."""
    found = []
    for row, token in zip([0, *(node + 1 for node in verdict.path)], verdict.tokens, strict=False):
        found.append(before.scores(logits[row]).double().softmax(-1))
        before.append(token)
    return found
