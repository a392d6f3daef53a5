"""What the parts of a step cost, in plain passes: learned from their seconds, and from the cost curve before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.core.verify import Outcome
from forerun.policy.cost_curve import CostCurve, CostTable
from forerun.policy.decision import Decision
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

FIRST_PROPOSAL = 0.0002
"""First guess of proposing a tree, in seconds. Measured: 150 us, plus 20 us per further row."""
FIRST_DECIDING = 5e-5
"""First guess of deciding, in seconds. Measured: 40 to 70 us."""
FIRST_EXTENSION = 0.3
"""First guess of a costly source's draft for a row that was not measured at load, in plain passes: a small model's."""
FURTHER_ROW = 0.13
"""What a further row adds, as a share."""
SLOPE_NODES = 8
"""Nodes over which the slope of the cost curve is taken."""
PLAIN_STEPS_TO_MEASURE = 2
"""Plain steps needed to measure one: drafting evicts the next pass's data from the processor's caches."""


@dataclass(frozen=True)
class DraftPasses:
    """First guess of the cost of a pass that drafts a token of a chain, in plain passes.

    Attributes:
        reads: how many of a row's cached tokens it reads.
        weight: its cost relative to the target's pass over that many cached tokens.
        small: costs of a small model that drafts directly for requests of at most ``alone`` cached tokens; its pass
            over one token costs ``share``, and it reads at most ``window`` of them.
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
            return self.share * self.small.decoding(len(cached), sum(min(each, self.window) for each in cached))
        return self.weight * table.decoding(len(cached), sum(map(self.reads, cached)))

    def prefill(self, tokens: int) -> float:
        """Return the cost of the small model's prefill of ``tokens`` tokens."""
        return 0.0 if self.small is None else self.share * self.small.cost([min(tokens, self.window)], [0])


class StepCosts:
    """Costs of passes, of proposing, deciding and drafting; see ``Choice`` for the arguments."""

    def __init__(self, costs: CostCurve, draft: DraftPasses, costly: Callable[[], float | None] | None) -> None:
        self.table, self.draft, self._costly = CostTable(costs), draft, costly
        self._loaded = costs.unit is not None
        self._passes = TimeModel(costs.unit or 1.0, LOADED_DOUBT if self._loaded else NOTHING_KNOWN, noise=STEP_NOISE)
        self._parts: dict[str, TimeModel] = {}
        self._drafting = {alone: TimeModel(1.0, GUESS_DOUBT, IN_PROPORTION) for alone in (False, True)}
        self._since, self._after_plain, self._plain_measured = 0, False, False

    @property
    def unit(self) -> float | None:
        """Seconds of a pass of cost 1 without drafts; None if unknown."""
        return self._passes.scale if self._loaded or self._passes.count else None

    def _part(self, name: str, seconds: float | None, passes: float = 1e-9) -> TimeModel:
        """Return a part's cost by rows; first guess: ``seconds``, or ``passes`` while these or the unit are unknown."""
        if name in self._parts:
            return self._parts[name]
        unit = self.unit
        guess = seconds / unit if seconds and unit else passes
        model = TimeModel(guess, GUESS_DOUBT, LinearCost(1.0 - FURTHER_ROW, FURTHER_ROW))
        if unit:
            self._parts[name] = model
        return model

    @property
    def proposals(self) -> TimeModel:
        """Cost of proposing trees, by rows."""
        return self._part("proposals", FIRST_PROPOSAL)

    @property
    def extensions(self) -> TimeModel:
        """Cost of a costly source's drafts, by rows."""
        return self._part("extensions", self._costly() if self._costly else None, FIRST_EXTENSION)

    @property
    def correction(self) -> LinearCost:
        """Correction of what drafts add by the curve, as shares of a pass without them."""
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
        return float(fixed), [correction.each * (float(slope) + look * cached) for cached in shape.cached]

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
        cost = self.proposals.line.at(len(step.proposing)) if step.proposing else 0.0
        return cost + (self.extensions.line.at(len(step.extended)) if step.extended else 0.0)

    def plain_step_due(self, gain: float) -> bool:
        """Return whether to measure a plain step now: if none was and drafts gain little, if it is in doubt whether
        they pay, or if it costs less than ``SHARE`` of the time since the last. ``gain``: recent tokens in the time of
        a plain step."""
        if not self._plain_measured and (not self._loaded or self._after_plain):
            return gain <= PLAIN_STEPS_TO_MEASURE
        doubt = self._passes.doubt
        if self.unit and self._since and doubt > CREDIBLE * STEP_NOISE and gain < math.exp(CREDIBLE * doubt):
            return True
        return self._since * SHARE > PLAIN_STEPS_TO_MEASURE * max(gain, 1.0)

    def learn(self, step: Decision, outcomes: Sequence[Outcome | None], beside: float, scoring: float) -> float:
        """Record the seconds of a step's pass (``scoring``) and of all else (``beside``); return its cost in plain
        passes, or without drafts its excess over a plain step."""
        sizes = [0 if outcome is None else len(outcome.tree) for outcome in outcomes]
        added = step.shape.cost(self.table, sizes) - step.plain if any(sizes) else 0.0
        passed = 0.0 if step.plain_step else step.alone + (self.scored(step, added) if any(sizes) else 0.0)
        credible = self._record_pass(step, added, scoring, not any(sizes)) if step.shape.decodes else None
        unit = self.unit
        if not unit:  # without a measurement, the curve is believed
            return passed
        deciding = max(beside - step.proposal - step.extension - step.drafting, 0.0)
        cost = self._part("deciding", FIRST_DECIDING).record(deciding / unit)
        if step.proposing:
            cost += self.proposals.record(step.proposal / unit, len(step.proposing), sized=True)
        if step.extended:
            cost += self.extensions.record(step.extension / unit, len(step.extended), sized=True)
        if step.chain:
            cost += self._record_chains(step, sum(sizes) / len(step.shape), unit)
        return cost + (passed if credible is None or not any(sizes) else credible / unit)

    def learn_plain(self, plain: float, seconds: float) -> None:
        """Record a plain pass after another one: its cost by the curve, and its seconds."""
        self._passes.record(seconds / plain)
        self._plain_measured, self._after_plain, self._since = True, True, 0

    def _record_pass(self, step: Decision, added: float, seconds: float, empty: bool) -> float | None:
        """Record a pass; return its credible time, or None if it was not measured."""
        self._since += 1
        if empty and not self._after_plain:
            self._after_plain = True
            return None
        credible = step.plain * self._passes.record(seconds / step.plain, added / step.plain, sized=not empty)
        if empty:
            self._plain_measured, self._since = True, 0
        self._after_plain = empty
        return credible

    def _record_chains(self, step: Decision, length: float, unit: float) -> float:
        """Record the time of drafting chains, and return its credible cost. The first chains touch memory and select
        keys, so they only count if cheaper than the guess."""
        model = self._drafting[self.draft.are_alone(step.shape.cached)]
        passes = step.drafting / unit / step.passes
        if not length:
            return step.drafting / unit
        return model.record(passes if model.count else min(passes, length), length, sized=True) * step.passes
