"""What the parts of a step take on this machine: the cost curve scaled to recent measurements.

A measurement may be disturbed, and disturbances only ever slow it. So times are quantiles of the last few
measurements, and lines through them go by quantiles of slopes, as Theil and Sen do it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.policy.cost_curve import CostCurve, FloatArray
from forerun.policy.exploration_budget import EXPLORATION_SHARE, EXPLORATION_START

RECALL = 15
"""Measurements that are remembered. Their median ignores single slow ones, and follows a machine that slows down."""
UNDISTURBED_QUANTILE = 0.25
"""The share of passes that are taken to be undisturbed: this quantile of times is the time of a pass alone."""
PLAIN_STEPS_TO_MEASURE = 2
"""Plain steps that it takes to measure one. Drafting displaces what the next pass reads from the processor's caches, so
only a plain step that follows another one is measured."""


class LinearCost(NamedTuple):
    """A cost by size: ``start``, and ``each`` for every unit of size."""

    start: float
    each: float

    def at(self, size: float) -> float:
        """The cost of this size."""
        return self.start + self.each * size


AS_THE_CURVE_SAYS = LinearCost(1.0, 1.0)


class PassTimer:
    """Times of passes of one kind.

    Args:
        fallback: passes of another kind, whose time stands for these until some were measured.
        quantile: which of the measured times counts.
        warm: whether the processor's caches are warm in all of them, so that one measurement is enough.
    """

    def __init__(self, fallback: PassTimer | None = None, quantile: float = 0.5, warm: bool = False) -> None:
        self._fallback, self._quantile, self._enough = fallback, quantile, 1 if warm else 2
        self._units: deque[float] = deque(maxlen=RECALL)
        self._unit: float | None = None

    def record(self, cost: float, seconds: float) -> None:
        """A pass of this cost took ``seconds``."""
        if cost > 0 and seconds > 0:
            self._units.append(seconds / cost)
            self._unit = None

    def bound(self, cost: float, seconds: float) -> None:
        """A pass that does more than one of this cost took ``seconds``. If the only measured pass took longer, it was
        disturbed."""
        if self.count == 1 and cost > 0 and seconds > 0:
            self._units[0] = min(self._units[0], seconds / cost)

    @property
    def count(self) -> int:
        """Passes measured, of the last ``RECALL``."""
        return len(self._units)

    @property
    def unit(self) -> float | None:
        """Seconds of a pass of cost 1; None where nothing is known.

        The first pass is often slow, because caches are cold. So unless they are warm it is never taken alone: the time
        of the other kind counts as one more measurement, and without another kind two are needed.
        """
        if self._unit is None:
            other = None if self._fallback is None else self._fallback.unit
            units = self._units if other is None or self.count == RECALL else [*self._units, other]
            unit = quantile_of(units, self._quantile) if len(units) >= self._enough else other
            if self.count < RECALL:
                return unit
            self._unit = unit
        return self._unit


def quantile_of(values: Iterable[float], quantile: float) -> float:
    """A quantile of some values; the lower one between two."""
    ordered = sorted(values)
    return ordered[int((len(ordered) - 1) * quantile)]


class CurveCorrection:
    """How much longer passes with drafts take: a correction of the cost curve, by a line through recent measurements.

    The curve was measured alone and with short caches. In use, drafting displaces what a pass reads from the
    processor's caches, so a pass with drafts has an overhead. And where keys come over a slow link, drafts add hardly
    anything to a pass. The slope is a high quantile of the slopes between any two passes, at most the curve's: where
    noise hides the slope, the curve is believed.

    Args:
        plain: passes without drafts.
    """

    def __init__(self, plain: PassTimer) -> None:
        self._plain = plain
        self._points = TheilSen(RECALL)
        self._line: tuple[float, LinearCost] | None = None  # by what a plain pass took

    def record(self, plain: float, added: float, seconds: float) -> None:
        """A pass took ``seconds``; by the curve it costs ``plain`` without its drafts, which add ``added``."""
        if plain > 0 and seconds > 0:
            if not self._points.count and (unit := self._plain.unit):
                for x in (0.0, 1.0):  # as the curve says, until others have taken their place
                    self._points.add(x, unit * (1.0 + x))
            self._points.add(added / plain, seconds / plain)
            self._line = None

    @property
    def line(self) -> LinearCost:
        """By what drafts add, both as shares of what a pass without them costs and takes."""
        unit = self._plain.unit
        if not unit or not self._points.count:
            return AS_THE_CURVE_SAYS
        if self._line is None or self._line[0] != unit:
            slope = self._points.slope(1 - UNDISTURBED_QUANTILE)
            each = unit if slope is None else min(max(slope, 0.0), unit)
            self._line = unit, LinearCost(max(self._points.start(each), 0.0) / unit, each / unit)
        return self._line[1]


class LinearTimer:
    """Times by size: a line through recent measurements.

    Chains that a model drafts are an example. Their first pass takes longer than the others: the sparse cache takes in
    what was committed, and the processor's caches are cold. So the time grows with the length, but not in proportion to
    it. The slope is the median of the slopes between any two, which single slow ones do not change.

    Args:
        fallback: passes that stand for these until some were measured.
    """

    def __init__(self, fallback: PassTimer | None = None) -> None:
        self._mean = PassTimer(fallback)
        self._points = TheilSen(RECALL)
        self._line: LinearCost | None = None

    def record(self, size: float, seconds: float) -> None:
        """One of this size took ``seconds``."""
        self._mean.record(size, seconds)
        if size > 0 and seconds > 0:
            self._points.add(size, seconds)
            self._line = None

    @property
    def measured(self) -> bool:
        """Whether there is a measurement."""
        return self._mean.count > 0

    @property
    def line(self) -> LinearCost | None:
        """In seconds; None where nothing is known."""
        unit = self._mean.unit
        if self._points.count < 2 or unit is None:  # one alone may have been disturbed
            return None if unit is None else LinearCost(0.0, unit)
        if self._line is None:
            slope = self._points.slope(0.5)
            each = unit if slope is None or slope <= 0 else min(slope, unit)
            self._line = LinearCost(max(self._points.start(each), 0.0), each)
        return self._line

    @property
    def curve(self) -> CostCurve | None:
        """Costs of passes by their tokens, rounded; None where it is not known how their time grows."""
        slope = self._points.slope(0.5)
        if slope is None or slope <= 0 or (line := self.line) is None:
            return None
        return CostCurve.linear((line.start + line.each) / line.each).rounded()


class StepTimer:
    """Times of plain steps, of steps with drafts, of proposing trees and of drafting chains.

    Args:
        loaded: seconds of a pass of cost 1, if they were measured before any step. They stand for those of steps until
            some were measured.
    """

    def __init__(self, loaded: float | None = None) -> None:
        self._loaded = loaded
        self.plain, self.trees = (
            PassTimer(quantile=UNDISTURBED_QUANTILE, warm=True),
            PassTimer(quantile=UNDISTURBED_QUANTILE),
        )
        self.drafted, self.chains = PassTimer(self.plain), LinearTimer(self.plain)
        self.preparing = PassTimer(warm=True)  # reading a prompt for chains, by its tokens
        self._correction = CurveCorrection(self.plain)
        self._since = 0
        self._after_plain = False

    def record_step(self, plain: float, added: float, seconds: float, empty: bool) -> None:
        """Learn from a step.

        Args:
            plain: cost of its pass by the curve, without drafts.
            added: what they add to it.
            seconds: from the end of drafting to the end of the pass.
            empty: whether nothing was drafted.
        """
        self._since += 1
        if not empty:
            self.plain.bound(plain, seconds)
            self.drafted.record(plain + added, seconds)
            self._correction.record(plain, added, seconds)
        elif self._after_plain:
            self.plain.record(plain, seconds)
            self._since = 0
        self._after_plain = empty

    @property
    def plain_known(self) -> bool:
        """Whether it is known what plain steps take."""
        return self.plain.unit is not None or self._loaded is not None

    @property
    def chains_known(self) -> bool:
        """Whether chains were measured. Until then their cost is a guess, and may be far too high."""
        return self.chains.measured

    @property
    def correction(self) -> LinearCost:
        """The correction of the curve for passes with drafts; see ``CurveCorrection``."""
        return self._correction.line if self.plain.unit is not None else AS_THE_CURVE_SAYS

    @property
    def unit(self) -> float | None:
        """Seconds of a pass of cost 1 without drafts, as far as it is known. Passes with drafts may take longer than
        they cost, so until plain steps were measured the least that is known counts."""
        known = (self.drafted.unit, self._loaded)
        return self.plain.unit or min((unit for unit in known if unit is not None), default=None)

    @property
    def tree_cost(self) -> float:
        """Cost of proposing a row's tree, in units of a pass of cost 1; 0 until steps have shown both. The first times
        find the processor's caches cold."""
        unit = self.plain.unit or self.drafted.unit
        return (self.trees.unit or 0.0) / unit if unit else 0.0

    @property
    def chain_cost(self) -> LinearCost:
        """Cost of drafting chains, in units of a pass of cost 1; in proportion to their size until it is known."""
        line, unit = self.chains.line, self.unit
        return LinearCost(line.start / unit, line.each / unit) if line is not None and unit else LinearCost(0.0, 1.0)

    @property
    def preparing_cost(self) -> float:
        """Cost of reading a token of a prompt for chains, in units of a pass of cost 1; 0 until one was read."""
        return (self.preparing.unit or 0.0) / self.unit if self.unit else 0.0

    def plain_step_due(self, gain: float) -> bool:
        """Whether to measure a plain step now, though drafts give ``gain`` times as many tokens a second.

        It is due if none was measured yet, or the last one was so long ago that another costs less than
        ``EXPLORATION_SHARE`` of the time since then. Where loading has shown what such a step takes, only one that
        follows another is due.
        """
        if self.plain.unit is None and (self._loaded is None or self._after_plain):
            return gain - 1.0 <= EXPLORATION_START
        return self._since * EXPLORATION_SHARE > PLAIN_STEPS_TO_MEASURE * max(gain, 1.0)


class TheilSen:
    """A line through the last few points, by quantiles of slopes.

    A least-squares line would follow a single measurement that was held up. This one ignores up to a quarter of them.
    There is one at every step, so it is compiled.

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

    def slope(self, quantile: float) -> float | None:
        """A quantile of the slopes between any two; None where all have the same ``x``."""
        slope = _slope(self._x, self._y, self.count, quantile, self._scratch)
        return None if math.isnan(slope) else slope

    def start(self, slope: float) -> float:
        """The median of where lines of this slope through each of them begin; of two, the lower."""
        return _start(self._x, self._y, self.count, slope, self._scratch)


@compiled
def _slope(x: FloatArray, y: FloatArray, count: int, quantile: float, scratch: FloatArray) -> float:
    size = 0
    for i in range(count):
        for j in range(i):
            if x[i] != x[j]:
                _insert(scratch, size, (y[i] - y[j]) / (x[i] - x[j]))
                size += 1
    return math.nan if size == 0 else float(scratch[int((size - 1) * quantile)])


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
    points.start(points.slope(0.5) or 0.0)
