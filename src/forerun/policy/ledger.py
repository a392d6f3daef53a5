"""What drafting may lose: the cost to go, what a token is worth, and an account of losses.

Costs are in plain passes, by the cost curve: c(B) is the cost of a pass over one token of each of B rows.

**Cost to go.** If the rows of a closed batch (``Engine.generate``) lack R_1 <= ... <= R_B tokens, plain decoding costs
Phi = sum over k of (R_k - R_{k-1}) c(B - k + 1). In a server, where new rows replace finished ones, each token costs
its share of a pass: Phi = sum(R) c(B) / B.

**Value of a token.** One more token for a row saves one of its steps: a whole pass for the row that ends last, else
only a share of the batch's passes. Rows end at T = R / g, where g is the recent tokens per step; which one ends last is
uncertain by about sqrt(max T). If a step costs s plain ones, a row's token is worth P s / g, with P = last c(1) + (1 -
last) (c(B) - c(1)) / (B - 1).

**Ledger.** A step loses its time minus its progress, the reduction of the cost to go. The slack is what may still be
lost: a small start, a share of the progress, and earlier savings up to ``SAVED``. An action is taken only if the slack
covers its cost with all drafts rejected. So a batch costs at most

    (1 + SHARE) Phi_0 + START_SLACK

plain passes, plus the overrun of one step over its estimate, deciding in steps without drafts, the error of the unit
(seconds of a plain pass), single disturbances of the machine (``TimeModel.record``), and what earlier batches saved, up
to ``CREDIT`` of this batch's cost to go.
"""

from __future__ import annotations

import math

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.tree import IntArray
from forerun.policy.cost_curve import CostTable, FloatArray

START_SLACK = 3.0
"""What the first batch may lose at its start, in plain passes. First costs are guesses: with one pass, a first proposal
that cost twice its guess ended drafting for a whole request."""
TRIAL_SLACK = 1.0
"""What actions that are not expected to pay may lose at the start, in plain passes: one rejected draft of typical
size."""
SHARE = 0.01
"""Share of the progress that drafting may lose in the long run."""
RESERVE = TRIAL_SLACK / 2
"""Slack that costly sources and hopeless trials leave for actions that promise more. Outputs change: a source that
never hit may start to."""
COSTLY_SHARE = 0.5
"""Share of a small slack's income that is for costly sources: as much as for cheap ones."""
SAVED = 16.0
"""Maximum savings that count, in plain passes: how long drafts are trusted after they stop paying."""
CREDIT = 0.06
"""Share of a batch's cost to go that earlier savings may cover. With ``SHARE``, the sum is 7 %, as much as
``forerun bench never-slower`` allows a single run."""


class Ledger:
    """Account of a level's losses."""

    def __init__(self) -> None:
        self.slack = START_SLACK
        """What the next action may cost if all its drafts are rejected, in plain passes."""
        self.trials = TRIAL_SLACK
        """Slack of actions that are not expected to pay; savings do not count."""
        self.costly = 0.0
        """What a costly source may lose while the slack is small, so that a cheap source is tried first, and neither
        spends what the other needs for a trial."""
        self.lost = self.progress = 0.0
        """Total losses and progress, in plain passes, as benchmarks print them."""

    def open(self, cost_to_go: float) -> None:
        """Start a batch: earlier savings count only up to a share of its cost."""
        allowed = max(TRIAL_SLACK, CREDIT * cost_to_go)
        self.slack, self.trials = min(self.slack, allowed), min(self.trials, allowed)

    def lacks(self, cost: float, trial: bool = False) -> float:
        """Return the slack missing for an action of this cost; at most 0 if it suffices."""
        return cost - (min(self.trials, self.slack) if trial else self.slack)

    def affords(self, cost: float, trial: bool = False) -> bool:
        """Return whether the slack covers an action of this cost."""
        return self.lacks(cost, trial) <= 0

    def lacks_costly(self, spent: float, cost: float, trial: bool = False) -> float:
        """Return the slack missing for a costly source of this cost, after ``spent`` in this step, that leaves
        ``RESERVE`` to score its draft; at most 0 if it suffices."""
        own = 0.0 if self.slack > START_SLACK else (cost - self.costly) / COSTLY_SHARE
        return max(own, self.lacks(spent + cost + RESERVE, trial))

    def rest(self, overhead: float, progress: float) -> None:
        """Book steps without drafts. Deciding counts as lost but does not reduce the slack; otherwise a ledger that
        says no could never recover."""
        self.lost += overhead
        self.progress += progress
        self.slack = min(self.slack + SHARE * progress, SAVED)
        self._add_income(SHARE * progress)

    def book(
        self, cost: float, progress: float, trial: bool = False, costly: float = 0.0, hopeful: bool = True
    ) -> None:
        """Book a step; ``trial``: whether it was not expected to pay, ``costly``: what a costly source lost,
        ``hopeful``: whether that source was expected to pay."""
        loss = cost - progress
        self.lost += loss
        self.progress += progress
        self.slack = min(self.slack + SHARE * progress - loss, SAVED)
        self.costly -= costly
        if trial:
            self.trials -= max(loss, 0.0)
        elif not hopeful:
            self.trials -= costly
        self._add_income(SHARE * min(cost, progress))  # a share of the time: what is already fast has less to lose

    def _add_income(self, income: float) -> None:
        self.trials = min(self.trials + income, TRIAL_SLACK + SHARE * self.progress)
        self.costly = min(self.costly + COSTLY_SHARE * income, TRIAL_SLACK)


