"""What the parts of a step take on this machine: passes, asking for drafts, and drafting chains.

A machine that others use may be twice as slow from one step to the next, and drafts would seem to cost what the machine
lost. So one estimate of its speed follows all passes, and everything else is relative to it: what drafts add to a pass,
and the time of drafting, which is counted in passes of that moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.policy.cost_curve import CostTable, FloatArray
from forerun.policy.exploration_budget import EXPLORATION_SHARE

FIRST_PROPOSAL_SECONDS = 0.0003
"""What asking for a tree is taken to take before any was asked for: so much on two old cores. It only matters where a
model's pass takes hardly longer: there the first trees of a text would cost all that may be lost."""
FIRST_DEEPENING = 0.3
"""What asking a costly source is taken to take before it was asked, in passes of cost 1: a head's, or a
small model's."""
PLAIN_STEPS_TO_MEASURE = 2
"""Plain steps that it takes to measure one. Drafting displaces what the next pass reads from the processor's caches, so
only a plain step that follows another one is measured."""
STEP_NOISE, DRAFTING_NOISE, SPEED_DRIFT = 0.05, 0.2, 0.005
"""Standard deviations, as shares: of a pass's time on a quiet machine, of the time of drafting, which depends on the
text, too, and of the machine's speed from step to step."""
LOADED_DOUBT, START_DOUBT, EACH_DOUBT = 0.25, 0.2, 0.3
"""Standard deviations before any step: of the time found at loading, and of what the curve says of drafts."""
GUESS_DOUBT, NOTHING_KNOWN = 0.5, 10.0
"""The same, in logarithms: of a guess, and of nothing, from microseconds to hours."""
DRAFT_MEMORY = 50.0
"""Steps after which what was seen of drafts has faded, and the curve is believed again. So drafts that seemed dear are
tried once more."""
LEAST_START, MOST_EACH = 0.5, 8.0
"""Limits of ``start`` and ``each`` that noise may not pass, as shares of what they were taken to be."""
CREDIBLE = 2.0
"""Standard deviations up to which a measurement counts as it is."""


class LinearCost(NamedTuple):
    """A cost by size: ``start``, and ``each`` for every unit of size."""

    start: float
    each: float

    def at(self, size: float) -> float:
        """The cost of this size."""
        return self.start + self.each * size


@dataclass(frozen=True, slots=True)
class SmallModel:
    """What the passes of a small model take that looks back on a text's first and last tokens.

    Attributes:
        table: costs of its passes.
        share: what its pass over one token takes; the target's takes 1.
        window: the most tokens of a text that it reads.
    """

    table: CostTable
    share: float
    window: int

    def drafting(self, cached: Sequence[int]) -> float:
        """Cost of a pass over one token of each row, by the rows' cached tokens."""
        return self.share * self.table.cost([1] * len(cached), [min(each, self.window) for each in cached])

    def reading(self, tokens: int) -> float:
        """Cost of reading a prompt of so many tokens."""
        return self.share * self.table.cost([min(tokens, self.window)], [0])


AS_THE_CURVE_SAYS, IN_PROPORTION = LinearCost(1.0, 1.0), LinearCost(0.0, 1.0)


class TimeModel:
    """How long something takes by its size, followed through noise: ``scale * (start + each * size)``.

    The three are followed by a Kalman filter in logarithms (recursive least squares). The scale drifts; ``start`` and
    ``each`` return to what they were taken to be. A surprise beyond ``CREDIBLE`` deviations is cut off, and the rest of
    it is doubt about the scale: a single slow measurement changes little, and a second one shows that it was no
    accident.

    Args:
        scale: first guess.
        doubt: standard deviation of its logarithm.
        shape: ``start`` and ``each``, as they are taken to be.
        noise: standard deviation of a measurement, as a share.
    """

    def __init__(
        self, scale: float, doubt: float, shape: LinearCost = AS_THE_CURVE_SAYS, noise: float = DRAFTING_NOISE
    ) -> None:
        self.count = 0
        """Measurements so far."""
        self.scale = scale
        """The time of what has no size."""
        self.shape = shape
        """``start`` and ``each``, as shares of the scale."""
        self._prior = np.array([noise, shape.start, shape.each])
        self._state = np.array([math.log(scale), shape.start, shape.each])
        self._covariance = np.diag(np.square([doubt, START_DOUBT, EACH_DOUBT]))
        self._scratch = np.zeros(3)

    def record(self, time: float, size: float = 0.0, sized: bool = False) -> None:
        """It took ``time``; ``sized``: whether that depends on a size. Else it is the scale itself."""
        if time > 0:
            _follow(self._state, self._covariance, self._scratch, self._prior, float(size), sized, math.log(time))
            log_scale, start, each = self._state.tolist()
            self.scale, self.shape = math.exp(log_scale), LinearCost(start, each)
            self.count += 1

    @property
    def doubt(self) -> float:
        """Standard deviation of the scale, as a share."""
        return math.sqrt(float(self._covariance[0, 0]))

    @property
    def line(self) -> LinearCost:
        """The time by size."""
        return LinearCost(self.scale * self.shape.start, self.scale * self.shape.each)


