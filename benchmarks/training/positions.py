"""Positions with gaps: short training rows that show a model distances of up to 131,072 tokens.

A row's position ids increase by one, except at a few random places where they jump. So training sees the relative
distances of a long context at the cost of a short one. With such positions, give the model an attention mask of ones:
without one, transformers takes every jump for the border of a packed sequence and masks across it.
"""

from __future__ import annotations

import math

import numpy as np

LIMIT = 131_072
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def gapped(rng: np.random.Generator, length: int, limit: int = LIMIT, share: float = 0.5) -> IntArray:
    """Return `length` ascending positions below `limit`; a `share` of the calls has gaps, half the rest starts at 0."""
    if rng.random() >= share:
        start = 0 if rng.random() < 0.5 else int(rng.integers(0, limit - length + 1))
        return np.arange(start, start + length)
    span = int(math.exp(rng.uniform(math.log(length), math.log(limit))))
    places = rng.integers(1, length, size=int(rng.integers(1, 9)))
    leaps = np.zeros(length, dtype=np.int64)
    np.add.at(leaps, places, (rng.dirichlet(np.ones(len(places))) * (span - length)).astype(np.int64))
    start = int(rng.integers(0, limit - span + 1))
    return np.arange(start, start + length) + np.cumsum(leaps)
