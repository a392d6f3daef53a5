"""Chooses at every step what gives the most tokens a second: a tree from texts, a chain from a model, or nothing.

A tree costs next to nothing to propose, so it is asked for first, and cut to its best part. A chain takes passes of its
own. Its value is estimated from earlier chains, and from the time of those passes. The better of the two is taken: the
tree where a passage is quoted, the model in the next sentence, which nobody has seen.

Estimates can be wrong. So every source has a budget (``plan/account.py``): it may lose what it saved before, and a
small share of all time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter, OuterDrafter
from forerun.kv.cache import READ_BLOCK, Cache
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer
from forerun.policy import least_squares, node_table
from forerun.policy.chain_acceptance import Chains, best
from forerun.policy.cost_curve import CostCurve
from forerun.policy.exploration_budget import ExplorationBudget, Source
from forerun.policy.pass_times import Line
from forerun.policy.step_times import StepTimes
from forerun.policy.tree_pruning import Load, PrunedTrees, TreePruner

ROUNDING = 1e-6
"""So that what is exactly enough is enough."""
LEAST, GROWTH = 8, 4
"""Nodes that a source is asked for: at least ``LEAST`` per row, and ``GROWTH`` for each that was scored in the step
before. Proposing takes time, whether the nodes are scored or not."""


@dataclass(slots=True)
class _Step:
    """A step under way, and what came of it."""

    rows: dict[int, int]
    """The row number of each request whose outcome is still to come."""
    drawn: list[bool]
    """Whether each row's tree carries ``q``."""
    cut: PrunedTrees
    """What is scored: the trees, or the chains."""
    source: Source | None
    asking: float
    """Seconds until there were trees, and of learning from them; 0 where none were asked for."""
    drafting: float
    """Seconds of the chains' passes."""
    ended: float
    """When drafting was over."""
    seconds: float = 0.0
    seen: int = 0
    tokens: int = 0


