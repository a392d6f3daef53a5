"""Track how long the parts of a step run on this machine, through noise. Its speed may halve from one step to the next,
and drafts would be blamed; so one estimate of it follows all passes, and other costs are in passes of that moment.

A Kalman filter follows the logarithm of a time's ``scale``, which drifts, and ``start`` and ``each``, which return to
their priors. A surprise is clipped at ``CREDIBLE`` deviations, and the rest becomes doubt about the scale: one slow
measurement changes little, a second one confirms it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled

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


def begin_time(
    time: np.record, scale: float, doubt: float, shape: LinearCost = AS_THE_CURVE_SAYS, noise: float = DRAFTING_NOISE
) -> None:
    """Set a time to a first guess.

    Args:
        doubt: standard deviation of the logarithm of ``scale``.
        shape: prior of ``start`` and ``each``.
        noise: standard deviation of a measurement, as a share.
    """
    time.scale, time.log_scale, time.noise, time.count, time.guessed = scale, math.log(scale), noise, 0, 1
    time.start, time.each = time.prior_start, time.prior_each = shape
    time.p00, time.p11, time.p22 = doubt**2, START_DOUBT**2, EACH_DOUBT**2
    time.p01 = time.p02 = time.p12 = 0.0


@compiled
def time_at(time: np.record, size: float) -> float:
    """Return the time of this size."""
    return float(time.scale * (time.start + time.each * size))


@compiled
def record_time(time: np.record, taken: float, size: float, sized: bool) -> float:
    """Update from a measured time of this size, or (not ``sized``) of the scale; return its credible part."""
    if not taken > 0:
        return 0.0
    p00, p01, p02, p11, p12, p22 = time.p00, time.p01, time.p02, time.p11, time.p12, time.p22
    factor, h1, h2 = 1.0, 0.0, 0.0  # and derivatives by start and each; by scale: 1
    if sized:
        factor = max(time.start + time.each * size, 1e-3)
        h1, h2 = 1.0 / factor, size / factor
    g0, g1, g2 = p00 + p01 * h1 + p02 * h2, p01 + p11 * h1 + p12 * h2, p02 + p12 * h1 + p22 * h2
    variance = time.noise**2 + g0 + g1 * h1 + g2 * h2
    expected = time.log_scale + math.log(factor)
    surprise, limit = math.log(taken) - expected, CREDIBLE * math.sqrt(variance)
    credible = min(max(surprise, -limit), limit)
    kept, step = 1.0 - 1.0 / DRAFT_MEMORY, credible / variance
    fade = kept * kept
    start = time.prior_start + kept * (time.start + g1 * step - time.prior_start)
    each = time.prior_each + kept * (time.each + g2 * step - time.prior_each)
    log_scale = time.log_scale + g0 * step
    time.log_scale, time.scale, time.count = log_scale, math.exp(log_scale), time.count + 1
    time.start = max(start, LEAST_START * time.prior_start)
    time.each = min(max(each, 0.0), MOST_EACH * time.prior_each)
    time.p00 = p00 - g0 * g0 / variance + SPEED_DRIFT**2 + (surprise - credible) ** 2
    time.p01 = kept * (p01 - g0 * g1 / variance)
    time.p02 = kept * (p02 - g0 * g2 / variance)
    time.p11 = fade * (p11 - g1 * g1 / variance) + START_DOUBT**2 * (1.0 - fade)
    time.p12 = fade * (p12 - g1 * g2 / variance)
    time.p22 = fade * (p22 - g2 * g2 / variance) + EACH_DOUBT**2 * (1.0 - fade)
    return math.exp(expected + credible)
