"""A line through a few measurements, some of which are far off: by quantiles of slopes, as Theil and Sen do it.

A least-squares line would follow a single measurement that was held up. This one ignores up to a quarter of them. There
is one at every step, so it is compiled.
"""

from __future__ import annotations

import math

import numpy as np

from forerun.core.compiling import compiled
from forerun.policy.cost_curve import FloatArray


class Points:
    """The last few measurements.

    Args:
        most: how many are remembered.

    Attributes:
        count: how many there are.
    """

    def __init__(self, most: int) -> None:
        self.count = 0
        self._most, self._next = most, 0
        self._x, self._y = np.zeros(most), np.zeros(most)
        self._scratch = np.zeros(most * most)

    def add(self, x: float, y: float) -> None:
        """Remember one; the oldest goes."""
        self._x[self._next], self._y[self._next] = x, y
        self._next = (self._next + 1) % self._most
        self.count = min(self.count + 1, self._most)

    def slope(self, quantile: float) -> float | None:
        """A quantile of the slopes between any two; None where all have the same ``x``."""
        found = _slope(self._x, self._y, self.count, quantile, self._scratch)
        return None if math.isnan(found) else found

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
    points = Points(1)
    points.add(0.0, 0.0)
    points.start(points.slope(0.5) or 0.0)
