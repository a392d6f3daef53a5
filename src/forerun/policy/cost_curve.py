"""The cost of a forward pass, by the tokens that it scores and the cached tokens that it attends to.

A pass over n tokens, of which row r has n_r and attends to L_r cached ones, costs

    curve(n) + per_row * (rows - 1) + sum(L_r * cached_curve(n_r))

in units of a pass over one token with an empty cache. Both curves are piecewise linear between a few measured sizes: on
a CPU the second token turns matrix-vector into matrix products and costs as much as the next eight, and after a long
prompt, a few more tokens of a row can cost as much as the whole pass. The Lookahead paper has one constant instead, the
critical decoding length (section 3.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

STEPS_PER_DECADE = 10
"""Steps of rounded costs per tenfold increase, as in Renard's series of preferred numbers."""

PREFILL_PASS = 512
"""Usual number of prompt tokens per prefill pass."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostCurve:
    """Costs of passes over one row with an empty cache, and what cached tokens add; beyond the last size, linear.
    Raises ValueError for impossible costs.

    Attributes:
        sizes, costs: tokens scored by a pass, rising from 1, and its cost, never falling, from 1.
        cached_sizes, cached_costs: tokens of a row, rising from 1, and its cost per cached token, never falling.
        per_row: cost of each row but the first.
        unit: seconds of a pass of cost 1, if measured.
        doubtful: whether the machine was busy then.
    """

    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    cached_sizes: tuple[int, ...] = (1, 2)
    cached_costs: tuple[float, ...] = (0.0, 0.0)
    per_row: float = 0.0
    unit: float | None = None
    doubtful: bool = False

    def __post_init__(self) -> None:
        for name in ("sizes", "cached_sizes"):
            sizes = getattr(self, name)
            if len(sizes) < 2 or sizes[0] != 1 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} are {sizes}; they must be two or more and rise from 1")
        if len(self.costs) != len(self.sizes) or self.costs[0] != 1 or not _never_fall(self.costs):
            raise ValueError(f"costs are {self.costs}; they must be one for each size and never fall from 1")
        if len(self.cached_costs) != len(self.cached_sizes) or not _never_fall((0.0, *self.cached_costs)):
            raise ValueError(
                f"cached_costs are {self.cached_costs}; they must be one for each size and never fall from 0"
            )
        if not 0 <= self.per_row < math.inf:
            raise ValueError(f"per_row is {self.per_row}; it must be finite and at least 0")

    @classmethod
    def linear(cls, critical_length: float) -> CostCurve:
        """Make a curve on which a further token costs 1 / ``critical_length``; raise ValueError if not positive."""
        if not critical_length > 0:
            raise ValueError(f"critical_length is {critical_length}; it must be positive")
        return cls((1, 2), (1.0, 1 + 1 / critical_length))

    def passes(self, tokens: npt.ArrayLike) -> FloatArray:
        """Return costs of passes with empty caches, by their tokens; any shape."""
        return _interpolated(tokens, self.sizes, self.costs)

    def cached(self, tokens: npt.ArrayLike) -> FloatArray:
        """Return the cost per cached token, by the tokens that a row scores; any shape."""
        return _interpolated(tokens, self.cached_sizes, self.cached_costs)

    def of(self, tokens: Sequence[int], cached: Sequence[int]) -> float:
        """Return the cost of a pass, by each row's scored and cached tokens."""
        looking = float(self.cached(tokens) @ np.asarray(cached, np.float64))
        return float(self.passes(sum(tokens))) + self.per_row * (len(tokens) - 1) + looking

    def rounded(self) -> CostCurve:
        """Round the cost of further tokens to preferred numbers, size by size, to hide noise."""
        costs = _rounded(self.sizes, self.costs, 1.0)
        cached = _rounded(self.cached_sizes, self.cached_costs, _preferred(self.cached_costs[0]))
        per_row = _preferred(self.per_row)
        return replace(self, costs=costs, cached_costs=cached, per_row=per_row)


class CostTable:
    """Costs by a curve, looked up in a microsecond."""

    def __init__(self, costs: CostCurve) -> None:
        self.costs = costs
        self._extend(128)

    def _extend(self, count: int) -> None:
        self._passes, self._cached = self.costs.passes(np.arange(count)), self.costs.cached(np.arange(count))
        self._pass_list, self._cached_list = self._passes.tolist(), self._cached.tolist()  # for single look-ups

    def curves(self, count: int) -> tuple[FloatArray, FloatArray]:
        """Return costs of passes over 0 to at least ``count`` - 1 tokens with empty caches, and per cached token."""
        if len(self._passes) < count:
            self._extend(2 * count)
        return self._passes, self._cached

    def decoding(self, rows: int, cached: int) -> float:
        """Return the cost of a pass over one token of each row; ``cached``: their cached tokens in all."""
        self.curves(rows + 1)
        return float(self._pass_list[rows] + self.costs.per_row * (rows - 1) + self._cached_list[1] * cached)

    def cost(self, tokens: Sequence[int], cached: Sequence[int], beside: int = 0) -> float:
        """Return the cost of a pass as by ``CostCurve.of``, with ``beside`` tokens of other rows' prompts."""
        count = sum(tokens) + beside
        self.curves(count + 1)
        looking = sum([self._cached_list[n] * length for n, length in zip(tokens, cached, strict=True)])
        return float(self._pass_list[count] + self.costs.per_row * (len(tokens) - 1) + looking)

    def prefill(self, tokens: int) -> float:
        """Return the cost of a prompt's prefill, in passes over ``PREFILL_PASS`` tokens."""
        passes, rest = divmod(tokens, PREFILL_PASS)
        full, looks = self.costs.passes(PREFILL_PASS), self.costs.cached(PREFILL_PASS)
        looking = float(looks) * PREFILL_PASS * passes * (passes - 1) / 2
        return float(full) * passes + looking + (self.cost([rest], [tokens - rest]) if rest else 0.0)


def _never_fall(values: Sequence[float]) -> bool:
    return list(values) == sorted(values) and values[-1] < math.inf


def _interpolated(at: npt.ArrayLike, sizes: Sequence[int], costs: Sequence[float]) -> FloatArray:
    wanted = np.asarray(at, np.float64)
    (one, two), (low, high) = sizes[-2:], costs[-2:]
    beyond = np.maximum(wanted - two, 0) * (high - low) / (two - one)
    return np.asarray(np.interp(wanted, sizes, costs) + beyond, np.float64)


def _rounded(sizes: Sequence[int], costs: Sequence[float], first: float) -> tuple[float, ...]:
    slopes = [_preferred(slope) for slope in np.diff(costs) / np.diff(sizes)]
    return tuple(float(f"{cost:.7g}") for cost in np.cumsum([first, *(slopes * np.diff(sizes))]))


def _preferred(value: float) -> float:
    return 0.0 if value <= 0 else float(f"{10 ** (round(math.log10(value) * STEPS_PER_DECADE) / STEPS_PER_DECADE):.2g}")
