"""A line through measurements, the older the lighter: seconds by tokens, as they come."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 0.95
"""What remains of the weight of a measurement after the next one."""
DOUBT = 1.5
"""Tokens: two noisy points that lie closer than this say next to nothing of a slope (a ridge)."""


@dataclass
class Line:
    """A line fitted through measurements, in plain numbers: it is asked in every step."""

    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def learn(self, x: float, y: float) -> None:
        """Take in a measurement."""
        self._weight = MEMORY * self._weight + 1
        self._x, self._y = MEMORY * self._x + x, MEMORY * self._y + y
        self._xx, self._xy = MEMORY * self._xx + x * x, MEMORY * self._xy + x * y

    @property
    def slope(self) -> float:
        """It falls nowhere, and is level until the tokens of its points differ by more than ``DOUBT``."""
        if not self._weight:
            return 0.0
        spread = self._xx - self._x * self._x / self._weight
        return max(0.0, (self._xy - self._x * self._y / self._weight) / (spread + DOUBT * DOUBT))

    def at(self, x: float) -> float:
        """The value at x; 0 where nothing was measured."""
        if not self._weight:
            return 0.0
        slope = self.slope
        return max(0.0, (self._y - slope * self._x) / self._weight + slope * x)
