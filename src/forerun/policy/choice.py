"""Choose what a step drafts: a tree from cheap sources, a chain from a model, or nothing.

One rule decides: an action is taken if its expected gain in tokens is worth more than it costs
(``ledger.TokenValues``), and if the ledger affords the cost even if every draft is rejected. A tree is proposed if its
predicted gain pays, then pruned to the nodes that pay. A chain is drafted if its net worth exceeds the tree's. What is
not expected to pay, but might within one standard error, is tried from a part of the slack reserved for trials.
Proposed trees are judged by the committed tokens even where they were not scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.policy import ledger, node_table, time_model
from forerun.policy.calibration import MEMORY
from forerun.policy.cost_curve import CostCurve
from forerun.policy.decision import Decision, DraftPasses
from forerun.policy.gains import (
    DEEPER_GAINS,
    DEEPER_PRIOR_TREES,
    DEEPER_SPREAD,
    EXPECTED_NODES,
    SUFFIX_GAINS,
    SUFFIXES,
    AcceptanceRate,
    Gains,
)
from forerun.policy.ledger import RESERVE, SHARE, Ledger, TokenValues
from forerun.policy.pass_shape import PassShape
from forerun.policy.step_costs import StepCosts
from forerun.policy.tree_pruning import PrunedTrees, TreePruner

DOUBT = 1.0
"""Standard errors added to the expected gain in trials."""
CHEAP = 0.25
"""Share of a plain pass that a chain may always cost if it is expected to pay, however short earlier ones were."""
PRICE_MARGIN = 0.5
"""Share of a node's price below which sources need not draft: calibration may raise a stated probability, and the cost
curve is flat in places. With SmolLM2, 0.35, 0.5, 0.7 and 1 lose 0.0, 0.1, 0.2 and 1.5 % of the accepted nodes of trees
of 64 nodes, and draft 24, 20, 16 and 13 % of them."""
RECENT = 0.1
"""Weight of the last step in recent averages."""
REST_STEPS = 16
"""Maximum steps for which a decision to skip drafting stands: what tokens are worth hardly changes meanwhile. With 0, 8
and 64 the simulated table is the same to 0.0001."""


class Choice:
    """Decides what a level drafts, and learns from the outcomes; ``draft``: assumed cost of chains' passes, ``costly``:
    if there is a costly source besides trees, returns its measured seconds for a row's draft, None if unknown."""

    def __init__(
        self,
        costs: CostCurve,
        vocabulary: int,
        draft: DraftPasses | None = None,
        costly: Callable[[], float | None] | None = None,
    ) -> None:
        self.ledger, self.draft, self._costly = Ledger(), draft or DraftPasses(), costly
        self.chains = AcceptanceRate()
        """Acceptance rate of chains over all requests."""
        self._gains = Gains(SUFFIXES, SUFFIX_GAINS)
        self._deeper_gains = Gains(EXPECTED_NODES, DEEPER_GAINS, DEEPER_PRIOR_TREES, DEEPER_SPREAD)
        self._pruner, self._values = TreePruner(vocabulary), TokenValues()
        self.costs = StepCosts(costs, self.draft, costly)
        self._stretch = self._tokens = self._spent = 1.0

    # deciding

    def begin(self, shape: PassShape, gains: Sequence[float], fresh: bool = False) -> Decision:
        """Start a step; ``gains``: recent tokens per step of each row that may have drafts, ``fresh``: whether it is
        the first of a batch, whose steps count as plain ones until some were drafted for."""
        if fresh:
            self._stretch = 1.0
        every = [*gains, *[1.0] * len(shape.undrafted_left)]
        left, cached = shape.left + shape.undrafted_left, shape.cached + shape.undrafted_cached
        values, cost_to_go = self._values.of(left, every, cached, self.costs.table, self._stretch, shape.closed)
        if fresh:
            self.ledger.open(cost_to_go)
        plain = shape.plain(self.costs.table)
        alone = plain if shape.decodes else shape.alone(self.costs.table)
        step = Decision(shape, values[: len(shape)], cost_to_go, plain, alone)
        if self._costly is not None:
            self._consider_costly(step)
        return step

    def _consider_costly(self, step: Decision) -> None:
        """Decide whether the costly source may propose in this step or soon; if not, it needs no hidden states. It is
        trusted if its drafts would surely pay at the pace of plain steps, so that it is ready where a copy ends."""
        line, worth = self.costs.deepening, max(float(step.values.sum()), step.plain)
        cost, pays = line.at(1), self._deeper_gains.expected(0) * float(step.values.max()) > line.at(1)
        lacks = self.ledger.lacks_costly(0.0, cost, trial=not pays)
        step.trusted = self._deeper_gains.expected(0, doubt=-DOUBT) * worth > line.at(len(step.shape))
        step.costly = step.trusted or lacks <= 0
        step.reserved = cost + RESERVE if pays and cost <= self.ledger.costly else 0.0
        if not step.costly:
            step.lacks = lacks

    @property
    def gain(self) -> float:
        """Recent tokens per row in the time of a plain step."""
        return self._tokens / self._spent

    def ask(self, step: Decision, promises: Sequence[int | None]) -> list[int]:
        """Choose the rows that propose trees, by each row's known suffix; a short one where the source cannot tell."""
        line, (fixed, slopes), kept = self.costs.asking, self.costs.nodes(step), step.reserved
        step.kinds = kinds = self.kinds(promises)
        for doubt in (0.0, DOUBT):
            worth = [
                value * self._gains.expected(kind, slope / value, doubt) - line.each
                for kind, value, slope in zip(kinds, step.values.tolist(), slopes, strict=True)
            ]
            rows = [row for row, net in enumerate(worth) if net > 0 and step.shape.budgets[row] > 0]
            pays = bool(rows) and sum(worth[row] for row in rows) > line.start + fixed
            if pays:
                scored = max(fixed, 0.0) + self._least_scored(step, rows, slopes, doubt)
                lacks = self.ledger.lacks(line.at(len(rows)) + scored + kept, doubt > 0)
                if lacks <= 0:
                    break
                step.lacks = min(step.lacks, lacks)
        else:
            rows = [
                row for row, kind in enumerate(kinds) if step.shape.budgets[row] > 0 and (kind or line.at(1) < CHEAP)
            ]
            if not rows:
                return []
            if not self._affords_hopeless(line.at(len(rows)) + kept):
                step.lacks = min(step.lacks, self.ledger.lacks(line.at(len(rows)) + kept + RESERVE, trial=True))
                return []
        step.asked, step.trial = {row: kinds[row] for row in rows}, not pays or doubt > 0
        return rows

    def _least_scored(self, step: Decision, rows: Sequence[int], slopes: Sequence[float], doubt: float) -> float:
        """Return the slack that a proposal leaves for its nodes: the cost of one per row that is expected to have some
        that pay. With none left, the proposal itself would be lost, again and again."""
        prices = {row: slopes[row] / float(step.values[row]) for row in rows}
        return sum(slopes[row] for row, price in prices.items() if self._gains.nodes(step.kinds[row], price, doubt))

    def kinds(self, promises: Sequence[int | None]) -> list[int]:
        """Return the classes of the rows' promises."""
        return [self._gains.kind(SUFFIXES[0] if promise is None else promise) for promise in promises]

    def patience(self, step: Decision) -> int:
        """Return for how many steps a decision to draft nothing holds, unless a row promises more: until the slack has
        grown by what it lacked."""
        if not (step.rests and step.kinds and step.shape.decodes) or step.shape.undrafted_left:
            return 0
        return int(min(step.lacks / (SHARE * step.plain), REST_STEPS))

    def _affords_hopeless(self, cost: float) -> bool:
        return self.ledger.affords(cost + RESERVE, trial=True)

    def limits(self, step: Decision) -> list[tuple[int, float]]:
        """Return the maximum nodes of each row's tree, and the minimum stated probability at which one can pay."""
        left = self._left(step)
        _, slopes = self.costs.nodes(step)
        nodes = max(1, int(left / max(min(slopes), 1e-9))) if left > 0 else 1
        return [
            (min(budget, nodes), PRICE_MARGIN * min(slope / value, 1.0))
            for budget, slope, value in zip(step.shape.budgets, slopes, step.values.tolist(), strict=True)
        ]

    def _left(self, step: Decision) -> float:
        slack = min(self.ledger.slack, self.ledger.trials) if step.trial else self.ledger.slack
        return slack - self.costs.proposed(step)

    def deepen(self, step: Decision, trees: Mapping[int, DraftTree]) -> list[int]:
        """Choose the rows, among these with their trees, that a costly source drafts for."""
        line, spent = self.costs.deepening, self.costs.proposed(step)
        kinds = {
            row: self._deeper_gains.kind(tree.expected) for row, tree in trees.items() if step.shape.budgets[row] > 0
        }
        for doubt in (0.0, DOUBT):
            worth = {
                row: self._deeper_gains.expected(kind, 0.0, doubt) * float(step.values[row]) - line.each
                for row, kind in kinds.items()
            }
            rows = [row for row, net in worth.items() if net > 0]
            pays = bool(rows) and sum(worth[row] for row in rows) > line.start
            if pays and self.ledger.lacks_costly(spent, line.at(len(rows)), doubt > 0) <= 0:
                break
        else:
            rows = list(kinds)
            lacks = self.ledger.lacks_costly(spent, line.at(len(rows)), trial=True) if rows else math.inf
            if lacks > 0:
                step.lacks = min(step.lacks, lacks)
                return []
        step.deeper = {row: (kinds[row], trees[row]) for row in rows}
        step.deeper_trial = not pays or doubt > 0
        step.trial |= not step.asked and step.deeper_trial
        return rows

    def prune(self, step: Decision, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Return the part of each row's tree that is worth scoring."""
        step.trees = trees
        if step.deeper:
            before = [step.deeper[row][1] if row in step.deeper else tree for row, tree in enumerate(trees)]
            step.worth_it = self._pruned(step, before, math.inf), self._pruned(step, trees, math.inf)
        step.pruned = self._pruned(step, trees, max(self._left(step), 0.0))
        return step.pruned.trees

    def _pruned(self, step: Decision, trees: Sequence[DraftTree], slack: float) -> PrunedTrees:
        correction = self.costs.correction
        fixed = (correction.start - 1.0) * step.alone
        return self._pruner.prune(step.shape, trees, step.values, self.costs.table, fixed, correction.each, slack)

    def chain_length(
        self, step: Decision, rates: Sequence[AcceptanceRate], most: int, stops_early: bool
    ) -> tuple[int, list[float]]:
        """Choose the draft length of chains, of at most ``most`` tokens, after the step's tree was pruned.

        Returns:
            The length, 0 if the tree or nothing is better; and by row, the probability of full acceptance at which a
            further token is not worth its cost.
        """
        shape, pruned = step.shape, step.pruned
        tree = 0.0 if pruned is None or not pruned.nodes else pruned.worth - self.costs.scored(step, pruned.added)
        draft, lengths = self.costs.draft_line(shape.cached), np.arange(1, most + 1)
        scored = np.array(
            [self.costs.scored(step, shape.added(self.costs.table, length)) for length in lengths.tolist()]
        )
        extra = draft.start + draft.each * lengths + scored
        longest = max(rate.longest for rate in rates)
        allowed = lengths <= max(longest, CHEAP * step.alone / max(draft.each, 1e-9))
        spent = self.costs.proposed(step)
        for doubt in (0.0, DOUBT):
            slack = self.ledger.slack if not doubt else min(self.ledger.slack, self.ledger.trials)
            powers = np.array([rate.rate(doubt) for rate in rates])[:, None] ** lengths
            affordable = allowed & (extra <= slack - spent)
            net = np.where(affordable, step.values @ powers.cumsum(1) - extra, -np.inf)
            best = int(net.argmax())
            if net[best] > max(tree, 0.0):
                step.chain = int(np.flatnonzero(affordable)[-1]) + 1 if stops_early and not doubt else best + 1
                step.trial, step.passes = doubt > 0, self.draft.cost(shape.cached, self.costs.table)
                each = draft.each + (float(scored[-1]) - float(scored[0])) / max(most - 1, 1)
                return step.chain, (each / len(shape) / step.values).tolist()
        if not tree and self._affords_hopeless(float(extra[0]) + spent):
            step.chain, step.trial, step.passes = 1, True, self.draft.cost(shape.cached, self.costs.table)
            return 1, [0.0] * len(shape)
        return 0, []

    # learning

    def learn(
        self,
        step: Decision,
        outcomes: Sequence[Outcome | None],
        rates: Sequence[AcceptanceRate],
        passed: float,
        taught: float,
    ) -> list[int]:
        """Update from a step, and book it. Returns the tokens that each row got. ``rates``: acceptance rates of the
        rows' chains, ``passed``: seconds of the pass and verifying, ``taught``: of updating the sources."""
        tokens = [1 if outcome is None else len(outcome.verdict.tokens) for outcome in outcomes]
        if not step.rests:
            self._judge(step, outcomes, rates)
        cost = self.costs.learn(step, outcomes, step.planning + taught, passed)
        shape = step.shape
        after = [max(left - got, 0) for left, got in zip(shape.left, tokens, strict=True)]
        waiting = [max(left - 1, 0) for left in shape.undrafted_left]
        cached = shape.cached + shape.undrafted_cached
        progress = step.cost_to_go - self._values.cost_to_go(after + waiting, cached, self.costs.table, shape.closed)
        if step.rests:
            self.ledger.rest(cost, progress)
        else:
            costly = max(step.deepening / self.costs.unit - step.added, 0.0) if step.deeper and self.costs.unit else 0.0
            self.ledger.book(cost, progress, step.trial, costly, not step.deeper_trial)
        self._stretch += RECENT * ((1.0 + cost if step.rests else cost / step.alone) - self._stretch)
        self._tokens = MEMORY * self._tokens + (sum(tokens) + len(waiting)) / shape.waiting
        self._spent = MEMORY * self._spent + (1.0 if step.rests else cost / step.alone)
        return tokens

    def rested(self, step: Decision, steps: int, deciding: float, passed: float) -> None:
        """Update from ``steps`` steps for which a decision to draft nothing held, and book them. ``deciding``: seconds
        of checking that it holds; ``passed``: of the passes."""
        self.costs.rested(step, steps, passed)
        cost, kept, fade = deciding / (self.costs.unit or 1.0), (1.0 - RECENT) ** steps, MEMORY**steps
        self.ledger.rest(cost, steps * step.plain)
        stretch, share = 1.0 + cost / steps, (1.0 - fade) / (1.0 - MEMORY)
        self._stretch = stretch + kept * (self._stretch - stretch)
        self._tokens, self._spent = fade * self._tokens + share, fade * self._spent + share

    def _judge(self, step: Decision, outcomes: Sequence[Outcome | None], rates: Sequence[AcceptanceRate]) -> None:
        """Record which of the step's drafts were correct, scored or not."""
        for row, outcome in enumerate(outcomes):
            if outcome is None:
                continue
            accepted = len(outcome.verdict.path)
            if step.chain and (drafted := len(outcome.tree)):
                rates[row].record(accepted, drafted)
                self.chains.record(accepted, drafted)
            if row not in step.asked and row not in step.deeper:
                continue
            drawn = step.trees[row].q is not None
            if step.chain and drawn:
                continue
            self._pruner.note(row, outcome, drawn)
            if row in step.deeper:
                kind, before = step.deeper[row]
                added = self._added_by_deeper(step, row, outcome)
                self._deeper_gains.record(kind, added)
                step.added += added * float(step.values[row])
                if row in step.asked:
                    self._gains.record(step.asked[row], before.matches(outcome.verdict.tokens))
        for row, right in self._pruner.learn():
            if row in step.asked and row not in step.deeper:
                self._gains.record(step.asked[row], right)

    def _added_by_deeper(self, step: Decision, row: int, outcome: Outcome) -> float:
        """Return the tokens that a costly source added to a row, minus the cost of its nodes, by what was worth scoring
        with it and without it, scored or not. A chain with ``q`` counts as far as it was accepted."""
        assert step.worth_it is not None
        right = [each.trees[row].matches(outcome.verdict.tokens) for each in step.worth_it]
        costs = [self.costs.scored(step, each.added) if each.nodes else 0.0 for each in step.worth_it]
        if step.trees[row].q is not None:
            right[1] = len(outcome.verdict.path)
        return right[1] - right[0] - (costs[1] - costs[0]) / len(step.deeper) / float(step.values[row])


def warm_up() -> None:
    """Compile the code of decisions, or load it from the cache."""
    node_table.warm_up()
    time_model.warm_up()
    ledger.warm_up()
