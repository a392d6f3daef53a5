"""How long the parts of a step take on this machine, tracked through noise.

On a shared machine, speed may halve from one step to the next, and drafts would be blamed for it. So one estimate of
the speed follows all passes, and all else is relative to it: what drafts add to a pass, and drafting, in passes of that
moment.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.policy.cost_curve import FloatArray

STEP_NOISE, DRAFTING_NOISE, SPEED_DRIFT = 0.05, 0.2, 0.005
"""Standard deviations, as shares: of a pass's time on a quiet machine; of drafting's, which also depends on the
request; and of the machine's speed per step."""
LOADED_DOUBT, START_DOUBT, EACH_DOUBT = 0.25, 0.2, 0.3
"""Prior standard deviations: of the time measured at load, and of what the cost curve says about drafts."""
GUESS_DOUBT, NOTHING_KNOWN = 0.5, 10.0
"""Prior standard deviations of the logarithm: of a guess, and of no knowledge (microseconds to hours)."""
DRAFT_MEMORY = 50.0
"""Steps in which measurements of drafts fade and the cost curve is believed again, so that drafts that seemed expensive
are retried."""
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

    A Kalman filter follows all three, in logarithms (recursive least squares). The scale drifts; ``start`` and ``each``
    return to their priors. A surprise is clipped at ``CREDIBLE`` deviations, and the rest becomes doubt about the
    scale: one slow measurement changes little, a second one confirms it.

    Args:
        scale: first guess; ``doubt``: standard deviation of its logarithm.
        shape: prior of ``start`` and ``each``.
        noise: standard deviation of a measurement, as a share.
    """

    def __init__(
        self, scale: float, doubt: float, shape: LinearCost = AS_THE_CURVE_SAYS, noise: float = DRAFTING_NOISE
    ) -> None:
        self.count = 0
        """Number of measurements."""
        self.scale = scale
        """Time without any size."""
        self.shape = shape
        """``start`` and ``each``, as shares of the scale."""
        self._prior = np.array([noise, shape.start, shape.each])
        self._state = np.array([math.log(scale), shape.start, shape.each])
        self._covariance = np.diag(np.square([doubt, START_DOUBT, EACH_DOUBT]))
        self._scratch = np.zeros(3)

    def record(self, time: float, size: float = 0.0, sized: bool = False) -> float:
        """Update from a measured time of this size; without ``sized`` it measures the scale itself. Returns the time as
        far as it is credible: a disturbance of the machine is not drafting's fault."""
        if not time > 0:
            return 0.0
        credible = _follow(self._state, self._covariance, self._scratch, self._prior, size, sized, math.log(time))
        log_scale, start, each = self._state.tolist()
        self.scale, self.shape = math.exp(log_scale), LinearCost(start, each)
        self.count += 1
        return math.exp(credible)

    @property
    def doubt(self) -> float:
        """Standard deviation of the scale, as a share."""
        return math.sqrt(float(self._covariance[0, 0]))

    @property
    def line(self) -> LinearCost:
        """The time by size."""
        return LinearCost(self.scale * self.shape.start, self.scale * self.shape.each)


@compiled
def _follow(
    state: FloatArray,
    doubt: FloatArray,
    shared: FloatArray,
    prior: FloatArray,
    size: float,
    sized: bool,
    measured: float,
) -> float:
    """Take one filter step. Returns the log of the time as far as it is credible.

    Args:
        state: log of the scale, ``start``, ``each``; ``doubt``: their covariance.
        shared: scratch memory, ``[3]``.
        prior: the noise, and the priors of ``start`` and ``each``.
        measured: log of the time.
    """
    factor = max(state[1] + state[2] * size, 1e-3) if sized else 1.0
    slope = (1.0, sized / factor, sized * size / factor)
    variance = prior[0] ** 2
    for i in range(3):
        shared[i] = 0.0
        for j in range(3):
            shared[i] += doubt[i, j] * slope[j]
    for i in range(3):
        variance += slope[i] * shared[i]
    expected = state[0] + math.log(factor)
    surprise = measured - expected
    limit = CREDIBLE * math.sqrt(variance)
    credible = min(max(surprise, -limit), limit)
    for i in range(3):
        state[i] += shared[i] * credible / variance
        for j in range(3):
            doubt[i, j] -= shared[i] * shared[j] / variance
    doubt[0, 0] += SPEED_DRIFT**2 + (surprise - credible) ** 2
    kept = 1.0 - 1.0 / DRAFT_MEMORY
    for i, first in ((1, START_DOUBT), (2, EACH_DOUBT)):
        state[i] = prior[i] + kept * (state[i] - prior[i])
        for j in range(3):
            doubt[i, j] *= kept
            doubt[j, i] *= kept
        doubt[i, i] += first**2 * (1.0 - kept**2)
    state[1], state[2] = max(state[1], LEAST_START * prior[1]), min(max(state[2], 0.0), MOST_EACH * prior[2])
    return float(expected + credible)


def warm_up() -> None:
    """Compile the filter, or load it from the cache."""
    TimeModel(1.0, 1.0).record(1.0)
