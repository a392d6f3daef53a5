"""Noise that a draft can know. Coupled sampling adds Gumbel noise to the scores, a pure function of seed, position and
token (``core/noise.py``). So among tokens of equal chance, the one whose noise is highest will come.

The target takes the best log p / T + g at temperature T, which is the best log p + T g. The mixer adds T g to
the log-odds, less its mean and times a weight, by which it learns how far to trust it.
"""

from __future__ import annotations

import math

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.noise import BITS, GOLDEN, MIX1, MIX2
from forerun.trie.tables import RecordArray

_GOLDEN, _MIX1, _MIX2 = np.uint64(GOLDEN), np.uint64(MIX1), np.uint64(MIX2)
_SHIFT1, _SHIFT2, _SHIFT3, _REST = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(64 - BITS)
_UNIT = 2.0**-BITS

EULER = 0.5772156649015329
"""Mean of Gumbel noise."""


@compiled
def _mixed(value: np.uint64) -> np.uint64:
    """A round of splitmix64 behind its addition."""
    value = (value ^ (value >> _SHIFT1)) * _MIX1
    value = (value ^ (value >> _SHIFT2)) * _MIX2
    return value ^ (value >> _SHIFT3)


@compiled
def noise_of(noise: RecordArray, ahead: int, token: int) -> float:
    """T times what a token's noise is above its mean, ``ahead`` tokens behind ``NOISE.position``; 0 if not known."""
    place = noise[0]
    if place.temperature == 0:
        return 0.0
    key = _mixed(place.seed + np.uint64((place.position + ahead) << 3) + _GOLDEN)
    u = (float(np.int64(_mixed(key + np.uint64(token) * _GOLDEN) >> _REST)) + 0.5) * _UNIT
    return float(place.temperature) * (-math.log(-math.log(u)) - EULER)
