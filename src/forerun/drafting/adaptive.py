"""Chooses at every step what gives the most tokens a second: a tree from texts, a chain from a model, or nothing.

A tree costs little to propose, so it is proposed first, for the rows where that gave more than it cost
(``policy/ask_gain.py``), and pruned to its best part. A chain takes passes of its own. Its value is estimated from
earlier chains, and from the time of those passes. The better of the two is taken: the tree where a passage is quoted,
the model in the next sentence, which nobody has seen.

Estimates can be wrong. So every source has a budget (``policy/exploration_budget.py``): it may lose what it saved
before, and a small share of all time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter, OuterDrafter, check_trees
from forerun.kv.cache import READ_BLOCK, Cache
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer
from forerun.policy import node_table, step_timer
from forerun.policy.ask_gain import SUFFIXES, AskGain
from forerun.policy.chain_acceptance import ChainAcceptance, best_length
from forerun.policy.cost_curve import CostCurve
from forerun.policy.exploration_budget import STAKE, ExplorationBudget, Source
from forerun.policy.step_timer import LinearCost, StepTimer
from forerun.policy.tree_pruning import TreePruner, TreeSelection

FLOAT_TOLERANCE = 1e-6
"""Tolerance for float rounding."""
LEAST_NODES, NODE_GROWTH = 8, 4
"""Nodes of a proposed tree: at least ``LEAST_NODES`` per row, and ``NODE_GROWTH`` for each that was scored in the step
before. Proposing takes time, whether the nodes are scored or not."""


@dataclass(slots=True)
class _StepRecord:
    """A step under way, and what came of it."""

    rows: dict[int, int]
    """The row number of each request whose outcome is still to come."""
    drawn: list[bool]
    """Whether each row's tree carries ``q``."""
    selection: TreeSelection
    """What is scored: the trees, or the chains."""
    source: Source | None
    asked: dict[int, int]
    """The known suffix of each row whose tree was asked for, by the row's number."""
    tree_seconds: float
    """Time to propose trees and to learn from them; 0 where none were proposed."""
    chain_seconds: float
    """Time of the chains' passes."""
    ended: float
    """When drafting was over."""
    pass_seconds: float = 0.0
    observed: int = 0
    tokens: int = 0
    outcomes: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each row whose tree was asked for: its known suffix, the tree's nodes, and the row's tokens."""


class AdaptiveDrafter(OuterDrafter):
    """Chooses between two sources of drafts, and how much of them is scored.

    Args:
        inner: receives all events; one of the sources, or a drafter that contains both.
        trees: proposes trees, at little cost.
        chains: drafts chains with passes of a model.
        max_length: maximum length of a chain, in tokens.
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
        max_length: int = 1,
        reach: int | None = None,
        beyond: int = 0,
        weight: float = 1.0,
    ) -> None:
        super().__init__(inner)
        self.trees, self.chains = trees, chains
        self.max_length, self.reach, self.beyond, self.weight = max_length, reach, beyond, weight
        self._prompts: dict[int, Cache] = {}
        self._preparing: dict[int, float] = {}  # seconds so far
        self._nodes = LEAST_NODES
        self._budget, self._acceptance, self._ask_gain = ExplorationBudget(), ChainAcceptance(), AskGain()
        self._step: _StepRecord | None = None
        self._resting: tuple[PassContext, float] | None = None  # a step under way without drafts, and when it began

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        super().bind(target, runtime)
        self._clock, costs = runtime.clock, runtime.costs(target)
        self._pruner, self._timer = TreePruner(costs, target.vocabulary), StepTimer(costs.unit)
        self.inner.fit(costs)

    def fit(self, costs: CostCurve) -> None:
        """Do nothing: it has its own costs, and its inner drafters know them."""

    def warm_up(self) -> None:
        node_table.warm_up()
        step_timer.warm_up()
        super().warm_up()

    def begin(self, request: Request) -> None:
        self._acceptance.begin(request)
        super().begin(request)

    def prefilled(self, request: Request, cache: Cache) -> None:
        """Prepare chains now if the prompt is long and they are expected to pay.

        Chains need a cache of the prompt. A short one's takes a single pass, and waits until the first chain is wanted.
        """
        self._prompts[request.id] = cache
        short = self._short(request) and self.trees is not None
        if self.chains is None or (not short and self._worth_preparing(request)):
            self._prepare([request])

    def _short(self, request: Request) -> bool:
        """Whether its prompt's cache for chains takes a single pass."""
        return len(request) <= READ_BLOCK

    def _worth_preparing(self, request: Request) -> bool:
        """Whether chains are expected to save more time in the rest of a text than it takes to read its beginning.

        They are expected to be accepted as earlier ones were. How long the reading takes is known from the first text
        on.
        """
        length = min(self.max_length, request.max_draft_depth)
        context = PassContext.decoding([request], length)
        if max(context.cached) < self.beyond or length < 1:
            return False
        passes = self._pruner.chain_passes(context, length, self._timer.correction)
        plain, _ = self._pruner.price(context)
        best = self._acceptance.best([request], self._draft_cost(context), passes)
        saved = request.remaining * (plain - 1 / best.rate)
        return saved > self._timer.preparing_cost * len(request)

    def _prepare(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if (cache := self._prompts.pop(request.id, None)) is not None:
                self._preparing[request.id] = 0.0
                with self._timing(request):
                    self.inner.prefilled(request, cache)

    def _prepared(self, requests: Sequence[Request]) -> bool:
        """Whether the chains' caches of the prompts are complete; reads one more piece of each that is not."""
        self._prepare(requests)
        unprepared = [request for request in requests if not self.catch_up(request, READ_BLOCK)]
        return not unprepared

    def catch_up(self, request: Request, tokens: int) -> bool:
        """Read on for the trees, and for the chains if any were wanted yet."""
        if self.trees is not None and not self.trees.catch_up(request, tokens):
            return False
        if request.id in self._preparing:
            with self._timing(request):
                ready = self.inner.catch_up(request, tokens)
            if ready:
                self._timer.record_preparing(len(request), self._preparing.pop(request.id))
        return request.id not in self._preparing

    @contextmanager
    def _timing(self, request: Request) -> Iterator[None]:
        """Count the time as preparing chains."""
        began = self._clock()
        yield
        self._preparing[request.id] += self._clock() - began

    def finish(self, request: Request) -> None:
        self._prompts.pop(request.id, None)
        self._preparing.pop(request.id, None)
        if self._step is not None and self._step.rows.pop(request.id, None) is not None:
            self._close(self._step)
        self._acceptance.finish(request)
        super().finish(request)

    def propose(self, context: PassContext) -> list[DraftTree]:
        """The best part of each tree, or chains, or nothing, whichever gives the most tokens a second."""
        plain, alone = self._pruner.price(context)
        asked = self._asked(context, alone)
        chains = self.chains is not None and context.decodes and max(context.cached) >= self.beyond
        measures = context.decodes and not (chains or self._timer.plain_measured)
        due = measures and self._timer.plain_step_due(self._pruner.gain)
        if due or not (asked or chains):
            return self._rest(context)
        correction = self._timer.correction
        began = self._clock()
        proposed = self._trees(context, asked, self._allowed(context, plain, alone))
        extra = self.trees.extra_seconds if self.trees and asked else 0.0
        unit = self._timer.unit
        spent = len(asked) * self._timer.tree_cost + (extra / unit if unit else 0.0)
        selection = self._pruner.prune(context, proposed, spent, correction)
        self._nodes = max(LEAST_NODES, self._nodes // 2, NODE_GROWTH * max(map(len, selection.trees)))
        tree_end = self._clock()
        length = self._length(selection, spent) if chains else 0
        if length and not self._prepared(context.rows):
            length = 0
        prepared = ended = self._clock()
        if length != 0:
            within = replace(context.within(length or 0), stop=self._acceptance.stop)
            selection = self._pruner.keep_all(context, _propose(self.chains if length else None, within), correction)
            ended = self._clock()
        self._resting = None
        self._step = _StepRecord(
            {request.id: row for row, request in enumerate(context.rows)},
            [tree.q is not None for tree in proposed],
            selection,
            "chain" if length else "tree" if asked else None,
            asked,
            tree_end - began - extra if asked else 0.0,
            ended - prepared if length else 0.0,
            ended,
        )
        return selection.trees

    def _rest(self, context: PassContext) -> list[DraftTree]:
        """Draft nothing in this step, because nothing can pay for it. It has to take hardly longer than a plain one."""
        self._step, self._resting = None, (context, self._clock())
        return [DraftTree.empty()] * len(context)

    def _rested(self, context: PassContext, began: float) -> None:
        """Learn from a step without drafts, when the first outcome is known."""
        self._resting = None
        if context.decodes:
            self._timer.record_step(self._pruner.price(context)[0], 0.0, self._clock() - began, True)
        self._pruner.rest()
        self._budget.add_time(1.0)

    def _asked(self, context: PassContext, alone: float) -> dict[int, int]:
        """The rows whose trees are worth asking for, with their known suffixes.

        While the budget is untouched, the others are tried, too. Those without a known suffix promise least, so they
        are only tried if that takes a small part of the budget. Where a drafter cannot tell, a short one is assumed.
        """
        each, rows = self._timer.tree_cost / alone, context.rows
        if self.trees is None or not self._budget.affords("tree", each):
            return {}
        price, tell = each * len(rows), self.trees.known_suffix
        suffixes = {n: SUFFIXES[0] if (known := tell(row)) is None else known for n, row in enumerate(rows)}
        tried = math.inf if not self._budget.full else 0 if price <= STAKE else SUFFIXES[0]
        gain = self._ask_gain.expected
        asked = {row: known for row, known in suffixes.items() if known >= tried or gain(known) > price}
        return asked if self._budget.affords("tree", len(asked) * each) else {}

    def _trees(self, context: PassContext, asked: Collection[int], most: int) -> list[DraftTree]:
        """The trees of the rows that are asked for, of ``most`` nodes each, and empty ones."""
        rows = sorted(asked)
        proposed = iter(_propose(self.trees, context.of(rows).within(most)) if rows else ())
        return [next(proposed) if row in asked else DraftTree.empty() for row in range(len(context))]

    def _allowed(self, context: PassContext, plain: float, alone: float) -> int:
        """Nodes of a row's tree: no more than may be lost if all of them are wrong. While trees have saved nothing they
        stay smaller, so that there are more of them."""
        passes = self._pruner.chain_passes(context, self._nodes, self._timer.correction)
        stake = self._budget.left("tree") if self._budget.proven("tree") else self._budget.stake("tree", 0.0)
        return max(1, int(np.searchsorted(passes, plain + stake * alone, side="right")))

    def _length(self, selection: TreeSelection, spent: float) -> int | None:
        """Length of the chains to draft; 0 if the trees are better, None if a plain step has to be measured."""
        context, rate = selection.context, selection.tokens / (spent + selection.cost)
        rows = len(context)
        longest = min(self.max_length, max(context.budgets), max(row.max_draft_depth for row in context.rows))
        if longest < 1:
            return 0
        draft = self._draft_cost(context)
        passes = spent + self._pruner.chain_passes(context, longest, self._timer.correction)
        hopeless = best_length([1.0] * rows, draft, passes).rate <= rate  # not even if all of it were accepted
        if hopeless and (self._timer.chains_known or any(request.id in self._prompts for request in context.rows)):
            return 0
        if any(
            row.id in self._prompts and not (self._short(row) or self._worth_preparing(row)) for row in context.rows
        ):
            return 0
        best = self._acceptance.best(context.rows, draft, passes)
        gain = (best.rate if self._timer.plain_known else rate) * (spent + selection.plain) / rows
        if self._timer.plain_step_due(gain):
            return None
        if not self._timer.plain_known:
            return 0
        each = draft.each + (float(passes[-1]) - float(passes[0])) / max(longest - 1, 1)
        pays = best.rate > rate
        stake = self._budget.stake("chain", (draft.start + each) / selection.plain) * selection.plain
        affordable = max(int((stake - draft.start) / each + FLOAT_TOLERANCE), int(self._budget.full))
        self._acceptance.start(context.rows, best.rate * each / rows if pays else 0.0)
        if pays:
            return min(longest if self._acceptance.stops_early else best.tokens, affordable)
        return int(not selection.nodes and affordable > 0)

    def _draft_cost(self, context: PassContext) -> LinearCost:
        """Cost of drafting chains for every row by their length, in the curve's units."""
        start, each = self._timer.chain_cost
        return LinearCost(start, each * self._draft_size(context))

    def _draft_size(self, context: PassContext) -> float:
        """Estimated cost of a drafting pass, by the cached tokens that it reads."""
        read = [length if self.reach is None else min(length, self.reach) for length in context.cached]
        return self.weight * self._pruner.cost([1] * len(read), read)

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Learn how long the step took, and what was accepted."""
        if self._resting is not None:
            self._rested(*self._resting)
        elif (step := self._step) is not None and (row := step.rows.pop(request.id, None)) is not None:
            began = self._clock()
            if not step.observed:
                step.pass_seconds = began - step.ended
            self._count(step, row, request, outcome)
            if step.tree_seconds:
                step.tree_seconds += self._clock() - began
            self._close(step)
        super().observe(request, outcome)

    def _close(self, step: _StepRecord) -> None:
        """Learn from a step when the outcome of every remaining row is known."""
        if not step.rows:
            self._step = None
            if step.observed:
                self._learn(step)

    def _count(self, step: _StepRecord, row: int, request: Request, outcome: Outcome) -> None:
        """Count a row's outcome; nodes of its tree count whether they were scored or not."""
        chain = step.source == "chain"
        step.observed += 1
        step.tokens += len(outcome.verdict.tokens)
        if chain:
            self._acceptance.record(request, len(outcome.verdict.path), len(outcome.tree))
        if step.source is not None and not (chain and step.drawn[row]):
            self._pruner.learn(row, outcome, step.drawn[row])
        if row in step.asked and not chain:
            step.outcomes.append((step.asked[row], len(outcome.tree), len(outcome.verdict.tokens)))

    def _learn(self, step: _StepRecord) -> None:
        """Learn the step's times, and book what it saved."""
        selection, timer, context = step.selection, self._timer, step.selection.context
        self._pruner.end(selection, step.tokens)
        if context.decodes:
            timer.record_step(selection.plain, selection.added, step.pass_seconds, not selection.nodes)
        steps, proposing = 1.0, 0.0
        if selection.nodes:
            steps = selection.steps
            if context.decodes:
                steps = selection.corrected(timer.correction).steps  # by what this step has shown of drafts, too
                if timer.unit:  # disturbances only ever slow a pass
                    steps = min(steps, step.pass_seconds / timer.unit / selection.plain)
        if step.source is not None:
            rows, asked = len(context), len(step.asked)
            each = (steps - 1.0) * rows / max(selection.nodes, 1)
            for known, nodes, tokens in step.outcomes:
                self._ask_gain.record(known, tokens - 1.0 - nodes * each)
            size = self._draft_size(context) * selection.nodes / rows if step.chain_seconds else 0.0
            timer.record_trees(asked, step.tree_seconds)
            timer.record_chains(size, step.chain_seconds)
            proposing = asked * timer.tree_cost / selection.alone if step.tree_seconds else 0.0
            steps += timer.chain_cost.at(size) / selection.alone if size else 0.0
        self._budget.add_time(steps + proposing)
        self._budget.record("tree", -proposing)
        if selection.nodes:
            self._budget.record(step.source or "tree", step.tokens / step.observed - steps)


def _propose(source: Drafter | None, context: PassContext) -> list[DraftTree]:
    if source is None:
        return [DraftTree.empty()] * len(context)
    trees = source.propose(context)
    check_trees(source, trees, len(context))
    return trees
