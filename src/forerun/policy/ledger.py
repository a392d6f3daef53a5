"""What drafting may lose: the cost to go, what a token is worth, and an account of losses.

Costs are in plain passes, by the cost curve: c(B) is the cost of a pass over one token of each of B rows.

**Cost to go.** If the rows of a closed batch (``Engine.generate``) lack R_1 <= ... <= R_B tokens, plain decoding costs
Phi = sum over k of (R_k - R_{k-1}) c(B - k + 1). In a server, where new rows replace finished ones, each token costs
its share of a pass: Phi = sum(R) c(B) / B.

**Value of a token.** Rows end at T = R / g, where g is the recent tokens per step, and the batch with the last one:
after about d log(sum exp(T / d)) steps, their maximum, smoothed by its uncertainty d = sqrt(max T). So a token saves
its row's share of that sum of the batch's steps, each worth c(1); the other steps of the row are worth (c(B) - c(1)) /
(B - 1). If a step costs s plain ones, so does what it saves. Tokens of one row alone are worth less and less, as it is
no longer the last; of all rows, they are not. In a server, a token saves its share of a pass, c(B) / B.

**Ledger.** A step loses its time minus its progress, the reduction of the cost to go. The slack is what may still be
lost: a small start, a share of the progress, and earlier savings up to ``SAVED``. An action is taken only if the slack
covers its cost with all drafts rejected. So a batch costs at most

    (1 + SHARE) Phi_0 + min(START_SLACK, max(TRIAL_SLACK, START_SHARE Phi_0))

plain passes, plus the overrun of one step over its estimate, deciding in steps without drafts, the error of the unit
(seconds of a plain pass), single disturbances of the machine (``TimeModel.record``), and what earlier batches saved, up
to ``CREDIT`` of this batch's cost to go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from forerun.policy.cost_curve import CostTable

START_SLACK = 3.0
"""What the first batch may lose at its start, in plain passes. With one pass, a first proposal that cost twice its
guess ended drafting for a whole request."""
START_SHARE = 0.02
"""Share of the first batch's cost to go that may be lost at its start. With ``SHARE``, the sum is 3 %, as much as
``forerun bench never-slower`` allows a median."""
TRIAL_SLACK = 1.0
"""What trials may lose at the start, in plain passes: one rejected draft of typical size."""
SHARE = 0.01
"""Share of the progress that drafting may lose in the long run."""
RESERVE = TRIAL_SLACK / 2
"""Slack that costly sources and hopeless trials leave for actions that promise more, in plain passes."""
COSTLY_SHARE = 0.5
"""Share of a small slack's income that is for costly sources: as much as for cheap ones."""
SAVED = 16.0
"""Maximum savings that count, in plain passes: how long drafts are trusted after they stop paying."""
CREDIT = 0.06
"""Share of the cost to go that earlier savings may cover; with ``SHARE``, 7 %, as ``never-slower`` allows."""


