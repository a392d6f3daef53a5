"""The most tokens a second that plain decoding and TriForce can give on some devices, from what passes must read.

TriForce has two levels (section 4.2 of its paper). The small model, over a short window, drafts for the target over a
sparse cache of ``budget`` tokens; their chain of ``gamma2`` tokens is verified by one pass over the full cache. So per
step the keys and values are read once, and once streamed if they are in the host's memory. Where the text fits the
budget, the small model drafts for the full cache at once, as ``decoding.level.Level`` lets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

from benchmarks.capacity.capacity import Fit, Machine, Pass, fit, pass_seconds
from benchmarks.capacity.shapes import ModelShape
from benchmarks.capacity.speculation import chain_seconds, expected_tokens, waiting
from forerun.core.long_context import LongContextConfig, Sparse

LONGEST = 32
"""The longest chain that is tried. At an acceptance rate of 0.95 it gives 0.82 of what an endless one would."""
WIDEST = 8
"""The most tokens that the small model is tried with at a time."""
RANK_BYTES = 24
"""Bytes of a key in the low-rank cache's index: 24 dimensions of a byte."""


@dataclass(frozen=True)
class Drafting:
    """How drafts are made, and how often they are accepted.

    Attributes:
        acceptance: rate at which the full cache accepts what the sparse cache made.
        small_acceptance: rate at which the level above accepts the small model's drafts.
        small: the small model's shape; None for drafts by the target over the sparse cache alone.
        budget: tokens of the sparse cache.
        window: tokens that the small model sees.
        sparse: the sparse cache. The low-rank one reads its index of all keys at each pass.
        gamma1, gamma2: tokens drafted and verified at a time; by default those that give the most tokens a second.
    """

    acceptance: float
    small_acceptance: float = 0.0
    small: ModelShape | None = None
    budget: int = LongContextConfig.cache_budget
    window: int = LongContextConfig.sinks + LongContextConfig.window
    sparse: Sparse = "retrieval"
    gamma1: int | None = None
    gamma2: int | None = None

    def index(self, shape: ModelShape, context: int) -> float:
        """Bytes of a row's index that a pass reads."""
        return float(RANK_BYTES * shape.layers * shape.kv_heads * context) if self.sparse == "low-rank" else 0.0

    def memory(self, shape: ModelShape, machine: Machine, context: int, rows: int) -> float:
        """Bytes of each device that drafting takes: the small model, its window, and the sparse cache."""
        small = self.small
        own = 0.0 if small is None else small.stored_bytes + rows * self.window * small.token_kv_bytes
        if context <= self.budget:
            return own
        held = self.index(shape, context) or self.budget * shape.token_kv_bytes  # low-rank reads keys where they lie
        return own + rows * held * machine.kv_share(shape)


class Step(NamedTuple):
    """A step with drafts: lengths, expected tokens of each row, and seconds."""

    gamma1: int
    gamma2: int
    tokens: float
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """What is possible at one context.

    Attributes:
        context: tokens of each row.
        rows: of the batch.
        fit: what lies where in plain decoding.
        drafting_fit: what lies where with drafts.
        plain_seconds: of a pass over one token of each row.
        step: the best step with drafts.
    """

    context: int
    rows: int
    fit: Fit
    drafting_fit: Fit
    plain_seconds: float
    step: Step

    @property
    def plain_rate(self) -> float:
        """Tokens a second of all rows, without drafts."""
        return self.rows / self.plain_seconds

    @property
    def rate(self) -> float:
        """Tokens a second of all rows, with drafts."""
        return self.rows * self.step.tokens / self.step.seconds

    @property
    def speed_up(self) -> float:
        """Of drafts over plain decoding."""
        return self.rate / self.plain_rate


class LevelTimes:
    """Seconds of each level's passes at one context.

    Args:
        shape: of the target.
        machine: that it runs on.
        context: tokens of each row.
        rows: of the batch.
        drafting: how drafts are made.
    """

    def __init__(self, shape: ModelShape, machine: Machine, context: int, rows: int, drafting: Drafting) -> None:
        self._shape, self._machine, self._context, self._rows = shape, machine, context, rows
        self._drafting = drafting
        self.plain_fit = fit(shape, machine, context, rows)
        self.fit = fit(shape, machine, context, rows, drafting.memory(shape, machine, context, rows))
        self.middle = cache(self._middle)

    def plain(self) -> float:
        """The target over its full cache, one token, and nothing else in memory."""
        return self._over_all(1, self.plain_fit)

    def full(self, tokens: int) -> float:
        """The target over its full cache."""
        return self._over_all(tokens, self.fit)

    def _over_all(self, tokens: int, at: Fit) -> float:
        return pass_seconds(self._shape, self._machine, Pass(tokens, self._context, self._rows, streamed=at.streamed))

    def _middle(self, tokens: int) -> float:
        """The target over its sparse cache."""
        shape, drafting, machine = self._shape, self._drafting, self._machine
        index, streamed = drafting.index(shape, self._context), 0.0
        if index:  # what a query finds lies where the full cache is
            found = self._rows * drafting.budget * shape.token_kv_bytes * machine.kv_share(shape)
            streamed = found * self.fit.offloaded
        return pass_seconds(shape, machine, Pass(tokens, drafting.budget, self._rows, index, streamed))

    def small(self) -> float | None:
        """The small model, one token; each device runs all of it."""
        small = self._drafting.small
        if small is None:
            return None
        alone = Machine(self._machine.device)
        return pass_seconds(small, alone, Pass(1, min(self._drafting.window, self._context), self._rows))


def forecast(shape: ModelShape, machine: Machine, context: int, rows: int, drafting: Drafting) -> Forecast:
    """The limits at a context; what is computed where something does not fit means nothing (``Fit.possible``)."""
    passes = LevelTimes(shape, machine, context, rows, drafting)
    steps = _steps(passes, drafting, context, rows)
    best = max(steps, key=lambda step: step.tokens / step.seconds)
    return Forecast(context, rows, passes.plain_fit, passes.fit, passes.plain(), best)


def _steps(passes: LevelTimes, drafting: Drafting, context: int, rows: int) -> list[Step]:
    """A step of each length that may be."""
    small, short = passes.small(), context <= drafting.budget
    acceptance = drafting.small_acceptance if short else drafting.acceptance
    lengths = range(LONGEST + 1) if drafting.gamma2 is None else [drafting.gamma2]
    widths = range(1, WIDEST + 1) if drafting.gamma1 is None else [drafting.gamma1]
    if short:
        drafts = {1: [n * small if small is not None else 0.0 for n in range(max(lengths) + 1)]}
        lengths = lengths if small is not None else [0]
    else:
        drafts = {gamma1: _chains(passes, drafting, gamma1, max(lengths), rows) for gamma1 in widths}
    verified = {gamma2: (expected_tokens(acceptance, gamma2), passes.full(gamma2 + 1)) for gamma2 in lengths}
    return [
        Step(gamma1, gamma2, verified[gamma2][0], drafts[gamma1][gamma2] + verified[gamma2][1])
        for gamma1, gamma2 in product(drafts, verified)
    ]


def _chains(passes: LevelTimes, drafting: Drafting, gamma1: int, most: int, rows: int) -> list[float]:
    """Seconds of making chains of 0, 1, ..., ``most`` tokens for all rows. Without a small model no row waits for
    another: each makes a token a pass."""
    seconds = chain_seconds(most, gamma1, drafting.small_acceptance, passes.middle, passes.small())
    slower = waiting(most, gamma1, drafting.small_acceptance, rows if drafting.small is not None else 1)
    return [each * factor for each, factor in zip(seconds, slower, strict=True)]
