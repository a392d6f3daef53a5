"""How long passes take on this machine: the cost curve scaled to recent measurements."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from forerun.policy.cost_curve import CostCurve
from forerun.policy.least_squares import Points

RECALL = 15
"""Passes that are remembered. Their median ignores single slow ones, and follows a machine that slows down."""
ALONE = 0.25
"""The share of passes that are taken to be undisturbed. What disturbs a pass only ever slows it, so what passes take
alone is this quantile of what they took."""


class Passes:
    """Passes of one kind.

    Args:
        like: passes of another kind, which stand for these until some were measured.
        quantile: which of the measured times counts. Disturbances only ever slow a pass, so a low quantile is what it
            takes by itself.
        warm: whether the processor's caches are warm in all of them, so that one is enough to know what they take.
    """

    def __init__(self, like: Passes | None = None, quantile: float = 0.5, warm: bool = False) -> None:
        self._like, self._quantile, self._enough = like, quantile, 1 if warm else 2
        self._seen: deque[float] = deque(maxlen=RECALL)
        self._unit: float | None = None

    def learn(self, cost: float, seconds: float) -> None:
        """A pass of this cost took so long."""
        if cost > 0 and seconds > 0:
            self._seen.append(seconds / cost)
            self._unit = None

    def bound(self, cost: float, seconds: float) -> None:
        """A pass that does what one of this cost does, and more, took so long. If that is less than the only one that
        was measured, it was disturbed."""
        if self.known == 1 and cost > 0 and seconds > 0:
            self._seen[0] = min(self._seen[0], seconds / cost)

    @property
    def known(self) -> int:
        """Passes measured, of the last ``RECALL``."""
        return len(self._seen)

    @property
    def unit(self) -> float | None:
        """Seconds of a pass of cost 1; None where nothing is known.

        The first pass is often slow, because caches are cold. So unless they are warm it is never taken alone: the time
        of the other kind counts as one more measurement, and without another kind two are needed.
        """
        if self._unit is None:
            other = None if self._like is None else self._like.unit
            seen = self._seen if other is None or self.known == RECALL else [*self._seen, other]
            found = ranked(seen, self._quantile) if len(seen) >= self._enough else other
            if self.known < RECALL:
                return found
            self._unit = found
        return self._unit


def ranked(seen: Iterable[float], quantile: float) -> float:
    """The one of these below which so large a share of the others lies; the lower one between two."""
    ordered = sorted(seen)
    return ordered[int((len(ordered) - 1) * quantile)]


class Line(NamedTuple):
    """What something takes by its size: ``start``, and ``each`` for every unit of its size."""

    start: float
    each: float

    def at(self, size: float) -> float:
        """Something of this size."""
        return self.start + self.each * size


AS_THE_CURVE_SAYS = Line(1.0, 1.0)


class Rise:
    """How much longer passes with drafts take: a correction of the cost curve, by a line through recent measurements.

    The curve was measured alone and with short caches. In use, drafting displaces what a pass reads from the
    processor's caches, so a pass with drafts has an overhead. And where keys come over a slow link, drafts add hardly
    anything to a pass. The slope is a high quantile of the slopes between any two passes, at most the curve's: where
    noise hides the slope, the curve is believed.

    Args:
        plain: passes without drafts.
    """

    def __init__(self, plain: Passes) -> None:
        self._plain = plain
        self._seen = Points(RECALL)
        self._line: tuple[float, Line] | None = None  # by what a plain pass took

    def learn(self, plain: float, added: float, seconds: float) -> None:
        """A pass that costs ``plain`` without its drafts, which add so much to it, took so long."""
        if plain > 0 and seconds > 0:
            if not self._seen.count and (unit := self._plain.unit):
                for x in (0.0, 1.0):  # as the curve says, until others have taken their place
                    self._seen.add(x, unit * (1.0 + x))
            self._seen.add(added / plain, seconds / plain)
            self._line = None

    @property
    def line(self) -> Line:
        """By what drafts add, both as shares of what a pass without them costs and takes."""
        unit = self._plain.unit
        if not unit or not self._seen.count:
            return AS_THE_CURVE_SAYS
        if self._line is None or self._line[0] != unit:
            slope = self._seen.slope(1 - ALONE)
            each = unit if slope is None else min(max(slope, 0.0), unit)
            self._line = unit, Line(max(self._seen.start(each), 0.0) / unit, each / unit)
        return self._line[1]


class Growth:
    """How long something takes by its size: a line through recent measurements.

    Chains that a model drafts are an example. Their first pass takes longer than the others: the sparse cache takes in
    what was committed, and the processor's caches are cold. So the time grows with the length, but not in proportion to
    it. The slope is the median of the slopes between any two (Theil and Sen), which single slow ones do not change.

    Args:
        like: passes that stand for these until some were measured.
    """

    def __init__(self, like: Passes | None = None) -> None:
        self._mean = Passes(like)
        self._seen = Points(RECALL)
        self._line: Line | None = None

    def learn(self, size: float, seconds: float) -> None:
        """One of this size took so long."""
        self._mean.learn(size, seconds)
        if size > 0 and seconds > 0:
            self._seen.add(size, seconds)
            self._line = None

    @property
    def known(self) -> bool:
        """Whether any was measured."""
        return self._mean.known > 0

    @property
    def line(self) -> Line | None:
        """In seconds; None where nothing is known."""
        unit = self._mean.unit
        if self._seen.count < 2 or unit is None:  # one alone may have been disturbed
            return None if unit is None else Line(0.0, unit)
        if self._line is None:
            slope = self._seen.slope(0.5)
            each = unit if slope is None or slope <= 0 else min(slope, unit)
            self._line = Line(max(self._seen.start(each), 0.0), each)
        return self._line

    @property
    def curve(self) -> CostCurve | None:
        """What passes over so many tokens cost, rounded; None where nothing is known of how their time grows."""
        slope = self._seen.slope(0.5)
        if slope is None or slope <= 0 or (line := self.line) is None:
            return None
        return CostCurve.linear((line.start + line.each) / line.each).rounded()
