"""Choose what a step drafts: a tree from cheap sources, a chain from a model, or nothing.

One rule decides: an action is taken if the tokens that it is expected to gain are worth more than it costs, and if the
ledger affords the cost even if every draft is rejected. A tree is proposed if its predicted gain pays, then pruned to
the nodes that pay. A chain is drafted if its net worth exceeds the tree's. What might pay within one standard error is
tried from a part of the slack reserved for trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.policy.calibration import MEMORY
from forerun.policy.cost_curve import CostCurve
from forerun.policy.decision import Decision, PlainSteps
from forerun.policy.gains import (
    COSTLY_GAINS,
    COSTLY_PRIOR_TREES,
    COSTLY_SPREAD,
    EXPECTED_NODES,
    SUFFIX_GAINS,
    SUFFIXES,
    AcceptanceRate,
    Gains,
    RowGains,
)
from forerun.policy.ledger import RESERVE, SHARE, Ledger, cost_to_go, token_values
from forerun.policy.pass_shape import PassShape
from forerun.policy.step_costs import DraftPasses, StepCosts
from forerun.policy.tree_pruning import PrunedTrees, TreePruner

DOUBT = 1.0
"""Standard errors added to the expected gain in trials."""
CHEAP = 0.25
"""Share of a plain pass that may be spent on a chain however short earlier ones were, and on any row's proposal."""
PRICE_MARGIN = 0.5
"""Share of a node's price below which sources need not draft; below 1, as calibration may raise a stated probability.
With SmolLM2 and 64 nodes, 0.35, 0.5, 0.7 and 1 lose 0.0, 0.1, 0.2 and 1.5 % of the accepted nodes, and draft 24, 20, 16
and 13 % of all."""
RECENT = 0.1
"""Weight of the last step in recent averages."""
PLAIN_STEPS = 16
"""Maximum steps for which a decision to draft nothing holds; with 0, 8 and 64, simulations agree to 0.0001."""


