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
from dataclasses import dataclass, field

import numpy as np

from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.policy import ledger, node_table, time_model
from forerun.policy.calibration import MEMORY
from forerun.policy.cost_curve import CostCurve, CostTable, FloatArray
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
from forerun.policy.time_model import (
    AS_THE_CURVE_SAYS,
    CREDIBLE,
    GUESS_DOUBT,
    IN_PROPORTION,
    LOADED_DOUBT,
    NOTHING_KNOWN,
    STEP_NOISE,
    LinearCost,
    TimeModel,
)
from forerun.policy.tree_pruning import PrunedTrees, TreePruner

FIRST_ASKING = 0.0002
"""Seconds assumed for proposing a tree before the first measurement. Measured: 150 us, plus 20 us per further row."""
FIRST_DECIDING = 5e-5
"""Seconds assumed for deciding before the first measurement. Measured: 40 to 70 us."""
FURTHER_ROW = 0.13
"""What a further row adds, as a share."""
FIRST_DEEPENING = 0.3
"""Plain passes assumed for a row's draft by a costly source that was not measured before: a small model."""
DOUBT = 1.0
"""Standard errors added to the expected gain in trials."""
CHEAP = 0.25
"""Share of a plain pass that a chain may always cost if it is expected to pay, however short earlier ones were."""
RECENT = 0.1
"""Weight of the last step in recent averages."""
SLOPE_NODES = 8
"""Nodes over which the slope of the cost curve is taken."""
REST_STEPS = 16
"""Maximum steps for which a decision to skip drafting stands: what tokens are worth hardly changes meanwhile. With 0, 8
and 64 the simulated table is the same to 0.0001."""
PLAIN_STEPS_TO_MEASURE = 2
"""Plain steps needed to measure one: drafting evicts what the next pass reads from the processor's caches, so only a
plain step after another is measured."""


@dataclass(frozen=True)
class DraftPasses:
    """First guess of the cost of a pass that drafts a token of a chain, in plain passes.

    Attributes:
        reads: how many of a row's cached tokens it reads.
        weight: its cost relative to the target's pass over that many cached tokens.
        small: costs of a small model that drafts directly for requests of at most ``alone`` cached tokens; its pass
            over one token costs ``share``, and it reads at most ``window`` cached tokens.
    """

    reads: Callable[[int], int] = lambda cached: cached
    weight: float = 1.0
    small: CostTable | None = None
    share: float = 1.0
    window: int = 0
    alone: int = 0

    def are_alone(self, cached: Sequence[int]) -> bool:
        """Return whether the small model drafts directly."""
        return self.small is not None and max(cached) <= self.alone

    def cost(self, cached: Sequence[int], table: CostTable) -> float:
        """Return the cost of a pass over one token of each row; ``table``: the target's costs."""
        if self.small is not None and self.are_alone(cached):
            return self.share * self.small.cost([1] * len(cached), [min(each, self.window) for each in cached])
        return self.weight * table.cost([1] * len(cached), list(map(self.reads, cached)))

    def reading(self, tokens: int) -> float:
        """Return the cost of the small model's prefill of ``tokens`` tokens."""
        return 0.0 if self.small is None else self.share * self.small.cost([min(tokens, self.window)], [0])