class AdaptiveDrafter(OuterDrafter):
    """Chooses between two sources of drafts, and how much of them is scored.

    Args:
        inner: receives all events; one of the sources, or a drafter that contains both.
        trees: proposes trees, at next to no cost.
        chains: drafts chains with passes of a model.
        most: maximum length of a chain, in tokens.
        reach: maximum number of cached tokens that a drafting pass reads; None for all.
        beyond: number of cached tokens up to which a drafting pass would read as much as the target's.
        weight: first guess of a drafting pass's cost; the target's pass over as many cached tokens costs 1.
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
        beyond: int = 0,
        weight: float = 1.0,
    ) -> None:
        super().__init__(inner)
        self.trees, self.chains = trees, chains
        self.most, self.reach, self.beyond, self.weight = most, reach, beyond, weight
        self._prompts: dict[int, Cache] = {}
        self._behind: set[int] = set()
        self._nodes = LEAST
        self._account, self._grown = ExplorationBudget(), Chains()
        self._step: _Step | None = None
        if chains is not None:
            chains.enough = self._grown.enough

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        super().bind(target, runtime)
        self._clock, costs = runtime.clock, runtime.costs(target)
        self._cutter, self._times = TreePruner(costs, target.vocabulary), StepTimes(costs.unit)
        self.inner.fit(costs)

    def fit(self, costs: CostCurve) -> None:
        """Nothing: it has its own costs, and its inner drafters know them."""

    def warm_up(self) -> None:
        """See ``Drafter.warm_up``."""
        node_table.warm_up()
        least_squares.warm_up()
        super().warm_up()

    def begin(self, request: Request) -> None:
        """See ``Drafter.begin``."""
        self._grown.begin(request)
        super().begin(request)

    def prefilled(self, request: Request, cache: Cache) -> None:
        """See ``Drafter.prefilled``.

        Chains need a cache of the prompt. It is made now if the prompt is long and chains could pay at all. A short
        one's takes a single pass, and waits until the first chain is asked for.
        """
        self._prompts[request.id] = cache
        load = Load([1], [len(request) - 1])
        short = len(request) <= READ_BLOCK and self.trees is not None
        if self.chains is None or (not short and self._could_pay(load, min(self.most, request.max_draft_depth))):
            self._prepare([request])

    def _could_pay(self, load: Load, most: int) -> bool:
        """Whether chains of at most so many tokens would pay if all of them were accepted."""
        if max(load.cached) < self.beyond or most < 1:
            return False
        passes = self._cutter.passes(load, most)
        return best([1.0] * load.rows, self._draft_cost(load), passes).rate > load.rows / self._cutter.plain(load)

    def _prepare(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if (cache := self._prompts.pop(request.id, None)) is not None:
                self.inner.prefilled(request, cache)
                self._behind.add(request.id)

    def _prepared(self, requests: Sequence[Request]) -> bool:
        """Whether the chains' caches of the prompts are complete; reads one more piece of each that is not."""
        self._prepare(requests)
        behind = [request for request in requests if not self.catch_up(request, READ_BLOCK)]
        return not behind

    def catch_up(self, request: Request, tokens: int) -> bool:
        """See ``Drafter.catch_up``; a request whose chains were not asked for yet has nothing to read."""
        if request.id in self._behind and self.inner.catch_up(request, tokens):
            self._behind.discard(request.id)
        return request.id not in self._behind

    def finish(self, request: Request) -> None:
        """See ``Drafter.finish``."""
        self._prompts.pop(request.id, None)
        self._behind.discard(request.id)
        if self._step is not None and self._step.rows.pop(request.id, None) is not None:
            self._close(self._step)
        self._grown.finish(request)
        super().finish(request)

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """The best part of each tree, or chains, or nothing, whichever gives the most tokens a second."""
        pending = [request.unread for request in requests]
        load = Load(pending, [len(request) - request.unread for request in requests], self.beside)
        asking = len(requests) * self._times.asking_cost
        trees = self.trees if self._account.affords("tree", asking / self._cutter.plain(load)) else None
        began = self._clock()
        proposed = _ask(trees, requests, min(budget, self._nodes))
        sunk = asking if trees else 0.0
        cut = self._cutter.cut(requests, proposed, load, sunk)
        self._nodes = max(LEAST, self._nodes // 2, GROWTH * max(map(len, cut.trees)))
        asked = self._clock()
        length = self._length(requests, cut, sunk, budget)
        if length and not self._prepared(requests):
            length = 0
        prepared = ended = self._clock()
        if length != 0:
            cut = self._cutter.whole(_ask(self.chains if length else None, requests, length or 0), load)
            ended = self._clock()
        self._step = _Step(
            {request.id: row for row, request in enumerate(requests)},
            [tree.q is not None for tree in proposed],
            cut,
            "chain" if length else "tree" if trees else None,
            asked - began if trees else 0.0,
            ended - prepared if length else 0.0,
            ended,
        )
        return cut.trees

    def _length(self, requests: Sequence[Request], cut: PrunedTrees, sunk: float, budget: int) -> int | None:
        """Length of the chains to draft; 0 if the trees are better, None if a plain step has to be measured."""
        load, rows, rate = cut.load, len(requests), cut.tokens / (sunk + cut.cost)
        if self.chains is None or not load.decoding or max(load.cached) < self.beyond:
            return 0
        most = min(self.most, budget, max(request.max_draft_depth for request in requests))
        if most < 1:
            return 0
        draft, passes = self._draft_cost(load), sunk + self._cutter.passes(load, most)
        hopeless = best([1.0] * rows, draft, passes).rate <= rate  # not even if all of it were accepted
        if hopeless and (self._times.drafts_known or any(request.id in self._prompts for request in requests)):
            return 0
        found = self._grown.best(requests, draft, passes)
        if self._times.due((found.rate if self._times.settled else rate) * (sunk + cut.plain) / rows):
            return None
        if not self._times.settled:
            return 0
        each = draft.each + (float(passes[-1]) - float(passes[0])) / max(most - 1, 1)
        pays = found.rate > rate
        stake = self._account.stake("chain", (draft.start + each) / cut.plain) * cut.plain
        affordable = max(int((stake - draft.start) / each + ROUNDING), int(self._account.untouched))
        self._grown.open(requests, found.rate * each / rows if pays else 0.0)
        if pays:
            return min(most if self._grown.asked else found.tokens, affordable)
        return int(not cut.nodes and affordable > 0)

    def _draft_cost(self, load: Load) -> Line:
        """Cost of drafting chains for every row by their length, in the curve's units."""
        start, each = self._times.drafting_cost
        return Line(start, each * self._draft_size(load))

    def _draft_size(self, load: Load) -> float:
        """Estimated cost of a drafting pass, by the cached tokens that it reads."""
        seen = [length if self.reach is None else min(length, self.reach) for length in load.cached]
        return self.weight * self._cutter.cost([1] * len(seen), seen)

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Learn how long the step took, and what was accepted."""
        if (step := self._step) is not None and (row := step.rows.pop(request.id, None)) is not None:
            began = self._clock()
            if not step.seen:
                step.seconds = began - step.ended
            self._count(step, row, request, outcome)
            if step.asking:
                step.asking += self._clock() - began
            self._close(step)
        super().observe(request, outcome)

    def _close(self, step: _Step) -> None:
        """Learn from a step when the outcome of every remaining row is known."""
        if not step.rows:
            self._step = None
            if step.seen:
                self._learn(step)

    def _count(self, step: _Step, row: int, request: Request, outcome: Outcome) -> None:
        """Count a row's outcome; nodes of its tree count whether they were scored or not."""
        chain = step.source == "chain"
        step.seen += 1
        step.tokens += len(outcome.verdict.tokens)
        if chain:
            self._grown.count(request, len(outcome.verdict.path), len(outcome.tree))
        if not (chain and step.drawn[row]):
            self._cutter.learn(row, outcome, step.drawn[row])

    def _learn(self, step: _Step) -> None:
        """Learn the step's times, and book what it saved."""
        cut, times, rows = step.cut, self._times, step.seen
        self._cutter.end(cut, step.tokens)
        if not cut.load.decoding:
            return
        size = self._draft_size(cut.load) * cut.nodes / len(cut.trees) if step.drafting else 0.0
        times.step(cut.plain, cut.added, step.seconds, not cut.nodes)
        times.asking.learn(len(cut.trees), step.asking)
        times.drafting.learn(size, step.drafting)
        self._cutter.rise = times.rise
        asking = len(cut.trees) * times.asking_cost / cut.plain if step.asking else 0.0
        drafting = times.drafting_cost.at(size) if size else 0.0
        cost = min(cut.cost, step.seconds / times.unit) if times.unit else cut.cost  # disturbances only ever slow it
        took = (cost + drafting) / cut.plain
        self._account.pass_by(took + asking)
        self._account.enter("tree", -asking)
        if cut.nodes:
            self._account.enter(step.source or "tree", step.tokens / rows - took)


def _ask(source: Drafter | None, requests: Sequence[Request], budget: int) -> list[DraftTree]:
    return [DraftTree.empty() for _ in requests] if source is None else source.propose_batch(requests, budget)
