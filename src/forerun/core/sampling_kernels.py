"""Compiled sampling over a vocabulary, which skips most tokens.

Gumbel noise: g = -log(-log u) for a uniform u. Two logarithms per token cost more than a small model's pass, but few
tokens can win: -log u is at least 1 - u, so g is at most -log(1 - u), and log2 of a float is at least its bits read as
a fixed-point number. Only tokens whose bound, which needs no logarithm, exceeds the best score so far get full noise.

Top-p: the least likely tokens that sum to at most 1 - p are cut without sorting. Positive floats are ordered like their
bits, so the smallest kept probability is found a few bits at a time: sum probabilities by their upper bits, drop the
lowest bins until one would exceed the sum, and divide that bin by the next bits. The cost does not depend on the
distribution.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.core.compiling import COMPILES, compiled

GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BITS = 52
"""Hash bits per uniform number. With 53, adding 0.5 could round up to 1."""

_GOLDEN, _MIX1, _MIX2 = np.uint64(GOLDEN), np.uint64(MIX1), np.uint64(MIX2)
_SHIFT1, _SHIFT2, _SHIFT3, _REST = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(64 - BITS)
_ONES = np.uint64((1 << BITS) - 1)
_UNIT = 2.0**-BITS
_LOG2 = math.log(2.0)
_EXPONENT = 1023.0 + BITS  # of 2 ** -BITS in a float's bits
_SLACK = 1e-6  # exceeds the bound's own rounding
_BLOCK = 512  # tokens bounded at a time, so that the loop is vectorised
_LINE = 64  # scores compared at a time, for the same reason
_CHANCE_BITS, _DIGIT = 36, 12  # bits of a float32, zero-extended, and those examined at a time


def best_with_noise(scores: npt.NDArray[Any], key: int) -> int:
    """Return the token with the highest score ``[V]`` plus noise for a 64-bit key; 0 if all scores are -inf."""
    return int(_search(scores, np.uint64(key), np.empty(_BLOCK, np.float64)))


def top_p_cut(
    scores: npt.NDArray[np.float32], chances: npt.NDArray[np.float32], out: float, filtered: float
) -> tuple[npt.NDArray[np.float32], int]:
    """Return scores ``[V]`` with ``filtered`` in place of cut tokens, and the number of tokens kept. ``chances`` are
    their softmax; ``out`` is the probability to cut. Of equally likely tokens at the edge, the first are cut."""
    result = np.empty(len(scores), np.float32)
    kept = _cut(scores, chances, out, filtered, result, np.empty(1 << _DIGIT, np.float64))
    return result, kept


def warm_up() -> None:
    """Compile or load the kernels."""
    if COMPILES:
        highest(np.zeros(1, np.float32))
        best_with_noise(np.zeros(1, np.float32), 0)
        top_p_cut(np.zeros(1, np.float32), np.ones(1, np.float32), 0.0, 0.0)


@compiled
def _round(bits: np.uint64) -> np.uint64:
    bits = (bits ^ (bits >> _SHIFT1)) * _MIX1
    bits = (bits ^ (bits >> _SHIFT2)) * _MIX2
    return bits ^ (bits >> _SHIFT3)


@compiled
def _hash(key: np.uint64, token: int) -> np.int64:
    return np.int64(_round(key + np.uint64(token) * _GOLDEN) >> _REST)


@compiled
def gumbel_of(mixed_seed: np.uint64, position: int, token: int) -> float:
    """Return a token's noise at a position, for drafts; see ``sampling.mixed``."""
    key = _round(mixed_seed + np.uint64(position << 3) + _GOLDEN)  # for ``Salt.TARGET``, which is 0
    return -math.log(-math.log((float(_hash(key, token)) + 0.5) * _UNIT))


@compiled
def _search(scores: npt.NDArray[Any], key: np.uint64, bounds: npt.NDArray[np.float64]) -> int:
    raw, token, most = bounds.view(np.int64), 0, -np.inf
    for first in range(0, len(scores), len(bounds)):
        count = min(len(bounds), len(scores) - first)
        for i in range(count):
            bounds[i] = float(np.int64(_ONES) - _hash(key, first + i)) + 0.5  # 1 - u, in units of 2 ** -BITS
        for i in range(count):
            bounds[i] = scores[first + i] + _LOG2 * (_EXPONENT - raw[i] * _UNIT) + _SLACK
        for i in range(count):
            if bounds[i] > most:
                u = (float(_hash(key, first + i)) + 0.5) * _UNIT
                value = float(scores[first + i]) - math.log(-math.log(u))
                if value > most:
                    token, most = first + i, value
    return token


@compiled
def highest(scores: npt.NDArray[np.float32]) -> int:
    """Return the token with the highest score ``[V]``, as torch's ``argmax`` does: the first of equals, or the first
    NaN. torch needs 45 us for 49,152 tokens, this 6."""
    token, most, last = 0, np.float32(-np.inf), len(scores) - len(scores) % _LINE
    for first in range(0, len(scores), _LINE):
        if first < last and not _any_above(scores, first, most):
            continue
        for i in range(first, min(first + _LINE, len(scores))):
            if scores[i] != scores[i]:
                return i
            if scores[i] > most:
                token, most = i, scores[i]
    return token


@compiled
def _any_above(scores: npt.NDArray[np.float32], first: int, most: np.float32) -> bool:
    """Return whether a line has a score above ``most`` or NaN. Unsigned indices and sums let the loop vectorise."""
    found = np.uint32(0)
    for i in range(np.uint64(_LINE)):
        found = np.uint32(found | np.uint32(not scores[np.uint64(first) + i] <= most))
    return bool(found)


@compiled
def _cut(
    scores: npt.NDArray[Any],
    chances: npt.NDArray[Any],
    out: float,
    filtered: float,
    result: npt.NDArray[np.float32],
    mass: npt.NDArray[np.float64],
) -> int:
    bits, edge, left = chances.view(np.int32), 0, 0.0  # the upper bits of the edge, and the sum below it
    for digit in range(1, _CHANCE_BITS // _DIGIT + 1):
        shift = _CHANCE_BITS - digit * _DIGIT
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
