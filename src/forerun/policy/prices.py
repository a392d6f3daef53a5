"""What the parts of a step take on this machine: the cost curve scaled to recent steps.

A machine that others use may be twice as slow from one step to the next, and drafts would seem to cost what the machine
lost. So one estimate of its speed follows all steps, and everything else is relative to it: what drafts add to a pass,
and the time of proposing them, which is counted in passes of that moment.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.policy.cost_curve import CostCurve, FloatArray
from forerun.policy.exploration_budget import EXPLORATION_SHARE, EXPLORATION_START

RECALL = 15
"""Measurements that are remembered. Their median ignores single slow ones, and follows a machine that slows down."""
UNDISTURBED_QUANTILE = 0.25
"""The share of proposals that are taken to be undisturbed: this quantile of times is the time of one alone."""
FIRST_PROPOSAL_SECONDS = 0.0003
"""What proposing a tree is taken to take before any was: so much on two old cores. It only matters where a model's pass
takes hardly longer: there the first trees of a text would cost all that may be lost."""
APART = 0.1
"""Sizes that differ by a smaller share say nothing of how times grow with them; contexts make them differ a little."""
PLAIN_STEPS_TO_MEASURE = 2
"""Plain steps that it takes to measure one. Drafting displaces what the next pass reads from the processor's caches, so
only a plain step that follows another one is measured."""
STEP_NOISE, SPEED_DRIFT = 0.05, 0.005
"""Standard deviations, as shares: of a step's time on a quiet machine, and of the machine's speed from step to step."""
LOADED_DOUBT, START_DOUBT, EACH_DOUBT = 0.25, 0.2, 0.3
"""Standard deviations before any step: of the time found at loading, and of what the curve says of drafts."""
NOTHING_KNOWN = 10.0
"""The same where loading found no time, in logarithms of seconds: from microseconds to hours."""
DRAFT_MEMORY = 50.0
"""Steps after which what was seen of drafts has faded, and the curve is believed again. So drafts that seemed dear are
tried once more."""
LEAST_START, MOST_EACH = 0.5, 2.0
"""Limits of ``start`` and ``each`` that noise may not pass: a factor of two on what the curve says."""
CREDIBLE = 2.0
"""Standard deviations up to which a measurement counts as it is."""


class LinearCost(NamedTuple):
    """A cost by size: ``start``, and ``each`` for every unit of size."""

    start: float
    each: float

    def at(self, size: float) -> float:
        """The cost of this size."""
        return self.start + self.each * size


AS_THE_CURVE_SAYS = LinearCost(1.0, 1.0)


class PassModel:
    """What passes take now: the cost curve's unit in seconds, and a correction of the curve for passes with drafts.

    The curve was measured alone and with short caches. In use, drafting displaces what a pass reads from the
    processor's caches, so a pass with drafts has an overhead, ``start``. And where keys come over a slow link, drafts
    add hardly anything to a pass, which ``each`` shows.

    A pass of plain cost 1 whose drafts add x takes ``unit * (start + each * x)`` seconds; without drafts ``unit``. The
    three are followed by a Kalman filter in logarithms (recursive least squares). The unit drifts. A surprise beyond
    ``CREDIBLE`` deviations is cut off, and the rest of it is doubt about the unit: a single slow step changes little,
    and a second one shows that the machine is slower now, for all passes alike. What drafts add returns to what the
    curve says.

    Args:
        loaded: seconds of a pass of cost 1, if that was measured before any step.
    """

    def __init__(self, loaded: float | None = None) -> None:
        self.known = loaded is not None
        self._state = np.array([math.log(loaded) if loaded else 0.0, 1.0, 1.0])
        self._scratch = np.zeros(3)
        self._covariance = np.diag(np.square([LOADED_DOUBT if loaded else NOTHING_KNOWN, START_DOUBT, EACH_DOUBT]))

    def record(self, plain: float, added: float, seconds: float, drafted: bool) -> None:
        """A pass took ``seconds``; by the curve it costs ``plain`` without its drafts, which add ``added``."""
        if plain > 0 and seconds > 0:
            _follow(self._state, self._covariance, self._scratch, added / plain, drafted, math.log(seconds / plain))
            self.known = True

    @property
    def unit(self) -> float | None:
        """Seconds of a pass of cost 1 without drafts; None where nothing is known."""
        return math.exp(self._state[0]) if self.known else None

    @property
    def doubt(self) -> float:
        """Standard deviation of the unit, as a share."""
        return math.sqrt(float(self._covariance[0, 0]))

    @property
    def correction(self) -> LinearCost:
        """Of the curve, for passes with drafts, by what these add; both as shares of what a pass without them costs."""
        return LinearCost(float(self._state[1]), float(self._state[2]))


@compiled
def _follow(
    state: FloatArray, doubt: FloatArray, shared: FloatArray, added: float, drafted: bool, measured: float
) -> None:
    """One step of the filter.

    Args:
        state: the unit's logarithm, ``start``, ``each``.
        doubt: their covariance.
        shared: scratch memory, ``[3]``.
        added: what drafts add to the pass, by the curve.
        drafted: whether there are any.
        measured: the logarithm of the pass's seconds by its plain cost.
    """
    factor = state[1] + state[2] * added if drafted else 1.0
    slope = (1.0, drafted / factor, drafted * added / factor)
    variance = STEP_NOISE**2
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
    for i, prior in ((1, START_DOUBT), (2, EACH_DOUBT)):
        state[i] = 1.0 + kept * (state[i] - 1.0)
        for j in range(3):
            doubt[i, j] *= kept
            doubt[j, i] *= kept
        doubt[i, i] += prior**2 * (1.0 - kept**2)
    state[1], state[2] = max(state[1], LEAST_START), min(max(state[2], 0.0), MOST_EACH)


class ProportionalTimer:
    """Times in proportion to size: a quantile of recent measurements.

    Args:
        guess: the time by size until there are some. Then it counts as one more.
        quantile: which of the measured times counts.
        enough: measurements that are needed where there is no guess. The first is often slow, because caches are cold.
    """

    def __init__(self, guess: float | None = None, quantile: float = 0.5, enough: int = 2) -> None:
        self._guess, self._quantile, self._enough = guess, quantile, enough
        self._each: deque[float] = deque(maxlen=RECALL)

    def record(self, size: float, time: float) -> None:
        """One of this size took ``time``."""
        if size > 0 and time > 0:
            self._each.append(time / size)

    @property
    def count(self) -> int:
        """How many were measured, of the last ``RECALL``."""
        return len(self._each)

    @property
    def each(self) -> float | None:
        """The time by size; None where nothing is known."""
        times = sorted(self._each)
        if self._guess is not None and self.count < RECALL:
            times = sorted([*times, self._guess])
        elif self.count < self._enough:
            return None
        return times[int((len(times) - 1) * self._quantile)]


class LinearTimer:
    """Times by size: a line through recent measurements.

    Chains that a model drafts are an example. Their first pass takes longer than the others: the sparse cache takes in
    what was committed, and the processor's caches are cold. So the time grows with the length, but not in proportion to
    it. The slope is the median of the slopes between any two, which single slow ones do not change.

    Args:
        guess: the time by size until some were measured.
    """

    def __init__(self, guess: float | None = None) -> None:
        self._mean = ProportionalTimer(guess)
        self._points = TheilSen(RECALL)
        self._line: LinearCost | None = None

    def record(self, size: float, time: float) -> None:
        """One of this size took ``time``."""
        self._mean.record(size, time)
        if size > 0 and time > 0:
            self._points.add(size, time)
            self._line = None

    @property
    def measured(self) -> bool:
        """Whether there is a measurement."""
        return self._mean.count > 0

    @property
    def line(self) -> LinearCost | None:
        """None where nothing is known."""
        mean = self._mean.each
        if self._points.count < 2 or mean is None:  # one alone may have been disturbed
            return None if mean is None else LinearCost(0.0, mean)
        if self._line is None:
            slope = self._points.slope()
            each = mean if slope is None or slope <= 0 else min(slope, mean)
            self._line = LinearCost(max(self._points.start(each), 0.0), each)
        return self._line

    @property
    def curve(self) -> CostCurve | None:
        """Costs of passes by their tokens, rounded; None where it is not known how their time grows."""
        slope = self._points.slope()
        if slope is None or slope <= 0 or (line := self.line) is None:
            return None
        return CostCurve.linear((line.start + line.each) / line.each).rounded()


class StepTimer:
    """Times of plain steps, of steps with drafts, of proposing trees and of drafting chains.

    All but passes are counted in the unit of the cost curve, by what it takes when they are measured.

    Args:
        loaded: seconds of a pass of cost 1, if they were measured before any step.
    """

    def __init__(self, loaded: float | None = None) -> None:
        self._loaded = loaded is not None
        self._passes = PassModel(loaded)
        self._trees = ProportionalTimer(quantile=UNDISTURBED_QUANTILE)
        self._chains = LinearTimer(guess=1.0)
        self._preparing = ProportionalTimer(enough=1)  # reading a prompt for chains, by its tokens
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
        if not empty or self._after_plain:
            self._passes.record(plain, added, seconds, not empty)
        if empty and self._after_plain:
            self._plain_measured, self._since = True, 0
        self._after_plain = empty

    def record_trees(self, rows: int, seconds: float) -> None:
        """Proposing trees for so many rows, and learning from them, took ``seconds``."""
        if self.unit:
            self._trees.record(rows, seconds / self.unit)

    def record_chains(self, size: float, seconds: float) -> None:
        """Drafting chains took ``seconds``; ``size`` is what the curve says of their passes."""
        if self.unit:
            self._chains.record(size, seconds / self.unit)

    def record_preparing(self, tokens: int, seconds: float) -> None:
        """Reading a prompt of so many tokens for chains took ``seconds``."""
        if self.unit:
            self._preparing.record(tokens, seconds / self.unit)

    @property
    def plain_measured(self) -> bool:
        """Whether a plain step was measured, so that what drafts add to it can be."""
        return self._plain_measured

    @property
    def plain_known(self) -> bool:
        """Whether it is known what plain steps take."""
        return self._plain_measured or self._loaded

    @property
    def chains_known(self) -> bool:
        """Whether chains were measured. Until then their cost is a guess, and may be far too high."""
        return self._chains.measured

    @property
    def correction(self) -> LinearCost:
        """The correction of the curve for passes with drafts; see ``PassModel``."""
        return self._passes.correction if self._plain_measured else AS_THE_CURVE_SAYS

    @property
    def unit(self) -> float | None:
        """Seconds of a pass of cost 1 without drafts, as far as it is known."""
        return self._passes.unit

    @property
    def tree_cost(self) -> float:
        """Cost of proposing a row's tree; a guess until steps have shown it, 0 if no pass was measured either."""
        unit = self.unit
        return self._trees.each or (FIRST_PROPOSAL_SECONDS / unit if unit else 0.0)

    @property
    def chain_cost(self) -> LinearCost:
        """Cost of drafting chains; in proportion to their size until it is known."""
        return self._chains.line or LinearCost(0.0, 1.0)

    @property
    def preparing_cost(self) -> float:
        """Cost of reading a token of a prompt for chains; 0 until one was read."""
        return self._preparing.each or 0.0

    def plain_step_due(self, gain: float) -> bool:
        """Whether to measure a plain step now, though drafts give ``gain`` times as many tokens a second.

        It is due if none was measured yet, if it is in doubt whether drafts pay, or if the last one was so long ago
        that another costs less than ``EXPLORATION_SHARE`` of the time since then. Where loading has shown what such a
        step takes, only one that follows another is due.
        """
        if not self._plain_measured and (not self._loaded or self._after_plain):
            return gain - 1.0 <= EXPLORATION_START
        doubt = self._passes.doubt
        if self._since and doubt > CREDIBLE * STEP_NOISE and gain < math.exp(CREDIBLE * doubt):
            return True
        return self._since * EXPLORATION_SHARE > PLAIN_STEPS_TO_MEASURE * max(gain, 1.0)


