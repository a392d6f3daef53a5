"""Chooses at every step what gives the most tokens a second: a tree from texts, a chain from a model, or nothing.

A tree costs little to propose, so it is proposed first, for the rows where that gave more than it cost
(``policy/ask_gain.py``), and pruned to its best part. A chain takes passes of its own. Its value is estimated from
earlier chains, and from the time of those passes. The better of the two is taken: the tree where a passage is quoted,
the model in the next sentence, which nobody has seen.

Estimates can be wrong. So every request has a budget (``policy/exploration_budget.py``): it may lose what it saved
before, and a small share of its time.

The levels of a hierarchy decide in the same way. To the drafter below a level, the level's pass is the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter, OuterDrafter, trees_of
from forerun.kv.cache import READ_BLOCK, Cache
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer
from forerun.policy import node_table, prices
from forerun.policy.ask_gain import DEEPER_GAINS, EXPECTED_NODES, SUFFIX_FALLS, SUFFIX_GAINS, SUFFIXES, AskGain
from forerun.policy.chain_acceptance import ChainAcceptance, best_length
from forerun.policy.chain_preparation import ChainPreparation, is_short
from forerun.policy.cost_curve import CostCurve, CostTable
from forerun.policy.exploration_budget import (
    EXPLORATION_START,
    STAKE,
    ExplorationBudget,
    growth,
    within_savings,
)
from forerun.policy.prices import LinearCost, Prices, SmallModel
from forerun.policy.tree_pruning import TreePruner, TreeSelection

FLOAT_TOLERANCE = 1e-6
"""Tolerance for float rounding."""
LEAST_NODES, NODE_GROWTH = 8, 4
"""Nodes of a proposed tree: at least ``LEAST_NODES`` per row, and ``NODE_GROWTH`` for each that was scored in the step
before. Proposing takes time, whether the nodes are scored or not."""
PREPARING_READS = 8.0
"""First guess of what it takes to prepare a cached token for chains: so many times what it adds to a plain pass. Both
read all keys. Measured: 6 to 9 for the bundled model and 5 to 11 for SmolLM2, in both types. A small model has to read
the prompt besides."""
TREES_GAIN = 1.07
"""Tokens that trees alone are taken to give in the time of a plain step; what chains save counts from there. 1.06 to
1.09 decide the same for the bundled model and SmolLM2, both types, behind 16,000 and 32,000 tokens."""


@dataclass(slots=True)
class _DraftedRow:
    """A row of a step with drafts, and what came of it.

    Attributes:
        number: of the row.
        budget: of its request.
        known: its known suffix, if its tree was asked for.
        shallow: its tree before a costly source was asked to add to it; None if none was.
        drawn: whether its tree carries ``q``.
        nodes: scored.
        tokens: that the step gave.
    """

    number: int
    budget: ExplorationBudget
    known: int | None = None
    shallow: DraftTree | None = None
    drawn: bool = False
    nodes: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _StepRecord:
    """A step under way.

    Attributes:
        waiting: the rows whose outcome is still to come, by request.
        selection: what is scored: the trees, or the chains.
        chained: whether it is chains.
        asking, deepening: seconds of asking for trees and of learning from them, and of asking a costly source.
        drafting: seconds of the chains' passes.
        ended: when drafting was over.
        scoring: seconds from then on to the end of the pass.
        done: the other rows.
    """

    waiting: dict[int, _DraftedRow]
    selection: TreeSelection
    chained: bool
    asking: float
    deepening: float
    drafting: float
    ended: float
    scoring: float = 0.0
    done: list[_DraftedRow] = field(default_factory=list)


class AdaptiveDrafter(OuterDrafter):
    """Chooses between two sources of drafts, and how much of them is scored.

    Args:
        inner: receives all events; one of the sources, or a drafter that contains both.
        trees: proposes trees, at little cost.
        chains: drafts chains with passes of a model.
        max_length: maximum length of a chain, in tokens.
        reads: how many of a row's cached tokens a drafting pass reads.
        beyond: number of cached tokens up to which a drafting pass would read as much as the target's.
        weight: first guess of a drafting pass's cost; the target's pass over as many cached tokens costs 1.
        window: the most tokens of a text that a small model among the chains reads.
        alone: number of cached tokens up to which it drafts for the target itself. So long its passes, as measured, are
            the first guess.
    """

    sized = True

    def __init__(
        self,
        inner: Drafter,
        *,
        trees: Drafter | None = None,
        chains: Drafter | None = None,
        max_length: int = 1,
        reads: Callable[[int], int] = lambda cached: cached,
        beyond: int = 0,
        weight: float = 1.0,
        window: int = 0,
        alone: int = 0,
    ) -> None:
        super().__init__(inner)
        self.trees, self.chains = trees, chains
        self.max_length, self.reads, self.beyond, self.weight = max_length, reads, beyond, weight
        self.window, self.alone = window, alone
        self._budgets: dict[int, ExplorationBudget] = {}  # by request
        self._credit = EXPLORATION_START  # what texts left over for the next ones, in plain steps
        self._nodes = LEAST_NODES
        self._texts = 0  # so far
        self._acceptance = ChainAcceptance()
        self._gain = AskGain(SUFFIXES, SUFFIX_GAINS, SUFFIX_FALLS)
        self._deepening_gain = AskGain(EXPECTED_NODES, DEEPER_GAINS)
        self._step: _StepRecord | None = None
        self._resting: tuple[PassContext, float] | None = None  # a step under way without drafts, and when it began

    def pruned_by(self, prune: Callable[[Drafter], Drafter]) -> Drafter:
        """Levels of chains prune what they verify themselves."""
        if self.chains is not None:
            self.chains.pruned_by(prune)
        return self

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        super().bind(target, runtime)
        self._clock = runtime.clock
        self._preparation = ChainPreparation(
            self.inner, self._clock, self._worth_preparing, self._prepared_in, asks=self.trees is not None
        )
        small = None if self.chains is None else self.chains.small_model
        models = [target] if small is None else [target, small]
        self._costs: Callable[[], list[CostCurve]] = lambda: [*map(runtime.costs, models)]  # copies share the models
        self._measured = self._costs()
        self._pruner = TreePruner(self._measured[0], target.vocabulary)
        self._start_anew()

    def _start_anew(self) -> None:
        """Guess what is not measured."""
        target, *small = self._measured
        self._prices, self._small = Prices(target.unit), None
        if small and small[0].unit and target.unit:
            self._small = SmallModel(CostTable(small[0]), small[0].unit / target.unit, self.window)

    def _preparing_guess(self, request: Request) -> float:
        """First guess of what it takes to read a text for chains."""
        guess = max(PREPARING_READS * float(self._measured[0].cached(1)), FLOAT_TOLERANCE) * len(request)
        return guess if self._small is None else guess + self._small.reading(request.prompt_length)

    def _ask_costs_again(self) -> None:
        """Start anew with other costs, if passes could be measured again."""
        if (measured := self._costs()) != self._measured:
            self._measured = measured
            self._pruner.fit(measured[0])
            self._start_anew()

    def warm_up(self) -> None:
        node_table.warm_up()
        prices.warm_up()
        super().warm_up()

    def begin(self, request: Request) -> None:
        self._texts += 1
        doubtful = any(costs.doubtful for costs in self._measured)
        if doubtful and not self._budgets and self._texts.bit_count() == 1:  # the 1st, 2nd, 4th, 8th
            self._ask_costs_again()
        self._budgets[request.id] = ExplorationBudget(request, self._credit)
        self._acceptance.begin(request)
        super().begin(request)

    def prefilled(self, request: Request, cache: Cache) -> None:
        """Prepare chains now if the prompt is long and they are expected to pay."""
        self._preparation.add(request, cache)
        if self.chains is None:
            self._preparation.start([request])
        else:
            self._preparation.allows([request])

    def _worth_preparing(self, request: Request) -> bool:
        """Whether chains are expected to save more time in the rest of a text than it takes to read its beginning.

        What trees give without chains does not count as saved; behind a short prompt, that is what they gave lately.
        Chains are expected to be accepted as earlier ones were. How long the reading takes is a guess at first.
        """
        length = min(self.max_length, request.max_draft_depth)
        context = PassContext.decoding([request], length)
        if max(context.cached) < self.beyond or length < 1:
            return False
        passes = self._pruner.chain_passes(context, length, self._prices.correction)
        plain, _ = self._pruner.price(context)
        best = self._acceptance.best([request], self._draft_cost(context), passes)
        trees = max(TREES_GAIN, self._pruner.gain) if is_short(request) else TREES_GAIN
        without = plain if self.trees is None else plain / trees
        saved = request.remaining * (without - 1 / best.rate)
        cost = self._prices.preparing * self._preparing_guess(request)
        return saved > cost and self._budgets[request.id].affords(cost / plain)

    def _prepared(self, requests: Sequence[Request]) -> bool:
        """Whether the chains' caches of the prompts are complete; reads one more piece of each that is not."""
        self._preparation.start(requests)
        unprepared = [request for request in requests if not self.catch_up(request, READ_BLOCK)]
        return not unprepared

    def catch_up(self, request: Request, tokens: int) -> bool:
        """Read on for the trees, and for the chains if any were wanted yet."""
        if self.trees is not None and not self.trees.catch_up(request, tokens):
            return False
        return self._preparation.catch_up(request, tokens)

    def _prepared_in(self, request: Request, seconds: float) -> None:
        """Learn what it took to read a prompt for chains. The next texts may lose that much less."""
        self._prices.record_preparing(self._preparing_guess(request), seconds)
        if unit := self._prices.unit:
            self._credit = within_savings(self._credit - seconds / unit / self._pruner.table.cost([1], [len(request)]))

    def finish(self, request: Request) -> None:
        if self._budgets.pop(request.id, None) is not None:
            self._credit = within_savings(self._credit + growth(request))
        self._preparation.finish(request)
        if self._step is not None and self._step.waiting.pop(request.id, None) is not None:
            self._close(self._step)
        self._acceptance.finish(request)
        super().finish(request)

    def propose(self, context: PassContext) -> list[DraftTree] | None:
        """The best part of each tree, or chains, or nothing, whichever gives the most tokens a second."""
        chains, known = self._may_draft_chains(context), self._prices
        drafted = self._asked(context)
        measures = context.decodes and not (chains or known.plain_measured)
        if not (drafted or chains) or (measures and known.plain_step_due(self._pruner.gain)):
            self._step, self._resting = None, (context, self._clock())
            return None
        correction, began = known.correction, self._clock()
        trees, deepening = self._trees(context, drafted, correction)
        deepened = sum(row.shallow is not None for row in drafted.values())
        spent = len(drafted) * known.asking + deepened * known.deepening
        selection = self._pruner.prune(context, trees, spent, correction)
        self._nodes = max(LEAST_NODES, self._nodes // 2, NODE_GROWTH * max(map(len, selection.trees)))
        asking = self._clock() - began - deepening if drafted else 0.0
        length = self._length(selection, spent) if chains else 0
        if length and not self._prepared(context.rows):
            length = 0
        if not (drafted or length):
            self._step, self._resting = None, (context, self._clock())
            return None
        prepared = ended = self._clock()
        if length != 0:
            within = replace(context.within(length or 0), stop=self._acceptance.stop)
            drafts = trees_of(self.chains, within) if self.chains and length else [DraftTree.empty()] * len(context)
            selection = self._pruner.keep_all(context, drafts, correction)
            ended = self._clock()
        rows = {row.id: drafted.get(n) or _DraftedRow(n, self._budgets[row.id]) for n, row in enumerate(context.rows)}
        self._resting, drafting = None, ended - prepared if length else 0.0
        self._step = _StepRecord(rows, selection, bool(length), asking, deepening, drafting, ended)
        return selection.trees

    def scored(self) -> None:
        """Learn from a step without drafts. It has to take hardly longer than a plain one."""
        super().scored()
        if self._resting is not None:
            (context, began), self._resting = self._resting, None
            if context.decodes:
                self._prices.record_step(self._pruner.price(context)[0], 0.0, self._clock() - began, True)
            self._pruner.rest()
        elif self._step is not None:
            self._step.scoring = self._clock() - self._step.ended

    def _may_draft_chains(self, context: PassContext) -> bool:
        """Whether drafting passes read less than the target's, and each row is prepared for them or can be."""
        if self.chains is None or not context.decodes or max(context.cached) < self.beyond:
            return False
        return self._preparation.allows(context.rows)

    def _asked(self, context: PassContext) -> dict[int, _DraftedRow]:
        """The rows whose trees are worth asking for.

        While a row's budget is untouched, it is asked all the same. Where no suffix is known a tree promises least; so
        then it has to take a small part of the budget. Where a drafter cannot tell, a short suffix is assumed.
        """
        asked: dict[int, _DraftedRow] = {}
        if self.trees is None:
            return asked
        price, node = self._prices.asking * context.waiting / self._pruner.price(context)[1], None
        budgets = self._budgets
        affording = [(n, b) for n, row in enumerate(context.rows) if (b := budgets[row.id]).affords(price)]
        promises = self.trees.known_suffixes([context.rows[n] for n, _ in affording]) if affording else []
        for (number, budget), known in zip(affording, promises, strict=True):
            known = SUFFIXES[0] if known is None else known
            tried = (known >= SUFFIXES[0] or price <= STAKE) and budget.untouched
            if not tried and self._gain.expected(known) <= price:  # not even if nodes cost nothing
                continue
            node = self._pruner.node_cost(context, self._prices.correction) if node is None else node
            if tried or self._gain.expected(known, node) > price:
                asked[number] = _DraftedRow(number, budget, known)
        return asked

    def _trees(
        self, context: PassContext, drafted: dict[int, _DraftedRow], correction: LinearCost
    ) -> tuple[list[DraftTree], float]:
        """A tree for each row, empty for those that are not asked for, and the seconds that costly sources took."""
        trees = [DraftTree.empty()] * len(context)
        if not drafted:
            return trees, 0.0
        plain, alone = self._pruner.price(context)
        price, rows = self._prices.deepening * context.waiting / alone, {context.rows[n].id: n for n in drafted}
        began = 0.0

        def deepens(request: Request, tree: DraftTree) -> bool:
            """Whether it is worth asking a costly source to add to a row's tree."""
            nonlocal began
            row = drafted[rows[request.id]]
            worth = row.budget.untouched or self._deepening_gain.expected(tree.expected) > price
            if not (worth and row.budget.affords(price)):
                return False
            row.shallow, began = tree, self._clock()
            return True

        own = context.of(list(drafted))
        share = alone * len(context) / context.waiting
        limits = [plain + row.budget.stake(0.0) * share for row in drafted.values()]  # what may be lost if all is wrong
        allowed = [max(1, self._pruner.affordable(context, self._nodes, limit, correction)) for limit in limits]
        most = [min(each) for each in zip(own.budgets, allowed, strict=True)]
        assert self.trees is not None
        proposed = trees_of(self.trees, replace(own, budgets=most, deepens=deepens))
        ended = self._clock()
        for (number, row), tree in zip(drafted.items(), proposed, strict=True):
            trees[number], row.drawn = tree, tree.q is not None
        return trees, ended - began if began else 0.0

    def _length(self, selection: TreeSelection, spent: float) -> int | None:
        """Length of the chains to draft; 0 if the trees are better, None if a plain step has to be measured."""
        context, rate = selection.context, selection.tokens / (spent + selection.cost)
        rows, others, waiting, known = len(context), len(context.undrafted), context.waiting, self._prices
        longest = min(self.max_length, max(context.budgets), max(row.max_draft_depth for row in context.rows))
        if longest < 1:
            return 0
        draft = self._draft_cost(context)
        passes = spent + self._pruner.chain_passes(context, longest, known.correction)
        hopeless = best_length([1.0] * rows, draft, passes, others).rate <= rate  # not even if all of it were accepted
        small = self._drafting_alone(context) is not None
        if hopeless and (known.chains_known(small) or any(map(self._preparation.unread, context.rows))):
            return 0
        best = self._acceptance.best(context.rows, draft, passes, others)
        gain = (best.rate if known.plain_known else rate) * (spent + selection.plain) / waiting
        if known.plain_step_due(gain):
            return None
        if not known.plain_known:
            return 0
        each = max(draft.each + (float(passes[-1]) - float(passes[0])) / max(longest - 1, 1), FLOAT_TOLERANCE)
        pays, budgets = best.rate > rate, [self._budgets[row.id] for row in context.rows]
        least = (draft.start + each) / selection.plain * waiting / rows
        stake = sum(budget.stake(least) for budget in budgets) / waiting
        tokens = int((stake * selection.plain - draft.start) / each + FLOAT_TOLERANCE)
        affordable = max(tokens, int(all(budget.untouched for budget in budgets)))
        cheap = int(STAKE * selection.plain / each)  # where passes take far longer than drafts, these may be wrong
        affordable = min(affordable, max(self._acceptance.longest(context.rows), cheap))
        self._acceptance.start(context.rows, best.rate * each / rows if pays else 0.0)
        if pays:
            return min(longest if self._acceptance.stops_early else best.tokens, affordable)
        return int(not selection.nodes and affordable > 0)

    def _drafting_alone(self, context: PassContext) -> SmallModel | None:
        """The small model, where it drafts for the target itself."""
        return self._small if max(context.cached) <= self.alone else None

    def _draft_cost(self, context: PassContext) -> LinearCost:
        """Estimated cost of chains by their length."""
        return self._prices.chain(self._draft_size(context), self._drafting_alone(context) is not None)

    def _draft_size(self, context: PassContext) -> float:
        """Estimated cost of a drafting pass, by the cached tokens that it reads."""
        if (small := self._drafting_alone(context)) is not None:
            return small.drafting(context.cached)
        return self.weight * self._pruner.table.cost([1] * len(context), list(map(self.reads, context.cached)))

    def verified(self, request: Request, outcome: Outcome) -> None:
        self._note(request, outcome, self.inner.verified)

    def observe(self, request: Request, outcome: Outcome) -> None:
        self._note(request, outcome, self.inner.observe)

    def _note(self, request: Request, outcome: Outcome, hand_on: Callable[[Request, Outcome], None]) -> None:
        """Learn how long the pass took that verified a draft, and what was accepted.

        What the trees' source does to learn from it counts as asking, unless chains are prepared: their caches learn in
        the same call.
        """
        step = self._step
        if step is None or (row := step.waiting.pop(request.id, None)) is None:
            hand_on(request, outcome)
            return
        began = self._clock()
        self._count(step, row, request, outcome)
        counted = self._clock()
        hand_on(request, outcome)
        if row.known is not None:
            alone = self.chains is None or self._preparation.unread(request)
            step.asking += (self._clock() if alone else counted) - began
        self._close(step)

    def _close(self, step: _StepRecord) -> None:
        """Learn from a step when the outcome of every remaining row is known."""
        if not step.waiting:
            self._step = None
            if step.done:
                self._learn(step)

    def _count(self, step: _StepRecord, row: _DraftedRow, request: Request, outcome: Outcome) -> None:
        """Count a row's outcome; nodes of its tree count whether they were scored or not."""
        verdict = outcome.verdict
        row.nodes, row.tokens = len(outcome.tree), len(verdict.tokens)
        step.done.append(row)
        if step.chained:
            self._acceptance.record(request, len(verdict.path), row.nodes)
        elif row.shallow is not None:
            added = len(verdict.path) - row.shallow.matches(verdict.tokens)
            self._deepening_gain.record(row.shallow.expected, max(added, 0))
        if (row.known is not None or step.chained) and not (step.chained and row.drawn):
            self._pruner.learn(row.number, outcome, row.drawn)

    def _learn(self, step: _StepRecord) -> None:
        """Learn the step's times, and book what it saved."""
        selection, known, context = step.selection, self._prices, step.selection.context
        rows, waiting, alone, nodes = len(context), context.waiting, selection.alone, selection.nodes
        self._pruner.end(selection, sum(row.tokens for row in step.done), step.chained)
        steps = selection.steps if nodes else 1.0
        if context.decodes:
            known.record_step(selection.plain, selection.added, step.scoring, not nodes)
            if nodes:
                steps = selection.steps_at(known.correction)  # by what this step has shown of drafts, too
                if known.unit:  # disturbances only ever slow a pass
                    steps = min(steps, step.scoring / known.unit / selection.plain)
        known.record_asking(sum(row.known is not None for row in step.done), step.asking)
        known.record_deepening(sum(row.shallow is not None for row in step.done), step.deepening)
        chain = 0.0
        if step.drafting:
            length = nodes / rows
            small = self._drafting_alone(context) is not None
            known.record_chains(length, self._draft_size(context), step.drafting, small)
            chain = self._draft_cost(context).at(length) * waiting / rows / alone
        each = (steps - 1.0) * waiting / max(nodes, 1)  # all rows wait for each node, and for all that is asked
        node = self._pruner.node_cost(context, known.correction)
        asking, deepening = known.asking * waiting / alone, known.deepening * waiting / alone
        for row in step.done:
            saved = row.tokens - 1.0 - row.nodes * each - chain
            if row.shallow is not None:
                saved -= deepening
            if row.known is not None:
                if not step.chained:
                    self._gain.record(row.known, saved, node)
                saved -= asking
            row.budget.record(saved)
            self._credit = within_savings(self._credit + saved)
