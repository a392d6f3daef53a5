"""What the parts of a step cost, in plain passes: learned from their seconds, and from the cost curve before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from forerun.core.verify import Outcome
from forerun.policy.cost_curve import CostCurve, CostTable
from forerun.policy.decision import Decision, DraftPasses
from forerun.policy.ledger import SHARE
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

FIRST_ASKING = 0.0002
"""Seconds assumed for proposing a tree before the first measurement. Measured: 150 us, plus 20 us per further row."""
FIRST_DECIDING = 5e-5
"""Seconds assumed for deciding before the first measurement. Measured: 40 to 70 us."""
FURTHER_ROW = 0.13
"""What a further row adds, as a share."""
FIRST_DEEPENING = 0.3
"""Plain passes assumed for a row's draft by a costly source that was not measured before: a small model."""
SLOPE_NODES = 8
"""Nodes over which the slope of the cost curve is taken."""
PLAIN_STEPS_TO_MEASURE = 2
"""Plain steps needed to measure one: drafting evicts what the next pass reads from the processor's caches, so only a
plain step after another is measured."""


class StepCosts:
    """Costs of passes, of proposing, deciding and drafting; ``costly``: returns the measured seconds of a costly
    source's draft for one row, None if unknown."""

    def __init__(self, costs: CostCurve, draft: DraftPasses, costly: Callable[[], float | None] | None) -> None:
        self.table, self.draft, self._costly = CostTable(costs), draft, costly
        self._loaded = costs.unit is not None
        self._passes = TimeModel(costs.unit or 1.0, LOADED_DOUBT if self._loaded else NOTHING_KNOWN, noise=STEP_NOISE)
        self._asking: TimeModel | None = None
        self._deepened: TimeModel | None = None
        self._drafting = {alone: TimeModel(1.0, GUESS_DOUBT, IN_PROPORTION) for alone in (False, True)}
        self._deciding: TimeModel | None = None
        self._since, self._after_plain, self._plain_measured = 0, False, False

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
    def deepening(self) -> LinearCost:
        """Cost of a costly source's drafts, by rows."""
        return self._deepening.line

    @property
    def _deepening(self) -> TimeModel:
        """A guess until a plain pass is measured."""
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

    def nodes(self, step: Decision) -> tuple[float, list[float]]:
        """Return the fixed cost of having nodes at all, and the cost per node of each row."""
        correction, shape = self.correction, step.shape
        nodes = len(shape)
        passes, looks = self.table.curves(shape.tokens + max(nodes, SLOPE_NODES) + 2)
        slope = (passes[shape.tokens + 1 + nodes] - passes[shape.tokens + 1]) / nodes
        jump = passes[shape.tokens + 1] - passes[shape.tokens] - slope
        look = max(float(looks[2 + SLOPE_NODES] - looks[2]) / SLOPE_NODES, 0.0)
        fixed = (correction.start - 1.0) * step.alone + correction.each * max(jump, 0.0)
        return fixed, [correction.each * (float(slope) + look * cached) for cached in shape.cached]

    def scored(self, step: Decision, added: float) -> float:
        """Return the corrected cost of drafts that add ``added`` to the pass by the curve."""
        correction = self.correction
        return (correction.start - 1.0) * step.alone + correction.each * added

    def draft_line(self, cached: Sequence[int]) -> LinearCost:
        """Return the cost of drafting chains, by draft length."""
        start, each = self._drafting[self.draft.are_alone(cached)].line
        size = self.draft.cost(cached, self.table)
        return LinearCost(start * size, each * size)

    def proposed(self, step: Decision) -> float:
        """Return the cost of the step's proposals."""
        asking = self.asking.at(len(step.asked)) if step.asked else 0.0
        return asking + (self.deepening.at(len(step.deeper)) if step.deeper else 0.0)

    def plain_step_due(self, gain: float) -> bool:
        """Whether to measure a plain step now: none was measured yet and drafts gain little; it is in doubt whether
        drafts pay; or another would cost less than ``SHARE`` of the time since the last. ``gain``: recent tokens in the
        time of a plain step."""
        if not self._plain_measured and (not self._loaded or self._after_plain):
            return gain <= PLAIN_STEPS_TO_MEASURE
        doubt = self._passes.doubt
        if self.unit and self._since and doubt > CREDIBLE * STEP_NOISE and gain < math.exp(CREDIBLE * doubt):
            return True
        return self._since * SHARE > PLAIN_STEPS_TO_MEASURE * max(gain, 1.0)

    def learn(self, step: Decision, outcomes: Sequence[Outcome | None], beside: float, scoring: float) -> float:
        """Record the seconds of a step's parts. Returns its cost in plain passes; for a step without drafts, only the
        excess over a plain one."""
        nodes = sum(len(outcome.tree) for outcome in outcomes if outcome is not None)
        added = self._added(step, outcomes) if nodes else 0.0
        credible = None
        if step.shape.decodes and step.plain > 0:
            credible = self._record_pass(step.plain, added, scoring, not nodes)
        unit = self.unit
        if not unit:  # without a measurement, the curve is believed
            return 0.0 if step.rests else step.alone + (self.scored(step, added) if nodes else 0.0)
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
        passed = step.alone + self.scored(step, added) if nodes else step.alone
        if credible is not None and nodes:
            passed = credible / unit
        return cost + passed

    def _added(self, step: Decision, outcomes: Sequence[Outcome | None]) -> float:
        """Return what the scored trees added to the pass, by the curve."""
        shape = step.shape
        sizes = [0 if outcome is None else len(outcome.tree) for outcome in outcomes]
        tokens = [pending + size for pending, size in zip(shape.pending, sizes, strict=True)]
        return shape.cost(tokens, self.table) - step.plain

    def rested(self, step: Decision, steps: int, passed: float) -> None:
        """Record ``steps`` plain passes of ``passed`` seconds in all."""
        self._passes.record(passed / steps / step.plain)
        self._plain_measured, self._after_plain, self._since = True, True, 0

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
