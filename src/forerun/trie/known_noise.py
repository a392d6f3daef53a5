"""Noise that a draft can know. Coupled sampling adds Gumbel noise to the scores, a pure function of seed, position and
token (``core/noise.py``). So among tokens of equal chance, the one whose noise is highest will come.

The target takes the best log p / T + g at temperature T, which is the best log p + T g. The mixer adds T g to
the log-odds, less its mean and times a weight, by which it learns how far to trust it.
"""

from __future__ import annotations

from forerun.core.compiling import compiled
from forerun.core.noise import gumbel_of
from forerun.trie.tables import RecordArray

EULER = 0.5772156649015329
"""Mean of Gumbel noise."""


@compiled
def noise_of(noise: RecordArray, ahead: int, token: int) -> float:
    """T times what a token's noise is above its mean, ``ahead`` tokens behind ``NOISE.position``; 0 if not known."""
    place = noise[0]
    if place.temperature == 0:
        return 0.0
    return float(place.temperature) * (gumbel_of(place.seed, place.position + ahead, token) - EULER)