@dataclass(slots=True)
class Decision:
    """The decision for a step under way, with what it cost. Costs and worths are in plain passes.

    Attributes:
        values: worth of a token, by row.
        cost_to_go: of all waiting rows.
        plain, alone: cost of the pass without drafts, and without prompts either.
        kinds: class of each row's predicted gain.
        lacks: slack missing for the cheapest action that was rejected for lack of it.
        costly: whether the costly source may propose now or soon; ``trusted``: whether its drafts surely pay;
            ``reserved``: slack that cheap sources leave to it.
        asked: by proposing row, the class of its prediction.
        deeper: by row of the costly source, the class of its prediction, and the tree before.
        worth_it: what is worth scoring without and with the costly source, under unlimited slack.
        chain: draft length of chains scored instead of trees; ``passes``: guessed cost of one of their passes.
        trial, deeper_trial: whether the drafts, or those of the costly source, are not expected to pay.
        added: worth of what the costly source added.
        planning: seconds of deciding and of the sources; ``asking``, ``deepening``, ``drafting``: of these.
    """

    shape: PassShape
    values: FloatArray
    cost_to_go: float
    plain: float
    alone: float
    kinds: list[int] = field(default_factory=list)
    lacks: float = math.inf
    costly: bool = False
    trusted: bool = False
    reserved: float = 0.0
    asked: dict[int, int] = field(default_factory=dict)
    deeper: dict[int, tuple[int, DraftTree]] = field(default_factory=dict)
    trees: Sequence[DraftTree] = ()
    worth_it: tuple[PrunedTrees, PrunedTrees] | None = None
    pruned: PrunedTrees | None = None
    chain: int = 0
    passes: float = 0.0
    trial: bool = False
    deeper_trial: bool = False
    added: float = 0.0
    planning: float = 0.0
    asking: float = 0.0
    deepening: float = 0.0
    drafting: float = 0.0

    @property
    def rests(self) -> bool:
        """Whether the step drafts nothing."""
        return not self.asked and not self.deeper and not self.chain


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
        self._stretch = self._tokens = self._spent = 1.0
        self.fit(costs)

    def fit(self, costs: CostCurve) -> None:
        """Restart all estimates from these costs."""
        self.table, self._loaded = CostTable(costs), costs.unit is not None
        self._passes = TimeModel(costs.unit or 1.0, LOADED_DOUBT if self._loaded else NOTHING_KNOWN, noise=STEP_NOISE)
        self._asking: TimeModel | None = None
        self._deepened: TimeModel | None = None
        self._drafting = {alone: TimeModel(1.0, GUESS_DOUBT, IN_PROPORTION) for alone in (False, True)}
        self._deciding: TimeModel | None = None
        self._since, self._after_plain, self._plain_measured = 0, False, False

    # what things cost

    @property
    def unit(self) -> float | None:
        """Seconds of a pass of cost 1 without drafts; None if unknown."""
        return self._passes.scale if self._loaded or self._passes.count else None

    @property
    def asking(self) -> LinearCost:
        """Cost of proposing trees, by rows."""
        if self._asking is None:
            if self.unit is None:
                return LinearCost(0.0, 0.0)
            self._asking = TimeModel(FIRST_ASKING / self.unit, GUESS_DOUBT, LinearCost(1.0 - FURTHER_ROW, FURTHER_ROW))
        return self._asking.line

    @property
    def _deepening(self) -> TimeModel:
        """Cost of a costly source's drafts, by rows; a guess until a plain pass is measured."""
        if self._deepened is not None:
            return self._deepened
        seconds = None if self._costly is None else self._costly()
        passes = FIRST_DEEPENING if seconds is None or not self.unit else seconds / self.unit
        guess = TimeModel(passes, GUESS_DOUBT, LinearCost(1.0 - FURTHER_ROW, FURTHER_ROW))
        if self.unit is not None:
            self._deepened = guess
        return guess

    @property
    def correction(self) -> LinearCost:
        """Correction of the curve for what drafts add, as shares of the cost of a pass without them."""
        return self._passes.shape if self._plain_measured else AS_THE_CURVE_SAYS

    def _node_costs(self, step: Decision) -> tuple[float, list[float]]:
        """Return the fixed cost of having nodes at all, and the cost per node of each row."""
        correction, shape = self.correction, step.shape
        nodes = len(shape)
        passes, looks = self.table.curves(shape.tokens + max(nodes, SLOPE_NODES) + 2)
        slope = (passes[shape.tokens + 1 + nodes] - passes[shape.tokens + 1]) / nodes
        jump = passes[shape.tokens + 1] - passes[shape.tokens] - slope
        look = max(float(looks[2 + SLOPE_NODES] - looks[2]) / SLOPE_NODES, 0.0)
        fixed = (correction.start - 1.0) * step.alone + correction.each * max(jump, 0.0)
        return fixed, [correction.each * (float(slope) + look * cached) for cached in shape.cached]

    def _scored(self, step: Decision, added: float) -> float:
        """Return the corrected cost of drafts that add ``added`` to the pass by the curve."""
        correction = self.correction
        return (correction.start - 1.0) * step.alone + correction.each * added

    # deciding

    def begin(self, shape: PassShape, gains: Sequence[float]) -> Decision:
        """Start a step; ``gains``: recent tokens per step of each row that may have drafts."""
        every = [*gains, *[1.0] * len(shape.undrafted_left)]
        left, cached = shape.left + shape.undrafted_left, shape.cached + shape.undrafted_cached
        values, cost_to_go = self._values.of(left, every, cached, self.table, self._stretch, shape.closed)
        plain = shape.plain(self.table)
        alone = plain if shape.decodes else shape.alone(self.table)
        step = Decision(shape, values[: len(shape)], cost_to_go, plain, alone)
        if self._costly is not None:
            self._consider_costly(step)
        return step

    def _consider_costly(self, step: Decision) -> None:
        """Decide whether the costly source may propose in this step or soon; if not, it needs no hidden states. It is
        trusted if its drafts would surely pay at the pace of plain steps, so that it is ready where a copy ends."""
        line, worth = self._deepening.line, max(float(step.values.sum()), step.plain)
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

    @property
    def plain_step_due(self) -> bool:
        """Whether to measure a plain step now: none was measured yet and drafts gain little; it is in doubt whether
        drafts pay; or another would cost less than ``SHARE`` of the time since the last."""
        gain = self.gain
        if not self._plain_measured and (not self._loaded or self._after_plain):
            return gain <= PLAIN_STEPS_TO_MEASURE
        doubt = self._passes.doubt
        if self.unit and self._since and doubt > CREDIBLE * STEP_NOISE and gain < math.exp(CREDIBLE * doubt):
            return True
        return self._since * SHARE > PLAIN_STEPS_TO_MEASURE * max(gain, 1.0)

    def ask(self, step: Decision, promises: Sequence[int | None]) -> list[int]:
        """Choose the rows that propose trees, by each row's known suffix; a short one where the source cannot tell."""
        line, (fixed, slopes), kept = self.asking, self._node_costs(step), step.reserved
        step.kinds = kinds = self.kinds(promises)
        for doubt in (0.0, DOUBT):
            worth = [
                value * self._gains.expected(kind, slope / value, doubt) - line.each
                for kind, value, slope in zip(kinds, step.values.tolist(), slopes, strict=True)
            ]
            rows = [row for row, net in enumerate(worth) if net > 0 and step.shape.budgets[row] > 0]
            pays = bool(rows) and sum(worth[row] for row in rows) > line.start + fixed
            if pays:
                lacks = self.ledger.lacks(line.at(len(rows)) + kept, doubt > 0)
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
        """Return the maximum nodes of each row's tree, and the minimum probability at which a node can pay."""
        left = self._left(step)
        _, slopes = self._node_costs(step)
        nodes = max(1, int(left / max(min(slopes), 1e-9))) if left > 0 else 1
        return [
            (min(budget, nodes), min(slope / value, 1.0))
            for budget, slope, value in zip(step.shape.budgets, slopes, step.values.tolist(), strict=True)
        ]

    def _left(self, step: Decision) -> float:
        slack = min(self.ledger.slack, self.ledger.trials) if step.trial else self.ledger.slack
        return slack - self._spent_on(step)

    def _spent_on(self, step: Decision) -> float:
        asking = self.asking.at(len(step.asked)) if step.asked else 0.0
        return asking + (self._deepening.line.at(len(step.deeper)) if step.deeper else 0.0)

    def deepen(self, step: Decision, trees: Mapping[int, DraftTree]) -> list[int]:
        """Choose the rows, among these with their trees, that a costly source drafts for."""
        line, spent = self._deepening.line, self._spent_on(step)
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
        correction = self.correction
        fixed = (correction.start - 1.0) * step.alone
        return self._pruner.prune(step.shape, trees, step.values, self.table, fixed, correction.each, slack)

    def chain_length(
        self, step: Decision, rates: Sequence[AcceptanceRate], most: int, stops_early: bool
    ) -> tuple[int, list[float]]:
        """Choose the draft length of chains, of at most ``most`` tokens, after the step's tree was pruned.

        Returns:
            The length, 0 if the tree or nothing is better; and by row, the probability of full acceptance at which a
            further token is not worth its cost.
        """
        shape, pruned = step.shape, step.pruned
        tree = 0.0 if pruned is None or not pruned.nodes else pruned.worth - self._scored(step, pruned.added)
        draft, lengths = self.draft_line(shape.cached), np.arange(1, most + 1)
        scored = np.array([self._scored(step, shape.added(self.table, length)) for length in lengths.tolist()])
        extra = draft.start + draft.each * lengths + scored
        longest = max(rate.longest for rate in rates)
        allowed = lengths <= max(longest, CHEAP * step.alone / max(draft.each, 1e-9))
        spent = self._spent_on(step)
        for doubt in (0.0, DOUBT):
            slack = self.ledger.slack if not doubt else min(self.ledger.slack, self.ledger.trials)
            powers = np.array([rate.rate(doubt) for rate in rates])[:, None] ** lengths
            affordable = allowed & (extra <= slack - spent)
            net = np.where(affordable, step.values @ powers.cumsum(1) - extra, -np.inf)
            best = int(net.argmax())
            if net[best] > max(tree, 0.0):
                step.chain = int(np.flatnonzero(affordable)[-1]) + 1 if stops_early and not doubt else best + 1
                step.trial, step.passes = doubt > 0, self.draft.cost(shape.cached, self.table)
                each = draft.each + (float(scored[-1]) - float(scored[0])) / max(most - 1, 1)
                return step.chain, (each / len(shape) / step.values).tolist()
        if not tree and self._affords_hopeless(float(extra[0]) + spent):
            step.chain, step.trial, step.passes = 1, True, self.draft.cost(shape.cached, self.table)
            return 1, [0.0] * len(shape)
        return 0, []

    def draft_line(self, cached: Sequence[int]) -> LinearCost:
        """Return the cost of drafting chains, by draft length."""
        start, each = self._drafting[self.draft.are_alone(cached)].line
        size = self.draft.cost(cached, self.table)
        return LinearCost(start * size, each * size)

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
        cost = self._learn_times(step, outcomes, step.planning + taught, passed)
        shape = step.shape
        after = [max(left - got, 0) for left, got in zip(shape.left, tokens, strict=True)]
        waiting = [max(left - 1, 0) for left in shape.undrafted_left]
        cached = shape.cached + shape.undrafted_cached
        progress = step.cost_to_go - self._values.cost_to_go(after + waiting, cached, self.table, shape.closed)
        if step.rests:
            self.ledger.rest(cost, progress)
        else:
            costly = max(step.deepening / self.unit - step.added, 0.0) if step.deeper and self.unit else 0.0
            self.ledger.book(cost, progress, step.trial, costly, not step.deeper_trial)
        self._stretch += RECENT * ((1.0 + cost if step.rests else cost / step.alone) - self._stretch)
        self._tokens = MEMORY * self._tokens + (sum(tokens) + len(waiting)) / shape.waiting
        self._spent = MEMORY * self._spent + (1.0 if step.rests else cost / step.alone)
        return tokens

    def rested(self, step: Decision, steps: int, deciding: float, passed: float) -> None:
        """Update from ``steps`` steps for which a decision to draft nothing held, and book them. ``deciding``: seconds
        of checking that it holds; ``passed``: of the passes."""
        self._passes.record(passed / steps / step.plain)
        self._plain_measured, self._after_plain, self._since = True, True, 0
        cost, kept, fade = deciding / (self.unit or 1.0), (1.0 - RECENT) ** steps, MEMORY**steps
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
            tree = step.trees[row]
            drawn = tree.q is not None
            if step.chain and drawn:
                continue
            right = accepted if drawn else tree.matches(outcome.verdict.tokens)
            self._pruner.note(row, outcome, drawn)
            if row in step.deeper:
                kind, before = step.deeper[row]
                added = self._added_by_deeper(step, row, outcome)
                self._deeper_gains.record(kind, added)
                step.added += added * float(step.values[row])
                right = before.matches(outcome.verdict.tokens)
            if row in step.asked:
                self._gains.record(step.asked[row], right)
        self._pruner.learn()

    def _added_by_deeper(self, step: Decision, row: int, outcome: Outcome) -> float:
        """Return the tokens that a costly source added to a row, minus the cost of its nodes, by what was worth scoring
        with it and without it, scored or not. A chain with ``q`` counts as far as it was accepted."""
        assert step.worth_it is not None
        right = [each.trees[row].matches(outcome.verdict.tokens) for each in step.worth_it]
        costs = [self._scored(step, each.added) if each.nodes else 0.0 for each in step.worth_it]
        if step.trees[row].q is not None:
            right[1] = len(outcome.verdict.path)
        return right[1] - right[0] - (costs[1] - costs[0]) / len(step.deeper) / float(step.values[row])

    def _learn_times(self, step: Decision, outcomes: Sequence[Outcome | None], beside: float, scoring: float) -> float:
        """Record the seconds of a step's parts. Returns its cost in plain passes; for a step without drafts, only the
        excess over a plain one."""
        nodes = sum(len(outcome.tree) for outcome in outcomes if outcome is not None)
        added = self._added_by(step, outcomes) if nodes else 0.0
        credible = None
        if step.shape.decodes and step.plain > 0:
            credible = self._record_pass(step.plain, added, scoring, not nodes)
        unit = self.unit
        if not unit:  # without a measurement, the curve is believed
            return 0.0 if step.rests else step.alone + (self._scored(step, added) if nodes else 0.0)
        if self._deciding is None:
            self._deciding = TimeModel(FIRST_DECIDING / unit, GUESS_DOUBT)
        cost = self._deciding.record(max(beside - step.asking - step.deepening - step.drafting, 0.0) / unit)
        if step.asked and self._asking is not None:
            cost += self._asking.record(step.asking / unit, len(step.asked), sized=True)
        if step.deeper:
            cost += self._deepening.record(step.deepening / unit, len(step.deeper), sized=True)
        if step.chain:
            cost += self._record_chains(step, nodes / len(step.shape), unit)
        if step.rests:
            return cost
        passed = step.alone + self._scored(step, added) if nodes else step.alone
        if credible is not None and nodes:
            passed = credible / unit
        return cost + passed

    def _added_by(self, step: Decision, outcomes: Sequence[Outcome | None]) -> float:
        """Return what the scored trees added to the pass, by the curve."""
        shape = step.shape
        sizes = [0 if outcome is None else len(outcome.tree) for outcome in outcomes]
        tokens = [pending + size for pending, size in zip(shape.pending, sizes, strict=True)]
        return shape.cost(tokens, self.table) - step.plain

    def _record_pass(self, plain: float, added: float, seconds: float, empty: bool) -> float | None:
        """Record a pass. Returns its credible time, None if it was not measured."""
        self._since += 1
        credible = None
        if not empty or self._after_plain:
            credible = plain * self._passes.record(seconds / plain, added / plain, sized=not empty)
        if empty and self._after_plain:
            self._plain_measured, self._since = True, 0
        self._after_plain = empty
        return credible

    def _record_chains(self, step: Decision, length: float, unit: float) -> float:
        """Record the time of drafting chains. Returns its credible cost. The first chains touch memory and select keys,
        so they only count if cheaper than the guess."""
        model = self._drafting[self.draft.are_alone(step.shape.cached)]
        passes = step.drafting / unit / step.passes
        if not length:
            return step.drafting / unit
        known = model.count > 0
        return model.record(passes if known else min(passes, length), length, sized=True) * step.passes


def warm_up() -> None:
    """Compile the code of decisions, or load it from the cache."""
    node_table.warm_up()
    time_model.warm_up()
    ledger.warm_up()