@compiled
def _follow(
    state: FloatArray,
    doubt: FloatArray,
    shared: FloatArray,
    prior: FloatArray,
    size: float,
    sized: bool,
    measured: float,
) -> None:
    """One step of the filter.

    Args:
        state: the scale's logarithm, ``start``, ``each``.
        doubt: their covariance.
        shared: scratch memory, ``[3]``.
        prior: the noise, and what ``start`` and ``each`` return to.
        size, sized: of ``TimeModel.record``.
        measured: the logarithm of the time.
    """
    factor = max(state[1] + state[2] * size, 1e-3) if sized else 1.0
    slope = (1.0, sized / factor, sized * size / factor)
    variance = prior[0] ** 2
    for i in range(3):
        shared[i] = 0.0
        for j in range(3):
            shared[i] += doubt[i, j] * slope[j]
    for i in range(3):
        variance += slope[i] * shared[i]
    surprise = measured - state[0] - math.log(factor)
    limit = CREDIBLE * math.sqrt(variance)
    credible = min(max(surprise, -limit), limit)
    for i in range(3):
        state[i] += shared[i] * credible / variance
        for j in range(3):
            doubt[i, j] -= shared[i] * shared[j] / variance
    doubt[0, 0] += SPEED_DRIFT**2 + (surprise - credible) ** 2
    kept = 1.0 - 1.0 / DRAFT_MEMORY
    for i, first in ((1, START_DOUBT), (2, EACH_DOUBT)):
        state[i] = prior[i] + kept * (state[i] - prior[i])
        for j in range(3):
            doubt[i, j] *= kept
            doubt[j, i] *= kept
        doubt[i, i] += first**2 * (1.0 - kept**2)
    state[1], state[2] = max(state[1], LEAST_START * prior[1]), min(max(state[2], 0.0), MOST_EACH * prior[2])


