"""Takes from each source what gives the most tokens a second: branches of a tree, a chain that a model drafts, nothing.

A tree costs next to nothing to propose and is there before anything is decided: its best part gives so many tokens for
so much time. A chain takes passes of its own. What it would give is known from what chains gave before, and what those
passes take. The better one is taken, at every step anew: a passage that is quoted goes by the tree, and the next
sentence, which nobody has seen, by the model.

Estimates can be wrong. So every source has an account (``plan/account.py``): of all time it may lose a small share, and
what it saved before, and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.caches.base import READ_BLOCK, Cache
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafters.base import Drafter, OuterDrafter
from forerun.model.scorer import Scorer
from forerun.model.timing import costs_of
from forerun.plan.account import Account, Source
from forerun.plan.chains import Chains, best
from forerun.plan.costs import CostCurve
from forerun.plan.cutting import Cut, Cutter, Load
from forerun.plan.times import Times

LEAST, GROWTH = 16, 4
"""Nodes of a row that are asked for at least, and for each that was worth scoring in the step before: to propose a node
takes time whether it is scored or not."""


@dataclass
class _Step:
    """A step under way, and what came of it."""

    branches: Cut
    cut: Cut
    """What is scored: the branches, or the chains."""
    source: Source | None
    asking: float
    """Seconds until there were branches; 0 where none were asked for."""
    drafting: float
    """Seconds of the chains' passes."""
    ended: float
    """When drafting was over."""
    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)


