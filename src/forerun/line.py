"""A line through measurements, the older the lighter: seconds by tokens, as they come."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

MEMORY = 0.95
"""What remains of the weight of a measurement after the next one."""


@dataclass
class Line:
    """A line fitted through measurements, the older the lighter."""

    sums: np.ndarray[tuple[int], np.dtype[np.float64]] = field(default_factory=lambda: np.zeros(5))

    def learn(self, x: float, y: float) -> None:
        """Take in a measurement."""
        self.sums = MEMORY * self.sums + np.array([1.0, x, y, x * x, x * y])

    @property
    def slope(self) -> float:
        """A line that falls, or has one point, is level."""
        weight, sum_x, sum_y, sum_xx, sum_xy = self.sums.tolist()
        spread = weight * sum_xx - sum_x * sum_x
        if spread <= 1e-9 * weight * weight:
            return 0.0
        return max(0.0, float((weight * sum_xy - sum_x * sum_y) / spread))

    def at(self, x: float) -> float:
        """The value at x; 0 where nothing was measured."""
        weight, sum_x, sum_y = self.sums[:3].tolist()
        if not weight:
            return 0.0
        return float(max(0.0, (sum_y - self.slope * sum_x) / weight + self.slope * x))
