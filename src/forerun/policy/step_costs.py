"""What the parts of a step cost, in plain passes: learned from their seconds, and from the cost curve before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.policy.calibration import FIRST_GUESS
from forerun.policy.cost_curve import CostTable
from forerun.policy.ledger import SHARE
from forerun.policy.policy_tables import (
    CHAINS,
    DECIDING,
    EXTENSIONS,
    PASSES,
    PREPARING,
    PROPOSALS,
    SMALL_CHAINS,
    Policy,
    policy_at,
)
from forerun.policy.time_model import (
    CREDIBLE,
    GUESS_DOUBT,
    IN_PROPORTION,
    LOADED_DOUBT,
    NOTHING_KNOWN,
    STEP_NOISE,
    LinearCost,
    begin_time,
    record_time,
    time_at,
)

FIRST_PROPOSAL = 0.0002
"""First guess of proposing a tree, in seconds. Measured: 150 us, plus 20 us per further row."""
FIRST_DECIDING = 5e-5
"""First guess of deciding, in seconds. Measured: 40 to 70 us."""
FIRST_EXTENSION = 0.3
"""First guess of a costly source's draft for a row that was not measured at load, in plain passes: a small model's."""
FURTHER_ROW = 0.13
"""What a further row adds, as a share."""
SLOPE_NODES = 8
"""Nodes over which the slope of the cost curve is taken."""
NO_COST = 1e-9
"""Cost of a part while the seconds of a plain pass are unknown."""
PLAIN_STEPS_TO_MEASURE = 2
"""Plain steps needed to measure one: drafting evicts the next pass's data from the processor's caches."""


@dataclass(frozen=True)
class DraftPasses:
    """First guess of the cost of a pass that drafts a token of a chain, in plain passes.

    Attributes:
        reads: how many of a row's cached tokens it reads.
        weight: its cost relative to the target's pass over that many cached tokens.
        small: costs of a small model that drafts directly for requests of at most ``alone`` cached tokens; its pass
            over one token costs ``share``, and it reads at most ``window`` of them.
        prefills: whether the small model computes keys and values of the prompt.
        accepted: probability that a token is accepted.
    """

    reads: Callable[[int], int] = lambda cached: cached
    weight: float = 1.0
    small: CostTable | None = None
    share: float = 1.0
    window: int = 0
    alone: int = 0
    prefills: bool = True
    accepted: float = FIRST_GUESS

    def are_alone(self, cached: Sequence[int]) -> bool:
        """Return whether the small model drafts directly."""
        return self.small is not None and max(cached) <= self.alone

    def cost(self, cached: Sequence[int], table: CostTable) -> float:
        """Return the cost of a pass over one token of each row; ``table``: the target's costs."""
        if self.small is not None and self.are_alone(cached):
            return self.share * self.small.decoding(len(cached), sum(min(each, self.window) for each in cached))
        return self.weight * table.decoding(len(cached), sum(map(self.reads, cached)))

    def prefill(self, tokens: int) -> float:
        """Return the cost of the small model's prefill of ``tokens`` tokens."""
        if self.small is None or not self.prefills:
            return 0.0
        return self.share * self.small.cost([min(tokens, self.window)], [0])


def begin_times(policy: Policy, unit: float | None) -> None:
    """Set all times to first guesses; ``unit``: seconds of a plain pass, if measured at load."""
    times, account = policy.times, policy.account[0]
    account.loaded = unit is not None
    begin_time(times[PASSES], unit or 1.0, LOADED_DOUBT if unit else NOTHING_KNOWN, noise=STEP_NOISE)
    begin_time(times[PREPARING], 1.0, NOTHING_KNOWN)
    for part, seconds, guess in (
        (DECIDING, FIRST_DECIDING, NO_COST), (PROPOSALS, FIRST_PROPOSAL, NO_COST), (EXTENSIONS, 0.0, FIRST_EXTENSION)
    ):  # fmt: skip
        begin_time(times[part], guess, GUESS_DOUBT, LinearCost(1.0 - FURTHER_ROW, FURTHER_ROW))
        policy.seconds[part], times[part].guessed = seconds, 0
    for part in (CHAINS, SMALL_CHAINS):
        begin_time(times[part], 1.0, GUESS_DOUBT, IN_PROPORTION)


@compiled
def unit_of(address: int) -> float:
    """Return the seconds of a pass of cost 1 without drafts; 0 if unknown."""
    policy = policy_at(address)
    time = policy.times[PASSES]
    return float(time.scale) if policy.account[0].loaded or time.count else 0.0


@compiled
def _part(address: int, part: int) -> Any:
    """Return a part's time, in plain passes as soon as their seconds are known."""
    policy = policy_at(address)
    time, unit = policy.times[part], unit_of(address)
    if not time.guessed and unit > 0.0:
        time.guessed = 1
        if policy.seconds[part] > 0.0:
            time.scale = policy.seconds[part] / unit
            time.log_scale = math.log(policy.seconds[part] / unit)
    return time