class Ledger:
    """Account of a level's losses, in plain passes.

    Attributes:
        slack: what the next action may cost if all its drafts are rejected.
        trials: slack of trials, actions that are not expected to pay; savings do not count.
        costly: what a costly source may lose while the slack is small, so that it leaves enough for a cheap one.
        lost, progress: totals.
    """

    def __init__(self) -> None:
        self.slack, self.trials = START_SLACK, TRIAL_SLACK
        self.costly = self.lost = self.progress = 0.0

    def open(self, cost_to_go: float) -> None:
        """Start a batch: earlier savings count only up to a share of its cost."""
        allowed = max(TRIAL_SLACK, (CREDIT if self.progress else START_SHARE) * cost_to_go)
        self.slack, self.trials = min(self.slack, allowed), min(self.trials, allowed)

    def available(self, trial: bool) -> float:
        """Return what an action may cost."""
        return min(self.trials, self.slack) if trial else self.slack

    def lacks(self, cost: float, trial: bool = False) -> float:
        """Return the slack missing for an action of this cost; at most 0 if it suffices."""
        return cost - self.available(trial)

    def lacks_costly(self, spent: float, cost: float, trial: bool = False) -> float:
        """Return the slack missing for a costly source of this cost, after ``spent`` in this step, that leaves
        ``RESERVE`` to score its draft; at most 0 if it suffices."""
        own = 0.0 if self.slack > START_SLACK else (cost - self.costly) / COSTLY_SHARE
        return max(own, self.lacks(spent + cost + RESERVE, trial))

    def book_plain(self, overhead: float, progress: float) -> None:
        """Book steps without drafts. Deciding counts as lost but leaves the slack, which could not recover from 0."""
        self._book(overhead, progress, 0.0, SHARE * progress)

    def book(
        self, cost: float, progress: float, trial: bool = False, costly: float = 0.0, hopeful: bool = True
    ) -> None:
        """Book a step; ``costly``: what a costly source lost, ``hopeful``: whether that was expected to pay."""
        loss = cost - progress
        self.costly -= costly
        if trial:
            self.trials -= max(loss, 0.0)
        elif not hopeful:
            self.trials -= costly
        self._book(loss, progress, loss, SHARE * min(cost, progress))  # what is already fast has less to lose

    def _book(self, lost: float, progress: float, paid: float, income: float) -> None:
        self.lost += lost
        self.progress += progress
        self.slack = min(self.slack + SHARE * progress - paid, SAVED)
        self.trials = min(self.trials + income, TRIAL_SLACK + SHARE * self.progress)
        self.costly = min(self.costly + COSTLY_SHARE * income, TRIAL_SLACK)


def cost_to_go(left: Sequence[int], cached: Sequence[int], table: CostTable, closed: bool) -> float:
    """Return the cost of plain decoding until all rows have their tokens (``left``, with ``cached`` ones), as the
    module says. ``closed``: whether no new rows replace finished ones."""
    rows, looking = len(left), sum(cached)
    if not closed:
        return sum(left) * table.decoding(rows, looking) / rows
    total, before = 0.0, 0
    for number, (tokens, length) in enumerate(sorted(zip(left, cached, strict=True))):
        total += (tokens - before) * table.decoding(rows - number, looking)
        before, looking = tokens, looking - length
    return total


class TokenValues(NamedTuple):
    """What tokens save, in plain passes, by row; see the module.

    Attributes:
        each, last: what a token saves in any row, and beyond that in the one that ends last.
        weights: of the rows in the sum; a weight fades by a factor e with ``spreads`` tokens.
    """

    each: list[float]
    last: list[float]
    weights: list[float]
    spreads: list[float]

    @property
    def fade(self) -> bool:
        """Whether further tokens of one row alone are worth less: in a closed batch."""
        return bool(self.last[0])

    def after(self, tokens: Sequence[float]) -> list[float]:
        """Return what a token saves after so many of each row."""
        if not self.fade:
            return self.each
        faded = [w * math.exp(-n / spread) for w, n, spread in zip(self.weights, tokens, self.spreads, strict=True)]
        total = sum(faded)
        return [each + last * w / total for each, last, w in zip(self.each, self.last, faded, strict=True)]


def token_values(
    left: Sequence[int], gains: Sequence[float], cached: Sequence[int], table: CostTable, stretch: float, closed: bool
) -> TokenValues:
    """Return what tokens of each row save. ``left``, ``cached``, ``closed``: see ``cost_to_go``; ``gains``: recent
    tokens per step of each row; ``stretch``: recent cost of a step over a plain one."""
    rows, together = len(left), table.decoding(len(left), sum(cached))
    if not closed or rows == 1:
        ones = [1.0] * rows
        return TokenValues([together / rows * stretch / gain for gain in gains], [0.0] * rows, ones, ones)
    steps = [tokens / gain for tokens, gain in zip(left, gains, strict=True)]
    longest = max(steps)
    spread = math.sqrt(longest) + 1e-9
    each, last = list[float](), list[float]()
    for length, gain in zip(cached, gains, strict=True):
        alone = table.decoding(1, length)
        share = max(together - alone, 0.0) / (rows - 1)
        each.append(share * stretch / gain)
        last.append((alone - share) * stretch / gain)
    weights = [math.exp((step - longest) / spread) for step in steps]
    return TokenValues(each, last, weights, [spread * gain for gain in gains])