class Choice:
    """Decides what a level drafts, and learns from the outcomes. ``chains`` is the acceptance rate of all chains.

    Args:
        costs: of the target's passes; ``draft``: first guess of those that draft chains.
        costly: returns the measured seconds of a costly source's draft, or None; None without such a source.
    """

    def __init__(
        self,
        costs: CostCurve,
        vocabulary: int,
        draft: DraftPasses | None = None,
        costly: Callable[[], float | None] | None = None,
    ) -> None:
        self.ledger, self.chains, self.draft = Ledger(), AcceptanceRate(), draft or DraftPasses()
        self.costs, self._has_costly = StepCosts(costs, self.draft, costly), costly is not None
        self._gains = Gains(SUFFIXES, SUFFIX_GAINS)
        self._costly_gains = Gains(EXPECTED_NODES, COSTLY_GAINS, COSTLY_PRIOR_TREES, COSTLY_SPREAD)
        self._pruner = TreePruner(vocabulary)
        self._stretch = self._tokens = self._spent = 1.0

    @property
    def gain(self) -> float:
        """Recent tokens per row in the time of a plain step."""
        return self._tokens / self._spent

    # deciding

    def begin(self, shape: PassShape, rows: Sequence[RowGains], fresh: bool = False) -> Decision:
        """Start a step; ``rows``: those that may have drafts, ``fresh``: whether it is the first of a batch."""
        if fresh:
            self._stretch = 1.0
        table, left, cached = self.costs.table, shape.left + shape.undrafted_left, shape.cached + shape.undrafted_cached
        gains = [row.tokens for row in rows] + [1.0] * len(shape.undrafted_left)
        worth = token_values(left, gains, cached, table, self._stretch, shape.closed)
        remaining = cost_to_go(left, cached, table, shape.closed)
        if fresh:
            self.ledger.open(remaining)
        alone = shape.alone(table)
        plain = alone if shape.decodes else shape.cost(table, [0] * len(shape))
        step = Decision(shape, rows, worth, worth.after([0.0] * len(left))[: len(shape)], remaining, plain, alone)
        step.fixed, step.slopes = self.costs.nodes(step)
        step.prices = [slope / value for slope, value in zip(step.slopes, step.values, strict=True)]
        if self._has_costly:
            self._consider_costly(step)
        return step

    def _consider_costly(self, step: Decision) -> None:
        """Decide whether the costly source may propose now or soon; if not, it needs no hidden states. It is kept ready
        if it would surely pay at the pace of plain steps."""
        line, worth = self.costs.extensions.line, max(sum(step.values), step.plain)
        cost, pays = line.at(1), self._costly_gains.expected(0) * max(step.values) > line.at(1)
        lacks = self.ledger.lacks_costly(0.0, cost, trial=not pays)
        step.trusted = self._costly_gains.expected(0, doubt=-DOUBT) * worth > line.at(len(step.shape))
        step.costly = step.trusted or lacks <= 0
        step.reserved = cost + RESERVE if pays and cost <= self.ledger.costly else 0.0
        if not step.costly:
            step.lacks = lacks

    def choose_rows(self, step: Decision, known: Sequence[int | None]) -> list[int]:
        """Choose the rows that propose trees, by the length of each row's known suffix, None if unknown."""
        step.known, step.classes = known, list(map(self._class, known))
        rows, trial, lacks = self._proposers(step, step.classes)
        step.proposing, step.trial = {row: step.classes[row] for row in rows}, bool(rows) and trial
        step.lacks = min(step.lacks, lacks)
        return rows

    def _class(self, known: int | None) -> int:
        return self._gains.kind(SUFFIXES[0] if known is None else known)

    def _proposers(self, step: Decision, classes: Sequence[int]) -> tuple[list[int], bool, float]:
        """Return the rows of these classes that propose trees, whether as a trial, and the slack missing for others."""
        line, gains = self.costs.proposals.line, self._gains
        able = [row for row, budget in enumerate(step.shape.budgets) if budget > 0]
        values = step.values_after({row: gains.expected(classes[row], step.prices[row]) / 2 for row in able})
        prices = [slope / value for slope, value in zip(step.slopes, values, strict=True)]

        def net(row: int, doubt: float) -> float:
            return values[row] * gains.expected(classes[row], prices[row], doubt) - line.each

        def lacks(rows: Sequence[int], doubt: float) -> float:
            """Include a node of each row with some that pay: otherwise the proposal would be lost, again and again."""
            nodes = sum([step.slopes[row] for row in rows if gains.nodes(classes[row], prices[row], doubt)])
            return self.ledger.lacks(line.at(len(rows)) + max(step.fixed, 0.0) + nodes + step.reserved, doubt > 0)

        rows, trial, lacking = _paying(able, net, line.start + step.fixed, lacks)
        if not rows and (hopeless := [row for row in able if classes[row] or line.at(1) < CHEAP]):
            missing = self.ledger.lacks(line.at(len(hopeless)) + step.reserved + RESERVE, trial=True)
            rows, trial, lacking = (hopeless if missing <= 0 else []), True, min(lacking, missing)
        return rows, trial, lacking

    def limits(self, step: Decision) -> list[tuple[int, float]]:
        """Return the maximum nodes of each row's tree, and the minimum stated probability at which one can pay."""
        nodes = max(1, int(self._left(step) / max(min(step.slopes), 1e-9)))
        return [
            (min(budget, nodes), PRICE_MARGIN * min(price, 1.0))
            for budget, price in zip(step.shape.budgets, step.prices, strict=True)
        ]

    def _left(self, step: Decision) -> float:
        return self.ledger.available(step.trial) - self.costs.proposed(step)

    def choose_extensions(self, step: Decision, trees: Mapping[int, DraftTree]) -> list[int]:
        """Choose the rows, among these with their trees, that a costly source drafts for."""
        line, spent, gains = self.costs.extensions.line, self.costs.proposed(step), self._costly_gains
        kinds = {row: gains.kind(tree.expected) for row, tree in trees.items() if step.shape.budgets[row] > 0}
        values = step.values_after({row: trees[row].expected + gains.expected(kind) / 2 for row, kind in kinds.items()})

        def net(row: int, doubt: float) -> float:
            return values[row] * gains.expected(kinds[row], 0.0, doubt) - line.each

        def lacks(rows: Sequence[int], doubt: float) -> float:
            return self.ledger.lacks_costly(spent, line.at(len(rows)), doubt > 0)

        rows, step.costly_trial, _ = _paying(list(kinds), net, line.start, lacks)
        if not rows and kinds:
            missing = lacks(list(kinds), DOUBT)
            rows, step.lacks = (list(kinds) if missing <= 0 else []), min(step.lacks, missing)
        step.extended = {row: (kinds[row], trees[row]) for row in rows}
        step.trial |= bool(rows) and not step.proposing and step.costly_trial
        return rows

    def prune(self, step: Decision, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Return the part of each row's tree that is worth scoring."""
        step.trees = trees
        if step.extended:
            before = [step.extended[row][1] if row in step.extended else tree for row, tree in enumerate(trees)]
            step.worth_it = self._pruned(step, before, math.inf), self._pruned(step, trees, math.inf)
        step.pruned = self._pruned(step, trees, max(self._left(step), 0.0))
        return step.pruned.trees

    def _pruned(self, step: Decision, trees: Sequence[DraftTree], slack: float) -> PrunedTrees:
        correction = self.costs.correction
        fixed = (correction.start - 1.0) * step.alone
        return self._pruner.prune(step.shape, trees, step.token_values, self.costs.table, fixed, correction.each, slack)

    def chain_length(self, step: Decision, most: int, stops_early: bool) -> tuple[int, list[float]]:
        """Choose the draft length of chains, up to ``most``, after the step's tree was pruned; 0 if the tree or nothing
        is better. Also return, by row, the probability of full acceptance at which another token does not pay."""
        shape, pruned, table = step.shape, step.pruned, self.costs.table
        tree = 0.0 if pruned is None or not pruned.nodes else pruned.worth - self.costs.scored(step, pruned.added)
        draft, lengths, rows = self.costs.draft_line(shape.cached), np.arange(1, most + 1), len(shape)
        scored = np.array(
            [self.costs.scored(step, shape.cost(table, [length] * rows) - step.plain) for length in lengths.tolist()]
        )
        extra, spent = draft.start + draft.each * lengths + scored, self.costs.proposed(step)
        longest = max(row.rate.longest for row in step.rows)
        allowed = lengths <= max(longest, CHEAP * step.alone / max(draft.each, 1e-9))
        each = draft.each + (float(scored[-1]) - float(scored[0])) / max(most - 1, 1)
        least = [each / rows / value for value in step.values]
        for doubt in (0.0, DOUBT):
            powers = np.array([row.rate.rate(doubt) for row in step.rows])[:, None] ** lengths
            affordable = allowed & (extra <= self.ledger.available(doubt > 0) - spent)
            tokens = powers.cumsum(1)
            values = np.array([step.values_after(dict(enumerate(column / 2))) for column in tokens.T])
            net = np.where(affordable, (values.T * tokens).sum(0) - extra, -np.inf)
            best = int(net.argmax())
            if net[best] > max(tree, 0.0):
                step.chain = int(np.flatnonzero(affordable)[-1]) + 1 if stops_early and not doubt else best + 1
                step.trial = doubt > 0
                break
        else:
            if tree or self.ledger.lacks(float(extra[0]) + spent + RESERVE, trial=True) > 0:
                return 0, []
            step.chain, step.trial, least = 1, True, [0.0] * rows
        step.passes = self.draft.cost(shape.cached, table)
        return step.chain, least

    def plain_steps(self, step: Decision, most: float) -> PlainSteps | None:
        """Return how many steps, at most ``most``, a decision to draft nothing holds: until the slack has grown by what
        it lacked, or a row promises enough. None if the next step must decide again."""
        if not (step.plain_step and step.classes and step.shape.decodes) or step.shape.undrafted_left:
            return None
        income = SHARE * step.plain
        steps = int(min(step.lacks / income, PLAIN_STEPS, most))
        if steps <= 0:
            return None
        plain = PlainSteps(step, steps)
        for kind, suffix in enumerate(SUFFIXES, 1):
            if None not in step.known and kind > min(step.classes):
                rows, _, lacks = self._proposers(step, [max(own, kind) for own in step.classes])
                if rows or lacks < steps * income:
                    plain.suffix = suffix
                    self.promises_more(plain, step.known)
                    break
        return plain

    def promises_more(self, plain: PlainSteps, known: Sequence[int | None]) -> bool:
        """Return whether a known suffix is long enough to end a decision to draft nothing, else note when it may be."""
        rows = zip(known, plain.decision.classes, strict=True)
        missing = [
            max(plain.suffix, SUFFIXES[kind]) - max(each or 0, SUFFIXES[0] - 1)
            for each, kind in rows
            if kind < len(SUFFIXES)
        ]
        plain.unchecked = min(missing, default=math.inf) - 1
        return plain.unchecked < 0

    # learning

    def learn(self, step: Decision, outcomes: Sequence[Outcome | None], passed: float, taught: float) -> None:
        """Update from a step, and book it; seconds ``passed``: pass and verifying; ``taught``: updating sources."""
        tokens = [1 if outcome is None else len(outcome.verdict.tokens) for outcome in outcomes]
        for row, got in zip(step.rows, tokens, strict=True):
            row.record(got)
        added = 0.0 if step.plain_step else self._judge(step, outcomes)
        cost, shape = self.costs.learn(step, outcomes, step.planning + taught, passed), step.shape
        left = [max(before - got, 0) for before, got in zip(shape.left, tokens, strict=True)]
        left += [max(before - 1, 0) for before in shape.undrafted_left]
        cached = shape.cached + shape.undrafted_cached
        progress = step.cost_to_go - cost_to_go(left, cached, self.costs.table, shape.closed)
        stretch = 1.0 + cost if step.plain_step else cost / step.alone
        if step.plain_step:
            self.ledger.book_plain(cost, progress)
        else:
            costly = max(step.extension / (self.costs.unit or math.inf) - added, 0.0)
            self.ledger.book(cost, progress, step.trial, costly, not step.costly_trial)
        self._stretch += RECENT * (stretch - self._stretch)
        self._tokens = MEMORY * self._tokens + (sum(tokens) + len(shape.undrafted_left)) / shape.waiting
        self._spent = MEMORY * self._spent + (1.0 if step.plain_step else stretch)

    def learn_plain(self, plain: PlainSteps) -> None:
        """Update from the steps for which a decision to draft nothing held, and book them."""
        if not (steps := plain.steps):
            return
        step, cost = plain.decision, plain.deciding / (self.costs.unit or math.inf)
        self.costs.learn_plain(step.plain, plain.passed / steps)
        self.ledger.book_plain(cost, steps * step.plain)
        for row in step.rows:
            row.record(1.0, steps)
        stretch, fade = 1.0 + cost / steps, MEMORY**steps
        self._stretch = stretch + (1.0 - RECENT) ** steps * (self._stretch - stretch)
        share = (1.0 - fade) / (1.0 - MEMORY)
        self._tokens, self._spent = fade * self._tokens + share, fade * self._spent + share

    def _judge(self, step: Decision, outcomes: Sequence[Outcome | None]) -> float:
        """Record which drafts were correct, scored or not; return what the costly source's were worth."""
        judged, total = list[tuple[int, Outcome, bool]](), 0.0
        for row, outcome in enumerate(outcomes):
            if outcome is None:
                continue
            if step.chain and (drafted := len(outcome.tree)):
                step.rows[row].rate.record(len(outcome.verdict.path), drafted)
                self.chains.record(len(outcome.verdict.path), drafted)
            if row not in step.proposing and row not in step.extended:
                continue
            drawn = step.trees[row].q is not None
            if step.chain and drawn:
                continue
            judged.append((row, outcome, drawn))
            if row in step.extended:
                kind, before = step.extended[row]
                added = self._added(step, row, outcome)
                self._costly_gains.record(kind, added)
                total += added * step.values[row]
                if row in step.proposing:
                    self._gains.record(step.proposing[row], before.matches(outcome.verdict.tokens))
        for row, right in self._pruner.learn(judged).items():
            if row in step.proposing and row not in step.extended:
                self._gains.record(step.proposing[row], right)
        return total

    def _added(self, step: Decision, row: int, outcome: Outcome) -> float:
        """Return the tokens that a costly source added to a row, minus the cost of its nodes, by what was worth scoring
        with it and without it, scored or not. A chain with ``q`` counts as far as it was accepted."""
        assert step.worth_it is not None
        right = [each.trees[row].matches(outcome.verdict.tokens) for each in step.worth_it]
        costs = [self.costs.scored(step, each.added) if each.nodes else 0.0 for each in step.worth_it]
        if step.trees[row].q is not None:
            right[1] = len(outcome.verdict.path)
        return right[1] - right[0] - (costs[1] - costs[0]) / len(step.extended) / step.values[row]


def _paying(
    rows: Sequence[int],
    net: Callable[[int, float], float],
    start: float,
    lacks: Callable[[Sequence[int], float], float],
) -> tuple[list[int], bool, float]:
    """Choose the rows whose drafts pay together: as expected, or else with doubt, as a trial.

    Args:
        net: returns the net worth of a row's draft, given the doubt; together they must be worth more than ``start``.
        lacks: returns the slack missing for some rows, given the doubt.

    Returns the rows, none if none pay or the slack does not cover them; whether it is a trial; and the slack missing.
    """
    lacking = math.inf
    for doubt in (0.0, DOUBT):
        worth = {row: net(row, doubt) for row in rows}
        chosen = [row for row in rows if worth[row] > 0]
        if chosen and sum([worth[row] for row in chosen]) > start:
            missing = lacks(chosen, doubt)
            if missing <= 0:
                return chosen, doubt > 0, 0.0
            lacking = min(lacking, missing)
    return [], True, lacking