@compiled
def asking_cost(address: int, part: int, rows: int) -> float:
    """Return the cost of a source's drafts for so many rows; 0 for none."""
    return time_at(_part(address, part), float(rows)) if rows else 0.0


@compiled
def each_cost(address: int, part: int) -> float:
    """Return what a further row adds to a source's drafts."""
    time = _part(address, part)
    return float(time.scale * time.each)


@compiled
def scored_cost(address: int, step: np.record, added: float) -> float:
    """Return the cost of drafts that add ``added`` to the pass by the curve, corrected by what passes took."""
    policy = policy_at(address)
    if not policy.account[0].plain_measured:
        return added
    time = policy.times[PASSES]
    return float((time.start - 1.0) * step.alone + time.each * added)


@compiled
def node_share(address: int) -> float:
    """Return what nodes really cost, as a share of the curve's figure."""
    policy = policy_at(address)
    return float(policy.times[PASSES].each) if policy.account[0].plain_measured else 1.0


@compiled
def pass_cost(address: int, step: np.record, rows: RecordArray) -> float:
    """Return the cost of the pass with each row's ``nodes``."""
    policy = policy_at(address)
    count, looking = step.tokens, 0.0
    for row in rows:
        count += row.nodes
        looking += policy.looks[row.pending + row.nodes] * row.cached
    return float(policy.passes[count] + policy.account[0].per_row * (len(rows) - 1) + looking)


@compiled
def price_nodes(address: int, step: np.record, rows: RecordArray) -> None:
    """Set the fixed cost of having nodes at all, and the cost per node of each row."""
    policy = policy_at(address)
    first, nodes, passes, looks = step.tokens + 1, step.drafts, policy.passes, policy.looks
    slope = (passes[first + nodes] - passes[first]) / nodes
    look = max((looks[2 + SLOPE_NODES] - looks[2]) / SLOPE_NODES, 0.0)
    step.fixed = scored_cost(address, step, max(passes[first] - passes[first - 1] - slope, 0.0))
    for row in rows:
        row.slope = node_share(address) * (slope + look * row.cached)


@compiled
def plain_step_due(address: int) -> bool:
    """Return whether to measure a plain step now: if none was and drafts gain little, if it is in doubt whether they
    pay, or if it costs less than ``SHARE`` of the time since the last."""
    policy = policy_at(address)
    account = policy.account[0]
    gain = account.tokens / account.spent
    if not account.plain_measured and (not account.loaded or account.after_plain):
        return bool(gain <= PLAIN_STEPS_TO_MEASURE)
    doubt = math.sqrt(policy.times[PASSES].p00)
    if unit_of(address) > 0.0 and account.since and doubt > CREDIBLE * STEP_NOISE and gain < math.exp(CREDIBLE * doubt):
        return True
    return bool(account.since * SHARE > PLAIN_STEPS_TO_MEASURE * max(gain, 1.0))


@compiled
def record_plain(address: int, plain: float, seconds: float) -> None:
    """Record a plain pass after another one: its cost by the curve, and its seconds."""
    policy = policy_at(address)
    account = policy.account[0]
    record_time(policy.times[PASSES], seconds / plain, 0.0, False)
    account.plain_measured, account.after_plain, account.since = 1, 1, 0


@compiled
def record_pass(address: int, step: np.record, added: float, seconds: float, empty: bool) -> float:
    """Record a pass; return its credible time, or 0 if it was not measured."""
    policy = policy_at(address)
    account = policy.account[0]
    account.since += 1
    if empty and not account.after_plain:
        account.after_plain = 1
        return 0.0
    plain = float(step.plain)
    credible = plain * record_time(policy.times[PASSES], seconds / plain, added / plain, not empty)
    if empty:
        account.plain_measured, account.since = 1, 0
    account.after_plain = empty
    return credible


@compiled
def record_asking(address: int, part: int, seconds: float, rows: int) -> float:
    """Record the seconds of a part of a step for so many rows, if any, and return their credible cost."""
    return record_time(_part(address, part), seconds / unit_of(address), float(rows), rows > 0)


@compiled
def record_chains(address: int, step: np.record, part: int, seconds: float, length: float) -> float:
    """Record the time of drafting chains, and return its credible cost. The first chains touch memory and select keys,
    so they only count if cheaper than the guess."""
    policy = policy_at(address)
    time, unit = policy.times[part], unit_of(address)
    passes = seconds / unit / step.passes
    if length <= 0.0:
        return seconds / unit
    return record_time(time, passes if time.count else min(passes, length), length, True) * float(step.passes)
