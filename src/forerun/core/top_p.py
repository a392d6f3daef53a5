"""Top-p without sorting the vocabulary.

The least likely tokens that sum to at most 1 - p are left out. Positive floats are in the order of their bits. So the
least probability that is kept is found bit by bit, a few of them at a time: probabilities are summed by their upper
bits, and bins are left out from the lowest up, until one would exceed the sum. The next bits divide that one. So it
takes as long for any distribution.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.core.compiling import COMPILES, compiled

_BITS, _DIGIT = 36, 12  # of a float32, with zeros above, and of those that are looked at together


def cut(
    scores: npt.NDArray[np.float32], chances: npt.NDArray[np.float32], out: float, filtered: float
) -> tuple[npt.NDArray[np.float32], int]:
    """Scores with ``filtered`` in place of the tokens that are left out, and how many tokens are kept.

    Args:
        scores: ``[V]``.
        chances: their softmax, ``[V]``.
        out: the probability that may be left out. Of equally likely tokens at the edge, the first go.
    """
    result = np.empty(len(scores), np.float32)
    kept = _cut(scores, chances, out, filtered, result, np.empty(1 << _DIGIT, np.float64))
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
) -> int:
    bits, edge, left = chances.view(np.int32), 0, 0.0  # the upper bits of the edge, and the sum of all below it
    for digit in range(1, _BITS // _DIGIT + 1):
        shift = _BITS - digit * _DIGIT
        mass[:] = 0.0
        for token in range(len(chances)):
            upper = np.int64(bits[token]) >> shift
            if upper >> _DIGIT == edge:
                mass[upper & (len(mass) - 1)] += chances[token]
        last = 0
        while last < len(mass) - 1 and left + mass[last] <= out:
            left += mass[last]
            last += 1
        edge = edge << _DIGIT | last
    kept = 0
    for token in range(len(chances)):
        keep = bits[token] > edge
        if bits[token] == edge:
            left += chances[token]
            keep = left > out
        result[token] = scores[token] if keep else filtered
        kept += keep
    return kept
