"""Track how long the parts of a step run on this machine, through noise. Its speed may halve from one step to the next,
and drafts would be blamed; so one estimate of it follows all passes, and other costs are in passes of that moment."""

from __future__ import annotations

import math
from typing import NamedTuple

STEP_NOISE, DRAFTING_NOISE, SPEED_DRIFT = 0.05, 0.2, 0.005
"""Standard deviations, as shares: of a pass's time on a quiet machine; of drafting's, which also depends on the
request; and of the machine's speed per step."""
LOADED_DOUBT, START_DOUBT, EACH_DOUBT = 0.25, 0.2, 0.3
"""Prior standard deviations: of the time measured at load, and of what the cost curve says about drafts."""
GUESS_DOUBT, NOTHING_KNOWN = 0.5, 10.0
"""Prior standard deviations of the logarithm: of a guess, and of no knowledge (microseconds to hours)."""
DRAFT_MEMORY = 50.0
"""Steps in which measurements of drafts fade, so that drafts that seemed expensive are retried."""
LEAST_START, MOST_EACH = 0.5, 8.0
"""Limits of ``start`` and ``each`` against noise, as shares of their priors."""
CREDIBLE = 2.0
"""Standard deviations up to which a measurement is believed."""


class LinearCost(NamedTuple):
    """A cost that is linear in a size."""

    start: float
    each: float

    def at(self, size: float) -> float:
        return self.start + self.each * size


AS_THE_CURVE_SAYS, IN_PROPORTION = LinearCost(1.0, 1.0), LinearCost(0.0, 1.0)


class TimeModel:
    """Tracks a time by size: ``scale * (start + each * size)``.

    A Kalman filter follows the scale's logarithm, which drifts, and ``start`` and ``each``, which return to their
    priors. A surprise is clipped at ``CREDIBLE`` deviations, and the rest becomes doubt about the scale: one slow
    measurement changes little, a second one confirms it.

    Args:
        scale: first guess; ``doubt``: standard deviation of its logarithm.
        shape: prior of ``start`` and ``each``.
        noise: standard deviation of a measurement, as a share.
    """

    def __init__(
        self, scale: float, doubt: float, shape: LinearCost = AS_THE_CURVE_SAYS, noise: float = DRAFTING_NOISE
    ) -> None:
        self.count, self.scale, self.shape = 0, scale, shape
        self._log_scale, self._prior, self._noise = math.log(scale), shape, noise
        self._covariance = (doubt**2, 0.0, 0.0, START_DOUBT**2, 0.0, EACH_DOUBT**2)  # 00, 01, 02, 11, 12, 22

    def record(self, time: float, size: float = 0.0, sized: bool = False) -> float:
        """Update from a measured time of this size, or (not ``sized``) of the scale; return its credible part."""
        if not time > 0:
            return 0.0
        (start, each), prior = self.shape, self._prior
        p00, p01, p02, p11, p12, p22 = self._covariance
        factor = max(start + each * size, 1e-3) if sized else 1.0
        h1, h2 = (1.0 / factor, size / factor) if sized else (0.0, 0.0)  # derivatives by start and each; by scale: 1
        g0, g1, g2 = p00 + p01 * h1 + p02 * h2, p01 + p11 * h1 + p12 * h2, p02 + p12 * h1 + p22 * h2
        variance = self._noise**2 + g0 + g1 * h1 + g2 * h2
        expected = self._log_scale + math.log(factor)
        surprise, limit = math.log(time) - expected, CREDIBLE * math.sqrt(variance)
        credible = min(max(surprise, -limit), limit)
        kept, step = 1.0 - 1.0 / DRAFT_MEMORY, credible / variance
        fade = kept * kept
        self._log_scale += g0 * step
        start = prior.start + kept * (start + g1 * step - prior.start)
        each = prior.each + kept * (each + g2 * step - prior.each)
        self.shape = LinearCost(max(start, LEAST_START * prior.start), min(max(each, 0.0), MOST_EACH * prior.each))
        self._covariance = (
            p00 - g0 * g0 / variance + SPEED_DRIFT**2 + (surprise - credible) ** 2,
            kept * (p01 - g0 * g1 / variance),
            kept * (p02 - g0 * g2 / variance),
            fade * (p11 - g1 * g1 / variance) + START_DOUBT**2 * (1.0 - fade),
            fade * (p12 - g1 * g2 / variance),
            fade * (p22 - g2 * g2 / variance) + EACH_DOUBT**2 * (1.0 - fade),
        )
        self.scale, self.count = math.exp(self._log_scale), self.count + 1
        return math.exp(expected + credible)

    @property
    def doubt(self) -> float:
        """Standard deviation of the scale, as a share."""
        return math.sqrt(self._covariance[0])

    @property
    def line(self) -> LinearCost:
        """The time by size."""
        return LinearCost(self.scale * self.shape.start, self.scale * self.shape.each)