class Chooser(OuterDrafter):
    """Chooses between two sources, and how much of them.

    Args:
        inner: told of all that happens; one of the sources, or what holds both.
        trees: proposes branches, at next to no cost.
        chains: drafts chains of at most the budget it is given, with passes of a model.
        most: tokens of a chain, at most.
        reach: cached tokens that such a pass looks back on, at most; None for all.
        weight: what such a pass costs, until it was seen, where one of the target's over as many cached tokens costs 1.
        costs: of the target's passes; measured where none are given.
        clock: seconds.
    """

    sized = True

    def __init__(
        self,
        inner: Drafter,
        *,
        trees: Drafter | None = None,
        chains: Drafter | None = None,
        most: int = 1,
        reach: int | None = None,
        weight: float = 1.0,
        costs: CostCurve | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self.trees, self.chains = trees, chains
        self.most, self.reach, self.weight = most, reach, weight
        self._clock, self._costs = clock, costs
        self._prompts: dict[int, Cache] = {}
        self._nodes = LEAST
        self._account, self._times, self._grown = Account(), Times(), Chains()
        self._step: _Step | None = None
        if chains is not None:
            chains.enough = self._grown.enough

    def bind(self, target: Scorer) -> None:
        """See ``Drafter.bind``; what passes cost is measured where it is not given."""
        super().bind(target)
        self._vocabulary = target.vocabulary
        self._cutter = Cutter(self._costs or costs_of(target))

    def begin(self, request: Request) -> None:
        """See ``Drafter.begin``."""
        self._grown.begin(request)
        super().begin(request)

    def prefilled(self, request: Request, cache: Cache) -> None:
        """See ``Drafter.prefilled``; what chains need of the prompt is made when the first one is asked for."""
        self._prompts[request.id] = cache
        if self.chains is None:
            self._prepare([request])

    def _prepare(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if (cache := self._prompts.pop(request.id, None)) is not None:
                self.inner.prefilled(request, cache)
                while not self.inner.catch_up(request, READ_BLOCK):
                    pass

    def catch_up(self, request: Request, tokens: int) -> bool:
        """See ``Drafter.catch_up``; a request whose chains were not asked for yet has nothing to read."""
        return request.id in self._prompts or self.inner.catch_up(request, tokens)

    def finish(self, request: Request) -> None:
        """See ``Drafter.finish``."""
        self._prompts.pop(request.id, None)
        self._grown.finish(request)
        super().finish(request)

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """What pays: the best part of each tree, or chains, or nothing."""
        load = Load([request.unread for request in requests], [len(request) - request.unread for request in requests])
        asks = self.trees is not None and self._account.left("tree") > 0
        clock = [self._clock()]
        nodes = min(budget, self._nodes)
        branches = cut = self._cutter.cut(self._ask(self.trees if asks else None, requests, nodes), load)
        self._nodes = max(LEAST, self._nodes // 2, GROWTH * max(map(len, cut.trees)))
        clock.append(self._clock())
        length = self._length(requests, cut, budget)
        if length:
            self._prepare(requests)
        if length != 0:
            cut = self._cutter.whole(self._ask(self.chains if length else None, requests, length or 0), load)
        clock.append(self._clock())
        asking, drafting = clock[1] - clock[0], clock[2] - clock[1]
        source: Source | None = "chain" if length else "tree" if asks else None
        self._step = _Step(branches, cut, source, asking if asks else 0.0, drafting if length else 0.0, clock[2])
        return cut.trees

    def _ask(self, source: Drafter | None, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        if source is None:
            return [DraftTree.empty() for _ in requests]
        found = zip(source.propose_batch(requests, budget), requests, strict=True)
        return [tree.trim(request.max_draft_depth, self._vocabulary) for tree, request in found]

    def _length(self, requests: Sequence[Request], cut: Cut, budget: int) -> int | None:
        """Tokens of the chains that give more than the trees by cost, or are to be tried; 0 if there are none, and None
        if it has to be seen what a plain step takes."""
        load, rows, rate = cut.load, len(requests), cut.tokens / cut.cost
        most = min(self.most, budget, max(request.max_draft_depth for request in requests))
        if self.chains is None or not load.decoding or most < 1:
            return 0
        draft, passes = self._draft_cost(load), self._cutter.passes(load, most)
        if best([1.0] * rows, draft, passes).rate <= rate:  # not even if all of it were accepted
            return 0
        found = self._grown.best(requests, draft, passes)
        if self._times.due(found.rate * cut.plain / rows):
            return None
        each = draft + (float(passes[-1]) - float(passes[0])) / max(most - 1, 1)
        pays, may_try = found.rate > rate, self._account.untouched
        self._grown.open(requests, found.rate * each / rows if pays else 0.0)
        if pays:
            affordable = max(int(self._account.left("chain") * cut.plain / each), int(may_try))
            return min(most if self._grown.asked else found.tokens, affordable)
        return int(cut.empty and may_try)

    def _draft_cost(self, load: Load) -> float:
        """What drafting a token for every row costs, in the curve's units."""
        unit, drafting = self._times.plain.unit, self._times.drafting.unit
        return self._draft_size(load) * (drafting / unit if unit and drafting else 1.0)

    def _draft_size(self, load: Load) -> float:
        """What such a pass costs going by its size."""
        seen = [length if self.reach is None else min(length, self.reach) for length in load.cached]
        return self.weight * self._cutter.costs.of([1] * len(seen), seen)

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Learn how long the step took, and what was accepted."""
        if (step := self._step) is not None:
            if not step.outcomes:
                step.seconds = self._clock() - step.ended
            step.outcomes.append(outcome)
            if step.source == "chain":
                self._grown.count(request, len(outcome.verdict.path), outcome.tree.drafted)
            if len(step.outcomes) == len(step.cut.trees):
                self._step = None
                self._learn(step)
        super().observe(request, outcome)

    def _learn(self, step: _Step) -> None:
        """What drafts gave, what the step took, and what it saved; what branches foresaw and was not scored would have
        saved as much, and asking for them is worth it."""
        cut, times = step.cut, self._times
        foreseen = self._cutter.learn(step.branches.proposed, step.outcomes)
        if cut is not step.branches:
            self._cutter.learn(cut.proposed, step.outcomes)
        if not cut.load.decoding:
            return
        tokens = sum(len(outcome.verdict.tokens) for outcome in step.outcomes)
        self._cutter.spend(cut, tokens)
        size = self._draft_size(cut.load) * sum(map(len, cut.trees)) / len(cut.trees) if step.drafting else 0.0
        times.step(cut.cost if cut.empty else cut.cost / self._cutter.surcharge, step.seconds, cut.empty)
        times.asking.learn(1.0, step.asking)
        times.drafting.learn(size, step.drafting)
        self._cutter.surcharge = times.surcharge
        asking = times.share(times.asking, 1.0, cut.plain) if step.asking else 0.0
        took = cut.cost / cut.plain + times.share(times.drafting, size, cut.plain)
        self._account.pass_by(took + asking)
        accepted = sum(len(outcome.verdict.path) for outcome in step.outcomes) if cut is step.branches else 0
        self._account.enter("tree", (foreseen - accepted) / len(cut.trees) - asking)
        if not cut.empty:
            self._account.enter(step.source or "tree", tokens / len(cut.trees) - took)
