"""What drafting may lose: the cost to go, what a token is worth, and one account of losses.

Costs are counted in plain passes, by the cost curve: c(B) is the cost of a pass over one token of each of B rows.

**Cost to go.** Without drafts, a closed batch (``Engine.generate``) ends with its last row. Its rows lack R_1 <= ... <=
R_B tokens, so what is left costs Phi = sum over k of (R_k - R_{k-1}) c(B - k + 1). In a server, whose rows others
replace, each token costs its share of a pass: Phi = sum(R) c(B) / B.

**Value of a token.** A token more for a row takes off the cost to go what a step less of that row saves. A row that
ends last saves a whole pass of its own, any other only its share of the batch's passes. Rows end by T = R / g, where g
is what they gained per step lately; which one ends last is uncertain by about sqrt(max T). At s, what a step costs over
a plain one, a row's token is worth P s / g, with P = last c(1) + (1 - last) (c(B) - c(1)) / (B - 1).

**Ledger.** A step loses its whole time, in plain passes, less what it took off the cost to go. The slack is what may
still be lost: a small start, a share of the progress, and what was saved before, up to ``SAVED``. An action is taken
only if it costs no more than the slack even if all of its drafts are wrong. Therefore a batch takes at most

    (1 + SHARE) Phi_0 + START_SLACK

in plain passes, and the overrun of one step (what it cost beyond what was foreseen), the time of deciding in steps
without drafts, the error of the unit (the seconds of a plain pass), and what single disturbances of the machine took
(``TimeModel.record``). What earlier batches saved may be lost by a later
one as far as that is at most ``CREDIT`` of its own cost to go.
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
"""What actions that are not expected to pay may lose at the start, in plain passes: one wrong draft of usual size."""
SHARE = 0.01
"""The share of the progress that drafting may lose in the long run."""
RESERVE = TRIAL_SLACK / 2
"""What costly sources leave, and trials that promise nothing, for actions that do. Texts change: what was never right
may become so."""
COSTLY_SHARE = 0.5
"""The part of a small slack's income that is for costly sources: as much as for cheap ones."""
SAVED = 16.0
"""The maximum of savings that count, in plain passes: for how long drafts are trusted after they stop paying."""
CREDIT = 0.06
"""The share of a batch's own cost to go that savings of earlier batches may be lost in it. With ``SHARE`` it is 7 %,
what ``forerun bench never-slower`` allows a single run."""


class Ledger:
    """The account of a level's losses."""

    def __init__(self) -> None:
        self.slack = START_SLACK
        """What the next action may cost if all of it is wrong, in plain passes."""
        self.trials = TRIAL_SLACK
        """The same for an action that is not expected to pay: savings are not for trials."""
        self.costly = 0.0
        """What a costly source may lose while the slack is small, so that a cheap one is tried first, and neither takes
        what the other needs to be tried."""
        self.lost = self.progress = 0.0
        """Losses and progress of all steps, in plain passes: the account that benchmarks print."""

    def open(self, cost_to_go: float) -> None:
        """Begin with a batch: of earlier savings only a share of its own cost counts."""
        allowed = max(TRIAL_SLACK, CREDIT * cost_to_go)
        self.slack, self.trials = min(self.slack, allowed), min(self.trials, allowed)

    def lacks(self, cost: float, trial: bool = False) -> float:
        """What the slack lacks for an action that costs this if all of it is wrong; 0 or less if it suffices."""
        return cost - (min(self.trials, self.slack) if trial else self.slack)

    def affords(self, cost: float, trial: bool = False) -> bool:
        """Whether an action may cost this if all of it is wrong."""
        return self.lacks(cost, trial) <= 0

    def affords_costly(self, spent: float, cost: float, trial: bool = False) -> bool:
        """Whether a costly source may cost this, in a step that cost ``spent`` so far. It leaves ``RESERVE``, by which
        what it proposes can be scored."""
        return (cost <= self.costly or self.slack > START_SLACK) and self.affords(spent + cost + RESERVE, trial)

    def rest(self, overhead: float, progress: float) -> None:
        """Book steps without drafts. What deciding took counts as lost, and takes nothing from the slack: else a
        ledger that says no would never say anything else."""
        self.lost += overhead
        self.progress += progress
        self.slack = min(self.slack + SHARE * progress, SAVED)
        self._add_income(SHARE * progress)

    def book(
        self, cost: float, progress: float, trial: bool = False, costly: float = 0.0, hopeful: bool = True
    ) -> None:
        """Book a step.

        Args:
            cost: of all of the step.
            progress: what it took off the cost to go.
            trial: whether it was not expected to pay.
            costly: what a costly source lost in it.
            hopeful: whether that source was expected to pay.
        """
        loss = cost - progress
        self.lost += loss
        self.progress += progress
        self.slack = min(self.slack + SHARE * progress - loss, SAVED)
        self.costly -= costly
        if trial:
            self.trials -= max(loss, 0.0)
        elif not hopeful:
            self.trials -= costly
        self._add_income(SHARE * min(cost, progress))  # a share of the time: what is fast already has less to lose

    def _add_income(self, income: float) -> None:
        self.trials = min(self.trials + income, TRIAL_SLACK + SHARE * self.progress)
        self.costly = min(self.costly + COSTLY_SHARE * income, TRIAL_SLACK)


class TokenValues:
    """What tokens of a batch's rows are worth; arrays are allocated once."""

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
        """Value each row's next token.

        Args:
            left: tokens that each row still wants.
            gains: tokens that each row gained per step lately.
            cached: tokens that each row looks back on.
            table: costs of passes.
            stretch: what a step costs over a plain one, lately.
            closed: whether no rows will come in the place of those that end.

        Returns:
            The value of a token of each row, in plain passes, ``[rows]``; and the cost to go.
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
        """Cost of plain steps until all rows have what they want."""
        rows = len(left)
        self._left[:rows], self._cached[:rows] = left, cached
        passes, looks = table.curves(rows + 1)
        given = self._left[:rows], self._cached[:rows], passes, float(looks[1]), table.costs.per_row
        return _cost_to_go(*given, self._order, closed)


@compiled
def _pass_cost(rows: int, looking: float, passes: FloatArray, look: float, per_row: float) -> float:
    """Cost of a plain pass over rows that look back on ``looking`` tokens in all."""
    return float(passes[rows] + per_row * (rows - 1) + look * looking)


@compiled
def _cost_to_go(
    left: FloatArray, cached: FloatArray, passes: FloatArray, look: float, per_row: float, order: IntArray, closed: bool
) -> float:
    """Phi; see the module."""
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
    """Write P s / g of each row; see the module."""
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
    """Compile what valuing runs, or load it from an earlier process."""
    from forerun.policy.cost_curve import CostCurve

    TokenValues().of([1, 2], [1.0, 1.0], [0, 0], CostTable(CostCurve.linear(10.0)), 1.0, True)