class Prices:
    """What passes, asking and chains cost now.

    All but passes are counted in the unit of the cost curve, by what it takes when they are measured. A pass whose
    drafts add x to a plain cost of 1 takes ``unit * (start + each * x)`` seconds. The curve was measured alone and with
    short caches. In use, drafting displaces what a pass reads from the processor's caches, which ``start`` shows. And
    where keys come over a slow link, drafts add hardly anything to a pass, which ``each`` shows.

    Args:
        loaded: seconds of a pass of cost 1, if they were measured before any step.
    """

    def __init__(self, loaded: float | None = None) -> None:
        self._loaded = loaded is not None
        doubt = LOADED_DOUBT if self._loaded else NOTHING_KNOWN
        self._passes = TimeModel(loaded or 1.0, doubt, noise=STEP_NOISE)
        self._asking: TimeModel | None = None
        self._deepening = TimeModel(FIRST_DEEPENING, GUESS_DOUBT)
        self._chains = {alone: TimeModel(1.0, GUESS_DOUBT, IN_PROPORTION) for alone in (False, True)}
        self._preparing = TimeModel(1.0, NOTHING_KNOWN)
        self._since = 0
        self._after_plain = self._plain_measured = False

    def record_step(self, plain: float, added: float, seconds: float, empty: bool) -> None:
        """Learn from a step.

        Args:
            plain: cost of its pass by the curve, without drafts.
            added: what they add to it.
            seconds: from the end of drafting to the end of the pass.
            empty: whether nothing was drafted.
        """
        self._since += 1
        if plain > 0 and (not empty or self._after_plain):
            self._passes.record(seconds / plain, added / plain, sized=not empty)
        if empty and self._after_plain:
            self._plain_measured, self._since = True, 0
        self._after_plain = empty

    def record_asking(self, rows: int, seconds: float) -> None:
        """Asking for trees of so many rows, and learning from them, took ``seconds``."""
        if rows and (unit := self.unit):
            if self._asking is None:
                self._asking = TimeModel(FIRST_PROPOSAL_SECONDS / unit, GUESS_DOUBT)
            self._asking.record(seconds / unit / rows)

    def record_deepening(self, rows: int, seconds: float) -> None:
        """Asking a costly source to add to the trees of so many rows took ``seconds``."""
        if rows and (unit := self.unit):
            self._deepening.record(seconds / unit / rows)

    def record_chains(self, length: float, pass_cost: float, seconds: float, alone: bool = False) -> None:
        """Drafting chains of a mean ``length`` took ``seconds``.

        The first chains touch memory and choose keys. So they only count if they took less than the guess.

        Args:
            length: mean number of tokens.
            pass_cost: the guess for one of their passes.
            seconds: that drafting took.
            alone: whether a small model drafted them for the target itself.
        """
        if length and (unit := self.unit):
            passes = seconds / unit / pass_cost
            known = self.chains_known(alone)
            self._chains[alone].record(passes if known else min(passes, length), length, sized=True)

    def record_preparing(self, guess: float, seconds: float) -> None:
        """Reading a prompt for chains took ``seconds``; ``guess`` is what it was first taken to cost."""
        if guess and (unit := self.unit):
            self._preparing.record(seconds / unit / guess)

    @property
    def plain_measured(self) -> bool:
        """Whether a plain step was measured, so that what drafts add to it can be."""
        return self._plain_measured

    @property
    def plain_known(self) -> bool:
        """Whether it is known what plain steps take."""
        return self._plain_measured or self._loaded

    def chains_known(self, alone: bool = False) -> bool:
        """Whether chains were measured. Until then their cost is a guess, and may be far too high."""
        return self._chains[alone].count > 0

    @property
    def correction(self) -> LinearCost:
        """Of the curve, for passes with drafts, by what these add; both as shares of what a pass without them costs."""
        return self._passes.shape if self._plain_measured else AS_THE_CURVE_SAYS

    @property
    def unit(self) -> float | None:
        """Seconds of a pass of cost 1 without drafts; None where nothing is known."""
        return self._passes.scale if self._loaded or self._passes.count else None

    @property
    def asking(self) -> float:
        """Cost of asking for a row's tree; a guess until steps have shown it, 0 if no pass was measured either."""
        if self._asking is not None:
            return self._asking.scale
        unit = self.unit
        return FIRST_PROPOSAL_SECONDS / unit if unit else 0.0

    @property
    def deepening(self) -> float:
        """Cost of asking a costly source to add to a row's tree."""
        return self._deepening.scale

    @property
    def preparing(self) -> float:
        """Cost of reading prompts for chains, as a multiple of the first guess."""
        return self._preparing.scale

    def chain(self, pass_cost: float, alone: bool = False) -> LinearCost:
        """Cost of drafting chains by their length; see ``record_chains``.

        Their first pass takes longer than the others: the sparse cache takes in what was committed, and the processor's
        caches are cold.
        """
        start, each = self._chains[alone].line
        return LinearCost(start * pass_cost, each * pass_cost)

    def plain_step_due(self, gain: float) -> bool:
        """Whether to measure a plain step now, though drafts give ``gain`` times as many tokens a second.

        It is due if none was measured yet, if it is in doubt whether drafts pay, or if the last one was so long ago
        that another costs less than ``EXPLORATION_SHARE`` of the time since then. Where loading has shown what such a
        step takes, only one that follows another is due.
        """
        if not self._plain_measured and (not self._loaded or self._after_plain):
            return gain <= PLAIN_STEPS_TO_MEASURE
        doubt = self._passes.doubt
        if self._since and doubt > CREDIBLE * STEP_NOISE and gain < math.exp(CREDIBLE * doubt):
            return True
        return self._since * EXPLORATION_SHARE > PLAIN_STEPS_TO_MEASURE * max(gain, 1.0)


def warm_up() -> None:
    """Compile what following runs, or load it from an earlier process."""
    TimeModel(1.0, 1.0).record(1.0)