class TokenValues:
    """Values of tokens, computed in arrays that are allocated once."""

    def __init__(self, rows: int = 64) -> None:
        self._allocate(rows)

    def _allocate(self, rows: int) -> None:
        self._left, self._gains, self._cached = np.zeros(rows), np.ones(rows), np.zeros(rows)
        self._values, self._order = np.zeros(rows), np.zeros(rows, np.int64)

    def of(
        self,
        left: list[int],
        gains: list[float],
        cached: list[int],
        table: CostTable,
        stretch: float,
        closed: bool,
    ) -> tuple[FloatArray, float]:
        """Return the value of a token of each row, in plain passes, ``[rows]``, and the cost to go.

        Args:
            left: tokens that each row still needs.
            gains: recent tokens per step of each row.
            stretch: recent cost of a step over a plain one.
            closed: whether no new rows replace finished ones.
        """
        rows = len(left)
        if rows > len(self._left):
            self._allocate(2 * rows)
        self._left[:rows], self._gains[:rows], self._cached[:rows] = left, gains, cached
        passes, looks = table.curves(rows + 1)
        given = self._left[:rows], self._cached[:rows], passes, float(looks[1]), table.costs.per_row
        values = self._values[:rows]
        cost_to_go = _cost_to_go(*given, self._order, closed)
        _value_tokens(*given, self._gains, values, stretch, closed)
        return values, cost_to_go

    def cost_to_go(self, left: list[int], cached: list[int], table: CostTable, closed: bool) -> float:
        """Return the cost of plain decoding until all rows have their tokens."""
        rows = len(left)
        self._left[:rows], self._cached[:rows] = left, cached
        passes, looks = table.curves(rows + 1)
        given = self._left[:rows], self._cached[:rows], passes, float(looks[1]), table.costs.per_row
        return _cost_to_go(*given, self._order, closed)


@compiled
def _pass_cost(rows: int, looking: float, passes: FloatArray, look: float, per_row: float) -> float:
    return float(passes[rows] + per_row * (rows - 1) + look * looking)


@compiled
def _cost_to_go(
    left: FloatArray, cached: FloatArray, passes: FloatArray, look: float, per_row: float, order: IntArray, closed: bool
) -> float:
    rows, looking, tokens = len(left), 0.0, 0.0
    for row in range(rows):
        looking += cached[row]
        tokens += left[row]
        at = row
        while at > 0 and left[order[at - 1]] > left[row]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = row
    if not closed:
        return tokens * _pass_cost(rows, looking, passes, look, per_row) / rows
    total, before = 0.0, 0.0
    for number in range(rows):
        row = order[number]
        total += (left[row] - before) * _pass_cost(rows - number, looking, passes, look, per_row)
        before, looking = left[row], looking - cached[row]
    return total


@compiled
def _value_tokens(
    left: FloatArray,
    cached: FloatArray,
    passes: FloatArray,
    look: float,
    per_row: float,
    gains: FloatArray,
    values: FloatArray,
    stretch: float,
    closed: bool,
) -> None:
    """Write each row's P s / g; see the module."""
    rows, looking, longest = len(left), 0.0, 0.0
    for row in range(rows):
        looking += cached[row]
        longest = max(longest, left[row] / gains[row])
    together, total = _pass_cost(rows, looking, passes, look, per_row), 0.0
    spread = math.sqrt(longest) + 1e-9
    for row in range(rows):
        values[row] = math.exp((left[row] / gains[row] - longest) / spread)
        total += values[row]
    for row in range(rows):
        if not closed or rows == 1:
            share = together / rows
        else:
            last, alone = values[row] / total, _pass_cost(1, cached[row], passes, look, per_row)
            share = last * alone + (1.0 - last) * max(together - alone, 0.0) / (rows - 1)
        values[row] = share * stretch / gains[row]


def warm_up() -> None:
    """Compile the code of values, or load it from the cache."""
    from forerun.policy.cost_curve import CostCurve

    TokenValues().of([1, 2], [1.0, 1.0], [0, 0], CostTable(CostCurve.linear(10.0)), 1.0, True)
