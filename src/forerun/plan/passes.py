"""How long passes take: what the cost curve says of their size, times how long such passes took lately."""

from __future__ import annotations

from collections import deque
from itertools import combinations
from statistics import median
from typing import NamedTuple

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


class Line(NamedTuple):
    """What chains take: ``start`` to begin one, ``each`` for every unit of its size."""

    start: float
    each: float

    def at(self, size: float) -> float:
        """A chain of this size."""
        return self.start + self.each * size


class Growth:
    """How long chains take to draft, by their size.

    The first pass of a chain takes longer than the others: a cache takes in what was committed, and what the pass reads
    is cold. Short chains alone would make all of them look dear. So the line through the chains seen lately counts,
    by the median of their slopes (Theil and Sen), which no disturbed one moves.

    Args:
        like: passes that a chain's are taken to be like, until some were seen.
    """

    def __init__(self, like: Passes) -> None:
        self._like, self._mean = like, Passes(like)
        self._seen: deque[tuple[float, float]] = deque(maxlen=RECALL)
        self._line: Line | None = None

    def learn(self, size: float, seconds: float) -> None:
        """A chain of this size took so long."""
        self._mean.learn(size, seconds)
        if size > 0 and seconds > 0:
            self._seen.append((size, seconds))
            self._line = None

    @property
    def line(self) -> Line | None:
        """In seconds; None where nothing is known."""
        unit = self._mean.unit
        if not self._seen or unit is None:
            return None if unit is None else Line(0.0, unit)
        if self._line is None:
            slopes = [(t - s) / (b - a) for (a, s), (b, t) in combinations(self._seen, 2) if a != b]
            slope = median(slopes) if slopes else 0.0
            each = min(slope, unit) if slope > 0 else unit
            self._line = Line(max(median(seconds - each * size for size, seconds in self._seen), 0.0), each)
        return self._line