class TheilSen:
    """A line through the last few points, by medians.

    A least-squares line would follow a single measurement that was held up. This one ignores up to a quarter of them.
    That is how Theil and Sen do it. There is one at every step, so it is compiled.

    Args:
        size: how many points are remembered.

    Attributes:
        count: how many there are.
    """

    def __init__(self, size: int) -> None:
        self.count = 0
        self._size, self._next = size, 0
        self._x, self._y = np.zeros(size), np.zeros(size)
        self._scratch = np.zeros(size * size)

    def add(self, x: float, y: float) -> None:
        """Remember one; the oldest goes."""
        self._x[self._next], self._y[self._next] = x, y
        self._next = (self._next + 1) % self._size
        self.count = min(self.count + 1, self._size)

    def slope(self) -> float | None:
        """The median of the slopes between any two; None where all have about the same ``x``, which is positive."""
        slope = _slope(self._x, self._y, self.count, self._scratch)
        return None if math.isnan(slope) else slope

    def start(self, slope: float) -> float:
        """The median of where lines of this slope through each of them begin; of two, the lower."""
        return _start(self._x, self._y, self.count, slope, self._scratch)


@compiled
def _slope(x: FloatArray, y: FloatArray, count: int, scratch: FloatArray) -> float:
    size = 0
    for i in range(count):
        for j in range(i):
            if abs(x[i] - x[j]) > APART * max(x[i], x[j]):
                _insert(scratch, size, (y[i] - y[j]) / (x[i] - x[j]))
                size += 1
    return math.nan if size == 0 else float(scratch[(size - 1) // 2])


@compiled
def _start(x: FloatArray, y: FloatArray, count: int, slope: float, scratch: FloatArray) -> float:
    for i in range(count):
        _insert(scratch, i, y[i] - slope * x[i])
    return float(scratch[(count - 1) // 2])


@compiled
def _insert(ordered: FloatArray, size: int, value: float) -> None:
    """Put a value into its place among the first ``size``."""
    at = size
    while at > 0 and ordered[at - 1] > value:
        ordered[at] = ordered[at - 1]
        at -= 1
    ordered[at] = value


def warm_up() -> None:
    """Compile what fitting runs, or load it from an earlier process."""
    points = TheilSen(1)
    points.add(0.0, 0.0)
    points.start(points.slope() or 0.0)
    PassModel(1.0).record(1.0, 0.0, 1.0, drafted=False)
