"""How long the parts of a step take on this machine, followed through noise.

A machine that others use may be twice as slow from one step to the next, and drafts would seem to cost what the machine
lost. So one estimate of its speed follows all passes, and everything else is relative to it: what drafts add to a pass,
and the time of drafting, which is counted in passes of that moment.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.policy.cost_curve import FloatArray

STEP_NOISE, DRAFTING_NOISE, SPEED_DRIFT = 0.05, 0.2, 0.005
"""Standard deviations, as shares: of a pass's time on a quiet machine, of the time of drafting, which depends on the
text, too, and of the machine's speed from step to step."""
LOADED_DOUBT, START_DOUBT, EACH_DOUBT = 0.25, 0.2, 0.3
"""Standard deviations before any step: of the time measured at load, and of what the cost curve says of drafts."""
GUESS_DOUBT, NOTHING_KNOWN = 0.5, 10.0
"""The same, in logarithms: of a guess, and of nothing, from microseconds to hours."""
DRAFT_MEMORY = 50.0
"""Steps after which measurements of drafts have faded and the cost curve is believed again. So drafts that seemed
expensive are tried once more."""
LEAST_START, MOST_EACH = 0.5, 8.0
"""Limits of ``start`` and ``each`` that noise may not pass, as shares of what they were assumed to be."""
CREDIBLE = 2.0
"""Standard deviations up to which a measurement counts as it is."""


class LinearCost(NamedTuple):
    """A cost by size: ``start``, and ``each`` for every unit of size."""

    start: float
    each: float

    def at(self, size: float) -> float:
        """The cost of this size."""
        return self.start + self.each * size


AS_THE_CURVE_SAYS, IN_PROPORTION = LinearCost(1.0, 1.0), LinearCost(0.0, 1.0)


class TimeModel:
    """Follow how long something takes by its size: ``scale * (start + each * size)``.

    The three are followed by a Kalman filter in logarithms (recursive least squares). The scale drifts; ``start`` and
    ``each`` return to what they were assumed to be. A surprise beyond ``CREDIBLE`` deviations is cut off, and the rest
    of it becomes doubt about the scale: a single slow measurement changes little, and a second one shows that it was no
    accident.

    Args:
        scale: first guess.
        doubt: standard deviation of its logarithm.
        shape: ``start`` and ``each``, as they are assumed to be.
        noise: standard deviation of a measurement, as a share.
    """

    def __init__(
        self, scale: float, doubt: float, shape: LinearCost = AS_THE_CURVE_SAYS, noise: float = DRAFTING_NOISE
    ) -> None:
        self.count = 0
        """Measurements so far."""
        self.scale = scale
        """The time of what has no size."""
        self.shape = shape
        """``start`` and ``each``, as shares of the scale."""
        self._prior = np.array([noise, shape.start, shape.each])
        self._state = np.array([math.log(scale), shape.start, shape.each])
        self._covariance = np.diag(np.square([doubt, START_DOUBT, EACH_DOUBT]))
        self._scratch = np.zeros(3)

    def record(self, time: float, size: float = 0.0, sized: bool = False) -> float:
        """Learn from a measurement.

        Args:
            time: that it took.
            size: by which the time grows.
            sized: whether the time depends on a size. Else it is the scale itself.

        Returns:
            The time as far as it is credible: a disturbance of the machine is not drafting's fault.
        """
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
    """Take one step of the filter.

    Args:
        state: the scale's logarithm, ``start``, ``each``.
        doubt: their covariance.
        shared: scratch memory, ``[3]``.
        prior: the noise, and what ``start`` and ``each`` return to.
        size, sized: of ``TimeModel.record``.
        measured: the logarithm of the time.

    Returns:
        The logarithm of the time, as far as it is credible.
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
    """Compile what following runs, or load it from an earlier process."""
    TimeModel(1.0, 1.0).record(1.0)
