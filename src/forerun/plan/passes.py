"""How long passes take: what the cost curve says of their size, times how long such passes took lately."""

from __future__ import annotations

from collections import deque

RECALL = 15
"""Passes whose median counts: one that something else held up moves nothing, and a machine that slows down is noticed
after half as many."""


class Passes:
    """Passes of one kind.

    Args:
        like: passes of another kind that these are taken to be like, until they were seen.
        quantile: of those that were seen, which one counts. What disturbs a pass only ever slows it, so a low one is
            what it takes alone.
    """

    def __init__(self, like: Passes | None = None, quantile: float = 0.5) -> None:
        self._like, self._quantile = like, quantile
        self._seen: deque[float] = deque(maxlen=RECALL)
        self._unit: float | None = None

    def learn(self, cost: float, seconds: float) -> None:
        """A pass of this cost took so long."""
        if cost > 0 and seconds > 0:
            self._seen.append(seconds / cost)
            self._unit = None

    @property
    def known(self) -> int:
        """Passes that were seen lately."""
        return len(self._seen)

    @property
    def unit(self) -> float | None:
        """Seconds of a pass of cost 1; None where nothing is known.

        A first pass is cold as often as not. So one of the other kind is among them, and the lower of two counts; where
        there is no other kind, nothing is known before the second.
        """
        if self._unit is None:
            other = None if self._like is None else self._like.unit
            seen = sorted(self._seen if other is None or self.known == RECALL else [*self._seen, other])
            found = seen[int((len(seen) - 1) * self._quantile)] if len(seen) > 1 else other
            if self.known < RECALL:
                return found
            self._unit = found
        return self._unit
