"""Top-p without sorting the vocabulary.

The least likely tokens that sum to at most 1 - p are left out. Probabilities are put into bins by the upper bits of
their floats, which are in order of size. Bins are left out whole, from the lowest up, until one would exceed the sum;
only the tokens of that bin are sorted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.core.compiling import COMPILES, compiled

_SHIFT = 19  # a bin has all floats of one exponent and the same upper 4 bits of 23
_BINS = 1 << (31 - _SHIFT)


def cut(
    scores: npt.NDArray[Any], chances: npt.NDArray[Any], out: float, filtered: float
) -> tuple[npt.NDArray[np.float32], int]:
    """Scores with ``filtered`` in place of the tokens that are left out, and how many tokens are kept.

    Args:
        scores: float32 ``[V]``.
        chances: their softmax, float32 ``[V]``.
        out: the probability that may be left out.
    """
    result, mass = np.empty(len(scores), np.float32), np.zeros(_BINS, np.float64)
    kept = _cut(scores, chances, out, filtered, result, mass, np.empty(len(scores), np.int64))
    return result, kept


def warm_up() -> None:
    """Compile this, or load it from an earlier process."""
    if COMPILES:
        cut(np.zeros(1, np.float32), np.ones(1, np.float32), 0.0, 0.0)


@compiled
def _cut(
    scores: npt.NDArray[Any],
    chances: npt.NDArray[Any],
    out: float,
    filtered: float,
    result: npt.NDArray[np.float32],
    mass: npt.NDArray[np.float64],
    order: npt.NDArray[np.int64],
) -> int:
    bits, kept, size, last, left = chances.view(np.int32), 0, 0, 0, 0.0
    for token in range(len(chances)):
        mass[bits[token] >> _SHIFT] += chances[token]
    while last < len(mass) - 1 and left + mass[last] <= out:
        left += mass[last]
        last += 1
    for token in range(len(chances)):
        bin_of = bits[token] >> _SHIFT
        keep = bin_of > last
        result[token] = scores[token] if keep else filtered
        kept += keep
        if bin_of == last:
            at = size
            while at > 0 and chances[order[at - 1]] > chances[token]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = token
            size += 1
    for at in range(size):
        left += chances[order[at]]
        if left > out:
            result[order[at]] = scores[order[at]]
            kept += 1
    return kept
