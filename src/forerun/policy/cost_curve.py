"""What a forward pass costs, by the tokens that it scores and the tokens that it looks back on.

A pass over n tokens, of which row r has n_r and looks back on L_r cached ones, costs

    curve(n) + per_row * (rows - 1) + sum(L_r * (per_cached + per_tile * ((n_r - 1) // TILE_TOKENS)))

in units of a pass over one token with an empty cache. ``curve`` is piecewise linear between a few measured sizes, for
it is neither linear nor even smooth: on a CPU the second token turns matrix-vector products into matrix products and
costs as much as the next eight, and where arithmetic begins to count instead of memory, the slope grows. Each row's
cache is read once, and scored against ``TILE_TOKENS`` tokens of the row at a time. The arithmetic of the first is
hidden by the reading, so a few tokens cost a long text no more than one; that of the others is not. The Lookahead paper
has one constant instead, the critical decoding length (section 3.4), at which the extra tokens cost as much as the
pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TILE_TOKENS = 8
"""Tokens of a row that the kernels score together."""
STEPS_PER_DECADE = 10
"""Rounded costs grow tenfold in this many steps, as in Renard's series of preferred numbers."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostCurve:
    """Costs of passes over one row with an empty cache, and what cached tokens add.

    Attributes:
        sizes: tokens scored by a pass, rising from 1.
        costs: of these passes, never falling, from 1; beyond the last size they grow as between the last two.
        per_cached: what a pass pays for each cached token that it looks back on.
        per_tile: what it pays besides for each further ``TILE_TOKENS`` tokens that it scores, complete or not.
        per_row: what a pass pays for each row but the first.
        unit: seconds of a pass of cost 1, where it was measured.

    Raises:
        ValueError: if they cannot be such costs.
    """

    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    per_cached: float = 0.0
    per_tile: float = 0.0
    per_row: float = 0.0
    unit: float | None = None

    def __post_init__(self) -> None:
        sizes, costs = self.sizes, self.costs
        if len(sizes) < 2 or sizes[0] != 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"sizes are {sizes}; they must be two or more and rise from 1")
        if len(costs) != len(sizes) or costs[0] != 1 or list(costs) != sorted(costs) or not costs[-1] < math.inf:
            raise ValueError(f"costs are {costs}; they must be one for each size and never fall from 1")
        for name in ("per_cached", "per_tile", "per_row"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite and at least 0")

    @classmethod
    def linear(cls, critical_length: float) -> CostCurve:
        """One token costs 1, and each further one 1 / ``critical_length``.

        Raises:
            ValueError: if ``critical_length`` is not positive.
        """
        if not critical_length > 0:
            raise ValueError(f"critical_length is {critical_length}; it must be positive")
        return cls((1, 2), (1.0, 1 + 1 / critical_length))

    def passes(self, tokens: npt.ArrayLike) -> FloatArray:
        """Costs of passes by their tokens, with empty caches, in the shape of ``tokens``."""
        wanted = np.asarray(tokens, np.float64)
        (one, two), (low, high) = self.sizes[-2:], self.costs[-2:]
        beyond = np.maximum(wanted - two, 0) * (high - low) / (two - one)
        return np.asarray(np.interp(wanted, self.sizes, self.costs) + beyond, np.float64)

    def of(self, tokens: Sequence[int], cached: Sequence[int]) -> float:
        """Cost of a pass by each row's scored tokens and cached tokens."""
        return float(self.passes(sum(tokens))) + self.per_row * (len(tokens) - 1) + self.looking(tokens, cached)

    def looking(self, tokens: Iterable[int], cached: Iterable[int]) -> float:
        """What rows pay for their cached tokens, by each row's scored tokens."""
        if not self.per_cached and not self.per_tile:
            return 0.0
        each = zip(tokens, cached, strict=True)
        return sum(length * (self.per_cached + self.per_tile * ((n - 1) // TILE_TOKENS)) for n, length in each)

    def rounded(self) -> CostCurve:
        """Round the cost of further tokens to preferred numbers, size by size, so that noise seldom shows."""
        slopes = [_preferred(slope) for slope in np.diff(self.costs) / np.diff(self.sizes)]
        costs = np.cumsum([1, *(slopes * np.diff(self.sizes))]).round(6)
        looking = _preferred(self.per_cached), _preferred(self.per_tile), _preferred(self.per_row)
        return CostCurve(self.sizes, tuple(costs.tolist()), *looking, self.unit)


def _preferred(value: float) -> float:
    return 0.0 if value <= 0 else float(f"{10 ** (round(math.log10(value) * STEPS_PER_DECADE) / STEPS_PER_DECADE):.2g}")
